"""Run on 1 or 2 ranks: data as users write them. Writes which samples each rank trained on, and what was said.

``data_programs.py RESULT.json`` trains one epoch (or more) of each program with level 2 and plain SGD, and compares the
weights with SGD in fp64, on one process, over the same windows.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    get_worker_info,
    random_split,
)

from distaccum import Accumulator, DataSpec, World
from distaccum.accumulation.progress import Progress

SAMPLES, GLOBAL, MICRO, WIDTH = 44, 16, 4, 3  # 44: the last window, and on two ranks the last micro-batch, are ragged
X = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(5))


def row(i: int) -> dict[str, Tensor]:
    return {"x": X[i], "id": torch.tensor(i)}


def batches(world: World, samples: int = SAMPLES) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's own ids and rows, in micro-batches."""
    ids = list(range(world.rank, samples, world.size))
    for i in range(0, len(ids), MICRO):
        part = torch.tensor(ids[i : i + MICRO])
        yield X[part], part


class Again:
    """A stream that begins again: ``make`` gives an iterator."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class Rows(Dataset[Any]):
    def __init__(self, ids: range | list[int] = range(SAMPLES)) -> None:
        self.ids = list(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return row(self.ids[index])


# Batches of every kind -----------------------------------------------------------------------------------------------


class Graphs:
    """As torch_geometric's batch: it knows how many graphs it holds, and moves itself."""

    def __init__(self, x: Tensor, ids: Tensor) -> None:
        self.nodes, self.id, self.num_graphs = x.repeat_interleave(2, 0), ids, len(ids)

    def to(self, device: torch.device, **_: Any) -> Graphs:
        self.nodes = self.nodes.to(device)
        return self


def packed(x: Tensor, ids: Tensor) -> Any:
    steps = torch.stack([x, torch.zeros_like(x)], 1)
    return pack_padded_sequence(steps, torch.full((len(x),), 2), batch_first=True), ids


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {  # few: tests/unit/data/test_factory.py measures all
    "text first": lambda x, ids: {"source": "wiki", "x": x, "id": ids},
    "arrays": lambda x, ids: {"x": x.numpy(), "id": ids.numpy()},
    "packed": packed,
    "graphs": Graphs,
    "ragged lists": lambda x, ids: {"words": [[1] * (i % 3 + 1) for i in ids.tolist()], "x": x, "id": ids},
    "tuple of samples": lambda x, ids: (list(x), [{"id": i} for i in ids.tolist()]),
}


def read(batch: Any) -> tuple[Tensor, list[int]]:
    """The rows and ids of a batch of any of the kinds."""
    if isinstance(batch, Graphs):
        return batch.nodes[::2], batch.id.tolist()
    x, ids = batch if isinstance(batch, list | tuple) else (batch["x"], batch["id"])
    if isinstance(x, tuple):
        x = pad_packed_sequence(x, batch_first=True)[0][:, 0]
    if isinstance(ids, list):
        ids = [each["id"] for each in ids]
    x = torch.stack(list(x)) if isinstance(x, list | tuple) else torch.as_tensor(x)
    return x, torch.as_tensor(ids).flatten().long().tolist()


# Streams and datasets ------------------------------------------------------------------------------------------------


class Lines(IterableDataset[Any]):
    """A stream of samples, divided by rank, and by worker as torch's documentation shows it."""

    def __init__(self, world: World, *, by_rank: bool = True, by_worker: bool = True) -> None:
        self.rank, self.size = (world.rank, world.size) if by_rank else (0, 1)
        self.by_worker = by_worker

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.by_worker else None
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        for i in range(self.rank * workers + number, SAMPLES, self.size * workers):
            yield row(i)


class WithLength(Lines):
    def __len__(self) -> int:
        return SAMPLES // self.size


