"""The run directory: its paths, and the status and plan files that other programs read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from distaccum.checkpoint.files import write_json
from distaccum.errors import ConfigError


class State(StrEnum):
    """The ``state`` in ``status.json``."""

    RUNNING = "running"
    DONE = "done"
    PREEMPTED = "preempted"
    FAILED = "failed"
    CONFIG_ERROR = "config_error"


class RunDir:
    """Paths of one run, and its status and plan files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self._failure = path / ".failure"

    def make(self) -> None:
        """Makes the folder.

        Raises:
            ConfigError: if it cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            remedy = "Choose a folder that you can write to"
            raise ConfigError("hydra.run.dir", self.path, f"cannot be written ({error.strerror})", remedy) from error

    def remove_if_empty(self) -> None:
        """Removes the folder if nothing is in it."""
        with suppress(OSError):
            self.path.rmdir()

    def holds_results(self) -> bool:
        """Whether a run has logged or saved anything here."""
        return self.metrics.exists() or any(self.checkpoints.glob("step-*"))

    def refuse_to_mix(self) -> None:
        """Raises ConfigError if an earlier run's results are here."""
        if self.holds_results():
            remedy = "Continue it with resume=auto, or choose another folder"
            raise ConfigError("hydra.run.dir", self.path, "already holds the results of a run", remedy)

    def forget_failure(self) -> None:
        """Removes the mark of an earlier failure, before a run starts."""
        self._failure.unlink(missing_ok=True)

    def write_status(self, state: State, *, step: int, reason: str = "") -> None:
        """Replaces ``status.json``, unless some rank has failed already."""
        if not self._failure.exists():
            self._write_status(state, step=step, reason=reason)

    def state(self) -> State | None:
        """The state in ``status.json``; None without one."""
        try:
            return State(json.loads((self.path / "status.json").read_text())["state"])
        except (OSError, ValueError, KeyError):
            return None

    def write_failure(self, reason: str) -> None:
        """Writes ``failed``, at the step last written. The first rank's reason stays: the others follow from it."""
        with suppress(FileExistsError), self._failure.open("x") as file:
            file.write(reason)
        try:
            step = json.loads((self.path / "status.json").read_text())["step"]
        except (OSError, ValueError, KeyError):
            step = 0
        self._write_status(State.FAILED, step=step, reason=self._failure.read_text() or reason)

    def _write_status(self, state: State, *, step: int, reason: str) -> None:
        write_json(self.path / "status.json", {"state": state.value, "step": step, "reason": reason})

    def write_refusal(self, reason: str) -> None:
        """Writes ``config_error``, unless the folder holds a run's results or cannot be written."""
        with suppress(OSError, ConfigError):
            self.make()
            if not self.holds_results():
                self.write_status(State.CONFIG_ERROR, step=0, reason=reason)

    def write_artifacts(self, artifacts: Mapping[str, Mapping[str, object]]) -> None:
        """Writes each under its file name, as JSON."""
        for name, content in artifacts.items():
            write_json(self.path / name, dict(content))

    def write_plan(self, plan: Mapping[str, object]) -> None:
        """Replaces ``plan.json``."""
        write_json(self.path / "plan.json", dict(plan))
