"""Tries an optimizer's rule on a few numbers: whether a step on a part of them is what a step on all gives that part.

Engines on which each rank steps a part need that. A rule that clips by the norm over all of its parameters, or scales
by one, is another rule on every rank there.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.distributed.random import fork_rng
from distaccum.engines.modules import as_real, full_tensor
from distaccum.errors import ON_ALL_RANKS, ConfigError, MisuseError

_log = logging.getLogger(__name__)
_RATE = 1e-2
# Scales of gradients, since a norm may be clipped only where it is large; and steps, since some rules change later:
# slow weights follow every fifth or sixth.
SCALES = {1.0: 12, 1e4: 2, 1e-4: 2}
_SIZE = 6  # a trial's dimensions, at most
_OURS = ("step", "zero_grad")  # what an instance may have been given in place of its class's

_SEES = "would see a part of the parameters on each rank, or copies of them"
_REMEDY = "Remove it (clip with clip_norm= or clip_value=, change weights between two windows), or use engine=ddp"

OnStep = Callable[[Optimizer], None]
Pieces = Sequence[Sequence[Tensor]]
"""The values of a trial's parameters, by group."""


class Verdict(Enum):
    """What a trial says of a rule."""

    ALONE = auto()
    COUPLED = auto()
    RANDOM = auto()
    UNKNOWN = auto()


def try_rule(optimizer: Optimizer, whole: Pieces, parts: Sequence[Pieces]) -> Verdict:
    """Whether steps on each of ``parts``, with nothing beside it, are those on the ``whole``.

    Args:
        optimizer: of any state, which stays as it is.
        whole: by group.
        parts: each by group; a group's in all parts, end to end, are the whole's.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in held]
    for p in held:  # a rule may hold on to its parameters, and would step them
        p.grad = None
    try:
        return _tried(optimizer, whole, parts)
    finally:
        for p, gradient in zip(held, gradients, strict=True):
            p.grad = gradient


def _tried(optimizer: Optimizer, whole: Pieces, parts: Sequence[Pieces]) -> Verdict:
    verdict = Verdict.ALONE
    with fork_rng(t.device for group in whole for t in group):
        for scale in SCALES:
            found = stepped(optimizer, whole, scale, seed=0)
            if found is None:
                verdict = Verdict.UNKNOWN
                continue
            taken = [stepped(optimizer, part, scale, seed=1) for part in parts]
            joined = list(map(torch.cat, zip(*(one for one in taken if one is not None), strict=True)))
            if any(one is None for one in taken) or not alike(found, joined):
                return Verdict.COUPLED if repeats(optimizer, whole, scale, found) else Verdict.RANDOM
    return verdict


def repeats(optimizer: Optimizer, whole: Pieces, scale: float, found: Sequence[Tensor]) -> bool:
    """Whether other random numbers give what was ``found``."""
    again = stepped(optimizer, whole, scale, seed=1)
    return again is not None and alike(found, again)


def check_parts(optimizer: Optimizer, engine: str, *, warn: bool) -> None:
    """For an engine on which each rank steps some of the parameters, whole.

    Raises:
        ConfigError: the step of one parameter depends on others.
    """
    from distaccum.program import KEPT, load  # noqa: PLC0415  where an engine is made

    load(KEPT)(optimizer, engine)
    groups = [[p for p in group["params"] if p.requires_grad][:2] for group in optimizer.param_groups]
    if sum(map(len, groups)) <= 1:
        return
    generator = torch.Generator().manual_seed(0)
    whole = [[small(p, generator) for p in group] for group in groups]
    parts: list[list[list[Tensor]]] = [[[] for _ in groups] for _ in range(2)]
    lonely = 0
    for i, group in enumerate(whole):
        first = 0
        if len(group) == 1:  # such groups are dealt in turn
            first, lonely = lonely % 2, lonely + 1
        for j, value in enumerate(group):
            parts[(first + j) % 2][i].append(value)
    verdict = try_rule(optimizer, whole, parts)
    if verdict is Verdict.UNKNOWN and warn:
        problem = "its rule could not be tried on a few numbers"
        text = "optimizer %s: %s; it has to step each parameter by itself"
        _log.warning(text, type(optimizer).__name__, problem, extra=ON_ALL_RANKS)
    if verdict is Verdict.COUPLED:
        problem = (
            "its step of one parameter depends on the others (a norm over all of them?), and on this engine it has a "
            "part of them on each rank"
        )
        remedy = f"Clip with clip_norm= in place of it, or use engine=ddp, not {engine}"
        raise ConfigError("optimizer", type(optimizer).__name__, problem, remedy)


def small(parameter: nn.Parameter, generator: torch.Generator, ranks: int = 1) -> Tensor:
    """Of as many dimensions, and of few numbers; of a row for each of the ``ranks``, if the parameter has one."""
    size = [min(n, _SIZE if i else max(_SIZE, ranks)) for i, n in enumerate(parameter.shape)]
    return torch.randn(size, generator=generator).to(parameter.device, parameter.dtype)


def stepped(optimizer: Optimizer, pieces: Pieces, scale: float, *, seed: int) -> list[Tensor] | None:
    """The values after steps by the rule and settings of the optimizer's groups, end to end; None where it raises."""
    values = step_values(optimizer, pieces, scale, seed=seed)
    return None if values is None else [end_to_end(mine) for mine in values]


