"""Weights & Biases in a separate thread, where it can neither stop nor delay training.

``metrics.jsonl`` has every record, whatever becomes of W&B: ``distaccum wandb-upload RUN`` makes a W&B run of it.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from distaccum import program
from distaccum.config.checks import require_choice
from distaccum.config.metrics import WANDB_CONSOLES, WANDB_MODES, WandbConfig
from distaccum.config.secrets import redact
from distaccum.errors import ConfigError
from distaccum.train.metrics.background import SUFFIX, KeptCheckpoints, files_of, is_wanted
from distaccum.train.metrics.loggers import TEXTS, Logger, Record, RunInfo, records_of

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


# What W&B's environment variables say where the configuration says nothing.

_MODES = {**{mode: mode for mode in WANDB_MODES}, "dryrun": "offline", "run": "online"}  # W&B's older names


def resolved(settings: WandbConfig, environment: Mapping[str, str] = os.environ) -> WandbConfig:
    """The settings with what distaccum itself decides by: mode, project and folder.

    What W&B alone uses stays None, and W&B reads its variables itself: entity, name, group, job type, notes, tags. A
    run of a sweep's agent is online, and W&B takes the sweep's project.

    Raises:
        ConfigError: ``WANDB_MODE`` is none of W&B's modes, or ``WANDB_CONSOLE`` none of its consoles.
    """
    mode = settings.mode
    if mode is None and (given := environment.get("WANDB_MODE")):
        if given not in _MODES:
            raise ConfigError("WANDB_MODE", given, "no such mode", f"Use one of {', '.join(WANDB_MODES)}")
        mode = _MODES[given]
    console = settings.console
    if console is None and (console := environment.get("WANDB_CONSOLE")):
        require_choice("WANDB_CONSOLE", console, WANDB_CONSOLES)
    sweeps = bool(environment.get("WANDB_SWEEP_ID"))
    return replace(
        settings,
        mode=mode or ("online" if sweeps else "offline"),
        project=settings.project or environment.get("WANDB_PROJECT") or "distaccum",
        dir=settings.dir or environment.get("WANDB_DIR") or None,
        console=console or "off",
    )


def run_id(environment: Mapping[str, str] = os.environ) -> str:
    """The id of a new run: ``WANDB_RUN_ID``, as a sweep's agent gives one, or random letters."""
    return environment.get("WANDB_RUN_ID") or token_hex(4)


_log = logging.getLogger(__name__)

_THREAD = f"wandb{SUFFIX}"
_GIVEN = ("mode", "project", "entity", "name", "group", "job_type", "notes", "tags")  # to wandb.init as they are
_CLOSE_TIMEOUT_S = 8.0
_OFFLINE_TIMEOUT_S = 60.0  # no server is waited for, but a machine that is busy
_UPLOAD_TIMEOUT_S = 600.0  # of a run that logs checkpoints, and is not told to leave
_INIT_TIMEOUT_S = 120.0  # in its own thread, so patience costs nothing
_ROOM = 2**18  # bytes that W&B writes at once, and more: it says nothing of a disk that is full


