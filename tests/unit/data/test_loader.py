"""Windows that are loaded, in this process and in loading ones."""

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from distaccum import Trainer
from distaccum.accumulation.accumulator import Accumulator
from distaccum.data import loading_processes
from distaccum.data.adapters import to_data_spec
from distaccum.data.counter import GlobalCounter
from distaccum.data.datasets.digits import digits
from distaccum.data.datasets.text import docs, text
from distaccum.data.datasets.tokens import tokens
from distaccum.data.factory import build_loader, loading_options, make_plan
from distaccum.data.held_out import HeldOut
from distaccum.data.loader import MapWindowLoader
from distaccum.data.loading_processes import reading
from distaccum.data.plan.batch import BatchPlan
from distaccum.data.spec import DataSpec, WorkerOptions
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError
from distaccum.losses.cross_entropy import CrossEntropy
from tests.support.accumulators import Loss as Squares
from tests.support.accumulators import over_sgd
from tests.support.runs import settings


def test_docs_is_real_text_in_next_byte_pairs() -> None:
    source = docs(seq_len=32, held_out=0.1)
    inputs, labels = source.train[5]
    assert torch.equal(inputs[1:], labels[:-1])
    assert bytes(source.train[0][0].tolist()).startswith(b'The "assert" statement')
    assert source.eval_dataset is not None
    assert 0.08 < len(source.eval_dataset) / len(source.train) < 0.13
    baselines = source.baselines()
    assert 3.2 < baselines["byte bigram"] < 3.5
    assert 1.9 < baselines["zlib -9"] < 2.4


def test_text_of_a_folder_is_its_visible_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").write_text("x" * 100)
    (tmp_path / "b" / "2.txt").write_text("b" * 50)
    (tmp_path / "a.txt").write_text("a" * 50)
    source = text(path=str(tmp_path), seq_len=4, held_out=0.5)
    assert bytes(source.train[0][0].tolist()) == b"aaaa"
    assert source.eval_dataset is not None
    assert bytes(source.eval_dataset[5][0].tolist()) == b"bbbb"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_shards_are_mapped_and_give_every_block_once(tmp_path: Path, dtype: str) -> None:
    for shard, size in enumerate((41, 9, 3, 30)):
        ids = np.arange(size) + 100 * shard
        ids.astype(np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / f"{shard}.bin")
    source = tokens(path=str(tmp_path / "*.bin"), vocab_size=400, seq_len=4, dtype=dtype, held_out=0.2)
    starts = [int(source.train[i][0][0]) for i in range(len(source.train))]
    assert starts == [*range(0, 40, 4), *range(100, 108, 4), *range(300, 320, 4)]
    assert source.eval_dataset is not None
    assert int(source.eval_dataset[0][0][0]) == 324
    assert not source.train._arrays[0].flags.writeable  # type: ignore[attr-defined]


@pytest.mark.fault("more token shards than a process may have files open (1,000)")
def test_token_shards_keep_no_file_open_and_are_not_read(tmp_path: Path) -> None:
    for shard in range(100):
        np.arange(6, dtype="<u2").tofile(tmp_path / f"{shard}.bin")
    with (tmp_path / "x.bin").open("wb") as file:
        file.truncate(2**36)  # 64 GiB without a block
    source = tokens(path=str(tmp_path / "*.bin"), vocab_size=400, seq_len=4, dtype="uint16")
    assert not [file for file in Path("/proc/self/fd").iterdir() if file.exists() and file.resolve().parent == tmp_path]
    assert source.train[0][0].tolist() == [0, 1, 2, 3]
    before = Path("/proc/self/maps").read_text().count(str(tmp_path))
    del source
    gc.collect()
    assert before == 101
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_token_shards_are_held_out_by_name(tmp_path: Path) -> None:
    for number, name in enumerate(("train", "news", "code")):
        (np.arange(9 + number * 4) + 100 * number).astype("<u2").tofile(tmp_path / f"{name}.bin")
    held_out = {name: str(tmp_path / f"{name}.bin") for name in ("news", "code")}
    source = tokens(path=str(tmp_path / "train.bin"), vocab_size=400, seq_len=4, held_out_path=held_out)
    assert {name: (len(one), int(one[0][0][0])) for name, one in source.held_out.items()} == {
        "news": (3, 100),
        "code": (4, 200),
    }
    with pytest.raises(ConfigError, match=r"data\.held_out_path\.code=nowhere: matches no file"):
        tokens(path=str(tmp_path / "train.bin"), vocab_size=9, seq_len=4, held_out_path=held_out | {"code": "nowhere"})


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    np.full(100, 500, dtype="<u2").tofile(tmp_path / "a.bin")
    source = tokens(path=str(tmp_path / "a.bin"), vocab_size=500, seq_len=4, held_out=0.5)
    with pytest.raises(ValueError, match=r"token id 500 .* data\.vocab_size=500"):
        source.train[0]


