"""Rows of CSV, JSON-lines and Parquet files, and their weights."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from distaccum.config.extras import install_command
from distaccum.errors import ConfigError, near_misses

PLAIN, LABELS = "text or number", "text, number or list"
CHAT, EITHER = "list of messages", "text or list of messages"
"""What a column may hold."""
_KINDS = {PLAIN: (str, int, float), LABELS: (str, int, float, list), CHAT: (list,), EITHER: (str, list)}
_CSV = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = ".parquet"


def read(path: str, columns: Sequence[tuple[str, str | None]], holds: str, what: str) -> list[tuple[int, list[Any]]]:
    """The line of each row, and its values by column: empty texts of a column that is None.

    Args:
        path: of the file.
        columns: the settings that state them, and their names.
        holds: what a value is, ``PLAIN``, ``LABELS``, ``CHAT`` or ``EITHER``.
        what: a row is.
    """
    if not Path(path).is_file():
        raise ConfigError("data.path", path, "no such file", "Give the path of a CSV, JSON-lines or Parquet file")
    found = []
    for line, row in read_rows(path):
        values = []
        for key, column in columns:
            if column is not None and column not in row:
                problem = (
                    f"no such column: {place(path, line)} of {path} has {', '.join(row)}{near_misses(column, row)}"
                )
                raise ConfigError(key, column, problem, "Name one that is there on every line")
            value = "" if column is None else row[column]
            is_there = isinstance(value, _KINDS[holds]) and (str(value).strip() if holds in (PLAIN, LABELS) else value)
            if column is not None and not is_there:
                raise unreadable(path, line, f"there is no {holds} in column {column!r}")
            values.append(value)
        found.append((line, values))
    if len(found) < 2:  # noqa: PLR2004  one to train on, one to hold out
        problem = f"holds {len(found)} {what}, and two are the least"
        raise ConfigError("data.path", path, problem, "Give a file with more of them")
    return found


def read_rows(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each row's line number (the last, if it spans several lines; of Parquet its own), and its values by column."""
    suffix = Path(path).suffix.lower()
    if suffix == _PARQUET:
        yield from _parquet_rows(path)
        return
    if suffix not in (*_CSV, *_JSON_LINES):
        remedy = f"Give a file whose name ends in one of {', '.join((*_CSV, *_JSON_LINES, _PARQUET))}"
        raise ConfigError("data.path", path, "neither CSV nor JSON lines nor Parquet by its name", remedy)
    # utf-8-sig: spreadsheets write a byte order mark, which would become part of the first column's name
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from _csv_rows(path, file, _CSV[suffix]) if suffix in _CSV else _json_rows(path, file)
        except UnicodeDecodeError as error:
            raise ConfigError("data.path", path, f"not UTF-8 ({error})", "Save it as UTF-8") from error


def _csv_rows(path: str, file: TextIO, delimiter: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.DictReader(file, delimiter=delimiter, strict=True)  # strict: else a stray quote swallows lines silently
    try:
        names = rows.fieldnames or ()
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise unreadable(path, rows.line_num, f"two columns have the name {twice[0]!r}")
        for row in rows:
            if None in row:
                names = ", ".join(rows.fieldnames or ())
                raise unreadable(path, rows.line_num, f"it has more fields than the columns {names}")
            yield rows.line_num, row
    except csv.Error as error:
        raise unreadable(path, rows.reader.line_num, str(error)) from error


def _json_rows(path: str, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise unreadable(path, number, str(error)) from error
        if not isinstance(row, dict):
            raise unreadable(path, number, "it is no JSON object")
        yield number, row


def _parquet_rows(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each row's number, from 1, and its values by column, as Python has them.

    Raises:
        ConfigError: pyarrow is not installed, or the file is no Parquet, or damaged.
    """
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415  an optional extra
    except ImportError as error:
        remedy = f"Run {install_command('parquet')}"
        raise ConfigError("data.path", path, "pyarrow is not installed, which reads Parquet", remedy) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for number, row in enumerate(batch.to_pylist(), number + 1):  # noqa: B020  counts on
                    yield number, row
    except (ArrowException, OSError) as error:
        raise ConfigError(
            "data.path", path, f"cannot be read as Parquet ({error})", "Give a whole Parquet file"
        ) from error


def unreadable(path: str, line: int, problem: str, remedy: str = "Mend that line, or take it out") -> ConfigError:
    """The error of a line that cannot be read."""
    return ConfigError("data.path", path, f"{place(path, line)}: {problem}", remedy)


def place(path: str, line: int) -> str:
    """Where a row stands in its file."""
    return f"{'row' if Path(path).suffix.lower() == _PARQUET else 'line'} {line}"


def weights(path: str, stated: str, samples: int) -> NDArray[np.float64]:
    """The weight of each row of a file of ``samples`` rows.

    Args:
        path: of the file.
        stated: its column of numbers; or another file, of a number a line, or a ``.npy``.
        samples: how many.

    Raises:
        ConfigError: neither, something else than numbers, or another number of them.
    """
    if Path(stated).is_file():
        try:
            whole = Path(stated).suffix == ".npy"
            found = np.asarray(np.load(stated) if whole else np.loadtxt(stated, ndmin=1), dtype=np.float64)
        except (OSError, ValueError) as error:
            raise ConfigError("data.weights", stated, f"holds no numbers ({error})", "Write one a line") from error
        if found.shape != (samples,):
            problem = f"holds numbers of shape {found.shape}, and {path} {samples} rows"
            raise ConfigError("data.weights", stated, problem, "Give one for each row")
        return found
    given = list[float]()
    for line, row in read_rows(path):
        if stated not in row:
            problem = f"is no file, and no column: {place(path, line)} of {path} has {', '.join(row)}"
            raise ConfigError("data.weights", stated, f"{problem}{near_misses(stated, row)}", "Name one of them")
        try:
            given.append(float(row[stated]))
        except (TypeError, ValueError) as error:
            problem = f"{place(path, line)} of {path} has {row[stated]!r} there"
            raise ConfigError("data.weights", stated, problem, "Give a number of at least 0 on every line") from error
    return np.array(given)
