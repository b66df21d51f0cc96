"""A run directory, read as far as it can be: what is missing is empty, what is damaged is counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import yaml

from distaccum.config.secrets import redact, redact_text, values_of, values_of_environment
from distaccum.errors import ConfigError, shorten

Record = Mapping[str, Any]
Node = dict[str, Any]

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # any other error hides what is there
_OF_A_RUN = ("metrics.jsonl", "status.json", "plan.json", ".hydra/config.yaml")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# The level is the first of these words in a line: those of a message come after it.
_LOUD = re.compile(r"(?:(?!\b(?:DEBUG|INFO)\b).){0,60}?\b(?:WARNING|ERROR|CRITICAL)\b")
_MOST_READ, PARTS, _MOST_RARE = 20_000, 4000, 8
"""Records that are all read; of more, so many parts, each with a few of its records, and so many that are rare."""
_LOSS, _NORM = b'"loss": ', b'"grad_norm": '
_RARE = (b'"eval_', b"NaN", b"Infinity", b'"applied": false')
_LOG_BYTES = 256 * 1024  # of each log, its end
_MOST_LOGS, _MOST_LINES = 16, 200
_LAST, _LAST_CHARACTERS = 60, 20_000  # lines of the end of each log
# PyYAML's C parser where it was built with one: a tenth of the time.
YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Log:
    """What the logs of the ranks hold: warnings and errors, and the last lines of each.

    Attributes:
        loud: rank and line, of all ranks, the newest last.
        ends: of each rank the last lines, a traceback among them.
        ranks: that have a log.
    """

    loud: tuple[tuple[int, str], ...] = ()
    ends: Mapping[int, str] = field(default_factory=dict)
    ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run directory tells, without secrets.

    Attributes:
        name: what the report calls it.
        path: of the folder.
        records: of ``metrics.jsonl``, in the file's order; of a long one those that tell the most.
        logged: all of them, where they are more.
        damaged: lines of it that are no records.
        superseded: records that a resumed run has made again.
        status: ``state``, ``step`` and ``reason``.
        history: of ``history.json``: when the run began, what was saved last, its rollbacks.
        plan: of ``plan.json``.
        starts: each process that has trained in this folder, of ``environment.json``.
        config: the settings, nested.
        overrides: the command line's.
        kept: steps of the checkpoints that are there.
        best: of ``best.json``.
        log: of the ranks.
    """

    name: str
    path: Path
    records: tuple[Record, ...] = ()
    logged: int = 0
    damaged: int = 0
    superseded: int = 0
    status: Node = field(default_factory=dict)
    history: Node = field(default_factory=dict)
    plan: Node = field(default_factory=dict)
    starts: tuple[Node, ...] = ()
    config: Node = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()
    best: Node = field(default_factory=dict)
    log: Log = field(default_factory=Log)

    @property
    def state(self) -> str:
        """``running``, ``done``, ``preempted``, ``failed``, ``config_error``, or ``unknown`` without a status."""
        return str(self.status.get("state") or "unknown")


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs of these folders, by names that differ.

    Raises:
        ConfigError: a folder is no run, or is named twice.
        OSError: a file that is there cannot be read.
    """
    folders = [path.resolve() for path in paths]
    for asked, folder in zip(paths, folders, strict=True):
        _require_run(asked, folder)
        if folders.count(folder) > 1:
            raise ConfigError("RUN", asked, "is named twice", "Name each run once")
    return [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def read_run(folder: Path, name: str = "") -> Run:
    """The run of a folder.

    Raises:
        OSError: a file that is there cannot be read.
    """
    environment = _json(folder / "environment.json")
    config = environment.get("config")
    if not isinstance(config, dict):  # of a run before there was this file
        config = _resolved(_yaml(folder / ".hydra" / "config.yaml", dict) or {})
    secrets = {*values_of(config), *values_of_environment()}
    records, logged, damaged = _records(folder / "metrics.jsonl")
    starts = environment.get("starts")
    return Run(
        name=name or folder.name,
        path=folder,
        records=tuple(records),
        logged=logged,
        damaged=damaged,
        superseded=_count(folder / "metrics.superseded.jsonl"),
        status=redact(_json(folder / "status.json"), secrets),
        history=_json(folder / "history.json"),
        plan=redact(_json(folder / "plan.json"), secrets),
        starts=tuple(
            redact([one for one in starts if isinstance(one, dict)], secrets) if isinstance(starts, list) else ()
        ),
        config=redact(config, secrets),
        overrides=tuple(redact([str(one) for one in _yaml(folder / ".hydra" / "overrides.yaml", list) or []], secrets)),
        kept=tuple(sorted(_kept(folder / "checkpoints"))),
        best=_json(folder / "checkpoints" / "best.json") or _json(folder / "best.json"),
        log=_log(folder / "logs", secrets),
    )


def _require_run(asked: Path, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError("RUN", asked, "no such folder", "Name the folder of a run: its hydra.run.dir")
    if any((folder / name).is_file() for name in _OF_A_RUN):
        return
    runs = sorted(one.name for one in folder.iterdir() if any((one / name).is_file() for name in _OF_A_RUN))
    problem = "is no run: it has neither metrics.jsonl nor status.json"
    if runs:
        raise ConfigError("RUN", asked, f"{problem}, but holds runs: {shorten(runs)}", f"Name these: {asked}/*/")
    raise ConfigError("RUN", asked, problem, "Name the folder of a run: its hydra.run.dir")


def _names(folders: list[Path]) -> list[str]:
    """The folders' names; where two are equal, with as many folders above them as tell them apart."""
    for depth in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def _records(path: Path) -> tuple[list[Record], int, int]:
    """The lines that are objects; the number of records; and that of lines that are none, as one that was cut short.

    Of a run of weeks a part is read: to parse a million records takes ten times as long as to look for their losses.
    """
    found: list[Record] = []
    logged = damaged = 0
    lines = _count(path)
    with ExitStack() as opened:
        try:
            file: Iterable[bytes] = opened.enter_context(path.open("rb"))
        except _ABSENT:
            return [], 0, 0
        for line, read in _telling(file, -(-lines // PARTS)) if lines > _MOST_READ else zip(file, repeat(True)):
            try:
                record = json.loads(line) if read else {} if _is_whole(line) else None
            except (ValueError, RecursionError):
                record = None
            logged += isinstance(record, dict)
            damaged += not isinstance(record, dict)
            if read and isinstance(record, dict):
                found.append(record)
    return found, logged, damaged


def _telling(lines: Iterable[bytes], each: int) -> Iterator[tuple[bytes, bool]]:
    """Every line, and whether it is one of the telling ones of its ``each`` lines.

    These are the last one, those of the least and the greatest loss and of the greatest gradient norm, and some that
    have an evaluation, a number that is not finite, or a step that was skipped; of all lines the first one, too.
    """
    rest, first = iter(lines), {0}
    while block := list(islice(rest, each)):
        rare = [i for i, line in enumerate(block) if any(word in line for word in _RARE)]
        losses, norms = ([_number_of(one, line) for line in block] for one in (_LOSS, _NORM))
        last = next((i for i in reversed(range(len(block))) if _is_whole(block[i])), 0)
        chosen = {*first, last, *rare[:: -(-len(rare) // _MOST_RARE) or 1]}
        chosen |= {losses.index(min(losses)), losses.index(max(losses)), norms.index(max(norms))}
        yield from ((line, i in chosen) for i, line in enumerate(block))
        first = set()


def _is_whole(line: bytes) -> bool:
    return line[:1] + line[-2:] == b"{}\n"


def _number_of(key: bytes, line: bytes) -> float:
    at = line.find(key) + len(key)
    try:
        return float(line[at : line.index(b",", at)])
    except ValueError:
        return 0.0


def _count(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(partial(file.read, 1 << 20), b""))
    except _ABSENT:
        return 0


def _json(path: Path) -> Node:
    try:
        found = json.loads(path.read_bytes())
    except (*_ABSENT, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(path: Path, kind: type) -> Any:
    try:
        found = yaml.load(path.read_bytes(), Loader=YAML)  # noqa: S506  a safe loader, in C or not
    except (*_ABSENT, ValueError, RecursionError, yaml.YAMLError):
        return None
    return found if isinstance(found, kind) else None


def _resolved(config: Node) -> Node:
    """The configuration with settings in place of references to them, as ``${data.seq_len}``."""

    def value_of(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: value_of(value) for key, value in node.items()}
        if isinstance(node, list):
            return [value_of(value) for value in node]
        reference = REFERENCE.fullmatch(node) if isinstance(node, str) else None
        found: Any = config
        for key in reference[1].split(".") if reference else ():
            found = found.get(key) if isinstance(found, dict) else None
        return node if not reference or found is None else found

    resolved: Node = value_of(config)
    return resolved


def _kept(folder: Path) -> Iterator[int]:
    try:
        names = [path.name for path in folder.iterdir()]
    except _ABSENT:
        return
    for name in names:
        if found := re.fullmatch(r"step-(\d+)", name):
            yield int(found[1])


def _log(folder: Path, secrets: set[str]) -> Log:
    try:
        names = {int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(r"rank-(\d+)\.log", path.name))}
    except _ABSENT:
        return Log()
    loud: list[tuple[int, str]] = []
    ends: dict[int, str] = {}
    for rank in sorted(names)[:_MOST_LOGS]:
        text = redact_text(_end_of(names[rank]), secrets)
        lines = text.splitlines()
        loud += [(rank, line) for line in lines if _LOUD.match(line)]
        ends[rank] = "\n".join(lines[-_LAST:])[-_LAST_CHARACTERS:]
    return Log(loud=tuple(loud[-_MOST_LINES:]), ends=ends, ranks=len(names))


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LOG_BYTES))
        return file.read().decode(errors="replace")
