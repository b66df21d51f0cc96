"""What looks at windows attaches to the engine: one protocol, one list; who calls it names none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from distaccum.data.window import Window


class WindowHook:
    """Looks at windows. Every method does nothing here; every rank has the same hooks in the same order."""

    metrics: Mapping[str, float] = {}
    """What a record has of it, of the windows so far."""

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """This rank's numbers that ride in the one small all-reduce of a window's counts.

        As many on every rank, and in every window.

        Args:
            micro_batches: of this rank, that are counted.
            losses: that are counted.
        """
        return []

    def incoming(self, sums: list[float]) -> None:
        """The sums over the ranks of what :meth:`outgoing` gave; what it raises all ranks raise."""

    def window_begins(self, window: Window) -> None:
        """The window is counted, and its first micro-batch comes next."""

    def before_backward(self, loss: Tensor) -> None:
        """The backward of ``loss``, a 0-dim tensor that is divided already, comes next."""

    def after_backward(self) -> None:
        """That backward has ended without an error."""

    def before_step(self, divisor: float) -> None:
        """The gradient is reduced, and no weight has moved: may be a collective, and what it raises all ranks raise.

        Args:
            divisor: the gradient is what was accumulated over it.
        """

    def after_step(self, window: Window) -> None:
        """The window has ended, with a step, a skipped one, or none where it counted nothing."""

    def window_dropped(self) -> None:
        """The window has ended without a step on this rank."""

    def restarted(self) -> None:
        """Other weights were loaded: what is known of earlier windows holds no longer."""

    def state(self) -> Any:
        """What a checkpoint keeps, as JSON holds it; None: nothing. Between two windows; may be a collective."""

    def load_state(self, state: Any) -> None:
        """Restores :meth:`state` of any number of ranks, after :meth:`restarted`."""

    def close(self) -> None:
        """The last window has ended: what the hook has attached elsewhere is removed."""


class Hooks:
    """Hooks in their order, by event: one that does nothing at an event is not called there."""

    def __init__(self, *hooks: WindowHook) -> None:
        self._set(hooks)

    def _set(self, hooks: Sequence[WindowHook]) -> None:
        self._all = tuple(hooks)
        self.travelling = [hook for hook in hooks if _has(hook, "outgoing")]
        """Those with numbers in a count."""
        self.window_begins: Sequence[Callable[[Window], None]] = self._of("window_begins")
        self.before_backward: Sequence[Callable[[Tensor], None]] = self._of("before_backward")
        self.after_backward: Sequence[Callable[[], None]] = self._of("after_backward")
        self.before_step: Sequence[Callable[[float], None]] = self._of("before_step")
        self.after_step: Sequence[Callable[[Window], None]] = self._of("after_step")
        self.window_dropped: Sequence[Callable[[], None]] = self._of("window_dropped")
        self.restarted: Sequence[Callable[[], None]] = self._of("restarted")
        self.close: Sequence[Callable[[], None]] = self._of("close")

    def _of(self, event: str) -> Any:
        return [getattr(hook, event) for hook in self._all if _has(hook, event)]

    @property
    def metrics(self) -> dict[str, float]:
        """Those of all hooks."""
        return {name: value for hook in self._all for name, value in hook.metrics.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the hooks, by their classes."""
        found = {type(hook).__name__: hook.state() for hook in self._all if _has(hook, "state")}
        return {name: state for name, state in found.items() if state is not None}

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Restores :meth:`state` in those hooks that it knows."""
        for hook in self._all:
            if type(hook).__name__ in states:
                hook.load_state(states[type(hook).__name__])

    def add(self, hook: WindowHook) -> None:
        """The last one from here on; between two windows."""
        self._set((*self._all, hook))

    def remove(self, hook: WindowHook) -> None:
        """Leaves it out from here on; between two windows."""
        self._set([one for one in self._all if one is not hook])


def _has(hook: WindowHook, event: str) -> bool:
    return getattr(type(hook), event) is not getattr(WindowHook, event)


class BeforeStep(WindowHook):
    """Calls a function before each step, as to set the learning rate."""

    def __init__(self, call: Callable[[float], object]) -> None:
        self._call = call

    def before_step(self, divisor: float) -> None:
        """See :class:`WindowHook`."""
        self._call(divisor)
