"""What FSDP2 cannot shard of a model, found before there is a process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distaccum.config.engine import FSDP2Config
from distaccum.engines.blocks import blocks_of
from distaccum.engines.context import EngineContext
from distaccum.engines.fsdp2 import wrap
from distaccum.engines.modules import is_meta
from distaccum.errors import ConfigError
from distaccum.precision.policy import PrecisionPolicy

_REMEDY = "Use engine=zero1, or change the model"


def check(model: nn.Module, context: EngineContext) -> None:
    """Raises ConfigError for what ``create`` would fail on."""
    config = context.engine
    assert isinstance(config, FSDP2Config)
    check_world(context.world_size, replicas=config.replicas, reduce_dtype=context.policy.reduce_dtype)
    check_masters(config, context.policy)
    check_meta(model, meta_init=config.meta_init)
    check_parameters(model, config.blocks)
    wrap.check_hooks(model, once_a_window=config.sync == "boundary" and not context.policy.scales_loss)


def check_world(world_size: int, *, replicas: int, reduce_dtype: torch.dtype) -> None:
    """Raises ConfigError for a number of ranks or a format that cannot work."""
    if world_size % replicas:
        remedy = "Use a divisor of the number of processes"
        raise ConfigError("engine.replicas", replicas, f"does not divide {world_size} processes", remedy)
    if reduce_dtype is not torch.float32 and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        problem = f"torch {torch.__version__} has no way to send fp32 gradients of engine=fsdp2 in it"
        raise ConfigError("precision.reduce_dtype", reduce_dtype, problem, "Use fp32, a newer torch, or engine=ddp")


def check_masters(config: FSDP2Config, policy: PrecisionPolicy) -> None:
    """Raises ConfigError where weights are to be roundings of the shards, and would not be gathered as such."""
    if not policy.keeps_masters:
        return
    if policy.keep_fp32:
        problem = "engine=fsdp2 gathers a block's weights in one format, so that none of it stays in fp32"
        remedy = "Leave it out, or use engine=ddp or zero1, or precision=bf16"
        raise ConfigError("precision.keep_fp32", list(policy.keep_fp32), problem, remedy)
    if config.gather_dtype != "compute":
        problem = "precision=bf16-weights has bf16 weights, and they would be gathered in fp32"
        raise ConfigError("engine.gather_dtype", config.gather_dtype, problem, "Use compute, or precision=bf16")


def check_meta(model: nn.Module, *, meta_init: bool) -> None:
    """Raises ConfigError where the engine is to make weights that are there already."""
    if meta_init and not is_meta(model):
        problem = f"this {type(model).__name__} has its weights already"
        raise ConfigError("engine.meta_init", True, problem, "Build it under torch.device('meta'), or leave it out")


def check_parameters(model: nn.Module, globs: Sequence[str]) -> None:
    """Raises ConfigError for a parameter that ``fully_shard`` cannot take, or would take in two parts."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter in model.parameters():
        fault = _fault(parameter)
        if fault:
            raise _refusal(f"{names[id(parameter)]} {fault}")
    blocks = blocks_of(model, globs)
    units = [*(block for block in blocks if block is not model), model]
    homes: dict[int, nn.Module] = {}
    for unit in units:
        dtypes: dict[torch.dtype, str] = {}
        for parameter in _own(unit, set(units)):
            name = names[id(parameter)]
            if homes.setdefault(id(parameter), unit) is not unit:
                raise _refusal(f"{name} is shared by two blocks, or by a block and what is in none")
            if parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, name)
        if len(dtypes) > 1:
            mixed = " and ".join(f"{name} in {str(d).removeprefix('torch.')}" for d, name in dtypes.items())
            raise _refusal(f"one block holds {mixed}")


def _fault(parameter: nn.Parameter) -> str:
    if parameter.dim() == 0:
        return "has no dimension to cut"
    if parameter.numel() == 0:
        return "has no elements"
    return "" if parameter.is_contiguous() else "is not contiguous in memory"


def _own(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Its parameters, but for those of units inside it."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if child not in units:
            yield from _own(child, units)


def _refusal(problem: str) -> ConfigError:
    return ConfigError("engine", "fsdp2", f"cannot shard this model: {problem}", _REMEDY)
