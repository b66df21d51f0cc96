"""Lines for people: whole on a terminal of any width, and as they are anywhere else."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_NARROWEST = 20  # columns


def say(console: Console, text: str, *, indent: int = 2, style: str = "") -> None:
    """Prints text: on a terminal wrapped between words, with what is wrapped indented; else lines as they are.

    What has no spaces, such as a path, stays in one piece, whose wrapping is left to the terminal: it can be copied.
    """
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
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
