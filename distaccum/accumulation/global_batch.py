"""The global batch of a loop, which may change between two windows, and the loaders that cut it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from distaccum.accumulation.open_window import refuse
from distaccum.accumulation.progress import Progress
from distaccum.config.checks import require, whole_number
from distaccum.data.loader import WindowLoader
from distaccum.data.plan.batch import Resize, check_sizes
from distaccum.distributed.world import World
from distaccum.errors import ConfigError


class GlobalBatch:
    """The latest change of the global batch; the first one is what the loop began with.

    Args:
        sizes: ``global_batch_size``, ``micro_batch_size`` and ``tokens``, as the loop was told; None: not given.
    """

    def __init__(self, sizes: Mapping[str, int | None]) -> None:
        self._sizes = sizes
        self._first = sizes["global_batch_size"]
        self.change = None if self._first is None else _start(self._first)
        """The one that holds from its window on; None where ``tokens`` cuts the windows."""
        self._loaders = self.change  # the one that loaders have got

    @property
    def size(self) -> int | None:
        """Samples of the next window over all ranks; None where ``tokens`` says its size."""
        return None if self.change is None else self.change.global_batch_size

    def agree(self, global_batch_size: int, world: World) -> int:
        """The size that all ranks ask for; a collective.

        Raises:
            ConfigError: a size that cannot work, or that differs between the ranks.
            MisuseError: ``tokens`` cuts the windows.
        """
        if self.change is None:
            refuse("set_global_batch_size()", "where tokens= cuts the windows", "give global_batch_size= instead")
        size, error = 0, None
        try:
            check_sizes(whole_number("global_batch_size", global_batch_size), self._sizes["micro_batch_size"] or 1)
            size = int(global_batch_size)
        except ConfigError as own:  # the other ranks are told first
            error = own
        most, fewest = world.all_reduce_max_host([size, -size])
        if error is not None:
            raise error
        remedy = "Give every rank the same"
        require(most == -fewest, "global_batch_size", size, f"and from {-fewest} to {most} on other ranks", remedy)
        return size

    def set(self, size: int, progress: Progress, loader: WindowLoader | None) -> None:
        """Changes it from the window on that comes next, also for the loader that windows are taken from, if any.

        Raises:
            MisuseError: the loader cuts its windows itself.
        """
        assert self.change is not None
        epoch, window = progress.epoch, progress.epoch_window
        position = self.change.position_of(epoch, window)
        change = Resize(global_batch_size=size, epoch=epoch, window=window, position=position)
        if loader is not None:
            loader.resize(change)
            self._loaders = change
        self.change = change

    def give(self, loader: WindowLoader) -> None:
        """Gives a loader that is about to be used a change that was made before there was one."""
        if self.change is not None and self.change != self._loaders:
            loader.resize(self.change)
            self._loaders = self.change

    def give_on(self, loader: WindowLoader) -> None:
        """Gives a new loader what the one before had, if it is not what the loop began with."""
        if self._loaders is not None and self._first is not None and self._loaders != _start(self._first):
            loader.resize(self._loaders)

    def state(self) -> Mapping[str, Any] | None:
        """For a checkpoint."""
        return None if self.change is None else {**self._sizes, "change": asdict(self.change)}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Takes the saved global batch, if this loop began with the same one, or with what it was set to."""
        if self._first is None:
            return
        self.change = _start(self._first)
        if saved is not None and self._first in (saved["global_batch_size"], saved["change"]["global_batch_size"]):
            self.change = Resize(**saved["change"])  # otherwise the data's position says what does not fit
        self._loaders = self.change


def _start(global_batch_size: int) -> Resize:
    """The size that holds from the first window on."""
    return Resize(global_batch_size=global_batch_size, epoch=0, window=0, position=0)
