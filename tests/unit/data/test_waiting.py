"""What a device waits for data: it goes on with what is queued while the host waits."""

from __future__ import annotations

import pytest
import torch

from distaccum.data.loading_processes import WaitClock


class Device:
    """Work in a queue, and events between it; a second is a second of the host."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0

    def queue(self, seconds: float) -> None:
        self.free_at = max(self.now, self.free_at) + seconds

    def event(self) -> Event:
        return Event(self)


class Event:
    """As of ``torch.cuda``: it happens when all that was queued before is done; times are milliseconds."""

    def __init__(self, device: Device) -> None:
        self._device, self._at = device, float("nan")

    def record(self) -> None:
        self._at = max(self._device.now, self._device.free_at)

    def query(self) -> bool:
        return self._at <= self._device.now

    def synchronize(self) -> None:
        assert self.query(), "the host would wait"

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return (end._at - self._at) * 1e3


@pytest.mark.parametrize(
    ("queued", "loading", "waited"),
    [
        (2.0, 0.5, 0.0),  # still busy when the data are there
        (2.0, 5.0, 3.0),  # idle for the rest of the loading
        (0.0, 5.0, 5.0),  # idle from its beginning on, as after the first window's proof
        (0.0, 0.0, 0.0),
    ],
)
def test_a_device_waits_from_the_end_of_its_work_on(queued: float, loading: float, waited: float) -> None:
    device = Device()
    clock = WaitClock(torch.device("cpu"), clock=lambda: device.now, event=device.event)
    device.queue(queued)
    clock.start()
    device.now += loading
    of_host, of_device = clock.stop()
    assert of_host == loading
    assert of_device is not None
    device.queue(1.0)
    device.now += 0.25  # the host is ahead: the window is not done
    assert of_device() == pytest.approx(waited)


def test_without_events_the_host_is_what_waits() -> None:
    now = iter([3.0, 4.5])
    clock = WaitClock(torch.device("cpu"), clock=lambda: next(now))
    clock.start()
    assert clock.stop() == (1.5, None)