def end_to_end(values: Sequence[Tensor]) -> Tensor:
    """All numbers of some tensors, on the host; of sharded ones it is a collective."""
    flat = (as_real(full_tensor(value.detach())).flatten().cpu() for value in values)
    return torch.cat([torch.zeros(0), *flat])


def step_values(optimizer: Optimizer, pieces: Pieces, scale: float, *, seed: int) -> list[list[nn.Parameter]] | None:
    """The parameters after steps by the rule and settings of the optimizer's groups; None where it raises."""
    for begun in (False, True) if optimizer.state else (False,):  # some make their state when they are made
        torch.manual_seed(seed)
        values = [[nn.Parameter(piece.clone()) for piece in group] for group in pieces]
        groups = [
            dict(group) | {"params": mine} | _rate(group)
            for group, mine in zip(optimizer.param_groups, values, strict=True)
        ]
        trial = trial_copy(optimizer, groups)
        if trial is None:
            return None
        if begun:
            _begin(trial, optimizer)
        try:
            for step in range(1, SCALES[scale] + 1):
                for group, mine in zip(pieces, values, strict=True):
                    for piece, value in zip(group, mine, strict=True):
                        value.grad = _gradient(piece, step) * scale
                trial.step()
        except Exception:  # each optimizer has its own
            values = []
        if values:
            return values
    return None


def _rate(group: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule may begin at 0, and steps would then tell nothing."""
    return {"lr": _RATE} if "lr" in group and not float(group["lr"]) else {}


def _gradient(piece: Tensor, step: int) -> Tensor:
    """Of each element by itself: so a part's gradients are the whole's."""
    if piece.is_complex():
        return torch.view_as_complex(torch.sin(torch.view_as_real(piece) * (37.0 * step)))
    return torch.sin(piece * (37.0 * step))


def _begin(trial: Any, optimizer: Optimizer) -> None:
    """Gives a trial's parameters a state as the first parameter of their group has: its first number everywhere."""
    for group, given in zip(trial.param_groups, optimizer.param_groups, strict=True):
        with_state: list[Tensor] = [p for p in given["params"] if p in optimizer.state]
        for known, value in ((with_state[0], value) for value in group["params"] if with_state):
            trial.state[value] = {
                name: torch.full_like(value, float(entry.flatten()[0]))
                if isinstance(entry, Tensor) and entry.shape == known.shape and entry.numel()
                else deepcopy(entry)
                for name, entry in optimizer.state[known].items()
            }


def trial_copy(optimizer: Optimizer, groups: list[dict[str, Any]], *, wraps: bool = False) -> Any:
    """An optimizer of the same rule and settings over other groups, without state and hooks.

    None: it has one inside with groups of its own, and not ``wraps``. What it keeps as attributes is there too, lists
    and dictionaries as copies.
    """
    kind = type(optimizer)
    # Some free memory that the original needs when they are deleted.
    trial: Any = object.__new__(
        type(kind.__name__, (kind,), {"__del__": lambda _: None, "__module__": kind.__module__})
    )
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            if value.param_groups is not optimizer.param_groups and not wraps:
                return None
            vars(trial)[name] = trial_copy(value, groups, wraps=wraps)
        elif name not in _OURS:
            vars(trial)[name] = copy(value) if isinstance(value, dict | list | set) else value
            if isinstance(value, Tensor):
                vars(trial)[name] = value.clone()
    trial.state, trial.param_groups = defaultdict(dict), groups
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return trial


def alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether they are the same but for rounding, tensor by tensor."""
    return all(
        torch.allclose(one, other, rtol=1e-5, equal_nan=True) for one, other in zip(found, expected, strict=True)
    )


def foreign_hooks(optimizer: Optimizer) -> list[str]:
    """The names of the functions that a user has registered to run before or after the optimizer's step."""
    before: Mapping[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    after: Mapping[int, Any] = getattr(optimizer, "_optimizer_step_post_hooks", {})
    if not (before or after):
        return []
    functions = (getattr(hook, "func", hook) for hook in (*before.values(), *after.values()))
    return [
        getattr(function, "__qualname__", type(function).__name__)
        for function in functions
        if not (getattr(function, "__module__", "") or "").startswith("distaccum.")
    ]


def around_step(optimizer: Optimizer, before: OnStep, after: OnStep = lambda _: None) -> list[Any]:
    """Hooks that run once a step: torch runs others in its ``super().step()`` too, once that class has an instance."""
    call: list[Any] = []  # the outermost's keywords: a dictionary of its own, the same before and after

    def either(_: Optimizer, __: Any, keywords: Any) -> None:
        if not call or call[0] is keywords:
            (after if call else before)(optimizer)
            call[:] = [] if call else [keywords]

    return [optimizer.register_step_pre_hook(either), optimizer.register_step_post_hook(either)]


def check_hooks(optimizer: Optimizer) -> None:
    """For an engine whose step gives the optimizer a part of the parameters, or copies of them.

    Raises:
        ConfigError: functions of a user's run before or after its step.
    """
    if hooks := foreign_hooks(optimizer):
        raise ConfigError("optimizer", type(optimizer).__name__, f"its step hook {hooks[0]} {_SEES}", _REMEDY)


def expect_no_hooks(optimizers: Iterable[Optimizer]) -> None:
    """The same before a step.

    Raises:
        MisuseError: a hook was registered since.
    """
    for optimizer in optimizers:
        if hooks := foreign_hooks(optimizer):
            raise MisuseError(f"the optimizer's step hook {hooks[0]} {_SEES}: {_REMEDY[0].lower()}{_REMEDY[1:]}")
