"""Builds the optimizers that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.instantiate import build, signature_of, target_of
from distaccum.config.schema import Node, OptimConfig
from distaccum.errors import ConfigError
from distaccum.train.parameter_groups import own_settings, split

KEY = "optim.optimizer"
_OF_THE_WHOLE = ("fused", "foreach", "capturable", "differentiable")  # how an optimizer computes


def build_optimizers(config: OptimConfig, model: nn.Module, device: torch.device) -> list[Optimizer]:
    """``optim.optimizer`` over what is left to it and its groups, the rest first; then the groups' own optimizers.

    Each has its fused kernel as ``optim.fused`` and its own node say. The model may still be elsewhere than on
    ``device``, where it is going to be trained.

    Raises:
        ConfigError: one cannot be built, or has no fused kernel and must; or a group is wrong.
    """
    if not config.groups:
        return [_build(KEY, config.optimizer, config, list(model.parameters()), device)]
    *members, rest = split(config.groups, model)
    groups: list[dict[str, Any]] = [{"params": list(rest.values())}] if rest else []
    others = []
    for number, (group, mine) in enumerate(zip(config.groups, members, strict=True)):
        parameters, settings, key = list(mine.values()), own_settings(group), f"optim.groups.{number}"
        if "optimizer" in group:
            others.append(_build(f"{key}.optimizer", group["optimizer"] | settings, config, parameters, device))
        else:
            groups.append({"params": parameters} | _checked(key, config, settings, parameters[0]))
    if not groups:
        problem = "has no parameter left: every one is in a group with an optimizer of its own"
        remedy = "Make one of these optimizers optim.optimizer, and leave its group out"
        raise ConfigError(KEY, config.optimizer.get("_target_"), problem, remedy)
    return [_build(KEY, config.optimizer, config, groups, device), *others]


def _checked(key: str, config: OptimConfig, settings: Node, like: nn.Parameter) -> Node:
    """A group's settings as the optimizer would keep them of its own: torch checks arguments, and not those of groups.

    Raises:
        ConfigError: the optimizer has no such setting, or not for a group.
    """
    target_of(KEY, config.optimizer)
    one = nn.Parameter(torch.zeros([1] * like.ndim, dtype=like.dtype), requires_grad=like.requires_grad)
    arguments = {"lr": config.lr} | config.optimizer | settings
    lr = arguments.pop("lr")
    trial = cast(Optimizer, build(key, arguments, [one], lr=lr))
    for name, value in settings.items():
        if name in _OF_THE_WHOLE or name not in trial.defaults:
            problem = f"is a setting of {type(trial).__name__} as a whole, not of a group of its parameters"
            raise ConfigError(f"{key}.{name}", value, problem, f"State it in {KEY}, or give the group its optimizer")
    return {name: trial.defaults[name] for name in settings}


def _build(key: str, node: Node, config: OptimConfig, parameters: Sequence[Any], device: torch.device) -> Optimizer:
    """The optimizer of a node over parameters, or groups of them; a rate that a group's own node states is its own."""
    own = {name: value for name, value in node.items() if name != "lr" or key == KEY}
    lr = config.lr if key == KEY else node.get("lr", config.lr)

    def make(parameters: Iterable[Any], **fused: bool) -> Optimizer:
        return cast(Optimizer, build(key, own, parameters, lr=lr, **fused))

    if "fused" in node:
        return make(parameters)
    if "fused" not in signature_of(target_of(key, node)):
        if config.fused is True:
            problem = f"{node['_target_']} takes no fused argument"
            raise ConfigError("optim.fused", True, problem, "Use optim.fused=auto")
        return make(parameters)
    if config.fused is False:
        return make(parameters, fused=False)
    try:
        _try_fused(make, parameters, device)
    except Exception as error:  # any error: the build below raises what is not about fusing
        optimizer = make(parameters)
        if config.fused is True:
            problem = f"{node['_target_']} cannot: {error}"
            raise ConfigError("optim.fused", True, problem, "Use optim.fused=auto") from error
        return optimizer
    return make(parameters, fused=True)


def _try_fused(make: Callable[..., Optimizer], parameters: Sequence[Any], device: torch.device) -> None:
    """A step on one zero of each kind that is trained: some of torch's optimizers refuse only then."""
    every = [p for one in parameters for p in (one["params"] if isinstance(one, dict) else [one])]
    zeros = [
        nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        for dtype in {p.dtype for p in every if p.requires_grad}
    ]
    for zero in zeros:
        zero.grad = torch.zeros_like(zero)
    make(zeros, fused=True).step()
