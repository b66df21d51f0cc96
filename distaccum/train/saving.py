"""What saves are made with: copies in host memory, a thread that writes them, the best one, and a clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import torch
from torch import Tensor

from distaccum.checkpoint.files import HashingWriter, Pieces, write_json
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.trainer import CheckpointConfig
from distaccum.data.hooks import WindowHook
from distaccum.distributed.world import World
from distaccum.errors import ConfigError

# Host memory that a save copies tensors into, so that training may change them: reused by the next save.

_ALIGNED = 64  # bytes, where each tensor begins


class HostMemory:
    """Copies of tensors on the host, in a few large blocks that are taken once; pinned where the tensors are on a GPU.

    Torch pins memory in powers of two, and each time the host waits:
    https://docs.pytorch.org/docs/stable/notes/cuda.html, on its host allocator. A copy is complete after :meth:`wait`,
    and stays until :meth:`reuse`.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pins = device, device.type != "cpu"
        self._blocks: list[Tensor] = []
        self._used: list[int] = []
        self._left = 0  # bytes of the tensors that are still to come

    def missing(self, sizes: Sequence[int]) -> int:
        """The bytes that copies of tensors of these sizes take, beside what is taken already."""
        own = [block.nbytes for block in self._blocks]
        blocks, used, left = [*own], [0] * len(own), sum(map(_aligned, sizes))
        for size in sizes:
            _place(size, blocks, used, left)
            left -= _aligned(size)
        return sum(blocks) - sum(own)

    def reuse(self, sizes: Sequence[int] = ()) -> None:
        """The next copies, of tensors of these sizes, overwrite those of before."""
        self._used, self._left = [0] * len(self._blocks), sum(map(_aligned, sizes))

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy on the host, of the same type and shape; from a GPU it is made behind the device's work."""
        sizes = [block.nbytes for block in self._blocks]
        block, start = _place(tensor.nbytes, sizes, self._used, self._left)
        self._left -= _aligned(tensor.nbytes)
        for size in sizes[len(self._blocks) :]:
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pins))
        copied = self._blocks[block][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor, non_blocking=self._pins)

    def wait(self) -> None:
        """Until the copies are there."""
        if self._pins:
            torch.get_device_module(self._device).current_stream(self._device).synchronize()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _place(size: int, blocks: list[int], used: list[int], left: int) -> tuple[int, int]:
    """Where a tensor goes, by block and byte; into a new block of a power of two where it fits into none.

    Blocks are as large as what is still to come allows: their sum is little more than the tensors'.
    """
    chosen = next((i for i, block in enumerate(blocks) if used[i] + size <= block), len(blocks))
    if chosen == len(blocks):
        blocks.append(max(1 << (size - 1).bit_length() if size else 1, 1 << left.bit_length() >> 1))
        used.append(0)
    start = used[chosen]
    used[chosen] += _aligned(size)
    return chosen, start


# A checkpoint's files, written by a thread while training goes on.

_LEFT, _POLL_S = ".rank-{}.json", 0.05


def clear(folder: Path) -> None:
    """Removes what the ranks have left for rank 0: it is no part of a checkpoint."""
    for file in folder.glob(_LEFT.format("*")):
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Written:
    """How this rank's part of ``step-N`` ended: the digests of its files, or an error, after so many seconds."""

    step: int
    digests: Mapping[str, str]
    seconds: float
    error: Exception | None = None


