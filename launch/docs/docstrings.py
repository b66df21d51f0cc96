"""An extension of griffe, which reads docstrings for docs/api.md: reStructuredText in them becomes Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


def markdown_of(docstring: str) -> str:
    """A docstring with roles such as ``:meth:`step``` as code, and without the second colon above a block of code."""
    text = re.sub(r":(?:\w+:)?\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", docstring)
    text = re.sub(r"^[ \t]*::\n", "\n", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


class MarkdownDocstrings(Extension):
    """Applies ``markdown_of`` to every docstring."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:  # type: ignore[override]  # griffe passes more by name
        """Called by griffe for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = markdown_of(obj.docstring.value)
