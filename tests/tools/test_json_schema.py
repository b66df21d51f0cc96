"""``conf/settings.schema.json`` takes every file and choice that comes along, and no key or value that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from distaccum.config.schema import RunConfig, conf_dir
from distaccum.errors import ConfigError
from distaccum.tools.settings import settings

SCHEMA = Draft7Validator(json.loads((conf_dir() / "settings.schema.json").read_text()))


def _wrong(content: Any) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in SCHEMA.iter_errors(content)]


@pytest.mark.parametrize("file", sorted((conf_dir() / "experiment").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_is_right(file: Path) -> None:
    assert _wrong(OmegaConf.to_container(OmegaConf.load(file))) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", [one.key for one in settings() if one.group])
def test_what_any_choice_composes_is_right(group: str) -> None:
    OmegaConf.register_new_resolver("distaccum.run_name", lambda *_: "run", replace=True)
    for file in sorted((conf_dir() / group).glob("*.yaml")):
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", [f"{group}={file.stem}"])
        assert _wrong(OmegaConf.to_container(composed)) == [], file


@pytest.mark.parametrize(
    "content",
    [
        {"optim": {"lrr": 1}},
        {"batch": {"global_size": "many"}},
        {"trainer": {"nonfinite": "go"}},
        {"engine": {"name": "fsdp2", "sync": "often"}},
        {"metrics": {"wandb": {"mode": "on"}}},
    ],
)
def test_what_is_refused_is_wrong(content: dict[str, Any]) -> None:
    assert len(_wrong(content)) == 1
    with pytest.raises(ConfigError):
        RunConfig.from_dict(content)


def test_every_setting_has_its_meaning_there() -> None:
    for one in settings():
        node: Any = SCHEMA.schema
        for part in one.key.split("."):
            node = node["properties"][part]
        assert node["description"]
