"""Re-points optimizers from full parameters to their DTensor shards."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.errors import ConfigError


def rebind_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], names: dict[int, str]) -> None:
    """Replaces, in the optimizers' groups, full parameters by their shards.

    ``names`` has the full parameters' names by ``id``. A fused kernel that takes no shards (SGD's, as of torch 2.13) is
    switched off.

    Raises:
        ConfigError: an optimizer has stepped before, or cannot step on shards.
    """
    sharded = dict(model.named_parameters(remove_duplicate=False))
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if optimizer.state:
            problem = "it has stepped, and its state is of whole parameters"
            raise ConfigError("optimizer", kind, problem, "Wrap first, then load its state")
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[id(p)]] for p in group["params"]]
        failure = _try(optimizer)
        if failure is not None and any(group.get("fused") for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                group["fused"] = False
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # torch sets it with fused
            failure = _try(optimizer)
        if failure is not None:
            reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
            remedy = "Use engine=zero1, where each steps whole parameters"
            raise ConfigError("optimizer", kind, f"its rule does not work on shards ({reason})", remedy)


def _try(optimizer: Optimizer) -> Exception | None:
    """What a step on zeros raises, for one parameter of each group and shape: a rule may turn tall matrices round."""
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
        return error
    return None
