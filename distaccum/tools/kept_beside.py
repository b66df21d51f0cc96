"""What an optimizer keeps beside its groups and state, tried in steps of its own code on copies of all of it.

Some engines give an optimizer a part of its parameters, or others in their places. What it keeps by a parameter's
place, as slow weights in a list or one flat buffer, then belongs to other parameters than were meant. Which attribute
that is does not matter: the steps of some parameters must be those that they have among all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.distributed.memory import is_out_of_memory
from distaccum.distributed.random import fork_rng
from distaccum.engines.modules import is_sharded
from distaccum.engines.rules import alike
from distaccum.errors import ConfigError

_STEPS = 12  # as in ``engines/rules.py``: slow weights follow every fifth or sixth
_SIDE, _WHOLE = 6, 2**22  # of a tensor's dimensions; numbers of all parameters that are tried as they are
_APART = ("step", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS = _APART[2:]


def check_kept(optimizer: Optimizer, engine: str) -> None:
    """For an engine whose step gives the optimizer a part of the parameters, or copies of them.

    Raises:
        ConfigError: some parameters step otherwise, in places of their own, than they do among all.
    """
    held = _parameters(optimizer)
    if len(held) <= 1 or any(map(is_sharded, held)) or not _Copies(optimizer, _SIDE).beside:
        return
    numbers = sum(p.numel() for p in held)
    with fork_rng(p.device for p in held), _without_gradients(held):
        for side in (_SIDE, 0) if numbers <= _WHOLE else (_SIDE,):
            among_all, again = (_stepped(optimizer, side, seed=seed) for seed in (0, 1))
            if among_all is not None and again is not None:
                if not alike(among_all, again):
                    return  # it draws random numbers, and nobody can tell
                found = _stepped(optimizer, side, seed=0, some=True)
                if found is not None and alike(found, among_all[1::2]):
                    return
                break
        else:
            if _Copies(optimizer, 0).beside < numbers:
                return
    problem = "keeps tensors of its own beside its state, and on this engine it steps other parameters by them"
    remedy = f"Keep what belongs to a parameter in optimizer.state[p], or use engine=ddp, not {engine}"
    raise ConfigError("optimizer", type(optimizer).__name__, problem, remedy)


def fault_of_step(optimizer: Optimizer) -> str:
    """What a step of the optimizer's own code raises, on copies of what it keeps; empty where it raises nothing.

    First without parameters, which costs nothing; then with the smallest of each group.
    """
    if not _raised(_Copies(optimizer, _SIDE), []) or _Copies(optimizer, _SIDE).beside:
        return ""
    smallest = [min(group["params"], key=Tensor.numel) for group in optimizer.param_groups if group["params"]]
    if any(map(is_sharded, smallest)):
        return ""
    with fork_rng(p.device for p in smallest), _without_gradients(_parameters(optimizer)):
        return _raised(_Copies(optimizer, 0), smallest)


def _raised(copies: _Copies, some: Sequence[Tensor]) -> str:
    kept = {id(copies.of(p)) for p in some}
    for group in copies.trial.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    try:
        getattr(copies.trial, "train", list)()  # as a schedule-free one wants it, and training loops call it later
        copies.trial.step()
    except Exception as error:  # each optimizer has its own
        return "" if is_out_of_memory(error) else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def _without_gradients(held: Sequence[Tensor]) -> Iterator[None]:
    """A rule may hold on to its parameters, as in a module, and would step them."""
    gradients = [p.grad for p in held]
    for p in held:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(held, gradients, strict=True):
            p.grad = gradient


def _stepped(optimizer: Optimizer, side: int, *, seed: int, some: bool = False) -> list[Tensor] | None:
    """The parameters after steps among all; or ``some``, every second in a place of its own; None where it raises."""
    copies = _Copies(optimizer, side)
    stand_ins = _parameters(copies.trial)
    stepped = copies.replace(stand_ins[1::2]) if some else stand_ins
    begun = [p.detach().clone() for p in stepped]
    torch.manual_seed(seed)
    try:
        getattr(copies.trial, "train", list)()
        for step in range(1, _STEPS + 1):
            for p, value in zip(stepped, begun, strict=True):
                p.grad = torch.sin(torch.view_as_real(value) if value.is_complex() else value).mul_(37.0 * step).sin_()
                p.grad = torch.view_as_complex(p.grad) if value.is_complex() else p.grad
            copies.trial.step()
    except Exception:  # each optimizer has its own
        return None
    return [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in stepped]


class _Copies:
    """An optimizer's copy, with copies of all that it keeps: lists, buffers, objects, optimizers within it.

    Args:
        optimizer: stays as it is.
        side: of its tensors, at most so many in each dimension; 0: all.
    """

    def __init__(self, optimizer: Optimizer, side: int) -> None:
        self._side = side
        self._known: dict[int, Any] = {}
        self._optimizers: list[Any] = []
        self.beside = 0
        """How many numbers it keeps in tensors that are neither its parameters nor their state."""
        for p in _parameters(optimizer):
            self._known[id(p)] = nn.Parameter(self._cut(p), requires_grad=p.requires_grad)
            vars(self._known[id(p)]).update(vars(p))
        self.trial: Any = self._of_optimizer(optimizer)

    def _cut(self, tensor: Tensor) -> Tensor:
        some = tuple(slice(0, self._side) for _ in tensor.shape) if self._side else ...
        return tensor.detach()[some].clone()

    def of(self, value: Any) -> Any:
        """Its copy, the same one each time."""
        if id(value) not in self._known:
            self._known[id(value)] = self._made(value)
        return self._known[id(value)]

    def _of_optimizer(self, optimizer: Optimizer) -> Any:
        kind = type(optimizer)
        # Some free memory that the original needs when they are deleted.
        names = {"__del__": lambda _: None, "__module__": kind.__module__}
        trial: Any = object.__new__(type(kind.__name__, (kind,), names))
        self._known[id(optimizer)] = trial
        self._optimizers.append(trial)
        before = self.beside
        trial.state = self.of(optimizer.state)
        self.beside = before  # belongs to a parameter, which takes it along
        for name, value in vars(optimizer).items():
            if name not in _APART and name != "state":
                vars(trial)[name] = self.of(value)
        vars(trial).update({name: OrderedDict() for name in _HOOKS})
        return trial

    def _made(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.beside += value.numel() if value.numel() > 1 else 0
            return value if is_sharded(value) else self._cut(value)
        if isinstance(value, Optimizer):
            return self._of_optimizer(value)
        if isinstance(value, list | deque | dict | set) and type(value).__module__ in ("builtins", "collections"):
            return self._of_container(value)
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        return self._of_object(value)

    def _of_container(self, value: Any) -> Any:
        made = self._known[id(value)] = copy(value)
        made.clear()
        if isinstance(value, dict):
            made.update({self.of(key): self.of(one) for key, one in value.items()})
        else:
            getattr(made, "update" if isinstance(value, set) else "extend")(map(self.of, value))
        return made

    def _of_object(self, value: Any) -> Any:
        """Of one with attributes: functions, modules and torch's own stay what they are."""
        own = getattr(value, "__dict__", None)
        if type(own) is not dict or callable(value) or type(value).__module__.startswith("torch."):
            return value
        made = self._known[id(value)] = copy(value)
        if made is not value and made.__dict__ is not own:
            made.__dict__.update({name: self.of(one) for name, one in own.items()})
        return made

    def replace(self, stand_ins: Sequence[Any]) -> list[nn.Parameter]:
        """Has new parameters stepped in place of these, which take their state along, and none of the others."""
        new = {id(p): nn.Parameter(p.detach().clone()) for p in stand_ins}
        for group in self.trial.param_groups:
            group["params"] = [new[id(p)] for p in group["params"] if id(p) in new]
        for trial in self._optimizers:
            for p in [p for p in trial.state if id(p) in new]:
                trial.state[new[id(p)]] = trial.state.pop(p)
        return list(new.values())
