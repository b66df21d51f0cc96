"""The settings of what is compiled."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from distaccum.config.compile import COMPILED, CompileConfig
from distaccum.config.schema import RunConfig, conf_dir
from distaccum.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"name": "blocked"}, "compile"),
        ({"name": "blocks", "blocks": "blocks.*"}, "compile.blocks"),
        ({"name": "blocks", "blocks": [1]}, "compile.blocks"),
        ({"name": "model", "blocks": ["blocks.*"]}, "compile.blocks"),
        ({"blocks": ["blocks.*"]}, "compile.blocks"),
        ({"name": "model", "mode": "reduce-overhead"}, "compile.mode"),
        ({"name": "model", "mode": "max-autotune"}, "compile.mode"),
        ({"name": "model", "mode": "fast"}, "compile.mode"),
        ({"name": "model", "mode": "max-autotune-no-cudagraphs", "backend": "aot_eager"}, "compile.mode"),
        ({"name": "model", "dynamic": "maybe"}, "compile.dynamic"),
        ({"name": "model", "dynamic": 1}, "compile.dynamic"),
        ({"name": "model", "dynamic": None}, "compile.dynamic"),
        ({"name": "model", "fullgraph": 1}, "compile.fullgraph"),
        ({"name": "model", "loss": "auto"}, "compile.loss"),
        ({"name": "model", "graphs": 1}, "compile.graphs"),
        ({"graphs": True}, "compile.graphs"),
        ({"name": "model", "graphs": True, "backend": "aot_eager"}, "compile.graphs"),
        ({"name": "model", "graphs": True, "dynamic": "auto"}, "compile.graphs"),
        ({"name": "model", "graphs": True, "mode": "reduce-overhead"}, "compile.mode"),
    ],
)
def test_a_setting_that_cannot_be_is_named(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompileConfig(**given)
    assert caught.value.key == key


def test_it_may_be_given_by_name() -> None:
    assert CompileConfig.of("blocks") == CompileConfig(name="blocks")
    assert RunConfig.from_dict({"compile": "model"}).compile == CompileConfig(name="model")
    assert not RunConfig().compile.compiles
    with pytest.raises(ConfigError, match="neither a name nor settings but bool"):
        CompileConfig.of(True)  # type: ignore[arg-type]


def test_the_groups_compose_to_what_they_name() -> None:
    assert {path.stem for path in (conf_dir() / "compile").glob("*.yaml")} == {*COMPILED}
    for name in COMPILED:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", [f"compile={name}", "compile.dynamic=auto"]).compile
        node: Any = OmegaConf.to_container(composed)
        assert RunConfig.from_dict({"compile": node}).compile == CompileConfig(name=name, dynamic="auto")