def test_digits_are_the_real_ones() -> None:
    source = digits(held_out=0.2)
    image, label = source.train[0]
    assert image.shape == (1, 8, 8)
    assert 0 <= image.min() <= image.max() == 15 / 16
    assert (int(label), len(source.train)) == (0, 1437)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda folder: text(path=str(folder / "none"), seq_len=4, held_out=0.1), "data.path"),
        (lambda folder: text(path=str(folder), seq_len=4, held_out=0.1), "data.path"),
        (lambda folder: text(path=str(folder / "empty"), seq_len=4, held_out=0.1), "data.path"),
        (lambda folder: text(path=str(folder / "short"), seq_len=400, held_out=0.1), "data.seq_len"),
        (lambda folder: text(path=str(folder / "short"), seq_len=4, held_out=1.5), "data.held_out"),
        (lambda folder: text(path=str(folder / "short"), seq_len=0, held_out=0.5), "data.seq_len"),
        (lambda folder: docs(seq_len=4, held_out=0.1, vocab_size=100), "data.vocab_size"),
        (lambda folder: tokens(path=str(folder / "*.bin"), vocab_size=9, seq_len=4), "data.path"),
        (lambda folder: tokens(path=str(folder / "odd"), vocab_size=9, seq_len=4), "data.path"),
        (lambda folder: tokens(path=str(folder), vocab_size=9, seq_len=4), "data.path"),
        (lambda folder: tokens(path=str(folder / "odd"), vocab_size=9, seq_len=4, dtype="int8"), "data.dtype"),
        (lambda folder: tokens(path=str(folder / "odd"), vocab_size=0, seq_len=4), "data.vocab_size"),
        (lambda folder: digits(held_out=0), "data.held_out"),
    ],
)
def test_bad_sources_name_the_key(tmp_path: Path, make: object, key: str) -> None:
    (tmp_path / "empty").touch()
    if key != "data.path":
        (tmp_path / "short").write_text("some text, but not much of it")
    (tmp_path / "odd").write_bytes(b"odd")
    if key == "data.path":
        (tmp_path / "empty").write_text("  \n")
        (tmp_path / "odd").write_bytes(b"   ")
    with pytest.raises(ConfigError) as caught:
        make(tmp_path)  # type: ignore[operator]
    assert caught.value.key == key


def test_what_is_no_dataset_is_refused() -> None:
    assert len(to_data_spec([1, 2, 3]).train) == 3
    with pytest.raises(TypeError, match="int is neither"):
        to_data_spec(3)


class Recorded:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([index]), torch.tensor([index])


