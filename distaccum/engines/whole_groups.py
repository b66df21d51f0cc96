"""The optimizers' groups: a rank's part while the engine steps, and all of the user's parameters otherwise.

A loop over ``optimizer.param_groups`` (a norm, a clamp, a copy of the weights) then does the same on every engine. If
it met one rank's part, or flat copies of it, forwards would go on with other weights than the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distaccum.errors import MisuseError


class WholeGroups:
    """Within the ``with`` block groups hold what the engine has put there; outside what the user gave.

    Args:
        optimizers: before the engine changes their groups.
        drops_empty: whether the engine removes groups without parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, drops_empty: bool = False) -> None:
        self._optimizers = optimizers
        for groups in (optimizer.param_groups for optimizer in optimizers if drops_empty):
            groups[:] = [group for group in groups if group["params"]]
        self._given: list[list[Any]] = [group["params"] for group in self._groups()]
        self._parameters = [list(parameters) for parameters in self._given]
        self._engines: list[list[Any]] = []
        self._numbers = [len(optimizer.param_groups) for optimizer in optimizers]
        self._added: list[list[dict[str, Any]]] = [[] for _ in optimizers]  # by a user, and put aside
        self._inside = False
        self._hooks: list[RemovableHandle] = []
        self._refused: frozenset[Any] = frozenset()

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Those of now: loading an optimizer's state makes new ones, and a user may have added some."""
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def show(self, *, state_is_whole: bool = False, copies: bool = False) -> None:
        """Called once the engine has changed the groups: keeps what it put there, and puts the user's back.

        Args:
            state_is_whole: of the optimizers, on every rank; otherwise their ``state_dict`` is refused.
            copies: whether the engine steps other tensors than the parameters, which then have no state.
        """
        self.__exit__()
        if state_is_whole:
            return
        begun = {p for optimizer in self._optimizers for p in optimizer.state}  # when it was made, as Adagrad's
        every = {p for parameters in self._parameters for p in parameters}
        self._refused = frozenset(every - begun if copies else ())
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_state_dict_pre_hook(self._before_state))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._before_state))

    def release(self) -> None:
        """Ends what :meth:`show` refuses."""
        while self._hooks:
            self._hooks.pop().remove()

    def _before_state(self, *_: object) -> None:
        if not self._inside:
            raise MisuseError(
                "the optimizer's state_dict() and load_state_dict() see one rank's share on this engine: call the "
                "accumulator's, acc.state_dict() and acc.load_state_dict()"
            )

    def __enter__(self) -> None:
        self._inside = True
        for optimizer, number, added in zip(self._optimizers, self._numbers, self._added, strict=True):
            added[:] = optimizer.param_groups[number:]
            del optimizer.param_groups[number:]
        for group, engines in zip(self._groups(), self._engines, strict=False):
            group["params"] = engines

    def __exit__(self, *_: object) -> None:
        self._inside = False
        self._engines = [group["params"] for group in self._groups()]
        for group, given in zip(self._groups(), self._given, strict=False):
            group["params"] = given
        for optimizer, added in zip(self._optimizers, self._added, strict=True):
            optimizer.param_groups += added
            added.clear()

    def check(self) -> None:
        """Called outside of the block.

        Raises:
            MisuseError: somebody has added or removed a group, or a parameter of one; or has asked for the state of a
                parameter that has none.
        """
        if not all(self._refused.isdisjoint(optimizer.state) for optimizer in self._optimizers):
            raise MisuseError(
                "optimizer.state was asked for a parameter's state, and this engine steps copies, which have it: leave "
                "the state to the engine, or use engine=ddp"
            )
        now = [group["params"] for group in self._groups()]
        if len(now) != len(self._parameters) or not all(map(_same, now, self._parameters)):
            raise MisuseError(
                "the optimizer's groups hold other parameters than when the engine was made (add_param_group, or "
                'group["params"] written by hand): set them up before, or close() the accumulator and make a new one'
            )


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
