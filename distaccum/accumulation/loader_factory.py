"""Makes the window loaders of a loop's data; with ``micro_batch_size="auto"`` the first one after a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from distaccum.accumulation.rehearsal import Rehearsal, rehearse
from distaccum.accumulation.two_pass import of_micro_batch
from distaccum.config.checks import AUTO
from distaccum.data.adapters import to_data_spec
from distaccum.data.factory import as_loader, make_plan
from distaccum.data.host_memory import longest_micro_batch
from distaccum.data.loader import WindowLoader
from distaccum.data.plan.batch import largest_share
from distaccum.data.spec import is_map_style
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import ConfigError
from distaccum.losses.base import AnyLoss, Loss


class LoaderFactory:
    """See the module.

    Args:
        engine: runs the rehearsal.
        world: this rank.
        sizes: ``global_batch_size``, ``micro_batch_size`` and ``tokens``; None: not given, or found in a rehearsal.
        loss: to rehearse with; None: nothing is rehearsed.
        options: of the loaders: ``seed``, ``prefetch_windows`` and ``virtual_ranks``.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        world: World,
        sizes: Mapping[str, int | None],
        loss: Loss | None,
        **options: int | None,
    ) -> None:
        self._engine, self._world, self._sizes, self._loss, self._options = engine, world, dict(sizes), loss, options
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
            self.rehearsal = rehearse(
                self._engine(),
                self._world,
                self._loss,
                partial(longest_micro_batch, spec),
                count=self._loss.count,
                most=largest_share(plan),
                sharing=max(1, LaunchEnvironment.from_environment().local_size),
            )
            self._sizes["micro_batch_size"] = self.rehearsal.micro_size
        return self._as_loader(spec)

    def _as_loader(self, data: Any) -> WindowLoader:
        sizes: dict[str, Any] = dict(self._sizes)
        options: dict[str, Any] = dict(self._options)
        return as_loader(data, self._world, **sizes, **options, together=True)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what was found, on what, and which shapes fit."""
        size = self._sizes["micro_batch_size"] if self._loss is not None else None
        return {"micro_size": size, "device": self._device, "marks": self._engine().memory_marks.state_dict()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes what was found on a device of the same kind; elsewhere it is rehearsed again."""
        if saved.get("device") != self._device:
            return
        self._engine().memory_marks.load_state_dict(saved["marks"])
        if self._loss is not None and self._sizes["micro_batch_size"] is None:
            self._sizes["micro_batch_size"] = saved["micro_size"]

    @property
    def _device(self) -> str:
        device = self._world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
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
    return of_micro_batch(loss)
