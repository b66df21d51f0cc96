"""Whether a loop of the user's communicates between micro-steps of which ranks have different numbers.

The ranks with fewer are in the window's reduction by then, and both would wait for each other. The first such window is
watched: a collective of the loop's own ends it on all ranks, before it is begun and before a weight moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from distaccum.data.hooks import WindowHook
from distaccum.data.plan.units import UnitAssignment
from distaccum.data.window import Window
from distaccum.engines.base import Engine
from distaccum.engines.compiled import compiled_parts
from distaccum.errors import MisuseError

_NAMESPACE, _POINT_TO_POINT = "c10d", ("send", "recv_", "recv_any_source_")
_OURS = "distaccum."


class OwnCollectives(WindowHook):
    """Attached by an Accumulator of several ranks.

    Args:
        engine: runs the windows.
        drop: drops the window on this rank.
    """

    def __init__(self, engine: Engine, drop: Callable[[], None]) -> None:
        self._engine, self._world, self._drop = engine, engine.world, drop
        self._uneven = self._watches = self._looked = False
        self._window: Window | None = None
        self._left = self._fewest = 0  # micro-steps of this rank; of the window, on the rank with the fewest
        self._found = ""
        self._watch = _Watch(self._met)
        self._hook: Any = None

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """The number of micro-batches, its square, and whether a window was looked at."""
        self._watch.end()
        return [float(micro_batches), float(micro_batches) ** 2, float(self._looked)]

    def incoming(self, sums: list[float]) -> None:
        """Their sums: the variance is 0 only where ranks have as many."""
        total, squares, looked = sums
        self._uneven = self._world.size * squares != total * total and not looked

    def window_begins(self, window: Window) -> None:
        """Begins to watch the first window that is uneven; a collective then."""
        self._window, self._left, self._found = window, len(window.micro_batches), ""
        if self._uneven:
            self._fewest = -self._world.all_reduce_max_host([-self._left])[0]
            self._watches = self._fewest > 0
        if self._watches:
            self._hook = self._engine.model.register_forward_pre_hook(lambda *_: self._watch.end(), prepend=True)
            vars(self._engine)["give_up"] = self._give_up

    def before_backward(self, loss: Tensor) -> None:
        """What communicates from here on is the engine."""
        self._watch.end()

    def after_backward(self) -> None:
        """What communicates from here on to the next forward is the loop.

        Raises:
            MisuseError: another rank has met a collective of the loop's; on all of them.
        """
        self._left -= 1
        if not self._watches:
            return
        if not self._left:
            self._compare()
        elif self._engine.compiled is None and not compiled_parts(self._engine.unwrapped_model):
            self._watch.begin()

    def _met(self, what: str) -> None:
        """Called before a collective of the loop's own.

        Raises:
            MisuseError: other ranks are in the window's reduction; raised on all of them.
        """
        assert self._window is not None
        together = self._engine.facts.forward_communicates
        if len(self._window.micro_batches) - self._left < self._fewest and not together:
            return  # all ranks have another micro-step
        self._watch.end()
        self._found = what
        if type(self._engine).give_up(self._engine, self._window.assignment) is None:
            for left in reversed(range(self._left if together else 1)):
                self._engine.shadow_micro_step(sync=left == 0)
        self._compare()

    def _give_up(self, assignment: UnitAssignment | None = None) -> bool | None:
        """The engine's own, after which this rank meets those that have ended their last backward."""
        sends = type(self._engine).give_up(self._engine, assignment)
        if sends is not None:
            self._compare()
        return sends

    def _compare(self) -> None:
        self.window_dropped()
        self._looked = True
        with self._engine.finishing():
            found = self._world.all_gather_names([self._found] if self._found else [])
        if found:
            self._drop()
            raise MisuseError(
                f"the loop calls a collective of its own ({', '.join(found)}) between two micro-steps, and ranks have "
                "different numbers of micro-batches in this step: those with fewer are in the gradient's reduction. No "
                "step was made. Communicate once a window, after its last micro-batch; or choose global and "
                "micro-batch size, and drop the ragged end of the data, so that all ranks have as many"
            )

    def window_dropped(self) -> None:
        """Watches no longer."""
        self._watches = False
        self._watch.end()
        vars(self._engine).pop("give_up", None)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def close(self) -> None:
        """As :meth:`window_dropped`."""
        self.window_dropped()


class _Watch(TorchDispatchMode):
    """Calls a function before each collective of all ranks that is not distaccum's own, with its name."""

    def __init__(self, met: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met = met
        self._keys: tuple[Any, Any] | None = None  # of the dispatcher, as they are for the loop: with autograd

    def begin(self) -> None:
        """Not within another mode, which may end in between."""
        if not _get_current_dispatch_mode_stack():
            self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Also where it has ended, or another one has begun since: that one ends it."""
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, unless it raises."""
        name = function._schema.name.partition("::")
        if name[0] == _NAMESPACE and name[2] not in _POINT_TO_POINT and _of_all((*args, *(kwargs or {}).values())):
            assert self._keys is not None
            with torch._C._ForceDispatchKeyGuard(*self._keys):
                if not _caller(sys._getframe(1)).startswith(_OURS):
                    self._met(name[2].rstrip("_"))
        return function(*args, **(kwargs or {}))


def _of_all(arguments: Any) -> bool:
    """Whether the group among a collective's arguments is that of all ranks."""
    world = torch.distributed.group.WORLD
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            with suppress(Exception):  # it is a reduction, not a group
                return torch.distributed.ProcessGroup.unbox(argument) is world
    return False


def _caller(frame: FrameType | None) -> str:
    """The module that has called torch."""
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith("torch") or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
