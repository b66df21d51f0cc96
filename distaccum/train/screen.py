"""What a rank shows while it trains: rank 0 header, records and live line; the others keep out of that line's way."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distaccum.accumulation.progress import Progress
from distaccum.distributed.random import RNGState
from distaccum.distributed.signals import StopSignals
from distaccum.distributed.world import World
from distaccum.train.live_line import erasing_streams
from distaccum.train.metrics.meter import Utilization

if TYPE_CHECKING:
    from rich.console import Console

    from distaccum.train.metrics.loggers import Logger

TRAINING = "training"
"""What a run does, to the screen, while it does nothing else."""
_NARROWEST = 20  # columns


class Screen:
    """What people see of a run; nothing but the ``console`` itself here: see ``ConsoleLogger`` for what shows records.

    Args:
        console: for what is printed; None on other ranks than 0.
    """

    logger: Logger | None = None
    """Prints records; None where ``metrics.console`` is false."""

    def __init__(self, console: Console | None) -> None:
        self.console = console

    def and_show(self, enter_phase: Callable[[str], None]) -> Callable[[str], None]:
        """``enter_phase`` that is shown in the live line, too."""

        def both(phase: str) -> None:
            enter_phase(phase)
            self.enter(phase)

        return both

    def enter(self, doing: str) -> None:
        """Shows in the live line what the run does from now on."""

    def saved(self, step: int, path: Path) -> None:
        """Tells of a checkpoint that is there."""

    def follow(
        self, progress: Callable[[], Progress], waited: Callable[[], float], utilization: Utilization | None
    ) -> None:
        """Lets the live line move with the loop: progress, seconds waited for data, MFU."""

    def leave(self) -> None:
        """Gives the terminal back; from any thread, and more than once."""


@contextmanager
def open_screen(total_steps: int, world: World, signals: StopSignals, *, records: bool) -> Iterator[Screen]:
    """The screen of this rank for the length of the block; a second Ctrl-C leaves the terminal in order.

    Args:
        total_steps: updates of the whole run.
        world: this rank.
        signals: may end the process.
        records: whether records are shown at all.
    """
    if not world.is_main:
        with erasing_streams() if records else nullcontext():
            yield Screen(None)
        return
    generators = RNGState.capture(world.device)
    from distaccum.train.metrics.console import ConsoleLogger, Status, open_console  # noqa: PLC0415  for rank 0 alone

    generators.restore()  # modules that are imported may draw
    console = open_console()
    screen = ConsoleLogger(total_steps, console, Status(total_steps, world)) if records else Screen(console)
    last_words = signals.last_words

    def leave_with(reason: str) -> None:
        screen.leave()
        if last_words is not None:
            last_words(reason)

    signals.last_words = leave_with
    try:
        yield screen
    finally:
        signals.last_words = last_words
        screen.leave()


def shown(path: Path) -> Path:
    """A path as people read it: from the working directory where it lies below that."""
    with suppress(OSError, ValueError):
        return path.relative_to(Path.cwd())
    return path


def say(console: Console, text: str, *, indent: int = 2, style: str = "", faint: str = r"(?!)") -> None:
    """Prints text: on a terminal wrapped between words, with what is wrapped indented; else lines as they are.

    What has no spaces, such as a path, stays in one piece, whose wrapping is left to the terminal: it can be copied.
    What the pattern ``faint`` finds is dim.
    """
    from rich.text import Text  # noqa: PLC0415  for rank 0 alone

    if console.is_terminal:
        lines = [
            part
            for line in text.splitlines()
            for part in textwrap.wrap(
                line,
                max(_NARROWEST, console.width),
                subsequent_indent=" " * indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        ]
        text = "\n".join(lines)
    styled = Text(text, style)
    styled.highlight_regex(faint, "dim")
    console.print(styled, soft_wrap=True)
