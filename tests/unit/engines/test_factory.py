"""Models and values that an engine cannot take, refused before there is a process group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distaccum.config.schema import RunConfig
from distaccum.data.adapters import to_data_spec
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.models.gpt import GPT
from distaccum.train.components import build_components


def _check(model: nn.Module, **engine: Any) -> None:
    data = to_data_spec(TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)))
    config = RunConfig.from_dict({"batch": {"global_size": 4, "micro_size": 2}, "engine": engine})
    cpu = torch.device("cpu")
    build_components(config, data, model, CrossEntropy(), world_size=2, device=cpu, planned=True)


class Blocks(nn.Module):
    def __init__(self, **own: nn.Parameter) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 3)
        for name, parameter in own.items():
            self.register_parameter(name, parameter)


def _tied(*, across: bool) -> Blocks:
    model = Blocks()
    if across:
        model.layers[1].weight = model.layers[0].weight
    else:
        model.register_parameter("same", model.head.weight)
    return model


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Blocks(scale=nn.Parameter(torch.tensor(1.0))), "scale has no dimension"),
        (Blocks(none=nn.Parameter(torch.zeros(0, 2))), "none has no elements"),
        (Blocks(turned=nn.Parameter(torch.zeros(3, 2).t())), "turned is not contiguous"),
        (Blocks(wide=nn.Parameter(torch.zeros(3).double())), r"one block holds wide in float64 and head\.weight in fl"),
    ],
)
def test_what_fsdp2_cannot_shard_is_named(model: nn.Module, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^engine=fsdp2: cannot shard this model: {problem}.*Use engine=zero1"):
        _check(model, name="fsdp2")


def test_what_fsdp2_can_shard_passes() -> None:
    _check(_tied(across=False), name="fsdp2")
    _check(_tied(across=True), name="fsdp2")  # what shares is no block by default
    with pytest.raises(ConfigError, match=r"layers\.0\.weight is shared by two blocks"):
        _check(_tied(across=True), name="fsdp2", blocks=["layers.*"])
    nested = nn.Sequential(Blocks(), nn.Linear(2, 2))
    _check(nested, name="fsdp2", blocks=["0", "0.layers.*"])
    _check(GPT(vocab_size=16, seq_len=8, n_layer=2, n_head=2, n_embd=8, dropout=0.0), name="fsdp2")
    _check(Blocks(frozen=nn.Parameter(torch.zeros(2).half(), requires_grad=False)), name="fsdp2")


def test_globs_and_meta_init_are_checked_before_the_run() -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.blocks=zzz: matches no module of Blocks, which has layers, layers\.0"
    ):
        _check(Blocks(), name="fsdp2", blocks=["zzz"])
    with pytest.raises(ConfigError, match=r"engine\.blocks=layer: matches no module of Blocks; did you mean layers"):
        _check(Blocks(), name="fsdp2", blocks=["layer"])
    with pytest.raises(ConfigError, match=r"engine\.meta_init=True: this Blocks has its weights already.*'meta'"):
        _check(Blocks(), name="fsdp2", meta_init=True)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"reduce_bucket_size": -5}, r"zero_optimization\.reduce_bucket_size=-5: DeepSpeed refuses it \(Input should"),
        ({"offload_optimizer": {"ratio": 7}}, r"zero_optimization\.offload_optimizer\.ratio=7: DeepSpeed refuses"),
    ],
)
def test_a_value_that_deepspeed_refuses_is_named(zero: Mapping[str, Any], message: str) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(ConfigError, match=r"^engine\.json\." + message):
        _check(Blocks(), name="deepspeed", json={"zero_optimization": zero})


def test_deepspeed_takes_no_parameter_without_dimensions() -> None:
    with pytest.raises(ConfigError, match=r"engine=deepspeed: cannot take scale.*Use engine=zero1"):
        _check(Blocks(scale=nn.Parameter(torch.tensor(1.0))), name="deepspeed")
