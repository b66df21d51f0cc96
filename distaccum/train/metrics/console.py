"""The console: a progress bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from distaccum.train.metrics.loggers import Logger, Record


class ConsoleLogger(Logger):
    """A live progress line on a terminal, plain lines elsewhere.

    Args:
        total_steps: updates of the whole run.
        console: where to print.
    """

    def __init__(self, total_steps: int, console: Console) -> None:
        self._console, self._total = console, total_steps
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task("", total=total_steps)
            self._progress.start()

    def log(self, record: Record) -> None:
        """Prints or updates one line."""
        line = (
            f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_s']:,.0f} tokens/s"
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
        evaluated = "".join(
            f"  {name.removeprefix('eval_').replace('_', ' ')} {value:.4f}"
            for name, value in record.items()
            if name.startswith("eval_")
        )
        if evaluated:
            line += f"  held-out:{evaluated}"
        if self._progress is None:
            self._console.print(f"step {record['step']:>6}/{self._total}  {line}", highlight=False, soft_wrap=True)
        else:
            self._progress.update(self._task, completed=record["step"], description=line)

    def alert(self, title: str, text: str) -> None:
        """Prints one line in red."""
        self._console.print(f"{title}: {text}", style="bold red", highlight=False, soft_wrap=True)

    def close(self, *, failed: bool) -> None:
        """Leaves the last progress line standing."""
        if self._progress is not None:
            self._progress.stop()
