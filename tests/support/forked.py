"""Starts scripts in processes of their own, forked where all that they import is imported already.

A fresh interpreter spends five seconds on them each time. ``Forks`` is the side of the tests; the other one reads a
request a line, forks, and answers with the exit code. The child ends as an interpreter does, exit handlers and all.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

ROOT = Path(__file__).parents[2]


class Forks:
    """The server, and requests to it. It is started by the first one, and ends with this process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, arguments: Sequence[str], *, cwd: Path | None, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)``."""
        server = self._started(environment)
        assert server.stdin is not None
        with TemporaryDirectory() as folder:
            out, error = Path(folder, "out"), Path(folder, "error")
            request = {"arguments": list(arguments), "environment": dict(environment), "cwd": str(cwd or Path.cwd())}
            server.stdin.write(json.dumps(request | {"out": str(out), "error": str(error)}) + "\n")
            server.stdin.flush()
            killer = Timer(timeout, os.kill, (int(self._answer(server)), 9))
            killer.start()
            try:
                code = int(self._answer(server))
            finally:
                killer.cancel()
            return subprocess.CompletedProcess(arguments, code, out.read_text(), error.read_text())

    def _started(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        if self._server is None or self._server.poll() is not None:
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=dict(environment) | {"PYTHONPATH": str(ROOT)},
            )
        return self._server

    @staticmethod
    def _answer(server: subprocess.Popen[str]) -> str:
        assert server.stdout is not None
        return server.stdout.readline()


def _become(request: Mapping[str, Any]) -> None:
    """In the child: streams, environment and import path of a fresh interpreter; then the script."""
    for path, stream in ((request["out"], sys.stdout), (request["error"], sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    script, *_ = sys.argv = request["arguments"]
    sys.path[0] = str(Path(script).parent)
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Serves until the tests close the pipe; returns in children alone."""
    import torch._dynamo  # noqa: F401, PLC0415  what every optimizer imports

    import distaccum.train.cli  # noqa: F401, PLC0415

    sys.path.remove(str(ROOT))  # the server's own PYTHONPATH
    gc.collect()
    gc.freeze()  # a child's collector would touch, and so copy, all that was imported
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
            return
        print(child, flush=True)
        _, state = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(state), flush=True)


if __name__ == "__main__":
    main()
