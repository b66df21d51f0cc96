from __future__ import annotations

import dataclasses

import pytest
import torch

from distaccum.config.precision import PRECISIONS, PrecisionConfig
from distaccum.errors import ConfigError
from distaccum.precision.policy import PrecisionPolicy

CPU = torch.device("cpu")


def _policy(**settings: object) -> PrecisionPolicy:
    return PrecisionPolicy.of(PrecisionConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "compute"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_every_policy_steps_fp32_weights_and_computes_in_its_own_type(name: str, compute: torch.dtype) -> None:
    policy = _policy(name=name)
    assert (policy.name, policy.compute_dtype) == (name, compute)
    assert policy.parameter_dtype is policy.reduce_dtype is torch.float32
    assert (policy.keep_fp32, policy.only) == ((), ())


def test_weights_are_bf16_where_they_have_masters() -> None:
    policy = _policy(name="bf16-weights")
    assert policy.compute_dtype is policy.parameter_dtype is torch.bfloat16
    assert (policy.reduce_dtype, policy.keeps_masters, policy.casts) == (torch.float32, True, True)
    assert not _policy(name="bf16").keeps_masters
    with pytest.raises(ConfigError, match=r"precision\.only.*keep_fp32.*precision=bf16"):
        _policy(name="bf16-weights", only=["block"])


def test_another_name_is_the_same_policy() -> None:
    assert _policy(name="16-mixed") == _policy(name="fp16")
    assert _policy(name="bfloat16") == _policy(name="bf16") != _policy(name="fp16")


def test_what_is_set_beside_the_name_arrives_and_cannot_change() -> None:
    globs = ["head"]
    policy = _policy(name="bf16", reduce_dtype="fp16", keep_fp32=globs, only=["blocks.*"])
    globs.append("more")
    assert policy.reduce_dtype is torch.float16
    assert (policy.keep_fp32, policy.only) == (("head",), ("blocks.*",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "fp32"  # type: ignore[misc]
    assert policy in {policy}  # hashable, as what is immutable should be


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_the_loss_is_scaled_where_gradients_pass_through_fp16(name: str, reduce_dtype: str) -> None:
    config = PrecisionConfig(name=name, reduce_dtype=reduce_dtype)
    expected = name == "fp16" or reduce_dtype == "fp16"
    assert PrecisionPolicy.of(config).scales_loss is config.scales_loss is expected


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_forward_is_autocast_to_the_16_bit_types_only(name: str) -> None:
    policy, weight = _policy(name=name), torch.ones(2, 2)
    with policy.autocast(CPU):
        assert (weight @ weight).dtype is policy.compute_dtype
    assert (weight @ weight).dtype is torch.float32


def test_around_chosen_modules_the_context_has_autocast_off_and_ends_what_a_hook_left_on() -> None:
    policy = _policy(name="bf16", only=["block"])
    with policy.autocast(CPU):
        assert not torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", True)  # as an interrupt between the hooks leaves it
    assert not torch.is_autocast_enabled("cpu")
