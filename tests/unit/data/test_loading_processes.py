from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distaccum.accumulation.accumulator import Accumulator
from distaccum.data import loading_processes
from distaccum.data.held_out import HeldOut
from distaccum.data.spec import WorkerOptions
from distaccum.distributed.world import World
from distaccum.errors import DataError


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