def test_windows_continue_from_any_window_in_the_same_order(gloo_world: World) -> None:
    plan = BatchPlan(samples=10, global_batch_size=4, micro_batch_size=3, world_size=1, seed=7)

    def ids(start: int, workers: int = 0) -> list[tuple[int, float, list[int]]]:
        loader = MapWindowLoader(Recorded(), plan, gloo_world, workers=WorkerOptions(num_workers=workers))
        counter = GlobalCounter(gloo_world, CrossEntropy().count)
        first, within = divmod(start, plan.windows_per_epoch)
        return [
            (window.epoch, window.counts["loss"], [int(i) for micro in window.micro_batches for i in micro.batch[0]])
            for epoch in range(first, 3)
            for window in loader.windows(epoch, within if epoch == first else 0, counter)
        ]

    whole = ids(0)
    assert [(epoch, count) for epoch, count, _ in whole] == [(e, c) for e in range(3) for c in (4, 4, 2)]
    for epoch in range(3):
        assert sorted(i for e, _, taken in whole if e == epoch for i in taken) == list(range(10))
    assert ids(5) == whole[5:]
    assert ids(2, workers=2) == whole[2:]


def test_loading_leaves_the_models_random_numbers_alone(gloo_world: World) -> None:
    plan = BatchPlan(samples=10, global_batch_size=4, micro_batch_size=3, world_size=1, seed=0)
    before = torch.get_rng_state()
    loader, counter = MapWindowLoader(Recorded(), plan, gloo_world), GlobalCounter(gloo_world, CrossEntropy().count)
    assert sum(len(list(loader.windows(epoch, 0, counter))) for epoch in range(2)) == 6
    assert torch.equal(before, torch.get_rng_state())


class RunsOut(Recorded):
    """Samples of an iterator that has too few of them, as ``next()`` says by ``StopIteration``."""

    def __getitem__(self, index: int) -> Any:
        return next(iter([super().__getitem__(index)][: index < 5]))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_stop_early_are_an_error_that_says_so(workers: int, gloo_world: World) -> None:
    """Torch passes a dataset's ``StopIteration`` on, which ends what takes a window's micro-batches."""
    plan = BatchPlan(samples=len(RunsOut()), global_batch_size=4, micro_batch_size=2, world_size=1, seed=None)
    loader = MapWindowLoader(RunsOut(), plan, gloo_world, workers=WorkerOptions(num_workers=workers))
    windows = loader.windows(0, 0, GlobalCounter(gloo_world, CrossEntropy().count))
    assert len(next(windows).micro_batches) == 2
    with pytest.raises(DataError, match=r"window 1 of epoch 0 ended after 0 batches, and there are more: .* Stop"):
        next(windows)


class Alone(World):
    """A rank whose fellows are not there: they would name their counts as it does, and it adds up its own."""

    def all_gather_names(self, names: Sequence[str]) -> tuple[str, ...]:
        return ("loss",)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size


@pytest.mark.parametrize(
    ("global_batch_size", "world_size", "numbers"),
    [(4, 8, [0] * 14 + [1] * 10), (3, 2, [0, 1, 1, 1, 1, 2, 2, 2])],  # micro-batches of each rank and window, sorted
)
def test_a_rank_takes_what_is_its_own_and_nothing_in_place_of_the_rest(
    gloo_world: World, global_batch_size: int, world_size: int, numbers: list[int]
) -> None:
    plan = BatchPlan(samples=10, global_batch_size=global_batch_size, micro_batch_size=1, world_size=world_size)
    taken: list[list[int]] = []
    for rank in range(world_size):
        world = Alone(rank=rank, size=world_size, device=torch.device("cpu"))
        loader, counter = MapWindowLoader(Recorded(), plan, world), GlobalCounter(world, CrossEntropy().count)
        for k, window in enumerate(loader.windows(0, 0, counter)):
            own = [int(micro.batch[0]) for micro in window.micro_batches]
            assert own == list(plan.share(k, rank))
            assert [micro.count for micro in window.micro_batches] == [1] * len(own)
            assert (window.counts, window.samples) == ({"loss": len(own)}, len(plan.window(k)))
            taken.append(own)
    assert sorted(len(own) for own in taken) == numbers
    assert sorted(i for own in taken for i in own) == list(range(10))


