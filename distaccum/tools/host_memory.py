"""The host memory that a rank's micro-batches take, and how many may be loaded ahead within a bound.

A run finds :func:`most_ahead` by its name where ``trainer.host_memory`` states one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from distaccum.config.checks import bytes_of
from distaccum.data.batches import map_tensors
from distaccum.data.loading_processes import reading
from distaccum.data.plan.batch import Plan
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.spec import DataSpec, WorkerOptions, is_map_style
from distaccum.distributed.random import RNGState
from distaccum.errors import ConfigError

_TRIED = 16  # samples, of which the first that is not None is reckoned with
_MIB = 2**20


def most_ahead(data: DataSpec, plan: Plan | StreamPlan, workers: WorkerOptions, stated: object) -> int:
    """How many micro-batches of a rank may be loaded ahead, where ``trainer.host_memory`` is ``stated``.

    Raises:
        ConfigError: not even the window fits, or the data do not tell.
    """
    key = "trainer.host_memory"
    if plan.is_stream:
        raise ConfigError(key, stated, "the data is a stream", "Leave it out: nobody knows how large its items are")
    memory = window_memory(data, plan, workers)
    return memory.most_ahead(key, stated, bytes_of(key, stated), workers.num_workers)


@dataclass(frozen=True, kw_only=True)
class WindowMemory:
    """The bytes of a full micro-batch on the host, and the most micro-batches of a rank's window."""

    micro_batch: int
    micro_batches: int

    @property
    def window(self) -> int:
        """The bytes of a rank's largest window: all its micro-batches are on the host before its first backward."""
        return self.micro_batch * self.micro_batches

    def most_ahead(self, key: str, value: object, limit: float, num_workers: int) -> int:
        """How many micro-batches may be loaded ahead, where these and a window take at most ``limit`` bytes.

        Args:
            key: of the setting that states the limit.
            value: as it was stated.
            limit: in bytes.
            num_workers: loading processes of this rank, each of which has at least one micro-batch ahead.

        Raises:
            ConfigError: not even that fits.
        """
        window = f"a rank's window takes {self.window / _MIB:,.1f} MiB"
        if self.window > limit:
            problem = f"{window} ({self.micro_batches} micro-batches of {self.micro_batch / _MIB:,.1f} MiB)"
            remedy = "Raise it, use more ranks, or lower batch.global_size: a window is counted as a whole"
            raise ConfigError(key, value, problem, remedy)
        if not self.micro_batch:
            raise ConfigError(key, value, "the first sample holds no tensor or array whose bytes tell", "Leave it out")
        ahead = int((limit - self.window) // self.micro_batch)
        if ahead < num_workers:
            least = f"{num_workers} loading processes at least {num_workers * self.micro_batch / _MIB:,.1f} MiB more"
            remedy = f"Raise it, or lower trainer.num_workers to {ahead}"
            raise ConfigError(key, value, f"{window}, and {least}", remedy)
        return ahead


def window_memory(source: DataSpec, plan: Plan, workers: WorkerOptions | None = None) -> WindowMemory:
    """Reckoned from one sample: the longest where the data say how long theirs are, else the first.

    The model's random numbers are left alone.

    Args:
        source: the data.
        plan: their division.
        workers: how samples are loaded; None: in this process.
    """
    assert is_map_style(source.train)
    generators = RNGState.capture()
    try:
        longest = 0 if source.lengths is None else int(np.argmax(source.lengths))
        tried = [longest, *range(min(_TRIED, len(source.train)))]
        of = partial(_bytes_of, source.collate or default_collate)
        found: int = next(filter(None, reading(source.train, [[i] for i in tried], of, workers or WorkerOptions())), 0)
    finally:
        generators.restore()
    return WindowMemory(micro_batch=math.ceil(found * plan.samples_like(longest)), micro_batches=plan.items_of_window)


def _bytes_of(collate: Callable[[list[Any]], Any], samples: list[Any]) -> int:
    """Those of the tensors and arrays of the samples' batch; of a sample that is None, 0."""
    if samples[0] is None:
        return 0
    sizes: list[int] = []
    map_tensors(
        collate(samples),
        lambda tensor: sizes.append(tensor.nbytes),
        lambda part: sizes.append(getattr(part, "nbytes", 0)),
    )
    return sum(sizes)