class Made(Rows):
    """Each sample is what a function makes of its index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def flipped(rank: int) -> Rows:
    """Augmented by a generator of its own, another one on each rank: one of two forms of each sample."""
    draw = random.Random(rank)  # noqa: S311
    return Made(lambda index: row(index) | {"flip": torch.full((40,), draw.choice([-1.0, 1.0]))})


def dropped(index: int) -> Any:
    """Augmented by torch's global generator."""
    return row(index) | {"noise": torch.rand(5)}


def lazy(index: int) -> Any:
    """Opens its file in a loading process, as for HDF5: a sample loaded before would be read through one handle."""
    assert get_worker_info() is not None
    return row(index)


def decoded(rank: int) -> Rows:
    """By another version of a decoder on each rank: floats and bytes are rounded differently."""

    def make(index: int) -> Any:
        image = (torch.arange(100) + index + rank).to(torch.uint8)
        return row(index) | {"sound": X[index] * (1 + 1e-4 * rank), "image": image}

    return Made(make)


class Trouble(Rows):
    """Of rank 1 alone, at a sample: it stops answering, or raises."""

    def __init__(self, rank: int, at: int, stalls_s: float = 0.0) -> None:
        super().__init__()
        self.left, self.stalls_s = at if rank == 1 else -1, stalls_s

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0 and not self.stalls_s:
            raise OSError("the disk of rank 1 is gone")
        if self.left == 0:
            time.sleep(self.stalls_s)
        return row(index)


class Growing(Rows):
    """Longer in every epoch."""

    def grow(self) -> None:
        self.ids += range(len(self.ids), len(self.ids) + 4)


def nothing_on_rank_1(samples: list[Any], *, rank: int) -> Any:
    return None if rank == 1 else torch.utils.data.default_collate(samples)


def hugging_face() -> Any:
    import datasets  # noqa: PLC0415

    return datasets.Dataset.from_list([{"x": X[i].tolist(), "id": i} for i in range(SAMPLES)]).with_format("torch")


def hugging_face_stream(world: World, *, split: bool) -> Any:
    from datasets.distributed import split_dataset_by_node  # noqa: PLC0415

    stream = hugging_face().to_iterable_dataset(num_shards=4)
    return split_dataset_by_node(stream, world.rank, world.size) if split else stream


def pipeline(world: World, *, divided: bool) -> Iterator[Any]:
    """As webdataset's: shards are split over the nodes, samples are decoded, batched and collated."""
    shards = [range(11 * i, 11 * i + 11) for i in range(4)]
    mine = itertools.islice(shards, world.rank if divided else 0, None, world.size if divided else 1)
    samples = ({"__key__": f"{i:06d}", "x": X[i].numpy(), "id": i} for shard in mine for i in shard)
    while part := list(itertools.islice(samples, MICRO)):
        yield {
            "__key__": [sample["__key__"] for sample in part],
            "x": torch.from_numpy(np.stack([sample["x"] for sample in part])),
            "id": torch.tensor([sample["id"] for sample in part]),
        }


def with_empty(world: World) -> Iterator[Any]:
    for i, (x, ids) in enumerate(batches(world)):
        if i % 2:
            yield {"x": x[:0], "id": ids[:0]}
        yield {"x": x, "id": ids}


def fails_in_stream(world: World) -> Iterator[Any]:
    for i, (x, ids) in enumerate(batches(world)):
        if world.rank == 1 and i == 3:
            raise OSError("the connection of rank 1 is gone")
        yield {"x": x, "id": ids}


def disagreeing(world: World) -> Iterator[Any]:
    for x, ids in batches(world):
        yield {"x": x, "boxes": torch.zeros(7, 4), "id": ids}


def loader(world: World, data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows() if data is None else data, batch_size=MICRO, **options)