def _dies_later() -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("problem", [EOFError(), ConnectionResetError()])
def test_a_connection_ends_before_its_process_is_known_to(gloo_world: World, problem: Exception) -> None:
    process = multiprocessing.get_context("fork").Process(target=_dies_later)
    process.start()
    error = loading_processes.explain(problem, [process], "window 3 of epoch 0", gloo_world)
    assert isinstance(error, DataError)
    expected = f"the loading process {process.pid} was killed by SIGKILL, as the kernel does when memory is over"
    assert str(error).startswith(expected)
    assert error.__cause__ is problem
    process.join()


def test_an_error_that_no_death_explains_is_told_at_once(gloo_world: World) -> None:
    problem, began = ValueError("a user's"), time.monotonic()
    assert loading_processes.explain(problem, [], "a window", gloo_world) is problem
    assert time.monotonic() - began < 1


@pytest.mark.fault("a loading process cannot be started: the limit of processes is reached, or memory is over")
@pytest.mark.filterwarnings("ignore:.*_MultiProcessingDataLoaderIter.__del__")  # torch's own, half made
def test_where_one_cannot_be_started_none_is_left(monkeypatch: pytest.MonkeyPatch, says: Callable[[str], None]) -> None:
    fork, forked = os.fork, list[int]()

    def fork_once() -> int:
        if forked:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        forked.append(fork())
        return forked[0]

    monkeypatch.setattr(os, "fork", fork_once)
    loader = DataLoader(range(8), num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    with pytest.raises(DataError) as caught:
        loading_processes.Iteration().begin(loader)
    says(str(caught.value))
    assert not loading_processes.children()
    with pytest.raises(ProcessLookupError):  # this process would wait for it at its end
        os.kill(forked[0], 0)
    del caught
    gc.collect()


@pytest.mark.fault("`TMPDIR` has more than 75 bytes, with loading processes")
def test_a_temporary_folder_of_too_long_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, says: Callable[[str], None]
) -> None:
    data = DataSpec(train=list(range(8)))
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 74)
    assert loading_options(data, num_workers=1).num_workers == 1
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 75)
    assert loading_options(data).num_workers == 0
    with pytest.raises(ConfigError) as caught:
        loading_options(data, num_workers=1)
    says(str(caught.value))


