"""Weights & Biases in a separate thread, where it can neither stop nor delay training.

``metrics.jsonl`` has every record, whatever becomes of W&B: ``distaccum wandb-upload RUN`` makes a W&B run of it.

A process that resumes a run begins with the records that W&B has not got, so that each is there once. Online that is
what an earlier process could not send; what it sent of the windows that are repeated stays as it was, since W&B takes
no step twice. Offline W&B has nothing: the new folder gets all records, and the earlier ones go to
``wandb/superseded``, as ``wandb sync`` would write each over the one before.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from distaccum.accumulation.progress import Progress
from distaccum.config.direction import known_mode
from distaccum.config.metrics import WANDB_MODES, WandbConfig
from distaccum.config.secrets import redact
from distaccum.errors import ConfigError, shorten
from distaccum.train.metrics.background import UPLOAD_TIMEOUT_S, InThread, KeptCheckpoints, files_of
from distaccum.train.metrics.loggers import TEXTS, Logger, Record, RunInfo, records_of

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


# What W&B's environment variables say where the configuration says nothing.

_MODES = {**{mode: mode for mode in WANDB_MODES}, "dryrun": "offline", "run": "online"}  # W&B's older names


def resolved(settings: WandbConfig, environment: Mapping[str, str] = os.environ) -> WandbConfig:
    """The settings with what distaccum itself decides by: mode and project.

    What W&B alone uses stays None, and W&B reads its variables itself. A run of a sweep's agent is online, and W&B
    takes the sweep's project.

    Raises:
        ConfigError: ``WANDB_MODE`` is none of W&B's modes.
    """
    mode = settings.mode
    if mode is None and (given := environment.get("WANDB_MODE")):
        if given not in _MODES:
            raise ConfigError("WANDB_MODE", given, "no such mode", f"Use one of {', '.join(WANDB_MODES)}")
        mode = _MODES[given]
    sweeps = bool(environment.get("WANDB_SWEEP_ID"))
    return replace(
        settings,
        mode=mode or ("online" if sweeps else "offline"),
        project=settings.project or environment.get("WANDB_PROJECT") or "distaccum",
    )


def remedy_of(folder: Path) -> str:
    """What to do about a run that W&B has not got."""
    return f"metrics.jsonl has every record: distaccum wandb-upload {folder} makes a W&B run of it"


def run_id(environment: Mapping[str, str] = os.environ) -> str:
    """The id of a new run: ``WANDB_RUN_ID``, as a sweep's agent gives one, or random letters."""
    return environment.get("WANDB_RUN_ID") or token_hex(4)


_log = logging.getLogger(__name__)

_GLOBAL = ("config", "log", "summary", "save", "log_artifact", "use_artifact", "define_metric", "watch", "alert")
_GIVEN = ("mode", "project", "name", "tags")  # to wandb.init as they are
INIT_TIMEOUT_S = 120.0  # in its own thread, so patience costs nothing
_ROOM = 2**18  # bytes that W&B writes at once, and more: it says nothing of a disk that is full


