"""Labels as the user's own file states them, as the losses of classifiers take them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite

import torch
from torch import Tensor

from distaccum.errors import ConfigError, near_misses, shorten
from distaccum.tools.rows import LABELS, PLAIN, read, unreadable

PROBLEMS = ("single_label", "multi_label", "regression")
Stated = Sequence[tuple[int, str]]


def labelled_rows(
    path: str, text: str, label: str, classes: Sequence[str], problem: str
) -> tuple[list[str], list[Tensor], tuple[str, ...]]:
    """The texts of a file, and what :func:`targets` makes of its labels.

    Raises:
        ConfigError: as that, or the file cannot be read.
    """
    kind = LABELS if problem == "multi_label" else PLAIN
    rows = read(path, [("data.text", text), ("data.label", label)], kind, "texts")
    for line, (one, _) in rows:
        if isinstance(one, list):
            raise unreadable(path, line, f"there is no {PLAIN} in column {text!r}")
    stated = [(line, json.dumps(given) if isinstance(given, list) else str(given)) for line, (_, given) in rows]
    return [str(one) for _, (one, _) in rows], *targets(path, stated, label, classes, problem)


def targets(
    path: str, stated: Stated, column: str, classes: Sequence[str], problem: str
) -> tuple[list[Tensor], tuple[str, ...]]:
    """The label of each row, and the names of the classes in the order of their numbers.

    Args:
        path: of the file.
        stated: the line of each row, and its label.
        column: of the labels.
        classes: the names, where they are stated; else they are sorted, whole numbers by their value.
        problem: of the loss. ``single_label``: numbers of classes ``()``, int64; ``multi_label``: zeros and ones
            ``(classes,)``, of ``["a", "b"]`` or ``a, b``; ``regression``: numbers ``()``; both fp32.

    Raises:
        ConfigError: no such problem, a label that is none of it or not among ``classes``, or a single class.
    """
    if problem not in PROBLEMS:
        remedy = f"Use one of {', '.join(PROBLEMS)}"
        raise ConfigError("data.problem", problem, f"no such problem{near_misses(problem, PROBLEMS)}", remedy)
    if problem == "regression":
        return [_number(path, line, column, text) for line, text in stated], ()
    several = problem == "multi_label"
    listed = [_names(path, line, column, text) if several else [text] for line, text in stated]
    found = {name for names in listed for name in names}
    if blank := sorted(name for name in found if name != name.strip() and name.strip() in found):
        problem = f"has {blank[0]!r} and {blank[0].strip()!r} in {path}"
        raise ConfigError("data.label", column, problem, "Take the blanks out, or they are two classes")
    numbers = all(re.fullmatch(r"-?\d+", name) for name in found)
    known = tuple(map(str, classes)) or tuple(sorted(found, key=lambda name: (int(name) if numbers else 0, name)))
    if others := found.difference(known):
        remedy = "Name every class, or leave it out"
        raise ConfigError("data.classes", list(known), f"has no {shorten(sorted(others))}, which {path} has", remedy)
    if len(known) <= 1:
        shown = repr(known[0]) if known else "empty"
        raise ConfigError("data.label", column, f"is {shown} on every line of {path}", "Give texts of two classes")
    if several:
        return [torch.tensor([float(name in names) for name in known]) for names in listed], known
    return [torch.tensor(known.index(name)) for (name,) in listed], known


def _number(path: str, line: int, column: str, text: str) -> Tensor:
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return torch.tensor(number)
    raise unreadable(path, line, f"{text!r} in column {column!r} is no number")


def _names(path: str, line: int, column: str, text: str) -> list[str]:
    if not text.startswith("["):
        return [name for part in text.split(",") if (name := part.strip())]
    with suppress(ValueError):
        return list(map(str, json.loads(text)))
    raise unreadable(path, line, f"{text!r} in column {column!r} is no list")