_KILLED_WHILE_A_BATCH_TRAVELS = """
import os, signal
from multiprocessing import resource_sharer
from multiprocessing.connection import Client
import torch
from torch.utils.data import DataLoader
from distaccum.data.loading_processes import WorkerInit, begin

def dies(ident):
    connection = Client(ident[0], authkey=resource_sharer.process.current_process().authkey)
    os.kill(os.getpid(), signal.SIGKILL)

resource_sharer._resource_sharer.get_connection = dies
for batch in DataLoader(torch.zeros(8, 2), num_workers=1, worker_init_fn=INIT):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("init", ["WorkerInit(None)", "begin"])
def test_a_rank_that_is_killed_while_a_batch_travels_leaves_no_traceback_of_its_loading_processes(init: str) -> None:
    code = _KILLED_WHILE_A_BATCH_TRAVELS.replace("INIT", init)
    # Its standard error is open until the loading process has ended, too.
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, "", "")


@pytest.mark.slow
def test_a_connection_that_fails_while_the_training_lives_is_told() -> None:
    code = _KILLED_WHILE_A_BATCH_TRAVELS.replace("INIT", "begin").replace("signal.SIGKILL", "0")
    code = code.replace("os.kill(os.getpid(), 0)", "connection.close(); __import__('time').sleep(4); raise SystemExit")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "EOFError" in ended.stderr


class _Own:
    """Garbage, once nobody names it, that only the process that made it may destroy."""

    def __init__(self) -> None:
        self._self, self._process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._process:
            os.kill(os.getpid(), signal.SIGKILL)


class _Collects:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.tensor(index)


@pytest.mark.slow
def test_loading_processes_destroy_nothing_of_the_training(gloo_world: World) -> None:
    gc.disable()
    try:
        _Own()
        data = DataLoader(_Collects(), num_workers=1)  # type: ignore[arg-type]
        assert len(list(loading_processes.Iteration().begin(data))) == 4
        _Own()
        workers = WorkerOptions(num_workers=1)
        given = HeldOut(_Collects(), gloo_world, limit=None, micro_batch_size=1, collate=None, workers=workers, seed=0)
        assert len(list(given.batches(in_lockstep=False))) == 4
    finally:
        gc.enable()


@pytest.mark.timeout(60)  # without: an hour for each process, and as long for those to look again
@pytest.mark.parametrize("stream", [False, True])
def test_processes_of_a_loop_that_is_garbage_are_told_to_end(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 3600.0)
    dataset: Any = _Numbers() if stream else list(range(8))
    before = active_children()
    gc.disable()
    try:
        _leave_a_loop(DataLoader(dataset, batch_size=2, num_workers=2), gloo_world)
        started = [process for process in active_children() if process not in before]
        gc.collect()
    finally:
        gc.enable()
    assert [process.exitcode for process in started] == [0, 0]


class _Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id, 16, 2)


def _leave_a_loop(data: DataLoader[Any], world: World) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, global_batch_size=4, micro_batch_size=2, count=len, world=world)
    windows = accumulator.windows(data)
    for micro in next(windows):
        with accumulator.accumulate():
            accumulator.backward(accumulator.model(micro.batch[:, None].float()).sum())
    accumulator.own = accumulator, windows  # type: ignore[attr-defined]  a cycle


def test_a_program_keeps_its_frozen_objects() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        _Own()
        data = DataLoader(_Collects(), num_workers=1)  # type: ignore[arg-type]
        assert len(list(loading_processes.Iteration().begin(data))) == 4
        assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)
    finally:
        gc.unfreeze()
    list(loading_processes.Iteration().begin([1]))
    assert not gc.get_freeze_count()


BROKEN = {3, 17, *range(8, 16), 20, 21, 22, 23}  # a window of eight, and a micro-batch of four


class Broken(Recorded):
    """Samples of which some cannot be read."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int, /) -> Any:
        return None if index in BROKEN else torch.full((1,), index / 32, dtype=torch.float64)


def whole_ones(samples: list[Any]) -> Any:
    kept = [sample for sample in samples if sample is not None]
    return default_collate(kept) if kept else None


@pytest.mark.parametrize(("micro", "workers"), [(1, 0), (4, 0), (4, 1)])
def test_broken_samples_are_left_out_and_count_nothing(micro: int, workers: int, gloo_world: World) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    w, b = (parameter.item() for parameter in model.parameters())
    data = DataSpec(train=Broken(), collate=whole_ones, shuffle=False, workers=WorkerOptions(num_workers=workers))
    loss = Squares()
    acc = over_sgd(model, 0.1, (8, micro), count=loss.count)
    for window in acc.windows(data):
        acc.step(window, loss)
    for k in range(4):
        x = [i / 32 for i in range(8 * k, 8 * k + 8) if i not in BROKEN]
        errors = [w * value + b - 1 for value in x]
        for _ in x[:1]:
            w -= 0.1 * 2 * sum(e * value for e, value in zip(errors, x, strict=True)) / len(x)
            b -= 0.1 * 2 * sum(errors) / len(x)
    assert [parameter.item() for parameter in model.parameters()] == pytest.approx([w, b], abs=1e-12)
    assert (acc.progress.step, acc.progress.skipped) == (3, 1)


