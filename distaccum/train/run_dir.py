"""The run directory: its paths, its owner, its history, and the status and plan files that other programs read."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from secrets import token_hex
from threading import Lock
from time import monotonic, sleep
from typing import Any

from distaccum.checkpoint.files import ABSENT, listed, make_folder, rename, retried, write_json, write_text
from distaccum.config.secrets import redact_text, values_of_environment
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, shorten
from distaccum.train import owner
from distaccum.train.owner import Owner

# Storage that all ranks share: found out before the first window, not when the first checkpoint is sealed.

_PATIENCE_S = 20.0  # a network file system shows a new file to other hosts after its caches have aged


def check_shared(folder: Path, world: World) -> None:
    """Whether every rank sees what rank 0 writes into ``folder``; a collective.

    Raises:
        ConfigError: one does not; the same on every rank.
    """
    if world.size == 1:
        return
    name = world.broadcast_str(f".shared-{token_hex(8)}")
    mark = folder / name
    if world.is_main:
        mark.touch()
    world.barrier()
    blind = world.all_gather_names([] if _sees(mark) else [f"rank {world.rank}"])
    if world.is_main:
        mark.unlink(missing_ok=True)
    if blind:
        problem = f"{shorten(blind)} cannot see what rank 0 writes there, and every rank writes a part of a checkpoint"
        remedy = "Give an absolute path on a file system that all hosts share, or checkpoint.every=0"
        raise ConfigError("hydra.run.dir", folder, problem, remedy)


def _sees(mark: Path) -> bool:
    latest = monotonic() + _PATIENCE_S
    while not (found := mark.exists()) and mark.parent.is_dir() and monotonic() < latest:
        sleep(0.1)
    return found


_log = logging.getLogger(__name__)

_RESERVED = 4096  # bytes of a status, kept for a full disk
# Of dead processes.
_LEFT = (".*.json.*", ".*.jsonl.*", ".*.html.*", ".latest.*", ".best.*", ".writable*", ".owner-*", ".shared-*")


class State(StrEnum):
    """The ``state`` in ``status.json``."""

    RUNNING = "running"
    DONE = "done"
    PREEMPTED = "preempted"
    FAILED = "failed"
    CONFIG_ERROR = "config_error"


class RunDir:
    """Paths of one run, and its status, history and plan files.

    Args:
        path: of the folder.
        token: of the run that owns it, where this process is not the owner itself but one of its ranks.
        secrets: values in settings that no status and no log may hold.
    """

    def __init__(self, path: Path, *, token: str = "", secrets: Collection[str] = ()) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.windows = path / "windows.jsonl"
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.html"
        self.ranks = path / ".ranks"
        self.logs = path / "logs"
        self.hang = path / "hang"
        self.token, self.secrets = token, secrets
        self.ranks_there: int | None = None
        """How many ranks there are, for the status of a run in which that changes."""
        self._turn = Lock()  # of this process's threads, which write by one temporary name
        self._owner: Owner | None = None
        self._failure = path / ".failure"
        self._status = path / "status.json"
        self._reserve = path / ".status.reserve"
        self._history = path / "history.json"

    def make(self) -> None:
        """Makes the folder.

        Raises:
            ConfigError: if it, or what a run writes into it, cannot be made or written to.
        """

        def make() -> None:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable.{token_hex(8)}"
            probe.touch(exist_ok=False)
            probe.unlink(missing_ok=True)

        remedy = "Choose a folder that you can write to"
        try:
            retried(make)
        except OSError as error:
            raise ConfigError("hydra.run.dir", self.path, f"cannot be written ({error.strerror})", remedy) from error
        folders = (self.checkpoints, self.logs, self.hang)
        for path in (self.metrics, self.windows, *folders):
            if os.path.lexists(path) and not (os.access(path, os.W_OK) and path.is_dir() == (path in folders)):
                what = "cannot be written" if path.exists() else "is a link to nothing"
                raise ConfigError("hydra.run.dir", self.path, f"its {path.name} {what}", remedy)

    @property
    def owned(self) -> bool:
        """Whether this process owns the folder."""
        return self._owner is not None

    def of_main(self, world: World) -> RunDir:
        """The folder as rank 0 names it; a collective."""
        path, token = json.loads(world.broadcast_str(json.dumps([str(self.path), self.token])))
        return self if world.is_main else RunDir(Path(path), token=token, secrets=self.secrets)

    @contextmanager
    def own(self, successor: Owner | None = None) -> Iterator[None]:
        """Owns the folder for the block, and clears away what a process that died has left in it.

        Args:
            successor: owns it after another process of the same run, which may wake.

        Raises:
            ConfigError: another run owns it, or it cannot be written.
        """
        with successor or Owner(self.path) as holding:
            self._owner, self.token = holding, holding.holder.token
            self._clear()
            try:
                self._reserve.write_bytes(b" " * _RESERVED)
                make_folder(self.ranks)
                if successor is not None and self.metrics.exists():
                    self._leave_to_others(self.metrics)
            except OSError as error:
                remedy = "Make room there, or choose another folder"
                raise ConfigError("hydra.run.dir", self.path, f"cannot be written ({error})", remedy) from error
            try:
                yield
            finally:
                with suppress(OSError, owner.OwnershipLostError):
                    holding.require()
                    self._reserve.unlink(missing_ok=True)
                    shutil.rmtree(self.ranks, ignore_errors=True)
                self._owner = None

    def _leave_to_others(self, file: Path) -> None:
        """Goes on with a copy: an owner that stands still, and was given up, may write once more when it wakes."""
        copy = self.path / "metrics.tmp"
        shutil.copyfile(file, copy)
        with copy.open("rb") as written:
            os.fsync(written.fileno())
        rename(copy, file)

    def _clear(self) -> None:
        left = [self._reserve, self.path / "metrics.tmp"]
        left += [file for pattern in _LEFT for file in listed(self.path, pattern)]
        left += [file for pattern in _LEFT for file in listed(self.checkpoints, pattern)]
        for file in left:
            with suppress(OSError):
                file.unlink()
        begun = (path for name in ("saving", "removing") for path in listed(self.checkpoints, f".{name}-*"))
        for folder in (self.ranks, *begun):
            shutil.rmtree(folder, ignore_errors=True)

    def require_owned(self) -> None:
        """Raises OwnershipLostError if this process owned the folder and another run has taken it over."""
        if self._owner is not None:
            self._owner.require()

    def remove_if_empty(self) -> None:
        """Removes the folder if nothing is in it."""
        with suppress(OSError):
            self.path.rmdir()

    def holds_results(self) -> bool:
        """Whether a run has logged or saved anything here."""
        return self.metrics.exists() or self.holds_checkpoints()

    def holds_checkpoints(self) -> bool:
        """Whether a run has saved anything here, be it there still or not."""
        return any(listed(self.checkpoints, "step-*")) or self.saved_step() is not None

    def refuse_to_mix(self) -> None:
        """Raises ConfigError if an earlier run's results are here."""
        if self.holds_results():
            remedy = "Continue it with resume=auto, or choose another folder"
            raise ConfigError("hydra.run.dir", self.path, "already holds the results of a run", remedy)

    def begin(self) -> None:
        """Notes in ``history.json`` that a run has begun here, where nobody has yet."""
        if not self.history():
            write_json(self._history, {"begun": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}", "saved": None})

    def note_saved(self, step: int) -> None:
        """Notes in ``history.json`` that a whole checkpoint of this step is, or was, here."""
        history = self.history() or {}
        if history.get("saved") != step:
            write_json(self._history, {"begun": None, **history, "saved": step})

    def note_rolled_back(self, step: int, window: int) -> None:
        """Notes in ``history.json`` that the updates from ``step`` to ``window``, an attempt, were given up."""
        history = self.history() or {}
        before = history.get("rolled_back", [])
        write_json(self._history, {**history, "rolled_back": [*before, {"to_step": step, "after_window": window}]})

    def saved_step(self) -> int | None:
        """The step of the last checkpoint that was ever saved here; None if there has been none, or nobody knows."""
        return (self.history() or {}).get("saved")

    def history(self) -> dict[str, Any] | None:
        """The content of ``history.json``: None without one, empty where it is damaged."""
        try:
            history = json.loads(retried(self._history.read_bytes, of=self._history))
        except ABSENT:
            return None
        except (ValueError, RecursionError):
            return {}
        return history if isinstance(history, dict) and history.keys() >= {"begun", "saved"} else {}

    def forget_failure(self) -> None:
        """Removes the mark of an earlier failure, before a run starts."""
        self._failure.unlink(missing_ok=True)

    def write_status(self, state: State, *, step: int, reason: str = "") -> None:
        """Replaces ``status.json``, unless some rank has failed already.

        Raises:
            OwnershipLostError: another run has taken the folder over.
            OSError: the disk is full.
        """
        self.require_owned()
        with self._turn:
            if retried(self._failure.exists):
                return
            try:
                write_text(self._status, _status(state, step, reason, self.ranks_there))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._status)) from error

    def status(self) -> dict[str, Any]:
        """The content of ``status.json``; empty without one."""
        try:
            found = json.loads(self._status.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def state(self) -> State | None:
        """The state in ``status.json``; None without one."""
        try:
            return State(self.status()["state"])
        except (ValueError, KeyError):
            return None

    def hidden(self, text: str) -> str:
        """A text without the secrets of settings and environment."""
        return redact_text(text, {*self.secrets, *values_of_environment()})

    def failure(self) -> str:
        """The reason of the first failure of this attempt; empty without one."""
        try:
            return self._failure.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def write_failure(self, reason: str) -> None:
        """Writes ``failed``, at the step last written. The first rank's reason stays: the others follow from it.

        Never raises: where the file system takes nothing, the log has the reason. Writes nothing into a folder that
        another run owns.
        """
        if not self.is_foreign():
            with self._turn:
                self._write_failed(self.hidden(reason))

    def correct_failure(self, reason: str) -> None:
        """Replaces the reason of the first failure, of which more is known by now; never raises."""
        if not self.is_foreign():
            with self._turn, suppress(OSError):
                self._failure.write_text(self.hidden(reason), encoding="utf-8")
                write_text(self._status, _status(State.FAILED, self.status().get("step", 0), self.hidden(reason)))

    def _write_failed(self, reason: str) -> None:
        first, left = self._write_first(reason)
        if not first and self.state() is State.FAILED:
            return
        step, why = self.status().get("step", 0), self.failure() or reason
        try:
            write_text(self._status, _status(State.FAILED, step, why))
        except OSError as error:
            if not self._write_reserved(step, why) and not left:
                _log.error("%s cannot be written (%s): the run failed, %s", self._status, error, reason)

    def _write_first(self, reason: str) -> tuple[bool, bool]:
        """Leaves the reason for the other ranks. Returns whether it is the first, and whether one is left there."""
        try:
            descriptor = os.open(self._failure, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False, True
        except OSError:
            return True, False
        try:
            os.write(descriptor, reason.encode(errors="replace"))
        except OSError:
            return True, False
        finally:
            os.close(descriptor)
        return True, True

    def _write_reserved(self, step: int, reason: str) -> bool:
        """Writes over the blocks that were taken as the run began, which needs no room: of a long reason the start."""
        while len(text := _status(State.FAILED, step, reason).encode()) > _RESERVED:
            reason = reason[: -max(1, (len(text) - _RESERVED) // 12)]  # of a character there are up to 12 bytes
        try:
            with self._reserve.open("r+b") as file:
                file.write(text)
                file.truncate()
            self._reserve.replace(self._status)
        except OSError:
            return False
        return True

    def is_foreign(self) -> bool:
        """Whether another run than the one that this rank is of owns the folder."""
        try:
            holder = owner.read_holder(self.path)
        except (OSError, ValueError):
            return False
        if holder is None:
            return False
        return holder.token != self.token if self.token else holder.launch != owner.launch()

    def write_refusal(self, reason: str) -> None:
        """Writes ``config_error``, unless the folder holds a run's results, is owned, or cannot be written."""
        with suppress(OSError, ConfigError):
            self.make()
            if not self.holds_results() and not self.is_foreign():
                self.write_status(State.CONFIG_ERROR, step=0, reason=self.hidden(reason))


def _status(state: State, step: int, reason: str, ranks: int | None = None) -> str:
    """The text of ``status.json``, a line for each key, as ``slurm/lib.sh`` reads it.

    It is written in each window: with ``indent``, ``json`` before Python 3.14 calls a generator in Python several times
    for each key; with the lines in the separator it does not.
    """
    status = {"state": state.value, "step": step, "reason": reason}
    lines = json.dumps(status if ranks is None else {**status, "ranks": ranks}, separators=(",\n  ", ": "))
    return f"{{\n  {lines[1:-1]}\n}}\n"
