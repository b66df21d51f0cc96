"""Optimizers whose rule DeepSpeed's flat partitions keep: those that treat each element of a parameter by itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from distaccum.engines.rules import Verdict, try_rule
from distaccum.errors import ConfigError, shorten

# Of the trial: matrices, and where they are cut; the second is large enough for moments in 8 bits, by blocks.
_TRIED = (((4, 6), 10), ((65, 64), 2000))
_REMEDY = "Use engine.stage=0, engine=ddp, or engine=zero1, where each rank steps whole parameters"


def check_rule(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> None:
    """For stages 1 to 3, which give the optimizer one flat tensor a group, or a part of it.

    A rule that looks at a matrix's rows, at a parameter's norm (Adafactor, Muon, LAMB) or at the norm of all parameters
    is another one there.

    Raises:
        ConfigError: a step on matrices differs from steps on the same numbers, flat and in two parts, each alone; or a
            trained parameter is none of the optimizer's.
    """
    kind = type(optimizer).__name__
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, parameter in trained.items() if id(parameter) not in held]
    if left_out:
        problem = f"steps none of {shorten(left_out)}, and DeepSpeed reduces what it steps only"
        raise ConfigError("optimizer", kind, problem, "Give it all that needs a gradient, or requires_grad_(False)")
    device = next(iter(trained.values())).device if trained else torch.device("cpu")
    verdicts = {_try(optimizer, device, shape, at) for shape, at in _TRIED}
    if Verdict.COUPLED in verdicts:
        problem = "its rule looks at more than one element, and DeepSpeed's stages 1 to 3 cut parameters up"
        raise ConfigError("optimizer", kind, problem, _REMEDY)
    if Verdict.RANDOM in verdicts:
        problem = "its rule draws random numbers, and DeepSpeed's stages 1 to 3 give each rank a part of a parameter"
        raise ConfigError("optimizer", kind, problem, _REMEDY)


def _try(optimizer: Optimizer, device: torch.device, shape: tuple[int, int], cut: int) -> Verdict:
    """Steps on a matrix a group, beside steps on its two parts, flat."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        [torch.randn(shape, generator=generator).to(device)] if group["params"] else []
        for group in optimizer.param_groups
    ]
    parts = [[matrix.flatten().tensor_split([cut]) for matrix in group] for group in whole]
    return try_rule(optimizer, whole, [[[pieces[i] for pieces in group] for group in parts] for i in range(2)])


def leaves_alone(optimizer: Optimizer) -> bool:
    """Whether a gradient of zeros changes neither a weight nor the state: plain SGD."""
    groups = optimizer.param_groups
    return type(optimizer) is SGD and not any(group["momentum"] or group["weight_decay"] for group in groups)
