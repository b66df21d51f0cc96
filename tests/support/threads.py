"""Ranks that are threads of this process, over torch's threaded process group: for cells that need no launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from distaccum.distributed.world import World

Result = TypeVar("Result")
_TIMEOUT_S = 60


def run_ranks(size: int, function: Callable[[World], Result]) -> list[Result | BaseException]:
    """What ``function`` gives on each rank, or what it raises there.

    A rank that raises ends; others that wait for it get an error of their own.

    Raises:
        TimeoutError: a rank is still running after a minute.
    """
    results: list[Result | BaseException] = [TimeoutError("the rank hangs")] * size
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()

    def rank(number: int) -> None:
        dist.init_process_group(backend="threaded", rank=number, world_size=size, store=store)
        try:
            results[number] = function(World(rank=number, size=size, device=torch.device("cpu")))
        except BaseException as error:
            results[number] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    multi_threaded_pg.ProcessLocalGroup.reset()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT_S)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"ranks {[i for i, thread in enumerate(threads) if thread.is_alive()]} hang")
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    return results
