"""Checkpoints that a run directory tells of and that are not there: waited for, told, or no beginning at zero."""

from __future__ import annotations

import logging
from pathlib import Path

from distaccum.checkpoint.files import awaited, listed
from distaccum.checkpoint.store import CheckpointStore
from distaccum.errors import ConfigError
from distaccum.tools.record_file import lines_of
from distaccum.train import owner
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)


def newest_checkpoint(store: CheckpointStore, run_dir: RunDir) -> Path | None:
    """The newest whole checkpoint of a run that goes on; None where it begins at zero, as none was ever saved.

    The one that ``history.json`` names may come late; if it does not come, the log says that it is missing.

    Raises:
        ConfigError: a checkpoint was saved, or may have been, and there is none.
        UnreadableError: see :meth:`CheckpointStore.newest_valid`.
    """

    def look() -> None:
        if missing := lacks(run_dir, *(path.name for path in store.steps())):
            raise FileNotFoundError(missing)

    missing = ""
    try:
        awaited(look)
    except FileNotFoundError as error:
        missing = str(error)
    path = store.newest_valid()
    if path is None:
        require_no_history(run_dir)
    elif missing:
        _log.warning("%s: %s, and %s is the newest one: the updates after it are made again", store.root, missing, path)
    return path


def lacks(run_dir: RunDir, *names: str) -> str:
    """In words, that ``history.json`` tells of a checkpoint later than these; empty where it does not.

    A newer one may be there: a process that died before it could note so.
    """
    saved = run_dir.saved_step()
    newest = max((int(name.removeprefix("step-")) for name in names), default=-1)
    is_late = isinstance(saved, int) and saved > newest
    return f"history.json says that step {saved} was saved, and it is not there" if is_late else ""


def require_no_history(run_dir: RunDir) -> None:
    """Called where no checkpoint can be used: a run may begin at zero only where none was ever saved.

    A whole checkpoint was saved if ``history.json`` says so or a folder of one is there. Records without a
    ``history.json`` may be of a run that saved some. A run that began and logged, but never saved, begins again.

    Raises:
        ConfigError: a checkpoint was saved, or may have been.
    """
    there = sorted(path.name for path in listed(run_dir.checkpoints, "*step-*") if not path.name.startswith("."))
    history, saved = run_dir.history(), run_dir.saved_step()
    logged = lines_of(run_dir.metrics)
    if saved is None and not there and (history or (history is None and not logged)):
        return
    found = f"{len(there)} damaged ({', '.join(there)})" if there else "the folder checkpoints is empty or gone"
    before = f"was saved at step {saved}" if saved is not None else f"has {logged} records in metrics.jsonl"
    before += " and a damaged history.json" if history == {} else ""
    problem = f"{run_dir.path} has no checkpoint to resume from: {found}, and the run {before}"
    remedy = (
        "Nothing is changed. Restore the folder checkpoints; or name a checkpoint elsewhere with resume=PATH and "
        "a new hydra.run.dir; or train from zero with resume=never and a new hydra.run.dir"
    )
    raise ConfigError("resume", "auto", problem, remedy)


def beginning(run_dir: RunDir) -> str:
    """What header and log say of a start from zero that is not the first one here; empty for that."""
    history, logged, times, status = run_dir.history(), lines_of(run_dir.metrics), owner.restarts(), run_dir.status()
    if history is not None:
        kept = f"; its {logged} records are moved to metrics.superseded.jsonl" if logged else ""
        note = f"begins again at zero: the attempt of {history.get('begun')} saved no checkpoint{kept}"
    elif status.get("step"):
        note = f"begins at zero, though status.json says {status.get('state')} at step {status['step']}: "
        note += "checkpoints, records and history of that run are gone"
    elif times:
        note = f"begins at zero, though this job was started again ({times} times): nothing was begun in this "
        note += "folder before. Was it to continue another one? Look at hydra.run.dir"
    else:
        return ""
    _log.warning("%s: %s", run_dir.path, note)
    return note
