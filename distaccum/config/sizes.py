"""Sizes of memory, with their unit."""

from __future__ import annotations

import math
import re

from distaccum.errors import ConfigError

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_WHOLE = 100  # from which on no decimal is shown
_WITH_UNIT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def bytes_of(key: str, value: object) -> float:
    """The bytes of ``512MiB``, ``1.5GiB``, ``64GB`` and the like.

    Raises:
        ConfigError: it is no positive size with a unit.
    """
    found = _WITH_UNIT.fullmatch(value) if isinstance(value, str) else None
    if found is None or not float(found[1]):
        raise ConfigError(key, value, "no positive size with its unit", f"Write 4GiB; units are {', '.join(_UNITS)}")
    return float(found[1]) * _UNITS[found[2]]


def size_of(count: float) -> str:
    """Bytes with a unit, as ``512 B``, ``1.5 MiB``, ``93.1 GiB``, ``250 GiB``."""
    power = min(len(_BINARY) - 1, int(math.log2(max(1.0, count))) // 10)
    number = count / 1024**power
    return f"{number:.{1 if power and number < _WHOLE else 0}f} {_BINARY[power]}"
