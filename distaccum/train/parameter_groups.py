"""The parameter groups of the configuration: which of the model's parameters each entry of ``optim.groups`` takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from distaccum.config.schema import Node, OptimConfig
from distaccum.engines.modules import clean
from distaccum.errors import ConfigError, near_misses, shorten

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
    key: str,
    group: Mapping[str, Any],
    names: Mapping[nn.Parameter, Sequence[str]],
    fitting: Mapping[str, int | None],
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