class BackgroundSave(WindowHook):
    """One save at a time. That it has ended on all ranks is known from the count of a later window.

    A save's number travels, as what is summed may have been sent before the
    save began.

    Each rank also leaves its digests in the folder, so that rank 0 can publish where the ranks have lost each other.

    Args:
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._number = 0
        self._thread: Thread | None = None
        self.step = -1
        """Of the last one that was begun."""
        self._written: Written | None = None
        self.ready = False
        """Whether it has ended on all ranks, well or not; the same on every rank."""

    @property
    def pending(self) -> bool:
        """Whether there is one that was not taken yet; the same on every rank."""
        return self._thread is not None

    def begin(self, step: int, folder: Path, files: Iterable[tuple[str, Pieces]]) -> None:
        """Writes the files, which are in memory that nobody changes until :meth:`take`, into the folder."""
        assert self._thread is None
        self._number, self.step = self._number + 1, step
        self._thread = Thread(target=self._write, args=(step, folder, files), name="checkpoint", daemon=True)
        self._thread.start()

    def take(self, within_s: float | None = None) -> Written:
        """How it ended, for which this waits; there is none afterwards.

        Raises:
            TimeoutError: it did not end within so many seconds; it may go on.
        """
        assert self._thread is not None
        self._thread.join(within_s)
        if self._thread.is_alive():
            raise TimeoutError(f"step {self.step} is still being written")
        written, self._written, self._thread, self.ready = self._written, None, None, False
        assert written is not None
        return written

    def _write(self, step: int, folder: Path, files: Iterable[tuple[str, Pieces]]) -> None:
        began = monotonic()
        try:
            with HashingWriter(folder) as writer:
                for name, content in files:
                    writer.write(name, content)
                digests = writer.digests
            write_json(folder / _LEFT.format(self._rank), digests)
            written = Written(step, digests, monotonic() - began)
        except Exception as error:  # raised, or told, where all ranks know of it
            written = Written(step, {}, monotonic() - began, error)
        self._written = written

    def left_by_all(self, folder: Path, within_s: float) -> list[dict[str, str]]:
        """The digests that all ranks have left in the folder.

        Raises:
            TimeoutError: some have left none within so many seconds.
        """
        files, latest = [folder / _LEFT.format(rank) for rank in range(self._world_size)], monotonic() + within_s
        while not all(file.exists() for file in files):
            if monotonic() > latest:
                raise TimeoutError(f"{folder}: some ranks have not written their part")
            sleep(_POLL_S)
        return [json.loads(file.read_bytes()) for file in files]

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """The number of the save that has ended here; 0.0 without one."""
        return [float(self._number) if self._written is not None else 0.0]

    def incoming(self, sums: list[float]) -> None:
        """Whether it has ended on every rank."""
        self.ready = self.pending and sums[0] == self._number * self._world_size


# The checkpoint with the best evaluation, which is kept beside the newest ones.


class BestCheckpoint:
    """Which evaluation has been the best of the run, also across resumes; a collective to make.

    Args:
        config: ``best`` names a result of the evaluation, null: none; its mode says what is better.
        store: keeps the checkpoint, and which it is.
        world: this rank.
    """

    def __init__(self, config: CheckpointConfig, store: CheckpointStore, world: World) -> None:
        self._config, self._store = config, store
        self._value, self._name = math.nan, ""
        if config.best is not None:
            kept = json.loads(world.broadcast_str(json.dumps(store.best() if world.is_main else None)))
            same = kept is not None and kept["metric"] == config.best
            if same and kept.get("mode", config.mode_of_best()) == config.mode_of_best():
                self._value, self._name = float(kept["value"]), str(kept["checkpoint"])

    def improves(self, evaluation: Mapping[str, float]) -> bool:
        """Whether this evaluation, the same on every rank, is better than any before; NaN never is.

        Raises:
            ConfigError: it has no such result.
        """
        name = self._config.best
        if name is None:
            return False
        if name not in evaluation:
            known = ", ".join(evaluation)
            raise ConfigError("checkpoint.best", name, f"the evaluation gives {known}", "Name one of these")
        sign = 1.0 if self._config.mode_of_best() == "min" else -1.0
        value = sign * evaluation[name]
        return value < (math.inf if math.isnan(self._value) else sign * self._value)

    def is_of(self, step: int, evaluation: Mapping[str, float]) -> bool:
        """Whether this evaluation is the best one as this process began, and its checkpoint that of this step."""
        name = self._config.best
        return name is not None and self._name == f"step-{step}" and evaluation.get(name) == self._value

    def mark(self, path: Path, evaluation: Mapping[str, float]) -> None:
        """Keeps ``path``, which is of the weights that were evaluated; the one before is pruned like any other.

        Rank 0 calls it before ``path`` is there, so that a run which dies then does not forget that it was the best.
        """
        assert self._config.best is not None
        metric, mode = self._config.best, self._config.mode_of_best()
        self._store.mark_best(path, metric=metric, mode=mode, value=evaluation[metric])

    def note(self, evaluation: Mapping[str, float]) -> None:
        """From here on a better one has to be better than this; every rank calls it."""
        assert self._config.best is not None
        self._value = evaluation[self._config.best]


# Checkpoints by the clock: rank 0 says when one is due, and it travels with the count of a window.


class SaveClock(WindowHook):
    """Due so long after the last save, or after the start; all ranks learn of it before the same window.

    Args:
        every: seconds.
        decides: whether this rank's clock counts: rank 0's does.
        ago: seconds since the last save.
        now: the clock, in seconds.
    """

    def __init__(self, every: float, *, decides: bool, ago: float = 0.0, now: Callable[[], float] = monotonic) -> None:
        self._every, self._decides, self._now = every, decides, now
        self.saved()
        self._began -= ago

    def saved(self) -> None:
        """Begins to count anew; on all ranks, after any save."""
        self._began, self.due = self._now(), False

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """1.0 from the rank that decides, where a save is due."""
        return [float(self._decides and self._now() - self._began >= self._every)]

    def incoming(self, sums: list[float]) -> None:
        """Whether that rank has said so: the same on every rank."""
        self.due = self.due or sums[0] > 0
