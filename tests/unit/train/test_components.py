from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distaccum.config.schema import RunConfig
from distaccum.data.adapters import to_data_spec
from distaccum.errors import ConfigError
from distaccum.train.components import TrainingComponents, build_components


class SquaredError:
    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[0])

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        total: Tensor = (model(batch[0]) - batch[1]).square().sum()
        return total


def _assemble(model: nn.Module, config: Mapping[str, Any]) -> TrainingComponents:
    data = to_data_spec(TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1)))
    config = {"batch": {"global_size": 4, "micro_size": 2}} | config
    return build_components(
        RunConfig.from_dict(config), data, model, SquaredError(), world_size=1, device=torch.device("cpu")
    )


def test_the_policy_and_the_optimizer_are_those_of_the_configuration() -> None:
    precision = {"name": "bf16", "keep_fp32": ["1"], "reduce_dtype": "bf16"}
    components = _assemble(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), {"precision": precision})
    assert (components.policy.compute_dtype, components.policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
    assert components.policy.keep_fp32 == ("1",)
    assert [optimizer.defaults["fused"] for optimizer in components.optimizers] == [True]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bits_is_refused_under_every_policy(dtype: torch.dtype, name: str) -> None:
    with pytest.raises(ConfigError, match=r"model=Linear: .*float16.*Load it in float32"):
        _assemble(nn.Linear(2, 1).to(dtype), {"precision": {"name": name}})


def test_a_compiled_model_and_modules_kept_in_fp32_are_refused_together() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"precision\.keep_fp32=1: .*compiled"):
        _assemble(model, {"precision": {"name": "bf16", "keep_fp32": ["1"]}})
    assert _assemble(model, {"precision": {"name": "bf16"}}).policy.casts


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"name": "tf32"}, r"precision=tf32: a CPU"),
        ({"name": "bf16", "keep_fp32": ["head"]}, r"precision\.keep_fp32=head: matches no module"),
        ({"name": "fp32", "only": ["head"]}, r"precision\.only=head: matches no module"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused_before_there_is_a_process_group(
    precision: dict[str, Any], message: str
) -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError, match=message):
        _assemble(nn.Linear(2, 1), {"precision": precision})