class WandbLogger(Logger):
    """Sends records to a W&B run; for :class:`~distaccum.train.metrics.background.InThread`, as it may take long.

    Args:
        settings: with ``mode`` and ``project`` decided: see :func:`resolved`.
        kept: has the checkpoints that it is told of; W&B reads them where they are.
        best: the result of an evaluation that names the best checkpoint, and ``min`` or ``max``.
    """

    def __init__(
        self, settings: WandbConfig, kept: KeptCheckpoints, *, best: tuple[str | None, str] = (None, "min")
    ) -> None:
        self._given = {name: getattr(settings, name) for name in _GIVEN}
        self._kept, self._best, self._preempted, self._has_room = kept, best, False, True
        self._window = 0
        self.progress: Callable[[], Progress] = Progress
        """The run's, for the rows of ``wandb.log``."""
        self.later: Callable[[Callable[[], None]], None] = lambda call: call()
        """Has a function called where this logger's methods are, after those that were called before."""

    def begin(self, run: RunInfo) -> None:
        """Opens the W&B run, and sends what it has not got of the processes before."""
        self._info = run
        self._remedy = remedy_of(run.folder)
        self._folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._is_full():  # W&B would print a traceback for each line of its log, and keep nothing
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
        self._run = self._open()
        # The next step; 0 offline. Before the first record one of the two knows it, by W&B's version.
        self._has_until = max(self._run.step, getattr(self._run, "starting_step", 0))
        before = False
        for record in records_of(run.folder / "metrics.jsonl"):
            if record["window"] <= run.window:
                before = True
                self._send(record)
        if self._has_until > run.window + 1 and not before:
            text = (
                f"the run {self._run.id} has {self._has_until} steps already, and takes none of this run's up to there"
            )
            _warn(f"{text}; {self._remedy}")
        self._supersede(Path(self._run.dir).parent)

    def log(self, record: Record) -> None:
        """Sends the record."""
        self._send(record)
        self._note_room()

    def alert(self, title: str, text: str) -> None:
        """Sends an alert, which W&B passes on by mail or message."""
        self._run.alert(title, text, level="WARN")

    def mark_preempted(self) -> None:
        """Marks the run as preempted, which W&B shows until the next process resumes it."""
        self._preempted = True

    def close(self, *, failed: bool) -> None:
        """Ends the W&B run, which takes one that ends with 0 for finished."""
        if self._preempted:
            self._run.mark_preempting()
        self._run.finish(exit_code=int(failed or self._preempted))
        if self._given["mode"] == "online":
            self._kept.drop()
        self._note_room()

    def _open(self) -> Run:
        import wandb  # noqa: PLC0415  a second of imports that only this thread should wait for

        info = self._info
        console: Any = os.environ.get("WANDB_CONSOLE") or "off"  # W&B's own check names the choices
        secret = redact(sys.argv) != sys.argv  # W&B's description of the process has the command line as it is
        settings = wandb.Settings(silent=True, console=console, init_timeout=INIT_TIMEOUT_S, x_disable_meta=secret)
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
        self._sender = Sender(run, self._best)
        if wandb.run is None:  # else the program has one of its own
            vars(run)["log"] = self._log_own
            for name in _GLOBAL:
                setattr(wandb, name, getattr(run, name))
            wandb.run = run
        for handler in logging.getLogger("wandb").handlers:  # or a full disk prints a traceback a line
            vars(handler)["handleError"] = _ignore
        if run.settings.save_code:
            run.log_code(str(Path.cwd()), exclude_fn=_is_no_code)
        return run

    def _send(self, record: Record) -> None:
        self._window = record["window"]
        if record["window"] >= self._has_until:
            self._sender.send(record)

    def _log_own(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """``wandb.log`` of the program: a part of the present window's row, since W&B takes no step after a later one.

        Raises:
            TypeError: as W&B's own.
        """
        if not isinstance(data, Mapping):
            raise TypeError("wandb.log must be passed a dictionary")
        now = self.progress()
        self.later(partial(self._send_own, {"step": now.step, **data}, now.window))

    def _send_own(self, row: dict[str, Any], window: int) -> None:
        if (at := max(window, self._window)) >= self._has_until:
            try:
                self._sender.log(row, step=at)
            except Exception as error:  # of what the program gave: the records go on
                _warn(f"wandb.log of {shorten(row)} failed: {type(error).__name__}: {error}")

    def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
        """Makes an artifact of the files: W&B reads them where they are."""
        import wandb  # noqa: PLC0415

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="model", metadata={"step": step})
        try:
            for file, name in files_of(path):
                artifact.add_file(str(file), name=name, policy="immutable", skip_cache=True)
        except (OSError, ValueError) as error:
            _warn(f"the checkpoint of step {step} cannot be read ({error}), and is not logged")
            return
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}", *(["best"] if best else [])])

    def _supersede(self, current: Path) -> None:
        """Puts earlier offline folders of this run aside: the present one has their records."""
        aside = current.parent / "superseded"
        for folder in current.parent.glob(f"offline-run-*-{escape(self._info.id)}"):
            if folder.resolve() != current.resolve():
                with suppress(OSError):  # a full disk: they stay
                    aside.mkdir(exist_ok=True)
                    folder.rename(aside / folder.name)

    def _is_full(self) -> bool:
        """Whether its disk can take no more: W&B itself loses in silence what does not fit."""
        own = self._folder / "wandb"  # it may be a disk of its own
        found = os.statvfs(own if own.is_dir() else self._folder)
        return found.f_bavail * found.f_frsize < _ROOM

    def _note_room(self) -> None:
        if self._has_room and self._is_full():
            self._has_room = False
            _warn(f"the disk of its folder is full, and W&B does not say what it loses; {self._remedy}")


