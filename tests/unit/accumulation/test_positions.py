"""Which samples come next: after another global batch, an abandoned window, a loop that was left for other data."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from distaccum import Accumulator
from distaccum.data.counter import GlobalCounter
from distaccum.data.loader import WindowLoader
from distaccum.data.plan.batch import Resize, ResizedPlan
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError, ConfigError, MisuseError
from tests.support.accumulators import Loss

DATA: Any = [torch.tensor([float(i), 1.0]) for i in range(22)]


class Stream(IterableDataset[Tensor]):
    def __init__(self, first: int = 0, size: int = 22) -> None:
        self.items = range(first, first + size)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i), 1.0]) for i in self.items)


def _kinds() -> dict[str, Any]:
    stream: Any = Stream()
    return {
        "map-style": DATA,
        "shuffled": DataLoader(DATA, batch_size=2, shuffle=True),
        "stream": DataLoader(stream, 2),
    }


def _make(world: World, **options: Any) -> Accumulator:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sizes: Any = {"global_batch_size": 4, "micro_batch_size": 2, "count": len}
    return Accumulator(model, optimizer, world=world, **(sizes | options))


def _numbers(batch: Tensor) -> list[Any]:
    return batch[:, 0].int().tolist()


def _run(
    acc: Accumulator,
    data: Any,
    *,
    windows: int = 1000,
    abandoned: tuple[int, ...] = (),
    of: Callable[[Tensor], list[Any]] = _numbers,
) -> list[list[Any]]:
    """The samples of each window of at most one epoch; these are abandoned after their first micro-batch."""
    seen: list[list[Any]] = []
    for k, window in enumerate(acc.windows(data)):
        seen.append([])
        for micro in window:
            seen[-1] += of(micro.batch)
            with acc.accumulate():
                acc.backward((acc.model(micro.batch) - 1).square().sum())
            if k in abandoned:
                acc.abandon()
                break
        if k + 1 == windows:
            break
    return seen


def _flat(windows: list[list[int]]) -> list[int]:
    return [i for window in windows for i in window]


@pytest.mark.parametrize("kind", _kinds())
def test_another_global_batch_takes_every_sample_once(gloo_world: World, kind: str) -> None:
    data = _kinds()[kind]
    whole = _flat(_run(_make(gloo_world), data)), _flat(_run(_make(gloo_world), data))
    assert whole[0] == whole[1]
    acc = _make(gloo_world)
    seen = []
    for k, window in enumerate(acc.windows(data)):
        seen.append([i for micro in window.plain.micro_batches for i in _numbers(micro.batch)])
        acc.step(window, Loss())
        if k in (1, 3):
            acc.set_global_batch_size({1: 6, 3: 2}[k])
    assert [len(one) for one in seen] == [4, 4, 6, 6, 2]
    assert _flat(seen) == whole[0]
    assert acc.progress.epoch == 1
    assert [len(one) for one in _run(acc, data)] == [2] * 11  # the size stays
    assert sorted(_flat(seen)) == list(range(22))


@pytest.mark.parametrize("kind", _kinds())
@pytest.mark.parametrize("resumed_size", [4, 6])
def test_another_global_batch_is_resumed(gloo_world: World, kind: str, resumed_size: int) -> None:
    first, data = _make(gloo_world), _kinds()[kind]
    seen = _run(first, data, windows=2)
    first.set_global_batch_size(6)
    seen += _run(first, data, windows=1)
    state = first.state_dict()
    rest = _run(first, data)
    assert [len(one) for one in seen + rest] == [4, 4, 6, 6, 2]
    assert sorted(_flat(seen + rest)) == list(range(22))
    second = _make(gloo_world, global_batch_size=resumed_size)
    second.load_state_dict(state)
    assert second.global_batch_size == 6
    data = _kinds()[kind]
    assert _run(second, data) == rest
    weights = [torch.cat([p.flatten() for p in acc.engine.unwrapped_model.parameters()]) for acc in (first, second)]
    assert torch.equal(*weights)
    third = _make(gloo_world, global_batch_size=8)
    third.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"batch\.global_size=6, and this loop has batch\.global_size=8"):
        _run(third, _kinds()[kind])


def test_a_size_is_set_between_load_and_loop(gloo_world: World) -> None:
    first = _make(gloo_world)
    seen = _run(first, DATA, windows=2)
    second = _make(gloo_world)
    second.load_state_dict(first.state_dict())
    second.set_global_batch_size(8)
    assert sorted(_flat(seen + _run(second, DATA))) == list(range(22))


def test_sizes_that_cannot_be_set(gloo_world: World) -> None:
    acc = _make(gloo_world)
    for wrong, message in ((1, "micro_batch_size=2: larger than"), (4.5, "no whole number"), (0, "must be at least 1")):
        with pytest.raises(ConfigError, match=message):
            acc.set_global_batch_size(wrong)  # type: ignore[arg-type]
    for _ in acc.windows(DATA):
        with pytest.raises(MisuseError, match=r"set_global_batch_size\(\) between two micro-batches"):
            acc.set_global_batch_size(8)
        acc.abandon()
        break
    with pytest.raises(MisuseError, match=r"where tokens= cuts the windows"):
        _make(gloo_world, global_batch_size=None, tokens=8).set_global_batch_size(8)
    stream = _make(gloo_world)
    data = _kinds()["stream"]
    _run(stream, data, windows=1)
    with pytest.raises(ConfigError, match="global_batch_size=5: no multiple of micro_batch_size=2"):
        stream.set_global_batch_size(5)
    assert [len(one) for one in _run(stream, data)] == [4, 4, 4, 4, 2]
    own = _make(gloo_world)
    own.set_global_batch_size(8)
    with pytest.raises(MisuseError, match=r"set_global_batch_size\(8\) with a Own, which cuts its windows itself"):
        _run(own, Own())


class Own(WindowLoader):
    @property
    def position(self) -> dict[str, Any]:
        return {}

    def windows(self, epoch: int, start: int, counter: GlobalCounter) -> Iterator[Window]:
        raise NotImplementedError


class Drawing:
    """Samples that draw from the global generator, when they are loaded."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


