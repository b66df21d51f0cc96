"""Weights & Biases in a separate thread, where it can neither stop nor delay training.

``metrics.jsonl`` has every record, whatever becomes of W&B: ``distaccum-wandb-upload RUN`` makes a W&B run of it.

A process that resumes a run begins with the records that W&B has not got, so that each is there once. Online that is
what an earlier process could not send; what it sent of the windows that are repeated stays as it was, since W&B takes
no step twice. Offline W&B has nothing: the new folder gets all records, and the earlier ones go to
``wandb/superseded``, as ``wandb sync`` would write each over the one before.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import TYPE_CHECKING, Any

from distaccum import program
from distaccum.config.secrets import redact
from distaccum.errors import ConfigError
from distaccum.train.metrics.loggers import Logger, Record

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

_log = logging.getLogger(__name__)

_THREAD = "wandb-logger"
_CLOSE_TIMEOUT_S = 8.0
_INIT_TIMEOUT_S = 120.0  # in its own thread, so patience costs nothing
_ROOM = 2**18  # bytes that W&B writes at once, and more: it says nothing of a disk that is full


class WandbLogger(Logger):
    """Sends records to a W&B run. After a failure it warns once, and the rest of the run is not sent.

    Args:
        folder: the run directory, where W&B keeps its files; ``wandb sync`` uploads an offline run from there. What is
            in ``metrics.jsonl`` by now is of the processes before.
        mode: ``offline`` or ``online``.
        project: W&B project.
        name: display name; None for W&B's own.
        tags: of the run.
        run_id: the same id on a resume continues the same run.
        config: shown with the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: str,
        project: str,
        name: str | None,
        tags: list[str],
        run_id: str,
        config: Mapping[str, Any],
    ) -> None:
        self._settings = {
            "dir": str(folder),
            "mode": mode,
            "project": project,
            "name": name,
            "tags": tags,
            "id": run_id,
            "resume": "allow",
            "config": dict(config),
            "reinit": "create_new",
        }
        self._metrics = folder / "metrics.jsonl"
        self._before = self._metrics.stat().st_size if self._metrics.exists() else 0
        self._exit_code, self._preempted, self._sent = 0, False, 0
        self._ended = Event()
        self._records: queue.SimpleQueue[Record | tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._work, name=_THREAD, daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Hands the record over; returns at once."""
        self._records.put(dict(record))

    def alert(self, title: str, text: str) -> None:
        """Sends an alert, which W&B passes on by mail or message; returns at once."""
        self._records.put((title, text))

    def mark_preempted(self) -> None:
        """Marks the run as preempted, which W&B shows until the next process resumes it."""
        self._preempted = True

    def close(self, *, failed: bool) -> None:
        """Waits a few seconds for the records to be written."""
        self._exit_code = int(failed or self._preempted)  # W&B takes one that ends with 0 for finished
        self._records.put(None)
        before = -1
        while not self._ended.wait(_CLOSE_TIMEOUT_S) and before < self._sent:
            before = self._sent
        if not self._ended.is_set():
            _warn(f"still busy after {_CLOSE_TIMEOUT_S:.0f} s, and left behind; {self._remedy}")

    @property
    def _remedy(self) -> str:
        return f"metrics.jsonl has every record: distaccum-wandb-upload {self._settings['dir']} makes a W&B run of it"

    def _work(self) -> None:
        try:
            self._require_room()
            import wandb  # noqa: PLC0415  a second of imports that only this thread should wait for

            secret = redact(sys.argv) != sys.argv  # W&B's description of the process has the command line as it is
            settings = wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, x_disable_meta=secret)
            with _quiet_handlers():
                run = wandb.init(**self._settings, settings=settings)  # type: ignore[arg-type]
            for handler in logging.getLogger("wandb").handlers:  # or a full disk prints a traceback a line
                vars(handler)["handleError"] = _ignore
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            # The next step; 0 offline. Before the first record one of the two knows it, by W&B's version.
            has_until, has_room = max(run.step, getattr(run, "starting_step", 0)), True
            for record in _read(self._metrics, self._before):
                self._send(run, record, has_until)
            self._supersede(Path(run.dir).parent)
            while (item := self._records.get()) is not None:
                if isinstance(item, tuple):
                    run.alert(*item, level="WARN")
                else:
                    self._send(run, item, has_until)
                if has_room and not self._has_room():
                    has_room = self._warn_of_disk()
            if self._preempted:
                run.mark_preempting()
            run.finish(exit_code=self._exit_code)
            if has_room and not self._has_room():
                self._warn_of_disk()
        except Exception as error:  # whatever fails in there is no reason to lose a training run
            _warn(f"{type(error).__name__}: {error}; {self._remedy}")
            self._ended.set()
            Event().wait()  # W&B's exit handlers would fail too, at length: see is_left_behind
        self._ended.set()

    def _send(self, run: Run, record: Record, has_until: int) -> None:
        window = record.get("window", has_until)
        if window >= has_until:
            run.log(dict(record), step=window)
        self._sent += 1

    def _supersede(self, current: Path) -> None:
        """Puts earlier offline folders of this run aside: the present one has their records."""
        aside = current.parent / "superseded"
        for folder in current.parent.glob(f"offline-run-*-{self._settings['id']}*"):
            if folder.resolve() != current.resolve():
                with suppress(OSError):  # a full disk: they stay
                    aside.mkdir(exist_ok=True)
                    folder.rename(aside / folder.name)

    def _has_room(self) -> bool:
        """Whether its disk can take more: W&B itself loses in silence what does not fit."""
        folder = Path(str(self._settings["dir"]))
        own = folder / "wandb"  # it may be a disk of its own
        found = os.statvfs(own if own.is_dir() else folder)
        return found.f_bavail * found.f_frsize >= _ROOM

    def _require_room(self) -> None:
        """Before W&B begins, which would print a traceback for each line of its log, and keep nothing."""
        if not self._has_room():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._settings["dir"]))

    def _warn_of_disk(self) -> bool:
        _warn(f"the disk of its folder is full, and W&B does not say what it loses; {self._remedy}")
        return False


def _read(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """The records in the first bytes of ``metrics.jsonl``, without lines that are none."""
    if not size:
        return
    with path.open("rb") as file:
        for line in file:
            if file.tell() > size:
                return
            with suppress(ValueError, TypeError):  # cut short, or damaged
                yield dict(json.loads(line))


def _ignore(_: logging.LogRecord) -> None:
    pass


@contextmanager
def _quiet_handlers() -> Iterator[None]:
    """Within the block no handler of ``logging`` prints a traceback where it cannot write: W&B makes its own there."""
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def require_key(mode: str) -> None:
    """Whether W&B finds a key of the right form, which ``online`` needs; asks no server.

    Raises:
        ConfigError: it does not.
    """
    if mode != "online":
        return
    import wandb  # noqa: PLC0415

    try:
        from wandb.sdk.lib.wbauth import authenticate_session  # noqa: PLC0415  it has no public name

        host = wandb.setup().settings.base_url
        found = authenticate_session(host=host, source="distaccum", prompt=False, update_session=False)
        problem = "" if found else "no API key is configured"
    except (ImportError, TypeError):  # of another version of W&B, which says so when it begins
        return
    except wandb.Error as error:
        problem = str(error).rstrip(".")
    if problem:
        remedy = "Set WANDB_API_KEY, or run `wandb login`; or take metrics.wandb.mode=offline, and upload later"
        raise ConfigError("metrics.wandb.mode", mode, f"but {problem}", remedy)


def is_left_behind() -> bool:
    """Whether W&B hung or failed: its exit handlers would then keep the process from ending, or print tracebacks."""
    return any(thread.name == _THREAD for thread in enumerate_threads())


def _warn(message: str) -> None:
    _log.warning("Weights & Biases: %s", message)


def upload(run_dir: Path, *, mode: str = "online", run_id: str | None = None) -> int:
    """Makes a W&B run of ``metrics.jsonl``, each record once, with the configuration of the newest checkpoint.

    Args:
        run_dir: of a run that trains no more.
        mode: ``online``, or ``offline`` for a folder that ``wandb sync`` uploads.
        run_id: of the W&B run, which must be a new one; None for a new id.

    Returns:
        how many records.

    Raises:
        OSError: there is no ``metrics.jsonl``.
    """
    import wandb  # noqa: PLC0415

    path = run_dir / "metrics.jsonl"
    size, config = path.stat().st_size, _saved_config(run_dir)
    about = config.get("metrics", {}).get("wandb", {})
    number = 0
    with wandb.init(
        dir=str(run_dir),
        mode="offline" if mode == "offline" else "online",
        id=run_id,
        project=about.get("project", "distaccum"),
        name=about.get("name"),
        tags=about.get("tags"),
        config={"config": config},
        settings=wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, x_disable_meta=True),
    ) as run:
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for record in _read(path, size):
            run.log(record, step=record.get("window"))
            number += 1
    return number


def _saved_config(run_dir: Path) -> dict[str, Any]:
    """Without secrets, as they are saved; empty without a checkpoint."""
    try:
        latest = (run_dir / "checkpoints" / "latest").read_text().strip()
        saved: dict[str, Any] = json.loads((run_dir / "checkpoints" / latest / "state.json").read_bytes())["config"]
    except (OSError, ValueError, KeyError):
        return {}
    return saved


_EPILOG = """\
examples:
  distaccum wandb-upload runs/NAME
  distaccum wandb-upload runs/NAME --offline       then: wandb sync

exit codes: 0 done; 1 it could not be made, and why
"""


def main() -> None:
    """``distaccum-wandb-upload RUN``: exit code 0, or 1 and one line on stderr."""
    program.start()
    parser = ArgumentParser(
        prog=program.name_of("wandb-upload"),
        description="Makes a W&B run of a run's metrics.jsonl, each record once.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--id", help="of the new W&B run (default: a new one)")
    parser.add_argument("--offline", action="store_true", help="into a folder that `wandb sync` uploads")
    parser.add_argument("--version", action="store_true", help="print the versions of distaccum, torch and Python")
    given = parser.parse_args()
    try:
        number = upload(given.run, mode="offline" if given.offline else "online", run_id=given.id)
    except Exception as error:  # W&B's own, of many kinds
        sys.exit(f"distaccum-wandb-upload: {type(error).__name__}: {error}")
    sys.stdout.write(f"{number} records of {given.run / 'metrics.jsonl'}\n")


if __name__ == "__main__":
    main()
