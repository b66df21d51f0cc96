"""``distaccum-verify RUN``: what a run directory holds, whole or not, and what ``resume=auto`` would take up.

Reads, and changes nothing. Exit codes: 0 all is whole, 1 something is damaged or cannot be read, 2 no run is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distaccum.checkpoint import state
from distaccum.checkpoint.store import UnreadableError, verify
from distaccum.errors import CheckpointError
from distaccum.train.run_dir import RunDir

_WIDTH = 24


@dataclass(frozen=True)
class Finding:
    """A file or folder of a run: what is said of it, and whether it is whole."""

    name: str
    text: str
    whole: bool = True


def inspect(path: Path) -> list[Finding]:
    """Every checkpoint, the log, the status, and the checkpoint that ``resume=auto`` would take up."""
    run_dir = RunDir(path)
    steps = sorted(run_dir.checkpoints.glob("step-*"), key=lambda folder: (len(folder.name), folder.name))
    found = [_checkpoint(folder) for folder in steps]
    found += [Finding(folder.name, "set aside") for folder in sorted(run_dir.checkpoints.glob("*-step-*"))]
    found += [*_metrics(run_dir.metrics), *_status(path / "status.json")]
    newest = next((one for one in reversed(found[: len(steps)]) if one.whole), None)
    return [*found, Finding("resume=auto", f"continues {newest.name}" if newest else "has no checkpoint to continue")]


def _checkpoint(folder: Path) -> Finding:
    try:
        verify(folder)
        saved = state.read(folder)
    except CheckpointError as error:
        what = "CANNOT BE READ" if isinstance(error, UnreadableError) else "DAMAGED"
        return Finding(folder.name, f"{what}: {str(error).removeprefix(f'{folder}: ')}", whole=False)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    run = saved.run
    by = f"{run.config.get('engine', {}).get('name', 'an engine')} on {saved.world_size} ranks"
    return Finding(folder.name, f"whole: window {run.progress.window}, {size / 2**20:.1f} MiB, saved by {by}")


def _metrics(file: Path) -> Iterator[Finding]:
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return
    records, torn = [], 0
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            torn += 1
    last = f", the last of step {records[-1].get('step')}" if records else ""
    broken = f"; DAMAGED: {torn} lines are no JSON" if torn else ""
    yield Finding(file.name, f"{len(records)} records{last}{broken}", whole=not torn)


def _status(file: Path) -> Iterator[Finding]:
    try:
        status = json.loads(file.read_bytes())
        text = f"{status['state']} at step {status['step']}" + (f": {status['reason']}" if status["reason"] else "")
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        yield Finding(file.name, f"DAMAGED: {error}", whole=False)
        return
    yield Finding(file.name, text)


def main() -> None:
    """Runs ``distaccum-verify``."""
    parser = argparse.ArgumentParser(prog="distaccum-verify", description="What a run directory holds, whole or not.")
    parser.add_argument("run", type=Path, help="a run directory, as hydra.run.dir names it")
    given = parser.parse_args()
    if not RunDir(given.run).holds_results() and not (given.run / "status.json").exists():
        parser.exit(2, f"distaccum: {given.run} holds no run: give the folder that has checkpoints/ in it\n")
    try:
        found = inspect(given.run)
    except OSError as error:
        parser.exit(1, f"distaccum: {given.run}: {error}\n")
    for one in found:
        sys.stdout.write(f"{one.name:<{_WIDTH}}{one.text}\n")
    sys.exit(not all(one.whole for one in found))


if __name__ == "__main__":
    main()
