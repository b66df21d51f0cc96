"""A stream that is resumed gives what it would have given: whatever its parts are, or it is refused in words."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from distaccum.data.adapters import to_data_spec
from distaccum.data.counter import GlobalCounter
from distaccum.data.factory import build_loader, make_plan
from distaccum.data.loader import WindowLoader
from distaccum.data.spec import DataSpec
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError
from tests.support.optional import Library

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about datapipes, of torchdata about set_vital

hf = Library("datasets")
Windows = list[list[int]]


def _part(first: int, samples: int = 32) -> Any:
    return hf.Dataset.from_dict({"a": list(range(first, first + samples))}).to_iterable_dataset(num_shards=4)


def _shuffled(first: int = 0, samples: int = 32) -> Any:
    return _part(first, samples).shuffle(seed=1, buffer_size=16)


def _mixed() -> Any:
    return hf.interleave_datasets([_shuffled(), _shuffled(100)])


def _plus_one(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"a": [value + 1 for value in rows["a"]]}


class Own(IterableDataset[Any]):
    """A state that is only that of a part of it."""

    def __init__(self) -> None:
        self.parts = {"train": [_shuffled(0, 64)]}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts["train"][0])

    def state_dict(self) -> Any:
        return self.parts["train"][0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.parts["train"][0].load_state_dict(state)


class Drawn(IterableDataset[Any]):
    """Its order is drawn when an epoch begins."""

    def __iter__(self) -> Iterator[Any]:
        return ({"a": i} for i in torch.randperm(64).tolist())


class Persistent(Drawn):
    def set_epoch(self, epoch: int) -> None:
        """As nobody in another process hears."""


def _pipe() -> Any:
    return IterableWrapper([{"a": i} for i in range(64)]).shuffle(buffer_size=16).map(dict)


STREAMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: _part(0, 64),
    "mixture": _mixed,
    "nested mixture": lambda: hf.interleave_datasets(
        [hf.interleave_datasets([_shuffled(), _part(100)]), _shuffled(200)]
    ),
    "mixture without buffers": lambda: hf.interleave_datasets([_part(0), _part(100)], probabilities=[0.3, 0.7], seed=3),
    "shuffled mixture": lambda: hf.interleave_datasets([_part(0), _part(100)]).shuffle(seed=2, buffer_size=9),
    "concatenation": lambda: hf.concatenate_datasets([_shuffled(), _shuffled(100)]),
    "map": lambda: _shuffled(0, 64).map(_plus_one, batched=True, batch_size=5),
    "filter": lambda: _shuffled(0, 96).filter(lambda row: row["a"] % 3 > 0),
    "take": lambda: _shuffled(0, 80).take(64),
    "loader": lambda: DataLoader(_mixed(), batch_size=2),
    "loader with processes": lambda: DataLoader(_shuffled(0, 64), batch_size=2, num_workers=2),
    "stateful": lambda: StatefulDataLoader(_shuffled(0, 64), batch_size=2),
    "stateful over a mixture": lambda: StatefulDataLoader(_mixed(), batch_size=2, num_workers=1),
    "stateful without a buffer": lambda: StatefulDataLoader(_part(0, 64), batch_size=2, num_workers=1),
    "stateful over torch's shuffler": lambda: StatefulDataLoader(_pipe(), batch_size=2),
    "own state": Own,
    "own order": Drawn,
    "torch's shuffler": _pipe,
    "torch's shuffler with a generator": lambda: DataLoader(
        _pipe(), batch_size=2, generator=torch.Generator().manual_seed(4)
    ),
}


def _loader(stream: Any, world: World) -> WindowLoader:
    spec = to_data_spec(stream) if isinstance(stream, DataLoader) else DataSpec(train=stream, batched=False)
    plan = make_plan(spec, global_batch_size=8, tokens=None, micro_batch_size=2, world_size=1, seed=0)
    return build_loader(spec, plan, world)


def _windows(loader: WindowLoader, world: World, epoch: int = 0, start: int = 0, most: int = 99) -> Windows:
    """The windows of two epochs, from one on."""
    found: Windows = []
    for number in range(epoch, 2):
        for window in loader.windows(number, start, GlobalCounter(world, lambda batch: len(batch["a"]))):
            found.append([int(value) for micro in window.micro_batches for value in micro.batch["a"]])
            if len(found) == most:
                return found
        start = 0
    return found


def _interrupted(make: Callable[[], Any], world: World, again: Callable[[], Any] | None = None) -> Windows:
    loader = _loader(make(), world)
    found = _windows(loader, world, most=3)
    file, generators = io.BytesIO(), RNGState.capture()
    torch.save(loader.state(), file)
    file.seek(0)
    loader = _loader((again or make)(), world)
    loader.load_state(torch.load(file, weights_only=True))
    generators.restore()
    return found + _windows(loader, world, start=3)


# The others with processes stay: of a loader, and of one that keeps a state.
HEAVY = "stateful without a buffer"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy) if name == HEAVY else name for name in STREAMS]
)
def test_a_resumed_stream_goes_on_as_if_nothing_had_been(name: str, gloo_world: World) -> None:
    torch.manual_seed(0)
    whole = _windows(_loader(STREAMS[name](), gloo_world), gloo_world)
    torch.manual_seed(0)
    assert _interrupted(STREAMS[name], gloo_world) == whole
    assert len({number for window in whole for number in window}) > 40


def test_another_order_than_before_is_refused(gloo_world: World) -> None:
    with pytest.raises(DataError, match="begins its epoch with other items than before"):
        _interrupted(lambda: _part(0, 64).shuffle(buffer_size=16), gloo_world)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_another_number_of_processes_is_refused_in_the_middle_of_an_epoch(kind: Any, gloo_world: World) -> None:
    with pytest.raises(ConfigError, match="num_workers=2: the epoch was begun with 0"):
        _interrupted(
            lambda: kind(_part(0, 64), batch_size=2),
            gloo_world,
            lambda: kind(_part(0, 64), batch_size=2, num_workers=2),
        )


@pytest.mark.parametrize("data", [Persistent(), ChainDataset([Persistent()])])
def test_processes_that_persist_are_refused_where_they_would_not_hear_of_epochs(data: Any, gloo_world: World) -> None:
    stream = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    with pytest.raises(ConfigError, match=r"persistent_workers=True: set_epoch\(\) of Persistent does not reach"):
        _loader(stream, gloo_world)
