"""A process group seen from one rank, and its small collectives. A :class:`World` is passed as an argument."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from time import sleep
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.distributed import environment
from distaccum.distributed.activity import Activity
from distaccum.distributed.environment import AUTO, GLOO, GROUP_TIMEOUT, LaunchEnvironment, check_backend, main_first
from distaccum.errors import ConfigError

# Gloo's threads release the last collective's tensors shortly after it returns. If the interpreter is ending by then,
# the process aborts: "terminate called without an active exception" (seen with torch 2.13; pytorch#190489).
_SETTLE_S = 0.2
# What every backend sends; gloo knows neither 8-bit floats nor 16-bit integers, of which the bytes are sent.
_SENT = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)


@dataclass(frozen=True, kw_only=True)
class World:
    """An open process group, seen from one rank.

    Host tensors go over gloo and device tensors over the device's own backend, unless gloo is asked for, so that a
    count that the host knows never waits for the device. Every collective must be called on all ranks, in one order.
    """

    rank: int
    size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None  # None: the default group serves the host as well
    store: Store | None = field(
        default=None, compare=False, repr=False
    )  # the launcher's; None: the group is the user's
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)
    """What this rank is doing, which :class:`~distaccum.distributed.watchdog.Watchdog` reads."""

    @classmethod
    def join(cls, timeout: timedelta | None = None, *, backend: str = AUTO) -> World:
        """The open process group; if there is none, a new one of the ranks that the launcher started.

        A group that this opens stays open until the process exits; its collectives wait for ``timeout``, by default
        ``GROUP_TIMEOUT``. ``backend`` is as in :func:`open_world`.

        Raises:
            ConfigError: as :meth:`LaunchEnvironment.from_environment` and :meth:`LaunchEnvironment.device`; or the open
                group has another backend.
        """
        ranks = LaunchEnvironment.from_environment()
        if dist.is_initialized():
            backend = _agreed(backend)
        if dist.is_initialized() and not ranks.launched and (kind := environment.accelerators()[0]) != "cpu":
            device = torch.device(kind, torch.accelerator.current_device_index())  # chosen by whoever opened the group
        else:
            device = ranks.device(backend)
        if not dist.is_initialized():
            opened = ExitStack()
            world = opened.enter_context(open_world(ranks, ranks.store(), device, timeout, backend=backend))
            atexit.register(_close_at_exit, opened)
            return world
        serves_host = "cpu" in dist.get_backend_config()  # NCCL alone cannot sum host tensors
        group = None if serves_host else dist.new_group(backend="gloo")
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=device, host_group=group)

    @property
    def backend(self) -> str:
        """What carries this device's tensors between ranks: ``nccl`` or ``gloo``, or what the program has chosen."""
        return _serving().get(self.device.type, "")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    def all_reduce_host(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over the ranks, by one fp64 all-reduce on the host; integers are exact to 2**53."""
        # A column: distaccum.testing.counters tells it from a gradient bucket by its shape.
        tensor = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
        dist.all_reduce(tensor, group=self.host_group)
        return cast(list[float], tensor.squeeze(1).tolist())

    def all_reduce_max_host(self, counts: Sequence[int]) -> list[int]:
        """The maximum of each integer over the ranks, by one all-reduce on the host."""
        tensor = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.host_group)
        return cast(list[int], tensor.tolist())

    def all_gather_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The union of all ranks' names, sorted; the same on every rank. Runs on the host."""
        return tuple(sorted({name for given in self.all_gather_object(list(names)) for name in given}))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value``, which is pickled, in the order of ranks; the same on every rank. Runs on the host."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor of any shape over the ranks, in place, on its device."""
        dist.all_reduce(tensor)
        return tensor

    def all_gather_rows(self, tensor: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's ``tensor``, in the order of ranks, over the device's own backend.

        Args:
            tensor: of any type; ranks differ in the leading dimension alone.
            rows: that dimension on each rank, which may be 0.
        """
        most, row = max(rows), tensor.shape[1:]
        padded = tensor.new_zeros(most, *row)  # not every backend gathers different sizes
        padded[: len(tensor)] = tensor
        content = padded if tensor.dtype in _SENT else padded.reshape(-1).view(torch.uint8)
        gathered = [torch.empty_like(content) for _ in rows]
        if content.numel():
            dist.all_gather(gathered, content)
        return [each.view(tensor.dtype).reshape(most, *row)[:own] for each, own in zip(gathered, rows, strict=True)]

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Overwrites a tensor of any shape and type with rank 0's, in place, on its device."""
        if tensor.dtype in _SENT and tensor.is_contiguous():
            dist.broadcast(tensor, src=0)
            return
        content = tensor.contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(content, src=0)
        tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))

    def broadcast_str(self, text: str) -> str:
        """Rank 0's ``text`` on every rank. Runs on the host."""
        box: list[str] = [text]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"), group=self.host_group)
        return box[0]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the block on one rank of each machine, and then on its others: ``with world.main_first(): ...``.

        For what is downloaded, tokenized or extracted once, and found in a cache by the others. They wait as long as it
        takes, whatever the process group's timeout is. All ranks call it.

        Raises:
            PeerError: on the others, where the block has failed on the first.
        """
        own = dist.distributed_c10d._get_default_store()  # a user's group says in no other way where its ranks meet
        with main_first(LaunchEnvironment.current(), self.store or own):
            yield

    def barrier(self) -> None:
        """Blocks the host until every rank has called it; does not wait for work on a device."""
        self.all_reduce_max_host([0])


def _serving() -> dict[str, str]:
    """The open group's backends, by the kind of device whose tensors they carry."""
    return dict(item.split(":", 1) for item in dist.get_backend_config().split(",") if ":" in item)


