"""One process of the bench: ``worker.py QUESTION ANSWER``, two JSON files.

A question is ``{"look": {part: module}}``, for the machine and the names of measurements, or ``{"module", "name",
"small"}`` for the figures of one.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from distaccum.distributed.signals import die_with_parent
from launch.bench.gpu.figures import Measurement, Options
from launch.bench.gpu.machine import facts


def look(parts: Mapping[str, str]) -> dict[str, Any]:
    """The machine's facts, each part's measurements, what kept a part from being imported, and limits in seconds."""
    names, broken = {}, {}
    limits: dict[str, float] = {}
    for part, module in parts.items():
        try:
            names[part] = list(measurements(module))
            limits |= getattr(import_module(module), "LIMITS", {})
        except Exception as error:  # a part may need what is not installed: the others run
            broken[part] = f"{type(error).__name__}: {error}"
    return {"machine": facts(), "names": names, "broken": broken, "limits": limits}


def measurements(module: str) -> Mapping[str, Measurement]:
    """The functions of a part, by name."""
    found: Mapping[str, Measurement] = resolve_name(f"{module}:MEASUREMENTS")
    return found


def measure(module: str, name: str, *, small: bool) -> dict[str, Any]:
    """The figures of one measurement on the first GPU, or else the CPU; with ``error`` what it raised."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        figures = measurements(module)[name](Options(device=device, small=small))
    except Exception as error:
        traceback.print_exc()  # to the log
        return {"figures": [], "error": f"{type(error).__name__}: {error}"}
    return {"figures": [asdict(figure) for figure in figures]}


def main() -> None:
    """Answers the question."""
    die_with_parent()
    question = json.loads(Path(sys.argv[1]).read_text())
    answer = look(question["look"]) if "look" in question else measure(**question)
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