@pytest.mark.parametrize("collate", [whole_ones, None])
def test_a_stream_leaves_broken_samples_out_too_or_names_the_first(collate: Any, gloo_world: World) -> None:
    data = DataSpec(train=(Broken()[i] for i in range(32)), collate=collate, batched=False)
    plan = make_plan(data, global_batch_size=8, tokens=None, micro_batch_size=4, world_size=1, seed=0)
    windows = build_loader(data, plan, gloo_world).windows(0, 0, GlobalCounter(gloo_world, len))
    if collate is None:
        with pytest.raises(DataError, match="sample 3 is None, which torch's default_collate cannot batch"):
            next(windows)
        return
    found = [int(value * 32) for window in windows for micro in window.micro_batches for value in micro.batch]
    assert found == [i for i in range(32) if i not in BROKEN]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("sample", "collate", "said"),
    [
        ({"x": 1.0, "more": [1, None]}, None, r"sample 0\['more'\]\[1\] is None, which torch's default_collate cannot"),
        (None, None, r"sample 0 is None, which .*: give DataSpec\.collate a function that drops it, and returns None"),
        (1.0, lambda samples: None, r"the collate function gave None for a batch: let it return"),
    ],
)
def test_a_none_that_nobody_meant_is_named(
    sample: Any, collate: Any, said: str, workers: int, gloo_world: World
) -> None:
    data = [sample] * 4
    plan = BatchPlan(samples=4, global_batch_size=4, micro_batch_size=2, world_size=1, seed=None)
    loader = MapWindowLoader(data, plan, gloo_world, collate=collate, workers=WorkerOptions(num_workers=workers))
    with pytest.raises(DataError, match=said):
        next(loader.windows(0, 0, GlobalCounter(gloo_world, len)))


# What is to be known of samples beside the training is read where they are loaded.

SAMPLES = 12


class OpensItsFile:
    """With the first sample, as datasets do for loading processes: those that are forked later would share it."""

    def __init__(self, path: Path) -> None:
        self.file: Any = None
        self.path, self.readers = path, path.with_suffix(".readers")
        path.write_bytes(bytes(range(SAMPLES)))

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
            with self.readers.open("a") as readers:
                readers.write(f"{os.getpid()}\n")
        self.file.seek(index)
        value = float(self.file.read(1)[0])
        return torch.tensor([value, 1.0]), torch.tensor(index % 2)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class Named:
    """Without scores: it is asked for the count of a held-out sample, as losses with names may differ."""

    def __init__(self) -> None:
        self.of = CrossEntropy()

    def count(self, batch: Any) -> dict[str, int]:
        return {"classes": self.of.count(batch)}

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"classes": self.of(model, batch)}


def test_no_file_is_opened_where_processes_are_forked(gloo_world: World, tmp_path: Path) -> None:
    data = OpensItsFile(tmp_path / "data")
    trainer = {"num_workers": 1, "eval_every": 1, "host_memory": "1GiB", "max_steps": 1}
    config = settings((5, 3), trainer, save=1, checkpoint={"best": "eval_classes", "mode": "min"}, schedule={})
    spec = DataSpec(train=data, eval_dataset=data, ignored={1: -100}, pad_rows=True)
    Trainer(Line(), Named(), spec, config=config, run_dir=tmp_path / "run").fit()
    readers = set(data.readers.read_text().split())
    assert data.file is None
    assert readers
    assert str(os.getpid()) not in readers


def test_a_sample_that_cannot_be_read_does_not_end_the_reading() -> None:
    for workers in (0, 1):
        found = reading(["a", "b"], [[0], [7], [1]], "".join, WorkerOptions(num_workers=workers))
        assert next(found) == "a"
        with pytest.raises(IndexError):
            next(found)
        assert next(found) == "b"


def test_no_file_is_opened_where_the_dataset_will_be_pickled(tmp_path: Path) -> None:
    data = OpensItsFile(tmp_path / "data")
    found = reading(data, [[3]], len, WorkerOptions(num_workers=2, multiprocessing_context="spawn"))
    assert next(found) == 1
    assert data.file is None
