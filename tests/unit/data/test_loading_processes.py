from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from distaccum.data import loading_processes
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