class Sender:
    """Sends records, and says of each name which of its values W&B's table of runs shows.

    Args:
        run: of W&B.
        best: see :class:`WandbLogger`.
    """

    def __init__(self, run: Run, best: tuple[str | None, str | None]) -> None:
        self._run, self._best, self.log = run, best, run.log
        self._defined: set[str] = set()
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def send(self, record: Record) -> None:
        """Logs one record as the step ``window``."""
        given = dict(record)
        for name, value in record.items():
            if name == TEXTS or isinstance(value, Mapping):
                import wandb  # noqa: PLC0415

                rows = [[one["prompt"], one["text"]] for one in value] if name == TEXTS else value["rows"]
                given[name] = wandb.Table(columns=["prompt", "text"] if name == TEXTS else value["columns"], data=rows)
        for name in record.keys() - self._defined:
            self._defined.add(name)
            # To W&B a dot begins a key within another, and a star stands for any text; it refuses one in the middle.
            if (best := best_of(name, *self._best)) is not None and "*" not in name:
                self._run.define_metric(name.replace(".", r"\."), step_metric="step", summary=f"{best},last")
        self.log(given, step=record.get("window"))


def best_of(name: str, named: str | None = None, mode: str | None = None) -> str | None:
    """Whether a result's ``min`` or ``max`` is its best; None where it has none. ``named`` may have its mode stated."""
    return mode if name == named and mode is not None else known_mode(name)


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


def require_key(settings: WandbConfig) -> None:
    """Requires a key of the right form, which W&B needs in the mode ``online``; asks no server.

    Raises:
        ConfigError: it does not.
    """
    if (mode := resolved(settings).mode) != "online":
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


_TIMEOUT_S = 8.0
_OFFLINE_TIMEOUT_S = 60.0  # no server is waited for, but a machine that is busy


def loggers(
    given: WandbConfig,
    run: RunInfo,
    best: tuple[str | None, str],
    progress: Callable[[], Progress],
    users: Sequence[object],
) -> list[Logger]:
    """W&B's logger in its thread; none where it is disabled.

    Args:
        given: the settings.
        run: what the logger begins with.
        best: see :class:`WandbLogger`.
        progress: the run's.
        users: callbacks and the loss: where one of them names W&B itself, the thread is waited for.
    """
    settings = resolved(given)
    if settings.mode == "disabled":
        return []
    timeout = _OFFLINE_TIMEOUT_S if settings.mode == "offline" else _TIMEOUT_S
    awaited_s = timeout if any(map(_names_wandb, users)) else 0.0
    timeout = timeout if settings.log_checkpoints == "none" else UPLOAD_TIMEOUT_S
    kept = KeptCheckpoints(run.folder / "wandb" / "checkpoints")
    logger = WandbLogger(settings, kept, best=best)
    thread = InThread(
        "Weights & Biases",
        logger,
        opening_s=timeout,
        timeout_s=timeout,
        remedy=remedy_of(run.folder),
        kept=kept,
        log_checkpoints=settings.log_checkpoints,
        reads_later=True,
        awaited_s=awaited_s,
    )
    logger.progress, logger.later = progress, thread.later
    return [thread]


def _names_wandb(user: object) -> bool:
    """Whether a callback's or a loss's code, or its module, names ``wandb``."""
    kind = type(user)
    codes = [code for one in kind.__mro__ for each in vars(one).values() if (code := getattr(each, "__code__", None))]
    return hasattr(sys.modules.get(kind.__module__), "wandb") or any("wandb" in code.co_names for code in codes)
