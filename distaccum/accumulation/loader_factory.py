"""Makes the window loaders of a loop's data; with ``micro_batch_size="auto"`` the first one after a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from distaccum.accumulation.open_window import refuse
from distaccum.accumulation.progress import Progress
from distaccum.config.checks import AUTO, require, whole_number
from distaccum.data.adapters import to_data_spec
from distaccum.data.factory import as_loader, make_plan
from distaccum.data.loader import WindowLoader
from distaccum.data.plan.batch import Resize, check_sizes, largest_share
from distaccum.data.spec import is_map_style
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import ConfigError
from distaccum.losses.base import AnyLoss, Loss

if TYPE_CHECKING:
    from distaccum.accumulation.rehearsal import Rehearsal

# The global batch of a loop, which may change between two windows, and the loaders that cut it.


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


class LoaderFactory:
    """See the module.

    Args:
        engine: runs the rehearsal.
        sizes: ``global_batch_size``, ``micro_batch_size`` and ``tokens``; None: not given, or found in a rehearsal.
        loss: to rehearse with; None: nothing is rehearsed.
        options: of the loaders: ``seed``, ``prefetch_windows`` and ``arrange``.
    """

    def __init__(self, engine: Engine, sizes: Mapping[str, int | None], loss: Loss | None, **options: Any) -> None:
        self._engine, self._world, self._sizes, self._loss = engine, engine.world, dict(sizes), loss
        self._options = options
        self.rehearsal: Rehearsal | None = None
        """What the rehearsal has found; None without one."""

    def __call__(self, data: Any) -> WindowLoader:
        """The loader of ``data``, on all ranks.

        Raises:
            ConfigError: sizes or data that cannot be planned.
        """
        if self._loss is None:
            return self._as_loader(data)
        spec = to_data_spec(data, self._world.size)
        if not is_map_style(spec.train):
            remedy = "State the samples that fit on a device at once"
            raise ConfigError("micro_batch_size", AUTO, "a stream gives its items once: nothing is rehearsed", remedy)
        spec = replace(spec, micro_batch_size=None)  # a DataLoader's batch_size says no more than its form
        if self._sizes["micro_batch_size"] is None:
            sizes: dict[str, Any] = {**self._sizes, "micro_batch_size": 1}
            plan = make_plan(spec, **sizes, world_size=self._world.size, seed=self._options["seed"] or 0)
            assert not plan.is_stream
            from distaccum.program import LONGEST, REHEARSAL, load  # noqa: PLC0415  with micro_batch_size=auto alone

            longest = partial(load(LONGEST), spec)
            found: Rehearsal = load(REHEARSAL)(self._engine, self._loss, longest, most=largest_share(plan))
            self.rehearsal, self._sizes["micro_batch_size"] = found, found.micro_size
        return self._as_loader(spec)

    def _as_loader(self, data: Any) -> WindowLoader:
        sizes: dict[str, Any] = dict(self._sizes)
        options: dict[str, Any] = dict(self._options)
        return as_loader(data, self._world, **sizes, **options, together=True)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what was found, on what, and which shapes fit."""
        size = self._sizes["micro_batch_size"] if self._loss is not None else None
        return {"micro_size": size, "device": self._device, "marks": self._engine.memory_marks.state_dict()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes what was found on a device of the same kind; elsewhere it is rehearsed again."""
        if saved.get("device") != self._device:
            return
        self._engine.memory_marks.load_state_dict(saved["marks"])
        if self._loss is not None and self._sizes["micro_batch_size"] is None:
            self._sizes["micro_batch_size"] = saved["micro_size"]

    @property
    def _device(self) -> str:
        device = self._world.device
        name = device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
        return f"{self._world.size} x {name}"


def loss_to_rehearse(micro_batch_size: object, loss: AnyLoss | None) -> Loss | None:
    """The loss, where the micro-batch is to be found in a rehearsal.

    Raises:
        ConfigError: it is, and there is no loss; or there is a loss and nothing to find.
    """
    if not (isinstance(micro_batch_size, str) and micro_batch_size == AUTO):
        problem, remedy = "and micro_batch_size is a number", 'Give micro_batch_size="auto", or leave the loss out'
        if loss is not None:
            raise ConfigError("loss", type(loss).__name__, problem, remedy)
        return None
    if loss is None or not callable(getattr(loss, "count", None)):
        problem = "a rehearsal runs the loss, and there is none with count(batch)"
        raise ConfigError("micro_batch_size", AUTO, problem, "Give loss=, as to the Trainer, or state a number")
    from distaccum.accumulation.two_pass import of_micro_batch  # noqa: PLC0415  with micro_batch_size=auto alone

    return of_micro_batch(loss)
