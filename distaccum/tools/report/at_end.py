"""The report of a run, written into its directory when the run ends: see ``distaccum/report/``."""

from __future__ import annotations

import logging
from types import TracebackType

from distaccum.checkpoint.files import write_text
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)


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
