"""What the command line has beside Hydra's own: distaccum's flags, and names that stand for others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore

from distaccum.config.precision import ALIASES
from distaccum.config.schema import as_typed
from distaccum.errors import ConfigError

_MAPPING = re.compile(r"(?!hydra\b)[A-Za-z_][\w.]*=\{")
_NUMBER = re.compile(r"(?<=[=,])(\d+)(?=,|$)")


def take_flag(arguments: Sequence[str], *names: str) -> tuple[list[str], str | None]:
    """Takes a flag that Hydra does not know off the command line, as ``NAME`` or ``NAME=VALUE``.

    Returns:
        The other arguments, and the last value given; an empty one for the bare flag, None without it.
    """
    given = [argument for argument in arguments if argument.partition("=")[0] in names]
    others = [argument for argument in arguments if argument not in given]
    return others, given[-1].partition("=")[2] if given else None


def register_aliases(arguments: Sequence[str]) -> list[str]:
    """Makes every alias of a precision a choice of Hydra's group ``precision``.

    Hydra resolves it: however it is quoted or swept over, and in the defaults list of a user's own file as well.

    Returns:
        The arguments, with quotes around a choice that Hydra would read as a number (``precision=32``), and with keys
        that Hydra adds to a mapping (``model.options={num_labels: 3}``); those of a setting are checked by its schema.
    """
    for alias, name in ALIASES.items():
        ConfigStore.instance().store(group="precision", name=alias, node={"defaults": [name]})
    given = [
        _NUMBER.sub(r"'\1'", argument) if argument.startswith("precision=") else argument for argument in arguments
    ]
    return [f"++{argument}" if _MAPPING.match(argument) else argument for argument in given]


def check_overrides(overrides: Any, engine: str) -> None:
    """Raises ConfigError where ``engine.name`` differs from the chosen group ``engine``."""
    for override in as_typed(overrides):
        key, _, value = override.lstrip("+").partition("=")
        if key == "engine.name" and value != engine:
            raise ConfigError(key, value, "engine=... chooses its settings too", f"Write engine={value}")
