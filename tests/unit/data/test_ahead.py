"""What loading processes load ahead, which nobody can tell by the windows; and what a device waits for."""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from distaccum.data.adapters import to_data_spec
from distaccum.data.counter import GlobalCounter
from distaccum.data.factory import as_loader, build_loader, check_workers, loading_options, make_plan
from distaccum.data.loader import MapWindowLoader
from distaccum.data.loading_processes import WaitClock, note_memory, prefetch_factor, shared_memory
from distaccum.data.plan.batch import BatchPlan, Resize
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.plan.tokens import TokenPlan
from distaccum.data.spec import DataSpec, WorkerOptions
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataWarning
from tests.unit.data.test_loader import Alone

SAMPLES, GLOBAL, MICRO = 22, 8, 2  # windows of 4, 4 and 3 micro-batches
WITHIN_S = 30.0
Drawn = list[tuple[int, int, list[list[float]]]]


class Augmented:
    """Samples with their number, what they draw from each of the global generators, and the epoch that they know of."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002, S311
        return torch.tensor([index, *numbers, self.epoch], dtype=torch.float64)


class Within:
    """A dataset of one's own around others."""

    def __init__(self, parts: list[Augmented]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.parts[0][index]


class Noted:
    """Samples that are noted when they are loaded, in whichever process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._loaded, self._lock = context.Array("i", 1000), context.Lock()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        with self._lock:
            self._loaded[self._loaded[999]] = index
            self._loaded[999] += 1
        return torch.tensor([index])

    def loaded(self, at_least: int) -> list[int]:
        """What was loaded for windows, in no order, as soon as that many samples were and none is on its way."""
        end, before = monotonic() + WITHIN_S, -1
        while (now := self._loaded[999]) < at_least or now != before:
            assert monotonic() < end, f"{now} of {at_least} samples"
            before = now
            sleep(0.05)
        return list(self._loaded[:now])


def _loader(world: World, data: Any, *, workers: int, windows: int = 1, **options: Any) -> MapWindowLoader:
    plan = BatchPlan(samples=SAMPLES, global_batch_size=GLOBAL, micro_batch_size=MICRO, world_size=1, seed=3)
    context = "fork" if workers else None
    given = WorkerOptions(num_workers=workers, prefetch_windows=windows, multiprocessing_context=context, **options)
    return MapWindowLoader(data, plan, world, workers=given, seed=3)


def _counter(world: World) -> GlobalCounter:
    return GlobalCounter(world, len)


def _drawn(windows: Any, k: int = 0) -> Drawn:
    return [
        (window.epoch, i, [row for micro in window.micro_batches for row in micro.batch.tolist()])
        for i, window in enumerate(windows, k)
    ]


def _epochs(loader: MapWindowLoader, world: World, epoch: int = 0, start: int = 0) -> Drawn:
    """Three epochs, from a window on."""
    found = _drawn(loader.windows(epoch, start, _counter(world)), start)
    for later in range(epoch + 1, 3):
        found += _drawn(loader.windows(later, 0, _counter(world)))
    return found


@pytest.fixture
def whole(gloo_world: World) -> Drawn:
    """The windows of three epochs, as one process gives them that loads what torch prefetches."""
    return _epochs(_loader(gloo_world, Augmented(), workers=1, windows=0), gloo_world)


def test_what_samples_draw_is_neither_constant_nor_repeated(whole: Drawn) -> None:
    rows = [row for _, _, window in whole for row in window]
    assert Counter(row[0] for row in rows) == dict.fromkeys(map(float, range(SAMPLES)), 3)
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == 3 * SAMPLES
    assert all(row[4] == epoch for epoch, _, window in whole for row in window)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make", [Augmented, lambda: Subset(Augmented(), range(SAMPLES)), lambda: Within([Augmented()])]
)
def test_a_dataset_knows_its_epoch_from_the_middle_of_one_on(gloo_world: World, make: Any, workers: int) -> None:
    found = _epochs(_loader(gloo_world, make(), workers=workers), gloo_world, 1, 1)
    assert all(row[4] == epoch for epoch, _, window in found for row in window)


@pytest.mark.parametrize(
    ("workers", "windows", "options"),
    [
        (2, 1, {}),
        pytest.param(2, 3, {"persistent_workers": False}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"prefetch_factor": 9}, marks=pytest.mark.slow),
    ],
)
def test_what_samples_draw_is_the_same_however_they_are_loaded(
    whole: Drawn, gloo_world: World, workers: int, windows: int, options: dict[str, Any]
) -> None:
    loader = _loader(gloo_world, Augmented(), workers=workers, windows=windows, **options)
    assert _epochs(loader, gloo_world) == whole


def test_a_resumed_epoch_draws_what_the_whole_one_did(whole: Drawn, gloo_world: World) -> None:
    assert _epochs(_loader(gloo_world, Augmented(), workers=2), gloo_world, 1, 1) == whole[4:]


def test_a_stop_loses_no_window_and_counts_none_twice(whole: Drawn, gloo_world: World) -> None:
    loader, counter = _loader(gloo_world, Augmented(), workers=2), _counter(gloo_world)
    found: Drawn = []
    for window in loader.windows(0, 0, counter):
        found += _drawn([window], len(found))
        if len(found) == 2:
            counter.request_stop()
    assert (len(found), counter.stopping) == (2, True)
    counter.clear_stop()
    assert found + _epochs(loader, gloo_world, 0, 2) == whole


def test_the_next_window_is_loaded_while_one_is_computed(gloo_world: World) -> None:
    data = Noted()
    windows = _loader(gloo_world, data, workers=2).windows(0, 0, _counter(gloo_world))
    order = [int(i) for micro in next(windows).micro_batches for i in micro.batch]
    assert len(order) == GLOBAL
    ahead = data.loaded(at_least=2 * GLOBAL)
    assert len(ahead) == 2 * GLOBAL  # and no more
    assert set(order) < set(ahead)
    second = [int(i) for micro in next(windows).micro_batches for i in micro.batch]
    assert set(ahead) == {*order, *second}


def test_without_prefetch_windows_torchs_own_prefetching_is_left(gloo_world: World) -> None:
    data = Noted()
    loader = _loader(gloo_world, data, workers=1, windows=0, prefetch_factor=1)
    next(loader.windows(0, 0, _counter(gloo_world)))
    assert len(data.loaded(at_least=GLOBAL + MICRO)) == GLOBAL + MICRO


def test_loading_goes_on_over_epochs_and_where_a_loop_is_left(gloo_world: World) -> None:
    """Each sample is loaded once an epoch, though the loop is left after every window."""
    data, taken = Noted(), 0
    loader = _loader(gloo_world, data, workers=2)
    for k in range(3):
        for window in loader.windows(0, k, _counter(gloo_world)):
            taken += sum(len(micro.batch) for micro in window.micro_batches)
            break
    assert taken == SAMPLES
    assert not list(loader.windows(0, 3, _counter(gloo_world)))
    times = Counter(data.loaded(at_least=SAMPLES + GLOBAL))
    assert set(times) == set(range(SAMPLES))
    windows = loader.windows(1, 0, _counter(gloo_world))
    next_epoch = {int(i) for micro in next(windows).micro_batches for i in micro.batch}
    assert next_epoch == {i for i, number in times.items() if number == 2}
    assert len(data.loaded(at_least=SAMPLES + 2 * GLOBAL)) == SAMPLES + 2 * GLOBAL


def test_processes_of_a_rank_without_samples_are_asked_for_none(gloo_world: World) -> None:
    """One global batch of 2 samples has none for rank 0 of 8, in any epoch."""

    world = Alone(rank=0, size=8, device=torch.device("cpu"))
    plan = BatchPlan(samples=2, global_batch_size=2, micro_batch_size=1, world_size=8, seed=0)
    loader = MapWindowLoader([torch.ones(1)] * 2, plan, world, workers=WorkerOptions(num_workers=1))
    for epoch in range(3):
        (window,) = loader.windows(epoch, 0, _counter(world))
        assert not window.micro_batches


def test_a_larger_global_batch_is_loaded_ahead_as_a_whole(gloo_world: World) -> None:
    data = Noted()
    loader, counter = _loader(gloo_world, data, workers=2), _counter(gloo_world)
    for _ in loader.windows(0, 0, counter):
        break
    loaded = len(data.loaded(at_least=2 * GLOBAL))
    loader.resize(Resize(global_batch_size=12, epoch=0, window=1, position=GLOBAL))
    windows = loader.windows(0, 1, counter)
    assert next(windows).samples == 12
    assert len(data.loaded(at_least=loaded + 24)) >= loaded + 24


@pytest.mark.parametrize(
    ("given", "window", "factor"),
    [
        ({"num_workers": 0}, 64, None),
        ({"num_workers": 4}, 64, 16),
        ({"num_workers": 3}, 64, 22),  # 66: never less than a window
        ({"num_workers": 4, "prefetch_windows": 2}, 64, 32),
        ({"num_workers": 4, "prefetch_factor": 20}, 64, 20),
        ({"num_workers": 4, "prefetch_factor": 3}, 64, 16),
        ({"num_workers": 4, "prefetch_factor": 3, "prefetch_windows": 0}, 64, 3),
        ({"num_workers": 4, "prefetch_windows": 0}, 64, 2),
        ({"num_workers": 4}, 1, 2),
    ],
)
def test_the_items_ahead_cover_the_windows(given: dict[str, Any], window: int, factor: int | None) -> None:
    assert prefetch_factor(WorkerOptions(**given), window) == factor


def test_the_items_of_a_ranks_largest_window() -> None:
    sizes: Any = {"micro_batch_size": 4, "world_size": 3}
    assert BatchPlan(samples=100, global_batch_size=40, **sizes).items_of_window == 4  # 14 samples
    assert TokenPlan(lengths=np.array([1] * 40 + [20] * 4), tokens=40, **sizes).items_of_window == 4
    assert StreamPlan(global_batch_size=40, **sizes).items_of_window == 14
    assert StreamPlan(global_batch_size=40, batched=True, **sizes).items_of_window == 4


def test_memory_that_shared_memory_cannot_hold_is_told(caplog: pytest.LogCaptureFixture) -> None:
    window = [{"x": torch.zeros(2**18), "y": [torch.zeros(2**17)]}, {"x": torch.zeros(2**17)}]  # 1.5 and 0.5 MiB
    with caplog.at_level("INFO", logger="distaccum"):
        note_memory(window, 6)
    assert "up to 6 micro-batches are loaded ahead: about 6.0 MiB" in caplog.text
    limit = round(shared_memory() / 2**20)
    with pytest.warns(DataWarning, match=rf"has {limit:,} MiB\. Give it more .* or set prefetch_windows=0"):
        note_memory(window, limit + 2)


DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))
SIZES: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "tokens": None, "seed": 3}
STATED: dict[str, Any] = {
    "prefetch_factor": 5,
    "persistent_workers": False,
    "timeout": 17.0,
    "multiprocessing_context": "spawn",
    "pin_memory": False,
}


def test_what_is_stated_reaches_torchs_loader(gloo_world: World) -> None:
    source = to_data_spec(DATA)
    plan: Any = make_plan(source, world_size=1, **SIZES)
    kept: Any = build_loader(source, plan, gloo_world, workers=loading_options(source, num_workers=2, options=STATED))
    inner = kept._loader
    assert (inner.prefetch_factor, inner.persistent_workers, inner.timeout, inner.pin_memory) == (5, False, 17.0, False)
    assert inner.multiprocessing_context.get_start_method() == "spawn"
    own: Any = as_loader(DataLoader(DATA, batch_size=2, num_workers=2), gloo_world, **SIZES, prefetch_windows=8)
    assert own._loader.prefetch_factor == 8


@pytest.mark.parametrize(
    ("data", "workers", "options", "said"),
    [
        (DATA, 0, {"timeout": 9.0}, "trainer.loader.timeout=9.0: trainer.num_workers is 0"),
        (DataLoader(DATA, 2, num_workers=1), 0, {"timeout": 9.0}, "comes with a DataLoader whose timeout is 0"),
        (DataLoader(DATA, 2, num_workers=1), 1, {"multiprocessing_context": "spawn"}, "context is None"),
        (DataSpec(train=iter([])), 0, {"prefetch_factor": 2}, "trainer.loader.prefetch_factor=2: the data is a stream"),
    ],
)
def test_what_would_not_be_heard_is_refused(data: Any, workers: int, options: dict[str, Any], said: str) -> None:
    source = to_data_spec(data)
    with pytest.raises(ConfigError, match=said):
        check_workers(source, make_plan(source, world_size=1, **SIZES), workers, options)


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
