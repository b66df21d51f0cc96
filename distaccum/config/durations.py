"""Durations as Slurm writes them."""

from __future__ import annotations

import re
import sys

from distaccum.errors import ConfigError

_CLOCK = re.compile(r"(?:(?P<days>\d+)[-:](?=\d+:\d+:))?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def seconds_of(key: str, value: object) -> float:
    """The seconds of ``D-HH:MM:SS``, ``DD:HH:MM:SS``, ``HH:MM:SS``, ``MM:SS``, ``90s`` (or ``m``, ``h``, ``d``), or of
    a number of seconds.

    Raises:
        ConfigError: it is none of these, or not positive.
    """
    found: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        found = float(value)
    elif isinstance(value, str) and (unit := _WITH_UNIT.fullmatch(value)):
        found = float(unit[1]) * _UNITS[unit[2]]
    elif isinstance(value, str) and (clock := _CLOCK.fullmatch(value)):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        found = days * 86400 + hours * 3600 + minutes * 60 + seconds
    if found is None or not 0 < found < float("inf"):
        remedy = "Write HH:MM:SS, D-HH:MM:SS, 90s, 30m, 12h, or seconds"
        raise ConfigError(key, value, "not a positive length of time", remedy)
    return found
