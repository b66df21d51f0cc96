"""What a ``DataLoader`` says is kept, or refused by its name; what only looks like a dataset is none."""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from distaccum.data.adapters import to_data_spec
from distaccum.data.counter import GlobalCounter
from distaccum.data.factory import as_loader, build_loader, check_workers, loading_options, make_plan
from distaccum.data.spec import DataSpec, WorkerOptions, is_map_style
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError, DataWarning
from tests.support.optional import Library

datasets, torchdata = Library("datasets"), Library("torchdata.stateful_dataloader")

DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))
SIZES: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "tokens": None, "seed": 3}


class Stream(IterableDataset[Tensor]):
    """It never asks which worker it is in."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(30.0).view(10, 3))


class WithLength(Stream):
    def __len__(self) -> int:
        return 10


class Divided(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        return iter(torch.arange(30.0).view(10, 3)[info.id :: info.num_workers] if info else [])


def _seen(loader: Any, world: World, **sizes: Any) -> list[float]:
    windows = as_loader(loader, world, **(SIZES | sizes)).windows(
        0, 0, GlobalCounter(world, lambda batch: len(batch[0]))
    )
    return [
        number for window in windows for micro in window.micro_batches for number in micro.batch[0].flatten().tolist()
    ]


class Told(TensorDataset):
    said = 0.0

    def __getitem__(self, index: Any) -> Any:
        return (torch.tensor([self.said]),)


def initialize(worker: int) -> None:
    """As users set a dataset up in each process."""
    Told.said = 1000.0 + worker


def test_the_options_of_loading_processes_are_kept(gloo_world: World) -> None:
    context = multiprocessing.get_context("fork")
    loader = DataLoader(
        DATA,
        batch_size=2,
        num_workers=2,
        worker_init_fn=initialize,
        multiprocessing_context=context,
        timeout=17,
        prefetch_factor=5,
        persistent_workers=False,
        generator=torch.Generator().manual_seed(5),
    )
    kept: Any = as_loader(loader, gloo_world, **SIZES)
    inner = kept._loader
    assert (inner.num_workers, inner.timeout, inner.prefetch_factor, inner.persistent_workers) == (2, 17, 5, False)
    assert inner.multiprocessing_context is context
    assert kept.position["seed"] == -1  # the generator's, for loading alone: nothing is shuffled


def test_the_users_worker_init_fn_is_called(gloo_world: World) -> None:
    loader = DataLoader(Told(torch.ones(10)), batch_size=2, num_workers=2, worker_init_fn=initialize)
    assert _seen(loader, gloo_world) == [1000.0, 1000.0, 1001.0, 1001.0] * 2 + [1000.0, 1000.0]


@pytest.mark.parametrize("where", ["loader", "sampler"])
def test_a_generator_decides_the_order_with_the_seed(gloo_world: World, where: str) -> None:
    def order(own: int | None, **sizes: Any) -> list[float]:
        generator = None if own is None else torch.Generator().manual_seed(own)
        if where == "loader":
            return _seen(DataLoader(DATA, batch_size=2, shuffle=True, generator=generator), gloo_world, **sizes)
        return _seen(
            DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, generator=generator)), gloo_world, **sizes
        )

    assert sorted(order(1)) == list(range(10))
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(1, seed=8)
    assert order(0) == order(None)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
def test_a_loader_with_a_state_is_planned_like_any_other(gloo_world: World) -> None:
    seen = _seen(torchdata.StatefulDataLoader(DATA, batch_size=2, shuffle=True), gloo_world)
    assert sorted(seen) == list(range(10))
    assert seen == _seen(DataLoader(DATA, batch_size=2, shuffle=True), gloo_world)


@pytest.mark.parametrize("empty", [[], [(torch.ones(0, 1),)]])
def test_an_epoch_of_nothing_is_an_error_on_every_level(gloo_world: World, empty: list[Any]) -> None:
    loader = as_loader(iter(empty), gloo_world, **SIZES)
    with pytest.raises(DataError, match="epoch 0: the streams of all 1 ranks are empty"):
        list(loader.windows(0, 0, GlobalCounter(gloo_world, len)))


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed([*super().__iter__()])


class Weighted(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([0] * 10)


class Grouped(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 0]] * 5)


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **({"batch_size": 2} | options))


def _of_ranks(**options: Any) -> DataLoader[Any]:
    return _loader(sampler=DistributedSampler(DATA, **({"num_replicas": 1, "rank": 0} | options)))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "in_order": (lambda: _loader(in_order=False), "loader=in_order=False: yields batches in the order in which"),
    "drop_last": (lambda: _loader(drop_last=True), "loader=drop_last=True: leaves samples out"),
    "no batches": (lambda: _loader(batch_size=None), "loader=batch_size=None: makes no batches"),
    "iterates itself": (lambda: Own(DATA, batch_size=2), "loader=Own: iterates in a way of its own"),
    "samples of some": (lambda: _loader(sampler=RandomSampler(DATA, num_samples=4)), "draws 4 of 10 samples"),
    "order of others": (lambda: _loader(sampler=SequentialSampler([0, 1])), "draws 2 of 10 samples"),
    "a subset": (
        lambda: _loader(sampler=SubsetRandomSampler([0, 1])),
        "SubsetRandomSampler: draws samples in an order",
    ),
    "batches by hand": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "loader=list: makes batches of its own"),
    "sampler of a kind": (lambda: _loader(sampler=Weighted(DATA)), "loader=Weighted: draws samples in an order"),
    "weights of some": (
        lambda: _loader(sampler=WeightedRandomSampler([1.0] * len(DATA), 3)),
        r"loader=WeightedRandomSampler\(num_samples=3, replacement=True\): an epoch draws \d+ of \d+ samples",
    ),
    "weights without replacement": (
        lambda: _loader(sampler=WeightedRandomSampler([1.0] * len(DATA), len(DATA), replacement=False)),
        r"replacement=False\): an epoch draws",
    ),
    "batches of a kind": (
        lambda: DataLoader(DATA, batch_sampler=Grouped(RandomSampler(DATA), 2, False)),
        "loader=Grouped: makes batches of its own",
    ),
    "ranks that drop": (lambda: _of_ranks(drop_last=True), r"DistributedSampler\(drop_last=True\): leaves samples out"),
    "other ranks": (lambda: _of_ranks(num_replicas=2), r"DistributedSampler\(num_replicas=2\): there are 1 ranks"),
    "stream of what": (lambda: DataLoader(Stream(), batch_size=None), "loader=batch_size=None: yields samples, or"),
    "bare rows": (
        lambda: datasets.Dataset.from_list([{"x": 1}]).to_iterable_dataset(),
        r"data=IterableDataset: a stream of samples, or of micro-batches",
    ),
    "bare stream": (Stream, r"data=Stream: a stream of samples, or of micro-batches\. Give DataLoader"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(gloo_world: World, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        as_loader(make(), gloo_world, **SIZES)


LOOK_ALIKES: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: "train.csv", "str is no dataset, but a text"),
    "splits": (
        lambda: datasets.DatasetDict({"train": datasets.Dataset.from_list([{"x": 1}])}),
        "a mapping of 'train': give one",
    ),
    "columns": (lambda: {"x": [1, 2], "y": [3, 4]}, "dict is no dataset, but a mapping of 'x', 'y'"),
    "tensors": (
        lambda: (torch.ones(8, 2), torch.ones(8)),
        "a tuple of 2 arrays of 8 rows is no dataset: give TensorDataset",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_only_looks_like_a_dataset_is_refused(name: str, wrapped: bool) -> None:
    make, message = LOOK_ALIKES[name]
    data = make()
    with pytest.raises(TypeError, match=message):
        to_data_spec(DataSpec(train=data) if wrapped else data)


def test_an_iterable_dataset_with_a_length_is_a_stream(gloo_world: World) -> None:
    assert not is_map_style(WithLength())
    assert not is_map_style(ChainDataset([WithLength()]))
    loader = DataLoader(WithLength(), batch_size=2)
    seen = as_loader(loader, gloo_world, **SIZES).windows(0, 0, GlobalCounter(gloo_world, len))
    assert [window.samples for window in seen] == [4, 4, 2]


def test_workers_that_each_yield_the_whole_stream(gloo_world: World) -> None:
    def epoch(data: Any) -> list[int]:
        windows = as_loader(data, gloo_world, **SIZES).windows(0, 0, GlobalCounter(gloo_world, len))
        return [window.samples for window in windows]

    with pytest.warns(
        DataWarning, match=r"Stream does not call torch\.utils\.data\.get_worker_info\(\): if each of the 2"
    ):
        loader = to_data_spec(DataLoader(Stream(), batch_size=2, num_workers=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        with pytest.raises(DataError, match="the 2 workers of the DataLoader begin with the same batch"):
            epoch(loader)
        assert sum(epoch(DataSpec(train=loader.train, may_repeat=True))) == 20
    assert sum(epoch(DataLoader(Divided(), batch_size=2, num_workers=2))) == 10


def test_two_numbers_of_workers_are_one_too_many(gloo_world: World) -> None:
    source = to_data_spec(DataLoader(DATA, batch_size=2, num_workers=2))
    plan = make_plan(source, world_size=1, **SIZES)
    with pytest.raises(ConfigError, match="num_workers=3: the loader's num_workers is 2"):
        check_workers(source, plan, 3)
    kept: Any = build_loader(source, plan, gloo_world)
    assert kept._loader.num_workers == 2


def test_the_processes_of_a_stream_have_its_next_window_ahead(gloo_world: World) -> None:
    rows = datasets.Dataset.from_list([{"x": float(i)} for i in range(20)]).to_iterable_dataset(num_shards=2)
    source = DataSpec(train=rows)
    plan = make_plan(source, world_size=1, **(SIZES | {"global_batch_size": 8}))
    options = {"timeout": 17.0, "prefetch_factor": 3}
    kept: Any = build_loader(source, plan, gloo_world, workers=loading_options(source, num_workers=2, options=options))
    assert (kept._stream.prefetch_factor, kept._stream.timeout) == (4, 17.0)
    windows = list(kept.windows(0, 0, GlobalCounter(gloo_world, lambda batch: len(batch["x"]))))
    assert sorted(x for window in windows for micro in window.micro_batches for x in micro.batch["x"].tolist()) == [
        float(i) for i in range(20)
    ]
    for stated in ({"persistent_workers": True}, {"pin_memory": True}):
        with pytest.raises(ConfigError, match="the data is a stream"):
            check_workers(source, plan, 2, stated)


def test_a_stream_whose_spec_names_processes_keeps_its_order(gloo_world: World) -> None:
    """A run that stopped goes on with the samples that come next: with processes these would be others."""
    rows = datasets.Dataset.from_list([{"x": float(i)} for i in range(20)]).to_iterable_dataset(num_shards=2)
    source = DataSpec(train=rows, workers=WorkerOptions(num_workers=2))
    windows = as_loader(source, gloo_world, **SIZES).windows(0, 0, GlobalCounter(gloo_world, lambda b: len(b["x"])))
    seen = [float(x) for window in windows for micro in window.micro_batches for x in micro.batch["x"]]
    assert seen == [float(i) for i in range(20)]


def test_a_generator_that_has_begun_cannot_be_resumed(gloo_world: World) -> None:
    def numbers() -> Iterator[Any]:
        yield from ([torch.full((2, 1), float(i))] for i in range(5))

    stream, counter = numbers(), GlobalCounter(gloo_world, lambda batch: len(batch[0]))
    first = as_loader(stream, gloo_world, **SIZES)
    next(first.windows(0, 0, counter))
    again = as_loader(stream, gloo_world, **SIZES)
    again.load_state(first.state())
    with pytest.raises(DataError, match="the stream is an iterator, which yields its items once, and has begun"):
        next(again.windows(0, 1, counter))
    fresh = as_loader(numbers(), gloo_world, **SIZES)
    fresh.load_state(first.state())
    window = next(fresh.windows(0, 1, counter))
    assert [micro.batch[0][0].item() for micro in window.micro_batches] == [2.0, 3.0]
