from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from omegaconf import OmegaConf

from distaccum.config.engine import ENGINES, DDPConfig, DeepSpeedConfig, FSDP2Config, Zero1Config, engine_config
from distaccum.config.precision import ALIASES, PRECISIONS, PrecisionConfig, canonical
from distaccum.config.schema import RunConfig, conf_dir
from distaccum.errors import ConfigError


def test_the_yaml_files_list_the_defaults_of_the_dataclasses() -> None:
    """The dataclass has a default; its YAML is where people read it."""
    listed = {
        path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (conf_dir() / "engine").glob("*.yaml")
    }
    assert listed == {name: asdict(kind()) for name, kind in ENGINES.items()}
    assert OmegaConf.to_container(OmegaConf.load(conf_dir() / "precision" / "fp32.yaml")) == asdict(PrecisionConfig())


def test_an_alias_names_a_precision_and_hides_none() -> None:
    assert {canonical(alias) for alias in ALIASES} <= {*PRECISIONS}
    assert [canonical(name) for name in PRECISIONS] == [*PRECISIONS]
    assert canonical("fp8") == "fp8"


@pytest.mark.parametrize("engine", [None, FSDP2Config, {"name": "fsdp2"}, 3, "horovod"])
def test_what_is_no_engine_is_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"^engine.*Use one of ddp, zero1, fsdp2, deepspeed"):
        engine_config(engine)
    if not isinstance(engine, dict):
        with pytest.raises(ConfigError, match=r"^engine.*Use one of ddp, zero1, fsdp2, deepspeed"):
            RunConfig.from_dict({"engine": engine})


@pytest.mark.parametrize("engine", [FSDP2Config(sync="every"), Zero1Config(), DeepSpeedConfig(stage=3, json={"a": 1})])
def test_settings_are_taken_as_they_are(engine: Any) -> None:
    assert engine_config(engine) is engine
    assert RunConfig.from_dict({"engine": engine}).engine == engine


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDPConfig(bucket_cap_mb="25"), r"engine\.bucket_cap_mb=25: not of type float"),  # type: ignore[arg-type]
        (lambda: DDPConfig(find_unused_parameters=1), r"engine\.find_unused_parameters=1: not of type bool"),  # type: ignore[arg-type]
        (lambda: FSDP2Config(replicas=True), r"engine\.replicas=True: not of type int"),
        (lambda: FSDP2Config(blocks="layers.*"), r"engine\.blocks=layers\.\*: not of type list"),  # type: ignore[arg-type]
        (lambda: FSDP2Config(blocks=[3]), r"engine\.blocks=\[3\]: not of type list\[str\]"),  # type: ignore[list-item]
        (lambda: DeepSpeedConfig(stage=2.0), r"engine\.stage=2\.0: not of type int"),  # type: ignore[arg-type]
        (lambda: DeepSpeedConfig(offload_optimizer="cpu"), r"engine\.offload_optimizer=cpu: not of type bool"),  # type: ignore[arg-type]
        (lambda: DDPConfig(name="fsdp2"), r"engine\.name=fsdp2: this is DDPConfig"),
        (lambda: Zero1Config(name="ddp"), r"engine\.name=ddp: this is Zero1Config"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
    assert DDPConfig(bucket_cap_mb=1).bucket_cap_mb == 1
