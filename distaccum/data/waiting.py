"""How long a rank waits for the micro-batches of a window: the device, or, without one of its own, the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch


class WaitClock:
    """Times the loading of windows, and never makes the host wait for the device.

    The host is ahead of a GPU, which goes on while the host waits for data. So an event marks the end of what was
    queued before the loading. If the GPU has not got there when the data are there, it has not waited. If it has, it
    was idle from that event until now, which a second event marks; what lies between them is known when both have
    happened.

    Args:
        device: of this rank.
        clock: seconds of the host.
        event: makes an event of the device, as ``torch.cuda.Event``; None: the device's own, or none without a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], float] = perf_counter,
        event: Callable[[], Any] | None = None,
    ) -> None:
        if event is None and device.type == "cuda":
            event = partial(torch.cuda.Event, enable_timing=True)
        self._clock, self._event = clock, event
        self._began = 0.0
        self._queued: Any = None

    def start(self) -> None:
        """Called when a window is asked for: all work of the one before is queued."""
        self._began = self._clock()
        if self._event is not None:
            self._queued = self._event()
            self._queued.record()

    def stop(self) -> tuple[float, Callable[[], float] | None]:
        """Called when its micro-batches are there.

        Returns:
            the seconds that the host has waited; and what gives those of the device, when the window is run, None where
            there are no events.
        """
        waited, queued = self._clock() - self._began, self._queued
        if self._event is None or queued is None:
            return waited, None
        if not queued.query():
            return waited, float  # 0.0: the device is still busy
        loaded = self._event()
        loaded.record()
        return waited, partial(_idle, queued, loaded, waited)


def _idle(queued: Any, loaded: Any, most: float) -> float:
    """Seconds between two events of a device, and no more than the host has waited."""
    loaded.synchronize()  # no wait: the device was idle when it was recorded, and has computed a window since
    idle: float = queued.elapsed_time(loaded) / 1e3
    return min(most, idle)