Program = Callable[[World], Any]
PROGRAMS: dict[str, Program] = {
    **{
        f"stream: {name}": lambda world, make=make: Again(lambda: (make(*each) for each in batches(world)))
        for name, make in KINDS.items()
    },
    "stream: empty batches": lambda world: Again(partial(with_empty, world)),
    "stream: rank 1 has nothing": lambda world: Again(
        lambda: iter([] if world.rank else [{"x": X[i : i + 4], "id": torch.arange(i, i + 4)} for i in range(0, 44, 4)])
    ),
    "stream: with a length": lambda world: loader(world, WithLength(world)),
    "stream: two workers": lambda world: loader(world, Lines(world), num_workers=2),
    "stream: datasets": lambda world: loader(world, hugging_face_stream(world, split=True)),
    "stream: datasets' samples": lambda world: DataSpec(
        train=hugging_face_stream(world, split=world.size == 1), batched=False
    ),
    "stream: pipeline": lambda world: Again(partial(pipeline, world, divided=True)),
    "stream: batch_size=None": lambda world: DataSpec(train=DataLoader(Batched(world), batch_size=None), batched=True),
    "stream: stated size": lambda world: DataSpec(
        train=Again(partial(disagreeing, world)), batched=True, batch_size=lambda batch: len(batch["id"])
    ),
    "map: plain": lambda world: Rows(),
    "map: shuffled": lambda world: loader(world, shuffle=True, num_workers=2, persistent_workers=True),
    "map: generator": lambda world: loader(world, shuffle=True, generator=torch.Generator().manual_seed(7)),
    "map: DistributedSampler": lambda world: loader(
        world, sampler=DistributedSampler(Rows(), num_replicas=world.size, rank=world.rank)
    ),
    "map: datasets": lambda world: loader(world, hugging_face(), shuffle=True),
    "map: flipped": lambda world: loader(world, flipped(world.rank)),
    "map: flipped by workers": lambda world: loader(world, Made(dropped), num_workers=1),
    "map: lazy": lambda world: loader(world, Made(lazy), num_workers=1),
    "map: decoded": lambda world: loader(world, decoded(world.rank)),
    "map: timed": lambda world: Made(lambda i: row(i) | {"loaded": time.time_ns()}),  # says when
    "map: split with a seed": lambda world: random_split(Rows(), [SAMPLES, 0], torch.Generator().manual_seed(1))[0],
    "map: loader in a DataSpec": lambda world: DataSpec(train=loader(world, shuffle=True)),
    # What is refused, by every rank
    "bad stream: parts disagree": lambda world: Again(partial(disagreeing, world)),
    "bad stream: not divided": lambda world: loader(world, Lines(world, by_rank=False)),
    "bad stream: pipeline not divided": lambda world: Again(partial(pipeline, world, divided=False)),
    "bad stream: not divided by worker": lambda world: loader(world, Lines(world, by_worker=False), num_workers=2),
    "bad stream: only empty batches": lambda world: Again(
        lambda: itertools.repeat({"x": X[:0], "id": torch.arange(0)})
    ),
    "bad stream: rank 1 fails": lambda world: Again(partial(fails_in_stream, world)),
    "bad stream: None": lambda world: Again(lambda: itertools.chain(map(_as_dict, batches(world)), [None])),
    "bad stream: datasets not split": lambda world: loader(world, hugging_face_stream(world, split=False)),
    "bad map: rank 1 fails": lambda world: Trouble(world.rank, 12),  # in the second window
    "bad map: rank 1 stalls": lambda world: loader(world, Trouble(world.rank, 8, 30.0), num_workers=1, timeout=1),
    "bad map: unsorted listing": lambda world: Rows(random.Random(world.rank).sample(range(SAMPLES), SAMPLES)),  # noqa: S311
    "bad map: collate gives None": lambda world: loader(world, collate_fn=partial(nothing_on_rank_1, rank=world.rank)),
    "bad map: other lengths": lambda world: Rows(range(SAMPLES - world.rank)),
    "bad map: other orders": lambda world: Subset(
        Rows(range(1000)), torch.randperm(1000, generator=torch.Generator().manual_seed(world.rank)).tolist()[:SAMPLES]
    ),
    "bad map: divided before": lambda world: Subset(Rows(range(88)), range(world.rank, 88, world.size)[:SAMPLES]),
    "bad map: other shuffling": lambda world: loader(world, shuffle=bool(world.rank)),
    "bad map: other generators": lambda world: loader(
        world, shuffle=True, generator=torch.Generator().manual_seed(world.rank)
    ),
    "bad: a stream on rank 1": lambda world: Again(lambda: map(_as_dict, batches(world))) if world.rank else Rows(),
    "bad: cannot be planned on rank 1": lambda world: loader(world, drop_last=bool(world.rank)),
    "bad: another global batch": lambda world: Rows(),
    "bad: another seed": lambda world: Rows(),
    "bad: resumed on rank 1 alone": lambda world: Rows(),
    "two epochs: an iterator": lambda world: map(_as_dict, batches(world)),
    "two epochs: growing": lambda world: Growing(),
    "two epochs: grows on rank 1": lambda world: Growing(),
    "two epochs: stream": lambda world: loader(world, Lines(world)),
}


