"""Where a run starts: at zero, or where a checkpoint of it left off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.state import RunState
from distaccum.checkpoint.store import CheckpointStore, verify
from distaccum.errors import CheckpointError, ConfigError
from distaccum.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Start:
    """A verified checkpoint and the run's part of it."""

    path: Path
    run: RunState


def find_start(resume: str, run_dir: RunDir, store: CheckpointStore, position: Mapping[str, int]) -> Start | None:
    """The checkpoint that ``resume`` (``never``, ``auto`` or a path) asks for; None to start at zero.

    Raises:
        ConfigError: the named checkpoint is damaged, the data position means something else in this run, or a new run
            would be mixed into the results of an old one.
    """
    if resume == "auto":
        path = store.newest_valid()
    else:
        run_dir.refuse_to_mix()
        path = None if resume == "never" else Path(resume)
    if path is None:
        return None
    try:
        verify(path)
        start = Start(path=path.resolve(), run=checkpoint.read(path))
    except CheckpointError as error:
        raise ConfigError(
            "resume", resume, str(error), "Name a whole checkpoint, a folder checkpoints/step-N"
        ) from error
    for key, value in position.items():
        saved = start.run.position.get(key)
        if saved != value:
            problem = f"but {path} counts its windows with {key}={saved}"
            raise ConfigError(
                key, value, problem, f"Continue with {key}={saved}, or start anew in another hydra.run.dir"
            )
    return start
