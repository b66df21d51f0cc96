"""Many command lines of the main job in one go: each in a process of its own, forked where all imports are done.

``forked.py ASKED ANSWERED``: a JSON file with arguments by name, and one to write, with exit code and stderr by name.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import distaccum.train  # noqa: F401  what every one of them imports, once
from tests.commands import ROOT


def _run(arguments: list[str]) -> int:
    """In the child: as ``python launch/train.py ARGUMENTS``."""
    sys.argv = [str(ROOT / "launch" / "train.py"), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


def main() -> None:
    """Runs them one after the other."""
    asked, answered = map(Path, sys.argv[1:])
    answers: dict[str, Any] = {}
    errors = answered.with_suffix(".stderr")
    for name, arguments in json.loads(asked.read_text()).items():
        child = os.fork()
        if child == 0:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
            code = _run(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, state = os.waitpid(child, 0)
        answers[name] = (os.waitstatus_to_exitcode(state), errors.read_text())
    answered.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