class WandbLogger(Logger):
    """Sends records to a W&B run. After a failure it warns once, and the rest of the run is not sent.

    Args:
        settings: with ``mode``, ``project`` and ``console`` decided: see :func:`resolved`.
        best: the result of an evaluation that names the best checkpoint, and ``min`` or ``max``.
    """

    def __init__(self, settings: WandbConfig, *, best: tuple[str | None, str] = (None, "min")) -> None:
        self._given = {name: getattr(settings, name) for name in _GIVEN}
        self._dir, self._console, self._save_code = settings.dir, settings.console, settings.save_code
        self._log_checkpoints, self._best = settings.log_checkpoints, best
        self._exit_code, self._preempted, self._sent = 0, False, 0
        self._ended = Event()
        self._items: queue.SimpleQueue[Record | tuple[str, str] | _Checkpoint | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._work, name=_THREAD, daemon=True)

    def begin(self, run: RunInfo) -> None:
        """Starts the thread; what is in ``metrics.jsonl`` by now is of the processes before."""
        self._info, self._metrics = run, run.folder / "metrics.jsonl"
        self._before = self._metrics.stat().st_size if self._metrics.exists() else 0
        self._folder = Path(self._dir) if self._dir else run.folder
        self._kept = KeptCheckpoints(run.folder / "wandb" / "checkpoints")
        self._thread.start()

    def log(self, record: Record) -> None:
        """Hands the record over; returns at once."""
        self._items.put(dict(record))

    def alert(self, title: str, text: str) -> None:
        """Sends an alert, which W&B passes on by mail or message; returns at once."""
        self._items.put((title, text))

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        """Hands over links of its files, which W&B uploads as an artifact; returns at once."""
        if self._ended.is_set() or not is_wanted(self._log_checkpoints, best=best):
            return
        try:
            self._items.put(_Checkpoint(self._kept.keep(path, step=step, best=best), step, best))
        except OSError as error:
            _warn(f"the checkpoint of step {step} cannot be kept for it ({error}); it stays in {path.parent}")

    def mark_preempted(self) -> None:
        """Marks the run as preempted, which W&B shows until the next process resumes it."""
        self._preempted = True

    def close(self, *, failed: bool) -> None:
        """Waits a few seconds for the records to be written."""
        self._exit_code = int(failed or self._preempted)  # W&B takes one that ends with 0 for finished
        self._items.put(None)
        before, uploads = self._sent, self._log_checkpoints != "none" and not self._preempted
        offline = self._given["mode"] == "offline" and not self._preempted
        patience = _UPLOAD_TIMEOUT_S if uploads else _OFFLINE_TIMEOUT_S if offline else _CLOSE_TIMEOUT_S
        while not self._ended.wait(patience) and before < self._sent:
            before = self._sent
        if not self._ended.is_set():
            _warn(f"still busy after {patience:.0f} s, and left behind; {self._remedy}")

    @property
    def _remedy(self) -> str:
        return f"metrics.jsonl has every record: distaccum wandb-upload {self._info.folder} makes a W&B run of it"

    def _work(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._require_room()
            run = self._open()
            sender = Sender(run, self._best)
            # The next step; 0 offline. Before the first record one of the two knows it, by W&B's version.
            has_until = max(run.step, getattr(run, "starting_step", 0))
            self._catch_up(run, sender, has_until)
            has_room = True
            while (item := self._items.get()) is not None:
                if isinstance(item, _Checkpoint):
                    self._make_artifact(run, item)
                elif isinstance(item, tuple):
                    run.alert(*item, level="WARN")
                else:
                    self._send(sender, item, has_until)
                if has_room and not self._has_room():
                    has_room = self._warn_of_disk()
            if self._preempted:
                run.mark_preempting()
            run.finish(exit_code=self._exit_code)
            if self._given["mode"] == "online":
                self._kept.drop()
            if has_room and not self._has_room():
                self._warn_of_disk()
        except Exception as error:  # whatever fails in there is no reason to lose a training run
            _warn(f"{type(error).__name__}: {error}; {self._remedy}")
            self._ended.set()
            Event().wait()  # W&B's exit handlers would fail too, at length: see is_left_behind
        self._ended.set()

    def _open(self) -> Run:
        import wandb  # noqa: PLC0415  a second of imports that only this thread should wait for

        info = self._info
        console: Any = self._console  # W&B's own check names the choices
        secret = redact(sys.argv) != sys.argv  # W&B's description of the process has the command line as it is
        settings = wandb.Settings(silent=True, console=console, init_timeout=_INIT_TIMEOUT_S, x_disable_meta=secret)
        with _quiet_handlers():
            run = wandb.init(
                **self._given,
                dir=str(self._folder),
                id=info.id,
                config=shown(info.config, info.plan, info.git_commit),
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
        for handler in logging.getLogger("wandb").handlers:  # or a full disk prints a traceback a line
            vars(handler)["handleError"] = _ignore
        if self._save_code or (self._save_code is None and run.settings.save_code):
            run.log_code(str(Path.cwd()), exclude_fn=_is_no_code)
        return run

    def _catch_up(self, run: Run, sender: Sender, has_until: int) -> None:
        """Sends what W&B has not got of the processes before."""
        if has_until > self._info.window + 1 and not self._before:
            text = f"the run {run.id} has {has_until} steps already, and takes none of this run's up to there"
            _warn(f"{text}; {self._remedy}")
        for record in records_of(self._metrics, self._before):
            self._send(sender, record, has_until)
        for kept, step, best in self._kept.all(until=self._info.step):
            self._make_artifact(run, _Checkpoint(kept, step, best))
        self._supersede(Path(run.dir).parent)

    def _send(self, sender: Sender, record: Record, has_until: int) -> None:
        if record.get("window", has_until) >= has_until:
            sender.send(record)
        self._sent += 1

    def _make_artifact(self, run: Run, item: _Checkpoint) -> None:
        """Makes an artifact of the linked files: W&B reads them where they are."""
        import wandb  # noqa: PLC0415

        artifact = wandb.Artifact(f"checkpoint-{run.id}", type="model", metadata={"step": item.step})
        try:
            for file, name in files_of(item.kept):
                artifact.add_file(str(file), name=name, policy="immutable", skip_cache=True)
        except (OSError, ValueError) as error:
            _warn(f"the checkpoint of step {item.step} cannot be read ({error}), and is not logged")
            return
        aliases = ["latest", f"step-{item.step}", *(["best"] if item.best else [])]
        run.log_artifact(artifact, aliases=aliases)
        self._sent += 1

    def _supersede(self, current: Path) -> None:
        """Puts earlier offline folders of this run aside: the present one has their records."""
        aside = current.parent / "superseded"
        for folder in current.parent.glob(f"offline-run-*-{escape(self._info.id)}"):
            if folder.resolve() != current.resolve():
                with suppress(OSError):  # a full disk: they stay
                    aside.mkdir(exist_ok=True)
                    folder.rename(aside / folder.name)

    def _has_room(self) -> bool:
        """Whether its disk can take more: W&B itself loses in silence what does not fit."""
        own = self._folder / "wandb"  # it may be a disk of its own
        found = os.statvfs(own if own.is_dir() else self._folder)
        return found.f_bavail * found.f_frsize >= _ROOM

    def _require_room(self) -> None:
        """Before W&B begins, which would print a traceback for each line of its log, and keep nothing."""
        if not self._has_room():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))

    def _warn_of_disk(self) -> bool:
        _warn(f"the disk of its folder is full, and W&B does not say what it loses; {self._remedy}")
        return False


