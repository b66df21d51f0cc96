"""Re-points optimizers from full parameters to their DTensor shards."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.distributed.world import World
from distaccum.engines.dtensor import is_sharded, shard_like, to_local
from distaccum.engines.rules import differs_on_shards
from distaccum.errors import ConfigError


def rebind_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], names: dict[int, str], world: World) -> None:
    """Replaces, in the optimizers' groups, full parameters by their shards; a collective.

    ``names`` has the full parameters' names by ``id``. A fused kernel that takes no shards (SGD's, as of torch 2.13) is
    switched off.

    Raises:
        ConfigError: an optimizer has stepped before, or cannot step on shards.
    """
    sharded = dict(model.named_parameters(remove_duplicate=False))
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if any(float(state.get("step", 1.0)) for state in optimizer.state.values()):  # Adagrad makes it when it is made
            problem = "it has stepped, and its state is of whole parameters"
            raise ConfigError("optimizer", kind, problem, "Wrap first, then load its state")
        state = {sharded[names[id(p)]]: values for p, values in optimizer.state.items()}
        optimizer.state.clear()
        for shard, values in state.items():
            optimizer.state[shard] = {
                name: shard_like(value, shard) if isinstance(value, Tensor) else value for name, value in values.items()
            }
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[id(p)]] for p in group["params"]]
        reason = _try(optimizer, world)
        if reason and any(group.get("fused") for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                group["fused"] = False
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # torch sets it with fused
            reason = _try(optimizer, world)
        if not reason and differs_on_shards(optimizer, world):
            reason = "it gives other numbers: what it reads of a shard, as a norm by .item(), is a rank's own"
        if reason:
            remedy = "Use engine=zero1, where each steps whole parameters"
            raise ConfigError("optimizer", kind, f"its rule does not work on shards ({reason})", remedy)


def _try(optimizer: Optimizer, world: World) -> str:
    """What a step on zeros raises on some rank, for one parameter of each group and shape; "" where it raises nothing.

    Nor may it keep shards of another shape than its parameter: a checkpoint could be saved, and never be loaded.

    A rule may turn tall matrices round, and a rank may have an empty shard.
    """
    trial: Any = copy(optimizer)
    trial.state, trial.param_groups = defaultdict(dict), [dict(group) for group in optimizer.param_groups]
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for group in trial.param_groups:
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
        if not isinstance(value, Tensor) or not value.ndim or value.shape == parameter.shape:
            continue
        if is_sharded(value) or (value.numel() > 1 and value.shape == to_local(parameter).shape):
            yield f"it keeps {name} of {tuple(value.shape)} for {tuple(parameter.shape)}, which no checkpoint holds"
