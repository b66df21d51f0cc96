"""Optimizers whose rule DeepSpeed's flat partitions keep: those that treat each element of a parameter by itself."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from distaccum.errors import ConfigError, shorten

_SHAPE, _CUT, _STEPS = (4, 6), 10, 2  # of the trial: a matrix, where it is cut, its steps
_REMEDY = "Use engine.stage=0, or engine=zero1, where each steps whole parameters"


def check_rule(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> None:
    """For stages 1 to 3, which give the optimizer one flat tensor a group, or a part of it.

    A rule that looks at a matrix's rows or at a parameter's norm (Adafactor, Muon, LAMB) is another one there.

    Raises:
        ConfigError: a step on a matrix differs from the step on the same numbers, flat and in two parts; or a trained
            parameter is none of the optimizer's.
    """
    kind = type(optimizer).__name__
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, parameter in trained.items() if id(parameter) not in held]
    if left_out:
        problem = f"steps none of {shorten(left_out)}, and DeepSpeed reduces what it steps only"
        raise ConfigError("optimizer", kind, problem, "Give it all that needs a gradient, or requires_grad_(False)")
    device = next(iter(trained.values())).device if trained else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(1 + _STEPS))
    for i, group in enumerate(optimizer.param_groups):
        whole = _stepped(optimizer, i, [start], [[g] for g in gradients])
        parts = _stepped(
            optimizer,
            i,
            list(start.flatten().tensor_split([_CUT])),
            [list(g.flatten().tensor_split([_CUT])) for g in gradients],
        )
        if group["params"] and whole is not None and (parts is None or not torch.allclose(whole, parts, rtol=1e-5)):
            problem = "its rule looks at more than one element, and DeepSpeed's stages 1 to 3 cut parameters up"
            raise ConfigError("optimizer", kind, problem, _REMEDY)


def _stepped(
    optimizer: Optimizer, group: int, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> Tensor | None:
    """The values after a step on each of the gradients by the rule and settings of one group; None where it raises."""
    trial: Any = copy(optimizer)
    parameters = [nn.Parameter(value.clone()) for value in values]
    trial.state = defaultdict(dict)
    trial.param_groups = [dict(optimizer.param_groups[group]) | {"params": parameters}]
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            trial.step()
    except Exception:
        return None
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def leaves_alone(optimizer: Optimizer) -> bool:
    """Whether a gradient of zeros changes neither a weight nor the state: plain SGD."""
    groups = optimizer.param_groups
    return type(optimizer) is SGD and not any(group["momentum"] or group["weight_decay"] for group in groups)
