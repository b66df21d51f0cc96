"""The console: a line for each record, which stays; on a terminal also what is saved, and a live line below."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rich.console import Console

from distaccum.accumulation.progress import Progress
from distaccum.config.checks import size_of, unit_of
from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.train.live_line import LiveLine, takes_live_line
from distaccum.train.metrics.loggers import TEXTS, Logger, Record
from distaccum.train.metrics.meter import Utilization, memory_of
from distaccum.train.screen import TRAINING, Screen, say, shown

_LONGEST = 200  # characters of a text; metrics.jsonl has all
_TIMES = r"ETA [\d:d ]+\d|data wait \d+%|[\d.,]+ (?:samples|tokens|TFLOP)/s|MFU [\d.]+%|(?:GPU|RSS) [\d.]+ [KMGT]?i?B"


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
            self._live = LiveLine(status.draw, faint=_TIMES)
            self._live.__enter__()

    def enter(self, doing: str) -> None:
        """Shows in the live line what the run does from now on."""
        self._status.enter(doing)
        if self._live is not None:
            self._live.write("")

    def follow(
        self, progress: Callable[[], Progress], waited: Callable[[], float], utilization: Utilization | None
    ) -> None:
        """Lets the live line move with the loop."""
        self._status.follow(progress, waited, utilization)

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
            if name.startswith("eval_") and isinstance(value, int | float)
        )
        if evaluated and self.console.is_terminal:
            say(self.console, step + line, style=style, faint=_TIMES)
            say(self.console, f"{step}held-out:{evaluated}")
        else:
            line += f"  held-out:{evaluated}" if evaluated else ""
            say(self.console, step + line, style=style, faint=_TIMES)
        for number, one in enumerate(record.get(TEXTS, ())):
            say(self.console, f"{step}text {number}: {_line(one['prompt'])} >>> {_line(one['text'])}")

    def saved(self, step: int, path: Path) -> None:
        """Prints, on a terminal, where a checkpoint is."""
        if self.console.is_terminal:
            say(self.console, f"step {step:>6}/{self._total}  saved: {shown(path)}")

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
    unit = unit_of(record["samples"], record["tokens"])
    line = (
        f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
        f"{record[f'{unit}_per_s']:,.0f} {unit}/s"
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


# What the live line says: where the run is, what it does, how fast, and when it will be done.
#
# All of it is known to the host without asking the device: a thread reads what the loop notes anyway, and the loop
# calls nothing for it.

_RECENT_S = 30.0  # over which rates are taken, or longer where windows are
_LEAST_S = 1.0  # several windows may become known at one moment
_LONG_S = 2.0  # after which it is told for how long something else than training has been going on
_BAR = (8, 30)  # columns


@dataclass(frozen=True)
class _Seen:
    """The run at one moment of the ``clock``; ``trained_s`` and ``waited_s`` are seconds of training, and for data."""

    clock: float
    progress: Progress
    trained_s: float
    waited_s: float


class Status:
    """The live line's text.

    Args:
        total_steps: updates of the whole run.
        world: this rank.
        clock: gives seconds.
    """

    def __init__(self, total_steps: int, world: World, *, clock: Callable[[], float] = monotonic) -> None:
        self._total, self._world, self._clock = total_steps, world, clock
        self._progress: Callable[[], Progress] = Progress
        self._begun = Progress()
        self._waited: Callable[[], float] = float
        self._utilization: Utilization | None = None
        self._loss: float | None = None
        self._doing, self._since = "starting", clock()
        self._drawn, self._trained_s = self._since, 0.0
        self._seen: deque[_Seen] = deque()
        self._first: _Seen | None = None

    def follow(
        self, progress: Callable[[], Progress], waited: Callable[[], float], utilization: Utilization | None
    ) -> None:
        """Says where to look: the progress that is known, the seconds that training has waited for data, MFU."""
        self._progress, self._waited, self._utilization = progress, waited, utilization
        self._begun = progress()

    def enter(self, doing: str) -> None:
        """Notes what the run does from now on: ``training``, or anything else, in words."""
        self._doing, self._since = doing, self._clock()

    def note_loss(self, loss: float) -> None:
        """Notes the loss of a record, which stays until the next one."""
        self._loss = loss

    def draw(self, columns: int) -> str:
        """The text, in so many columns; of what does not fit the least important is left out."""
        progress = self._look()
        doing = self._in_words()
        place = f"step {progress.step:,}/{self._total:,}" if self._total else ""  # no update to make: an evaluation
        text = "  ".join(filter(None, (place, doing)))
        left = columns - len(text)
        fields = []
        for field in self._fields(progress):
            if len(field) + 2 <= left:
                fields.append(field)
                left -= len(field) + 2
        bar = ""
        if not doing and left >= _BAR[0] + 2 and self._total:
            bar = "  " + _bar(progress.step / self._total, min(_BAR[1], left - 2))
        return "  ".join([text + bar, *fields])

    def _look(self) -> Progress:
        """Moves the clocks, and notes the progress where it has moved."""
        progress, now = self._progress(), self._clock()
        if self._doing == TRAINING:
            self._trained_s += now - self._drawn
        self._drawn = now
        last = self._seen[-1].progress if self._seen else self._begun
        if progress.window < last.window or progress.step < last.step:  # rolled back
            self._seen.clear()
            self._first = None
        elif progress.window > last.window:
            seen = _Seen(now, progress, self._trained_s, self._waited())
            # The first window that ends begins the rates: it has compiled kernels and started loading.
            self._first = self._first or seen
            self._seen.append(seen)
            while self._seen[0] is not seen and seen.trained_s - self._seen[1].trained_s >= _RECENT_S:
                self._seen.popleft()
        return progress

    def _in_words(self) -> str:
        if self._doing == TRAINING:
            return ""
        activity, took = self._world.activity, self._clock() - self._since
        words = self._doing.removesuffix(f" after step {self._progress().step}")
        if activity.phase is Phase.EVALUATION and activity.total:
            words += f": {min(activity.done, activity.total):,}/{activity.total:,} batches"
        elif took >= _LONG_S:
            words += f" ({took:.0f} s)"
        return words

    def _fields(self, progress: Progress) -> list[str]:
        """What there is to say, the most important first."""
        first, last = (self._seen[0], self._seen[-1]) if self._seen else (None, None)
        loss = [] if self._loss is None else [f"loss {self._loss:.4f}"]
        memory = memory_of(self._world.device).get("memory_bytes")
        kind = "RSS" if self._world.device.type == "cpu" else "GPU"
        room = [] if memory is None else [f"{kind} {size_of(memory)}"]
        if first is None or last is None or (seconds := last.trained_s - first.trained_s) < _LEAST_S:
            return [*loss, *room]
        samples = last.progress.samples - first.progress.samples
        unit = unit_of(last.progress.samples, last.progress.tokens)
        number = getattr(last.progress, unit) - getattr(first.progress, unit)
        utilized = {} if self._utilization is None else self._utilization.metrics(samples / seconds)
        found = [*self._left(progress), *loss, f"{number / seconds:,.0f} {unit}/s"]
        if "mfu" in utilized:
            found.append(f"MFU {utilized['mfu']:.1%}")
        elif "tflops_per_rank" in utilized:
            found.append(f"{utilized['tflops_per_rank']:.3g} TFLOP/s")
        waited = min(1.0, (last.waited_s - first.waited_s) / seconds)
        return [*found, f"data wait {waited:.0%}", *room]

    def _left(self, progress: Progress) -> list[str]:
        """When it ends, at its speed so far, evaluations and saves included."""
        assert self._first is not None
        done = progress.step - self._first.progress.step
        if done <= 0:
            return []
        left = max(0, self._total - progress.step) * (self._seen[-1].clock - self._first.clock) / done
        return [f"ETA {clock_of(left)}"]


def clock_of(seconds: float) -> str:
    """``0:09``, ``12:34``, ``1:02:03``, ``2d 03:04``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _bar(share: float, columns: int) -> str:
    full = round(min(1.0, share) * columns)
    return "━" * full + "─" * (columns - full)
