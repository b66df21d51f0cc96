from __future__ import annotations

import dataclasses

import pytest
from omegaconf import OmegaConf

from distaccum.build import build
from distaccum.config import RunConfig, conf_dir, from_node
from distaccum.errors import ConfigError


def test_settings_are_typed_and_frozen() -> None:
    config = from_node({"batch": {"global_size": 48}, "optim": {"lr": 1, "clip_norm": None}})
    assert config.batch.global_size == 48
    assert isinstance(config.optim.lr, float)
    assert config.optim.clip_norm is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch.global_size = 1  # type: ignore[misc]


def test_what_is_left_out_has_the_defaults_of_the_schema() -> None:
    assert from_node({}) == RunConfig()


def test_a_target_of_ones_own_has_none_of_the_defaults_arguments() -> None:
    config = from_node(
        {
            "optim": {"optimizer": {"_target_": "torch.optim.SGD"}},
            "schedule": {"_target_": "distaccum.schedule.Constant"},
        }
    )
    assert config.optim.optimizer == {"_target_": "torch.optim.SGD"}
    assert config.schedule == {"_target_": "distaccum.schedule.Constant"}
    config = from_node({"optim": {"optimizer": {"fused": False}}, "schedule": {"warmup_steps": 5}})
    assert config.optim.optimizer == RunConfig().optim.optimizer | {"fused": False}
    assert config.schedule == RunConfig().schedule | {"warmup_steps": 5}


@pytest.mark.parametrize(
    ("node", "key", "value"),
    [
        ({"batch": {"size": 3}}, "batch.size", 3),
        ({"batch": {"global_size": "many"}}, "batch.global_size", "many"),
        ({"optim": {"clip_norm": -1}}, "optim.clip_norm", -1),
        ({"batch": {"tokens": "many"}}, "batch.tokens", "many"),
        ({"batch": {"group_by_length": "long"}}, "batch.group_by_length", "long"),
        ({"trainer": {"prefetch": 1}}, "trainer.prefetch", 1),
        ({"checkpoint": {"keep": -1}}, "checkpoint.keep", -1),
        ({"engine": {"bucket_cap_mb": 0}}, "engine.bucket_cap_mb", 0),
        ({"precision": {"name": "fp8"}}, "precision", "fp8"),
    ],
)
def test_a_bad_value_is_named_with_its_key(node: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        from_node(node)
    assert (caught.value.key, caught.value.value) == (key, value)


def test_the_yaml_groups_are_found() -> None:
    assert (conf_dir() / "config.yaml").is_file()


def _takes(size: int, rate: float = 0.5, name: str = "") -> tuple[int, float, str]:
    if size > 5:
        raise ValueError("size above 5")
    return size, rate, name


TARGET = f"{__name__}._takes"


def test_a_target_is_called_with_its_node() -> None:
    assert build("part", {"_target_": TARGET, "size": 2, "rate": 1}) == (2, 1, "")
    assert build("part", {"_target_": TARGET, "size": 2}, name="extra") == (2, 0.5, "extra")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, r"part\._target_: is missing"),
        ({"_target_": "no.such"}, r"part\._target_=no\.such: cannot be imported"),
        ({"_target_": TARGET, "size": "2"}, r"part\.size=2: not of type int"),
        ({"_target_": TARGET, "size": True}, r"part\.size=True: not of type int"),
        ({"_target_": TARGET, "size": 1, "rat": 1}, r"part\.rat=1: no such argument; did you mean rate\?"),
        ({"_target_": TARGET, "size": 6}, r"ValueError: size above 5"),
        ({"_target_": TARGET}, r"missing 1 required positional argument: 'size'"),
    ],
)
def test_a_target_that_cannot_be_called_is_explained(node: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("part", node)


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("batch", "samples"), ("engine", "ddp"), ("precision", "fp32"), ("trainer", "default"),
        ("callbacks", "none"), ("checkpoint", "default"), ("metrics", "wandb"),
    ],
)  # fmt: skip
def test_the_schema_and_the_yaml_state_the_same_defaults(group: str, file: str) -> None:
    node = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{file}.yaml"))
    assert getattr(from_node({group: node}), group) == getattr(RunConfig(), group)
