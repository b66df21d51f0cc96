"""The programs of a checkout: they start the main job, its tests, benches and examples."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> dict[str, str]:
    """The environment by which a new process imports this checkout, whatever its working directory."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
