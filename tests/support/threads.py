"""Ranks that are threads of this process, over torch's threaded process group: for cells that need no launcher."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from distaccum.distributed.world import World

Result = TypeVar("Result")
_pg: Any = multi_threaded_pg  # torch does not annotate it
_dist: Any = dist
_TIMEOUT_S, _GRACE_S = 20, 5


def run_ranks(size: int, function: Callable[[World], Result]) -> list[Result | BaseException]:
    """What ``function`` gives on each rank, or what it raises there.

    A rank that waits in a collective for one that has ended is stopped after a few seconds, and gives TimeoutError.
    """
    results: list[Result | BaseException] = [TimeoutError("the rank hangs")] * size
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _pg._install_threaded_pg()
    store = _dist.HashStore()

    def rank(number: int) -> None:
        dist.init_process_group(backend="threaded", rank=number, world_size=size, store=store)
        try:
            results[number] = function(World(rank=number, size=size, device=torch.device("cpu")))
        except Exception as error:
            results[number] = error
        except SystemExit:  # torch's way to end a thread that waits
            pass
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    _pg.ProcessLocalGroup.reset()
    try:
        for thread in threads:
            thread.start()
        threads[0].join(_TIMEOUT_S)
        for thread in threads:
            thread.join(_GRACE_S)
        if any(thread.is_alive() for thread in threads):
            _pg.ProcessLocalGroup.exception_handle(TimeoutError())
            for thread in threads:
                thread.join(_GRACE_S)
    finally:
        _pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    return results


def on_ranks(size: int, function: Callable[[World], Result]) -> list[Result]:
    """What it gives on each rank; raises what it raises on one."""
    results = list[Result]()
    for result in run_ranks(size, function):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
