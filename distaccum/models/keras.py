"""Keras 3 models on the torch backend, which a tool makes modules of: ``distaccum/tools/keras_model.py``."""

from __future__ import annotations

from typing import Any

from distaccum.program import KERAS_MODEL, load


def __getattr__(name: str) -> Any:
    if name != "KerasModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(KERAS_MODEL)
