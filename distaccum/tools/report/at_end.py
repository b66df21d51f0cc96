"""The report of a run, written into its directory when the run ends: see ``distaccum/report/``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from distaccum.checkpoint.files import write_text
from distaccum.config.direction import known_mode
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)


def best_evaluation(records: Path, evaluation: Mapping[str, float]) -> str:
    """The best evaluation in ``metrics.jsonl``, in words; empty for a single one, or where no name tells the best."""
    name = next((name for name in evaluation if known_mode(name)), "")
    with suppress(OSError, ValueError, TypeError, KeyError):  # it is for people alone
        word = f'"{name}": '
        with records.open() as lines:
            found = [json.loads(line) for line in lines if word in line]
        finite = [(one[name], one["step"]) for one in found if name in one and math.isfinite(one[name])]
        sign = 1 if known_mode(name) == "min" else -1
        if len(finite) > 1:
            value, step = min(finite, key=lambda one: sign * one[0])
            return f"step {step}, {name} {value:.4f}"
    return ""


class ReportAtEnd:
    """Writes ``report.html`` when its block is left, however the run ended, but for a second Ctrl-C.

    Where that fails there is one warning: neither the run nor its exit code depends on it.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return
        try:
            from distaccum.tools.report.page import page  # noqa: PLC0415  at the end of a run, and on rank 0 alone
            from distaccum.tools.report.read import read_run  # noqa: PLC0415

            self._run_dir.require_owned()
            if self._run_dir.metrics.exists():
                write_text(self._run_dir.report, page([read_run(self._run_dir.path)]))
        except Exception as problem:  # whatever a file of the run may hold
            reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            _log.warning("%s is not written: %s", self._run_dir.report, reason)
