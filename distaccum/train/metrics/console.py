"""The console: a line for each record, which stays; on a terminal also what is saved, and a live line below."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from distaccum.train.live_line import LiveLine, takes_live_line
from distaccum.train.metrics.loggers import TEXTS, Logger, Record
from distaccum.train.screen import Screen, Training, say

if TYPE_CHECKING:
    from distaccum.train.metrics.flops import Utilization
    from distaccum.train.metrics.status import Status

_LONGEST = 200  # characters of a text; metrics.jsonl has all


class ConsoleLogger(Logger, Screen):
    """One line a record; on a terminal lines wrap between words, and a live line below them moves all the time.

    Args:
        total_steps: updates of the whole run.
        console: where to print.
        status: what the live line says.
    """

    console: Console

    def __init__(self, total_steps: int, console: Console, status: Status) -> None:
        super().__init__(console)
        self.logger, self._total, self._status = self, total_steps, status
        self._live: LiveLine | None = None
        if console.is_interactive:
            self._live = LiveLine(status.draw)
            self._live.__enter__()

    def enter(self, doing: str) -> None:
        """Shows in the live line what the run does from now on."""
        self._status.enter(doing)
        if self._live is not None:
            self._live.write("")

    def follow(self, loop: Training, utilization: Utilization | None) -> None:
        """Lets the live line move with the loop."""
        self._status.follow(lambda: loop.known_progress, lambda: loop.waited_s, utilization)

    def log(self, record: Record) -> None:
        """Prints the record; its evaluation in a line of its own where a line has an end."""
        step = f"step {record['step']:>6}/{self._total}  "
        line = _of_window(record) if "loss" in record else "no update"
        if "loss" in record:
            self._status.note_loss(record["loss"])
        style = "" if record.get("applied", True) else "yellow"
        evaluated = "".join(
            f"  {name.removeprefix('eval_').replace('_', ' ')} "
            + (f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
            for name, value in record.items()
            if name.startswith("eval_") and name != TEXTS
        )
        if evaluated and self.console.is_terminal:
            say(self.console, step + line, style=style)
            say(self.console, f"{step}held-out:{evaluated}")
        else:
            say(self.console, step + line + (f"  held-out:{evaluated}" if evaluated else ""), style=style)
        for number, one in enumerate(record.get(TEXTS, ())):
            say(self.console, f"{step}text {number}: {_line(one['prompt'])} >>> {_line(one['text'])}")

    def saved(self, step: int, path: Path) -> None:
        """Prints, on a terminal, where a checkpoint is."""
        if self.console.is_terminal:
            say(self.console, f"step {step:>6}/{self._total}  saved: {path}")

    def alert(self, title: str, text: str) -> None:
        """Prints one line in red."""
        say(self.console, f"{title}: {text}", style="bold red")

    def leave(self) -> None:
        """Gives the terminal back; from any thread, and more than once."""
        if self._live is not None:
            self._live.stop()

    def close(self, *, failed: bool) -> None:
        """Gives the terminal back."""
        self.leave()


def open_console() -> Console:
    """Standard output; without a live line where it is no terminal, where that is dumb, and in continuous integration.

    ``FORCE_COLOR`` colours what is printed to a file or a pipe, and makes no terminal of it.
    """
    return Console(force_interactive=takes_live_line(sys.stdout))


def _line(text: str) -> str:
    """A text in one line, cut, without what moves a terminal's cursor: a model writes anything."""
    shown = "".join(one if one.isprintable() else " " for one in text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def _of_window(record: Record) -> str:
    unit = "samples" if record["samples"] == record["tokens"] else "tokens"  # what the loss counts
    line = (
        f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
        f"{record['tokens_per_s']:,.0f} {unit}/s"
    )
    if "tflops_per_rank" in record:
        line += f"  {record['tflops_per_rank']:.3g} TFLOP/s"
    if "mfu" in record:
        line += f"  MFU {record['mfu']:.1%}"
    if record["loss_scale"] != 1.0:
        line += f"  loss scale {record['loss_scale']:.10g}"
    if "underflow_share" in record:
        line += f"  underflow {record['underflow_share']:.2%}"
    if record["skipped"]:
        line += f"  skipped {record['skipped']}"
    if not record["applied"]:
        spikes = "spikes" in record and math.isfinite(record["grad_norm"])
        line += f"  SKIPPED: the gradient {'norm spikes' if spikes else 'is NaN or infinite'}"
    return line
