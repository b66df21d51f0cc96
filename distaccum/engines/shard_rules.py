"""Whether an optimizer's rule works on shards: a step of them, tried beside one of whole parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.distributed.random import fork_rng
from distaccum.distributed.world import World
from distaccum.engines.modules import is_sharded, shard_over, tensors_in, to_local
from distaccum.engines.rules import SCALES, alike, end_to_end, repeats, small, step_values, stepped, trial_copy

_KINDS = 4  # shapes of a group that are tried


def fault_on_shards(optimizer: Optimizer, world: World) -> str:
    """Why an optimizer's rule does not work on shards, alike on all ranks; "" where it does; a collective."""
    other = "it gives other numbers: what it reads of a shard, as a norm by .item(), is a rank's own"
    return _raised_on_shards(optimizer, world) or (other if _differs_on_shards(optimizer, world) else "")


def _raised_on_shards(optimizer: Optimizer, world: World) -> str:
    """What a step on zeros raises on some rank, for one parameter of each group and shape; "" where it raises nothing.

    Nor may it keep shards of another shape than its parameter: a checkpoint could be saved, and never be loaded.
    A rule may turn tall matrices round, and a rank may have an empty shard.
    """
    groups = [dict(group) for group in optimizer.param_groups]
    trial = trial_copy(optimizer, groups)
    if trial is None:
        return ""
    for group in groups:
        kinds = {p.shape: p for p in reversed(group["params"]) if p.requires_grad}
        group["params"] = [nn.Parameter(torch.zeros_like(p)) for p in kinds.values()]
        for zero in group["params"]:
            zero.grad = torch.zeros_like(zero)
    try:
        trial.step()
    except Exception as error:  # each optimizer has its own
        raised = str(error).splitlines()[0] if str(error) else type(error).__name__
        return world.all_gather_names([raised])[0]
    other = [problem for p, values in trial.state.items() for problem in _lost(p, values)]
    return next(iter(world.all_gather_names(other[:1])), "")


def _lost(parameter: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """What is a shard, and of another shape than the parameter's: that of one rank, or cut in a way nobody notes."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and any(map(is_sharded, tensors_in(value))):
            yield f"it keeps a {type(value).__name__} of shards ({name}), which no checkpoint holds"
        if not isinstance(value, Tensor) or not value.ndim or value.shape == parameter.shape:
            continue
        if is_sharded(value) or (value.numel() > 1 and value.shape == to_local(parameter).shape):
            yield f"it keeps {name} of {tuple(value.shape)} for {tuple(parameter.shape)}, which no checkpoint holds"


def _differs_on_shards(optimizer: Optimizer, world: World) -> bool:
    """Whether steps on shards are others than on whole parameters, as where a rule reads a norm as a number.

    A collective. A rule that draws random numbers, or cannot be tried on few numbers, is taken for one that does not;
    one that can be tried on these, and not on their shards, for one that does.

    Args:
        optimizer: over sharded parameters, without state.
        world: this rank.
    """
    kinds = [
        list({p.shape: p for p in reversed(group["params"]) if p.requires_grad}.values())[:_KINDS]
        for group in optimizer.param_groups
    ]
    generator = torch.Generator().manual_seed(0)
    whole = [[small(p, generator, world.size) for p in group] for group in kinds]
    shards = [
        [shard_over(value, p) for value, p in zip(mine, group, strict=True)]
        for mine, group in zip(whole, kinds, strict=True)
    ]
    with fork_rng(value.device for mine in whole for value in mine):
        for scale in SCALES:
            expected = stepped(optimizer, whole, scale, seed=0)
            if expected is None:
                continue
            values = step_values(optimizer, shards, scale, seed=0)
            if world.all_gather_names([] if values is not None else ["raised"]) or values is None:
                return True
            if not alike(expected, list(map(end_to_end, values))) and repeats(optimizer, whole, scale, expected):
                return True
    return False