def _agreed(backend: str) -> str:
    """The backend of the open group for a GPU's tensors, which must be the one asked for."""
    serving = _serving()
    device_type, _ = environment.accelerators()
    check_backend(backend, device_type)
    there = serving.get(device_type, AUTO)
    if backend not in (AUTO, there):
        problem = f"and the process group that the program opened has {there} for {device_type} tensors"
        raise ConfigError("backend", backend, problem, f"Use backend=auto, or open it with backend={backend!r}")
    return GLOO if there == GLOO and device_type != "cpu" else AUTO


@contextmanager
def open_world(
    ranks: LaunchEnvironment,
    store: Store,
    device: torch.device,
    timeout: timedelta | None = None,
    *,
    backend: str = AUTO,
    together: tuple[type[BaseException], ...] = (),
) -> Iterator[World]:
    """Opens the default process group for the block, and closes it at the end.

    An exception leaves a group of several ranks open: NCCL closes it with all ranks of the host, and those that wait
    for this one in a collective do not come. The process is to end then.

    Args:
        ranks: this process's rank and the world size.
        store: shared by every rank; see :meth:`LaunchEnvironment.store`.
        device: of this rank's model.
        timeout: of every collective; by default ``GROUP_TIMEOUT``.
        backend: what carries a GPU's tensors: ``nccl``, which ``auto`` chooses, or ``gloo``, by way of the host, which
            is slower, but ranks may share a GPU. A CPU's go over gloo.
        together: exceptions that all ranks raise at the same place; they close the group.

    Raises:
        ConfigError: NCCL on a CPU, or there is no such backend.
    """
    from distaccum.program import OWN_DEVICE, load  # noqa: PLC0415  where a world is made

    check_backend(backend, device.type)
    backends = load(OWN_DEVICE)(device, backend)
    timeout = timeout or GROUP_TIMEOUT  # read here, so that a program can set another one for all that it opens
    dist.init_process_group(backends, store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout)
    atexit.unregister(sleep)  # once a process
    atexit.register(sleep, _SETTLE_S)
    alone = False
    try:
        yield World(rank=ranks.rank, size=ranks.size, device=device, store=store if ranks.size > 1 else None)
    except BaseException as error:
        alone = ranks.size > 1 and not isinstance(error, together)
        raise
    finally:
        if dist.is_initialized() and not alone:  # the user may have closed it
            dist.destroy_process_group()


def _close_at_exit(opened: ExitStack) -> None:
    """Closes the group, with the exception that ends the program, if any."""
    error: BaseException | None = getattr(sys, "last_value", None)
    opened.__exit__(None if error is None else type(error), error, None)
