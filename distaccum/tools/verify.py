"""``distaccum verify RUN``: what a run directory holds, whole or not, and what ``resume=auto`` would take up.

Reads, and changes nothing. Exit codes: 0 all is whole, 1 something is damaged or cannot be read, 2 no run is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import time

from distaccum import program
from distaccum.checkpoint import state
from distaccum.checkpoint.files import BEST, listed, pointed, retried
from distaccum.checkpoint.store import CheckpointStore, UnreadableError, verify
from distaccum.errors import CheckpointError, ConfigError
from distaccum.tools.arguments import Arguments
from distaccum.tools.history import lacks, require_no_history
from distaccum.train import owner
from distaccum.train.run_dir import RunDir

_EPILOG = """\
examples:
  distaccum verify runs/2026-11-23_10-00-00-a1b2
  distaccum verify runs/NAME && echo whole

exit codes: 0 all is whole; 1 some is damaged or cannot be read; 2 no run there
"""
_WIDTH = 24
_UNREADABLE = "CANNOT BE READ"
_BEGUN = "is being written or removed, or was when the run died"


@dataclass(frozen=True)
class Finding:
    """A file or folder of a run: what is said of it, and whether it is whole."""

    name: str
    text: str
    whole: bool = True


def inspect(path: Path) -> list[Finding]:
    """Every checkpoint, the log, the status, the lock, what lies about, and what ``resume=auto`` would do."""
    run_dir = RunDir(path)
    store = CheckpointStore(run_dir.checkpoints, keep=0)
    aside = {final: path for path, final in store.to_recover()}  # of a run that died in a rollback's save
    folders = sorted([*store.steps(), *aside], key=lambda path: int(path.name.removeprefix("step-")))
    steps = [_checkpoint(aside.get(folder, folder), folder.name) for folder in folders]
    lies = [path for path in listed(run_dir.checkpoints, "*-step-*") if path not in aside.values()]
    found = [Finding(folder.name, "set aside") for folder in lies]
    found = [one if not one.name.startswith(".") else Finding(one.name, _BEGUN) for one in found]
    found += [
        *_best(store),
        *_metrics(run_dir.metrics),
        *_metrics(run_dir.windows),
        *_status(path / "status.json"),
        *_owner(path),
    ]
    return [*steps, *found, _resume(run_dir, steps)]


def _resume(run_dir: RunDir, steps: Sequence[Finding]) -> Finding:
    """What it would do; a run that it refuses is none that is whole."""
    for one in reversed(steps):
        if one.whole:
            missing = lacks(run_dir, *(step.name for step in steps))
            return Finding("resume=auto", f"continues {one.name}" + (f"; {missing}" if missing else ""))
        if one.text.startswith(_UNREADABLE):
            return Finding("resume=auto", f"stops, as {one.name} cannot be read", whole=False)
    try:
        require_no_history(run_dir)
    except ConfigError as error:
        return Finding("resume=auto", f"refuses: {error}", whole=False)
    return Finding("resume=auto", "begins at zero: no checkpoint was ever saved here")


def _checkpoint(folder: Path, name: str) -> Finding:
    try:
        verify(folder)
        saved = state.read(folder)
    except CheckpointError as error:
        what = _UNREADABLE if isinstance(error, UnreadableError) else "DAMAGED"
        return Finding(name, f"{what}: {str(error).removeprefix(f'{folder}: ')}", whole=False)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    run = saved.run
    by = f"{run.config.get('engine', {}).get('name', 'an engine')} on {saved.world_size} ranks"
    return Finding(name, f"whole: window {run.progress.window}, {size / 2**20:.1f} MiB, saved by {by}")


def _best(store: CheckpointStore) -> Iterator[Finding]:
    best = store.best(only_reads=True)
    if best is not None:
        behind = (
            ""
            if pointed(store.root / BEST).name == best["checkpoint"]
            else f"; `{BEST}` names it from the next save on"
        )
        yield Finding("best.json", f"{best['checkpoint']}: {best.get('metric')} {best.get('value')}{behind}")


def _owner(path: Path) -> Iterator[Finding]:
    try:
        text = _holder(path)
    except ValueError as error:
        yield Finding("owner.json", f"DAMAGED: {error}", whole=False)
        return
    if text:
        yield Finding("owner.json", text)


def _holder(folder: Path) -> str:
    """In words, who holds a run directory and whether that lives, as far as this machine knows; empty for nobody.

    Raises:
        ValueError: the lock is no record of a holder.
    """
    holder = owner.read_holder(folder)
    if holder is None:
        return ""
    if holder.machine == owner.Machine.here():
        return f"held by {holder.who}, which {'runs' if holder.runs else 'is gone: the next run takes it over'}"
    age = time() - (folder / owner.NAME).stat().st_mtime
    return f"held by {holder.who}, on another machine; last sign of life {age:.0f} s ago"


def _metrics(file: Path) -> Iterator[Finding]:
    try:
        opened = retried(partial(file.open, "rb"), of=file)
    except FileNotFoundError:
        return
    records, torn, step = 0, 0, None
    with opened as lines:  # a run of weeks has a million of them
        for line in lines:
            try:
                step = json.loads(line)["step"]
                records += 1
            except (ValueError, RecursionError, KeyError, TypeError):
                torn += 1
    last = f", the last of step {step}" if records else ""
    broken = f"; DAMAGED: {torn} lines are no records" if torn else ""
    yield Finding(file.name, f"{records} records{last}{broken}", whole=not torn)


def _status(file: Path) -> Iterator[Finding]:
    try:
        status = json.loads(retried(file.read_bytes, of=file))
        text = f"{status['state']} at step {status['step']}" + (f": {status['reason']}" if status["reason"] else "")
    except FileNotFoundError:
        return
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        yield Finding(file.name, f"DAMAGED: {error}", whole=False)
        return
    yield Finding(file.name, text)


def _printable(text: str) -> str:
    """Names of files may hold what a terminal obeys."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def main() -> None:
    """Runs ``distaccum verify``."""
    program.start()
    description = "What a run directory holds, whole or not. Reads, and changes nothing."
    parser = Arguments("verify", description, _EPILOG)
    parser.add_argument("run", type=Path, help="a run directory, as hydra.run.dir names it")
    given = parser.of()
    try:
        if not RunDir(given.run).holds_results() and not (given.run / "status.json").exists():
            parser.exit(2, f"{parser.prog}: {given.run} holds no run: give the folder that has checkpoints/ in it\n")
        found = inspect(given.run)
    except (OSError, CheckpointError) as error:
        parser.exit(1, f"{parser.prog}: {given.run}: {error}\n")
    for one in found:
        text = "\n".join(map(_printable, one.text.split("\n")))
        sys.stdout.write(f"{_printable(one.name):<{_WIDTH}}{text}\n")
    sys.exit(not all(one.whole for one in found))


if __name__ == "__main__":
    main()
