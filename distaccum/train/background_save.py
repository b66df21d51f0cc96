"""A checkpoint's files, written by a thread while training goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

from distaccum.checkpoint.files import write_json
from distaccum.checkpoint.hashing import HashingWriter, Pieces

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


class BackgroundSave:
    """One save at a time. That it has ended on all ranks is known from the count of a later window.

    See :class:`~distaccum.data.counter.Rider`. A save's number travels, as what is summed may have been sent before the
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
