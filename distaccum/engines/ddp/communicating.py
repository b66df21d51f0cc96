"""Micro-steps that communicate, as SyncBatchNorm's do: ranks must then have the same number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distaccum.distributed.world import World
from distaccum.engines.modules import clean
from distaccum.errors import MisuseError, shorten


class Communicating:
    """Knows whether this rank's micro-steps communicate, and compares the ranks' numbers of them where they do.

    Args:
        model: whose layers may synchronize.
        world: this rank.
        dropped: called before the error where ranks have different numbers.
    """

    def __init__(self, model: nn.Module, world: World, dropped: Callable[[], None]) -> None:
        self._world, self._dropped = world, dropped
        self.collectives = Collectives(world.device)
        """Of the open micro-step, while these are watched."""
        self.micro_steps: int | None = None
        """Of this rank in the open window, where somebody has told."""
        self.begun = 0
        """Micro-steps of the open window."""
        self._seen = False  # a micro-step was seen to
        self.synchronized = {
            clean(name): module
            for name, module in model.named_modules()
            if world.size > 1 and any("SyncBatchNorm" in base.__name__ for base in type(module).__mro__)
        }

    @property
    def what(self) -> str:
        """What in a micro-step is a collective, as far as is known; empty: nothing."""
        found = [name for name, module in self.synchronized.items() if module.training]
        if found:
            return f"{shorten(found)} (SyncBatchNorm)"
        return "the model's forward or the loss" if self._seen else ""

    @property
    def suspected(self) -> bool:
        """Whether they communicate, or the open micro-step has so far."""
        return bool(self.what) or self.collectives.seen

    def window_begins(self, micro_steps: int) -> None:
        """Where micro-steps communicate this is a collective.

        Raises:
            MisuseError: ranks have different numbers of micro-steps; on every rank.
        """
        self.micro_steps, self.begun = micro_steps, 0
        if (self.synchronized or self._seen) and (what := self.what):
            self._compare(what)

    def window_ends(self) -> None:
        """Nothing is known of the next one."""
        self.micro_steps, self.begun = None, 0

    @property
    def micro_steps_left(self) -> int:
        """Of a window whose number was told."""
        return max(0, (self.micro_steps or 0) - self.begun)

    def micro_step_begins(self, *, first: bool) -> None:
        """Watches a window's first one: a loop that communicates does so in each. Raises as :meth:`window_begins`."""
        if self.synchronized and self.micro_steps is None and (what := self.what):
            self._compare(what)
        if first and not self._seen and self._world.size > 1:
            self.collectives.note()

    def forward_ended(self) -> None:
        """Before the backward of a micro-step that is watched. Raises as :meth:`window_begins`."""
        if self.collectives.called():  # on all ranks that have this micro-step
            self._seen = True
            self._compare(self.what)

    def _compare(self, what: str) -> None:
        problem = f"{what} communicates in every micro-step"
        if self.micro_steps is None:
            remedy = "call engine.begin_window(len(window.micro_batches)) before a window's first"
            raise MisuseError(f"{problem}, so ranks must have the same number of them: {remedy}")
        most, fewest = self._world.all_reduce_max_host([self.micro_steps, -self.micro_steps])
        if most != -fewest:
            self._dropped()
            raise MisuseError(
                f"{problem}, and ranks have different numbers of micro-batches in this step: {most} and {-fewest}. "
                "Choose global and micro-batch size, and drop the ragged end of the data, so that all ranks have as "
                "many; or use a layer that does not communicate, as GroupNorm"
            )

    def close(self) -> None:
        """Watches no longer."""
        self.collectives.stop()


_watching: list[Collectives] = []
_NOTHING = nullcontext()


class Collectives:
    """Tells whether a collective was called since :meth:`note`, on the default process group; costs none itself.

    Those within :func:`uncounted` do not count.

    Args:
        device: this rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._backends = list(_backends({torch.device("cpu"), torch.device(device.type)}))
        self._before: list[int] | None = None
        self._called = False  # before the last pause
        self.watching = False

    def note(self) -> None:
        """Begins to watch."""
        self._before, self._called, self.watching = self._numbers(), False, True
        if self not in _watching:
            _watching.append(self)

    @property
    def seen(self) -> bool:
        """Whether there was one so far, where somebody watches."""
        return self.watching and (self._called or self._differs())

    def called(self) -> bool:
        """Whether there was one; False where the group does not count. Ends the watching."""
        called = self._called or self._differs()
        self.stop()
        return called

    def stop(self) -> None:
        """Watches no longer."""
        self.watching = False
        if self in _watching:
            _watching.remove(self)

    def pause(self) -> None:
        """What follows is not counted, until :meth:`resume`."""
        self._called = self._called or self._differs()

    def resume(self) -> None:
        """Goes on after :meth:`pause`."""
        self._before = self._numbers()

    def _differs(self) -> bool:
        return self._before is not None and self._before != self._numbers()

    def _numbers(self) -> list[int] | None:
        try:
            return [int(backend._get_sequence_number_for_group()) for backend in self._backends]
        except RuntimeError:  # of a backend that does not count
            return None


def uncounted() -> AbstractContextManager[None]:
    """Within the block a collective is the library's own, though a micro-step of another accumulator is open."""
    return _paused() if _watching else _NOTHING


@contextmanager
def _paused() -> Iterator[None]:
    watching = list(_watching)
    for collectives in watching:
        collectives.pause()
    try:
        yield
    finally:
        for collectives in watching:
            collectives.resume()


def _backends(devices: set[torch.device]) -> Iterator[Any]:
    group: Any = dist.group.WORLD
    for device in devices:
        with suppress(RuntimeError):  # the group has none for it
            yield group._get_backend(device)