@pytest.mark.slow
def test_what_is_loaded_ahead_belongs_to_its_window(gloo_world: World) -> None:
    """Also after a window that was abandoned, a loop that was left, and a state that was loaded."""

    def rows(acc: Accumulator, windows: int, abandoned: int = -1) -> list[list[Any]]:
        return _run(acc, data, windows=windows, abandoned=(abandoned,), of=Tensor.tolist)

    data = DataLoader(Drawing(), batch_size=2, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    first = _make(gloo_world)
    whole = rows(first, 100) + rows(first, 100)
    assert [len(window) for window in whole] == [4, 4, 4, 4, 4, 2] * 2
    second = _make(gloo_world, prefetch_windows=3)
    seen = rows(second, 3, abandoned=1)
    assert seen == [whole[0], whole[1][:2], whole[2]]
    third = _make(gloo_world, prefetch_windows=0)
    third.load_state_dict(second.state_dict())
    for acc in (second, third):
        assert rows(acc, 100) + rows(acc, 100) == whole[3:]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 8, 20, 21, 22])
def test_a_resized_plan_covers_the_rest_once(world_size: int, position: int) -> None:
    change = Resize(global_batch_size=6, epoch=2, window=5, position=position)
    plan = ResizedPlan(samples=22, global_batch_size=6, micro_batch_size=2, world_size=world_size, seed=1, since=change)
    cut = plan.epoch(2)
    found = [
        i
        for k in range(5, cut.windows_per_epoch)
        for rank in range(world_size)
        for part in cut.micro_batches(k, rank)
        for i in part
    ]
    assert sorted(found) == list(range(position, 22))
    assert plan.epoch(3).windows_per_epoch == 4
    with pytest.raises(IndexError):
        cut.window(4)
    assert "since window 5 of epoch 2" in plan.describe()[-1]


@pytest.mark.parametrize("kind", _kinds())
def test_a_loop_that_goes_on_after_an_abandoned_window_skips_it(gloo_world: World, kind: str) -> None:
    whole = _run(_make(gloo_world), _kinds()[kind])
    acc, data = _make(gloo_world), _kinds()[kind]
    seen = _run(acc, data, windows=3, abandoned=(1,))
    assert [seen[0], seen[2]] == [whole[0], whole[2]]
    assert (acc.progress.step, acc.progress.skipped, acc.progress.epoch_window) == (2, 1, 3)
    state = acc.state_dict()
    assert _run(acc, data) == whole[3:]
    resumed = _make(gloo_world)
    resumed.load_state_dict(state)
    assert _run(resumed, _kinds()[kind]) == whole[3:]


@pytest.mark.parametrize("kind", _kinds())
def test_a_loop_that_is_left_begins_with_the_abandoned_window(gloo_world: World, kind: str) -> None:
    whole = _run(_make(gloo_world), _kinds()[kind])
    acc, data = _make(gloo_world), _kinds()[kind]
    _run(acc, data, windows=2, abandoned=(1,))
    if kind == "stream":
        with pytest.raises(MisuseError, match=r"state_dict\(\) after abandon\(\), when a stream"):
            acc.state_dict()
    else:
        resumed = _make(gloo_world)
        resumed.load_state_dict(acc.state_dict())
        assert _run(resumed, _kinds()[kind]) == whole[1:]
    assert _run(acc, data) == whole[1:]
    assert (acc.progress.step, acc.progress.skipped, acc.progress.epoch) == (6, 0, 1)


@pytest.mark.parametrize("kind", ["map-style", "stream"])
def test_other_data_begin_with_their_own_first_window(gloo_world: World, kind: str) -> None:
    stream: Any = Stream(100, 8)
    other: Any = DataLoader(stream, 2) if kind == "stream" else [tensor + 100 for tensor in DATA[:8]]
    acc, data = _make(gloo_world), _kinds()[kind]
    _run(acc, data, windows=3)
    first = _run(acc, other, windows=1)
    state = acc.state_dict()
    rest = _run(acc, other)
    assert (len(first), len(rest)) == (1, 1)
    assert sorted(_flat(first + rest)) == list(range(100, 108))
    assert acc.progress.epoch == 2
    assert len(_flat(_run(acc, data))) == 22
    resumed = _make(gloo_world)
    resumed.load_state_dict(state)
    assert _run(resumed, other if kind == "map-style" else DataLoader(stream, 2)) == rest


def test_other_parts_of_a_dataset_are_other_data(gloo_world: World) -> None:
    acc, parts = _make(gloo_world), [Subset(DATA, range(i, i + 8)) for i in (0, 8)]
    _run(acc, parts[0], windows=1)
    assert sorted(_flat(_run(acc, parts[1]))) == list(range(8, 16))


def test_another_loader_of_the_same_samples_goes_on(gloo_world: World) -> None:
    acc = _make(gloo_world)
    seen = _run(acc, DataLoader(DATA, batch_size=2, shuffle=True), windows=3)
    seen += _run(acc, DataLoader(DATA, batch_size=2, shuffle=True))
    assert sorted(_flat(seen)) == list(range(22))
    _run(acc, DataLoader(DATA, batch_size=2, shuffle=True), windows=3)
    assert _flat(_run(acc, DataLoader(DATA, batch_size=2))) == list(range(22))  # in another order it is another epoch
