"""The picture of the terminal in docs/trainer.md: a run in tmux, and what stands on its screen in the middle of it.

``python launch/docs/terminal.py`` writes ``docs/images/terminal-80.svg``; ``--columns`` another width. It needs tmux.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
RUN = (
    "trainer.max_steps=1000",
    "trainer.log_every=5",
    "trainer.eval_every=10",
    "trainer.eval_samples=256",
    "checkpoint.every=15",
    "data.seq_len=64",
    "metrics=jsonl",
    "hydra.run.dir=runs/first",
)
_ROWS = 34
_LAST = re.compile(r"^step 1[6-9]/1,000  .*ETA.*data wait", re.MULTILINE)
_PATIENCE_S = 600.0
_FONT = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)  # from the network


def capture(columns: int) -> str:
    """What a terminal of so many columns shows after some 16 updates, with its colours."""
    with tempfile.TemporaryDirectory() as folder:
        tmux = ["tmux", "-S", f"{folder}/tmux", "-f", "/dev/null"]
        size = ["-x", str(columns), "-y", str(_ROWS)]
        train = shlex.join(["env", f"PYTHONPATH={ROOT}", "CI=", sys.executable, "-m", "distaccum.train", *RUN])
        _run(*tmux, "new-session", "-d", *size, "-c", folder, train)
        deadline = time.monotonic() + _PATIENCE_S
        try:
            while time.monotonic() < deadline:
                screen = _run(*tmux, "capture-pane", "-e", "-p")
                if _LAST.search(screen):
                    return screen.rstrip().replace(folder, "/project")
                time.sleep(0.05)
        finally:
            _run(*tmux, "kill-server")
    raise TimeoutError(screen)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  written above


def picture(screen: str, columns: int) -> str:
    """The screen as an SVG, which asks for nothing from the network."""
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen), soft_wrap=True)
    return console.export_svg(title="distaccum train", code_format=_FONT.sub("", CONSOLE_SVG_FORMAT), unique_id="run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, default=80)
    columns = parser.parse_args().columns
    path = ROOT / "docs" / "images" / f"terminal-{columns}.svg"
    path.write_text(picture(capture(columns), columns))
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