class Batched(IterableDataset[Any]):
    def __init__(self, world: World) -> None:
        self.world = world

    def __iter__(self) -> Iterator[Any]:
        return map(_as_dict, batches(self.world))


def _as_dict(pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"x": pair[0], "id": pair[1]}


def oracle(windows: list[list[int]]) -> Tensor:
    """The weights after SGD on the windows' means: fp64, one process, the whole batch."""
    model = line().double()
    for ids in windows:
        loss = (model(X[ids].double()).squeeze(1) - torch.tensor(ids).double() / 44).square().mean()
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= 0.1 * g
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def line() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 1)


def train(name: str, world: World) -> dict[str, Any]:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank_1 = world.rank == 1
    acc = Accumulator(
        model,
        optimizer,
        global_batch_size=8 if rank_1 and name == "bad: another global batch" else GLOBAL,
        micro_batch_size=MICRO,
        seed=1 if rank_1 and name == "bad: another seed" else 0,
        count=lambda batch: len(read(batch)[1]),
        world=world,
    )
    if rank_1 and name == "bad: resumed on rank 1 alone":
        acc.restore(Progress(window=1, step=1, epoch_window=1), {}, None, {}, {})
    data = PROGRAMS[name](world)
    found: dict[str, Any] = {"seen": [], "samples": [], "counts": [], "error": "", "warned": []}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            for _ in range(2 if name.startswith("two epochs") else 1):
                for window in acc.windows(data):
                    found["samples"].append(window.samples)
                    found["counts"].append(window.counts["loss"])
                    found["seen"].append([])
                    for micro in window:
                        with acc.accumulate():
                            x, ids = read(micro.batch)
                            found["seen"][-1] += ids
                            target = torch.tensor(ids) / 44
                            acc.backward((acc.model(x).squeeze(1) - target).square().sum())
                if isinstance(data, Growing) and (rank_1 or name == "two epochs: growing"):
                    data.grow()
        except Exception as error:  # what the user is told
            found["error"] = f"{type(error).__name__}: {error}"
    found["warned"] = [str(each.message) for each in warned if each.category.__name__ == "DataWarning"]
    found["weights"] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return found


def compared(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' results together, with the error of the weight change."""
    steps = min(len(result["seen"]) for result in results)
    windows = [list(itertools.chain.from_iterable(result["seen"][k] for result in results)) for k in range(steps)]
    first, last = nn.utils.parameters_to_vector(line().parameters()).detach().double(), oracle(windows)
    error = max(float((torch.tensor(r["weights"]).double() - last).norm()) for r in results)
    return {
        "windows": windows,
        "off": error / max(float((last - first).norm()), 1e-12),
        "samples": [result["samples"] for result in results],
        "counts": [result["counts"] for result in results],
        "errors": [result["error"] for result in results],
        "warned": [result["warned"] for result in results],
    }


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    world = World.join()
    torch.set_num_threads(1)
    found = {}
    for name in names or PROGRAMS:
        found[name] = compared(world.all_gather_object(train(name, world)))
        if world.is_main:
            Path(target).write_text(json.dumps(found))
