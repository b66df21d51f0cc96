"""Keras's losses, which a tool makes sums with counts of: ``distaccum/tools/keras_loss.py``."""

from __future__ import annotations

from typing import Any

from distaccum.program import KERAS_LOSS, load


def __getattr__(name: str) -> Any:
    if name != "KerasLoss":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(KERAS_LOSS)