@dataclass(frozen=True)
class _Checkpoint:
    kept: Path
    step: int
    best: bool


class Sender:
    """Sends records, and says of each name which of its values W&B's table of runs shows.

    Args:
        run: of W&B.
        best: see :class:`WandbLogger`.
    """

    def __init__(self, run: Run, best: tuple[str | None, str]) -> None:
        self._run, self._best = run, best
        self._defined: set[str] = set()
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def send(self, record: Record) -> None:
        """Logs one record as the step ``window``."""
        given = dict(record)
        if TEXTS in given:
            import wandb  # noqa: PLC0415

            rows = [[one["prompt"], one["text"]] for one in given[TEXTS]]
            given[TEXTS] = wandb.Table(columns=["prompt", "text"], data=rows)
        for name in record.keys() - self._defined:
            self._defined.add(name)
            # To W&B a dot begins a key within another, and a star stands for any text; it refuses one in the middle.
            if (best := best_of(name, *self._best)) is not None and "*" not in name:
                self._run.define_metric(name.replace(".", r"\."), step_metric="step", summary=f"{best},last")
        self._run.log(given, step=record.get("window"))


def best_of(name: str, named: str | None = None, mode: str = "min") -> str | None:
    """Whether a result's ``min`` or ``max`` is its best; None where it has none. ``named`` has its ``mode`` stated."""
    if name == named:
        return mode
    last = name.rpartition("_")[2]
    if last in ("loss", "perplexity") or name.startswith("loss_") or name.endswith("bits_per_byte"):
        return None if name == "loss_scale" else "min"
    return "max" if last in ("accuracy", "acc", "f1", "auroc", "precision", "recall") else None


def shown(config: Mapping[str, Any], plan: Mapping[str, Any], git_commit: str | None) -> dict[str, Any]:
    """A run's configuration as W&B is given it: nested, since W&B's table and filters name a setting ``optim.lr``."""
    return {**config, "plan": dict(plan), "git_commit": git_commit}


def _is_no_code(path: str, root: str = "") -> bool:
    """Whether a Python file is installed, hidden, or a run's own."""
    parts = Path(path).relative_to(root).parts if root and Path(path).is_relative_to(root) else Path(path).parts
    hidden = any(part.startswith(".") or part in ("site-packages", "node_modules") for part in parts)
    return hidden or parts[0] in ("wandb", "runs")


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
    checkpoint = config.get("checkpoint", {})
    texts = {key: about.get(key) for key in ("entity", "name", "job_type", "notes", "tags", "group")}
    number = 0
    with wandb.init(
        dir=str(run_dir),
        mode="offline" if mode == "offline" else "online",
        id=run_id,
        project=about.get("project") or os.environ.get("WANDB_PROJECT") or "distaccum",
        **texts,
        config=shown(config, _plan(run_dir), None),
        settings=wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S, x_disable_meta=True),
    ) as run:
        sender = Sender(run, (checkpoint.get("best"), checkpoint.get("best_mode", "min")))
        for record in records_of(path, size):
            sender.send(record)
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

exit codes: 0 done; 1 it could not be made, and why; 2 bad arguments
"""


def _plan(run_dir: Path) -> dict[str, Any]:
    """Of the last process; empty where there is none."""
    try:
        plan: dict[str, Any] = json.loads((run_dir / "plan.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return plan


def main() -> None:
    """``distaccum wandb-upload RUN``: exit code 0, or 1 and one line on stderr."""
    program.start()
    description = "Makes a W&B run of a run's metrics.jsonl, each record once."
    parser = program.Arguments("wandb-upload", description, _EPILOG)
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--id", help="of the new W&B run (default: a new one)")
    parser.add_argument("--offline", action="store_true", help="into a folder that `wandb sync` uploads")
    given = parser.of()
    if not (given.run / "metrics.jsonl").is_file():
        parser.exit(1, f"{parser.prog}: {given.run}: no run, it has no metrics.jsonl. Name a run's folder\n")
    try:
        number = upload(given.run, mode="offline" if given.offline else "online", run_id=given.id)
    except Exception as error:  # W&B's own, of many kinds
        parser.exit(1, f"{parser.prog}: {type(error).__name__}: {error}\n")
    sys.stdout.write(f"{number} records of {given.run / 'metrics.jsonl'}\n")


if __name__ == "__main__":
    main()
