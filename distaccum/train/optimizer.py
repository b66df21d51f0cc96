"""Builds the optimizers that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.checks import Node
from distaccum.config.instantiate import build, signature_of, target_of
from distaccum.config.trainer import OptimConfig
from distaccum.engines.modules import clean
from distaccum.errors import ConfigError, near_misses, shorten

# The parameter groups of the configuration: which of the model's parameters each entry of ``optim.groups`` takes.

SELECTS = ("match", "dims")
Members = dict[str, nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """What steps a group, what is stated of it, and the number of elements that are trained in it."""

    optimizer: str
    states: str
    parameters: int

    def __str__(self) -> str:
        return f"{self.optimizer} ({self.states}): {self.parameters:,}"


def split(groups: Sequence[Node], model: nn.Module) -> list[Members]:
    """The parameters that each group takes, by name, and last those that none takes.

    A parameter goes to the first group that fits it. One that is tied has several names, and is there once, by the
    first; a glob may name it by any.

    Raises:
        ConfigError: a glob that matches nothing that is trained, or a group that nothing is left for.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(clean(name))
    taken: dict[nn.Parameter, int] = {}
    found: list[Members] = []
    for number, group in enumerate(groups):
        for glob in _listed(group.get("match", [])):
            _check_glob(f"optim.groups.{number}.match", glob, names)
        fitting = [p for p, called in names.items() if _fits(group, p, called)]
        mine = [p for p in fitting if p not in taken]
        if not any(p.requires_grad for p in mine):
            _refuse_empty(f"optim.groups.{number}", group, names, {names[p][0]: taken.get(p) for p in fitting})
        taken |= dict.fromkeys(mine, number)
        found.append({names[p][0]: p for p in mine})
    return [*found, {called[0]: p for p, called in names.items() if p not in taken}]


def own_settings(group: Mapping[str, Any]) -> Node:
    """What a group states for its optimizer, next to what it takes."""
    return {key: value for key, value in group.items() if key not in (*SELECTS, "optimizer")}


def group_sizes(config: OptimConfig, model: nn.Module) -> list[GroupSize]:
    """A line for each group, the rest first; empty where the configuration states no groups."""
    if not config.groups:
        return []
    *members, rest = split(config.groups, model)
    sizes = [_size(config.optimizer, "the rest", rest.values())] if rest else []
    for group, mine in zip(config.groups, members, strict=True):
        states = {key: value for key, value in group.items() if key != "optimizer"}
        text = ", ".join(f"{key} {_shown(value)}" for key, value in states.items())
        sizes.append(_size(group.get("optimizer", config.optimizer), text, mine.values()))
    return sizes


def _size(node: Mapping[str, Any], states: str, parameters: Iterable[nn.Parameter]) -> GroupSize:
    name = str(node.get("_target_", "")).rpartition(".")[2]
    return GroupSize(optimizer=name, states=states, parameters=sum(p.numel() for p in parameters if p.requires_grad))


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _fits(group: Mapping[str, Any], parameter: nn.Parameter, names: Sequence[str]) -> bool:
    if "dims" in group and parameter.ndim not in _listed(group["dims"]):
        return False
    globs = _listed(group.get("match", "*"))
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


def _check_glob(key: str, glob: str, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
    matched = [p for p, called in names.items() if any(fnmatchcase(name, glob) for name in called)]
    if any(p.requires_grad for p in matched):
        return
    if matched:
        problem = f"matches only what is frozen ({shorten(names[p][0] for p in matched)})"
        raise ConfigError(key, glob, problem, "Let it need a gradient, or leave the glob out")
    every = [name for called in names.values() for name in called]
    problem = f"matches no parameter of the model{near_misses(glob, every)}"
    raise ConfigError(key, glob, problem, f"Use names as of model.named_parameters(), such as {shorten(every, 2)}")


def _refuse_empty(
    key: str, group: Mapping[str, Any], names: Mapping[nn.Parameter, Sequence[str]], fitting: Mapping[str, int | None]
) -> None:
    """Says why nothing that is trained is left for a group."""
    stated = ", ".join(f"{name}={_shown(group[name])}" for name in SELECTS if name in group)
    earlier = [f"{name} (in group {number})" for name, number in fitting.items() if number is not None]
    if earlier:
        problem = f"takes no parameter: groups before it have {shorten(earlier)}, and the first that fits counts"
        raise ConfigError(key, stated, problem, "Put the narrower group first, or leave it out")
    trained = sorted({p.ndim for p in names if p.requires_grad})
    problem = f"takes no parameter that is trained; the model has some of {shorten(trained, 9)} dimensions"
    raise ConfigError(key, stated, problem, "Correct match and dims, or leave the group out")


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

    def make(parameters: Iterable[Any], **fused: Any) -> Optimizer:
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
