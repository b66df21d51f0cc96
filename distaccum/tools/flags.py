"""Settings as flags, ``--optim.lr=0.01``: as the agents of sweeps write them, and users of other trainers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from hydra._internal.utils import get_args_parser

from distaccum.config.command_line import Composed
from distaccum.config.schema import conf_dir
from distaccum.errors import ConfigError, near_misses

_NEGATIVE = re.compile(r"-[\d.]")
_TRUTH = ("true", "false", "True", "False")


def flags_as_settings(
    arguments: Sequence[str], compose: Callable[[Sequence[str]], Composed | None], own: Sequence[str] = ()
) -> list[str]:
    """Makes ``--optim.lr=0.01`` and ``--optim.lr 0.01`` into ``optim.lr=0.01``, as agents of sweeps write settings.

    Args:
        arguments: the command line.
        compose: the configuration that the other arguments choose; called where there is such a flag.
        own: flags of distaccum that Hydra does not know; like Hydra's own they stay as they are.

    Raises:
        ConfigError: a flag that is neither Hydra's nor ``own``, and no setting of the composed configuration.
    """
    options = get_args_parser()._option_string_actions  # argparse has no public name for them
    changed: list[str] = []
    flags: list[int] = []  # where a flag stands that may be a setting
    given = list(arguments)
    while given:
        argument = given.pop(0)
        flag = argument.partition("=")[0]
        changed.append(argument)
        if not argument.startswith("-") or _NEGATIVE.match(argument):
            continue
        if flag in own or _is_hydras(flag, options):
            if flag in options and options[flag].nargs is None and "=" not in argument and given:
                changed.append(given.pop(0))  # its value
            continue
        flags.append(len(changed) - 1)
    if not flags:
        return changed
    others = [argument for i, argument in enumerate(changed) if i not in flags]
    there = compose(others)
    made: list[str] = []
    i = 0
    while i < len(changed):
        following = changed[i + 1] if i + 1 < len(changed) and i + 1 not in flags else None
        if i not in flags:
            made.append(changed[i])
        elif there is None:  # Hydra says what is wrong with the others
            made.append(changed[i].lstrip("-"))
        else:
            setting, took = _setting(changed[i], following, there, [*options, *own])
            made.append(setting)
            i += took
        i += 1
    return made


def _is_hydras(flag: str, options: Mapping[str, object]) -> bool:
    """Whether it is an option of Hydra's, or the beginning of one, as argparse takes it; a group's name is none."""
    if flag.startswith("--"):
        return not (flag not in options and (conf_dir() / flag[2:]).is_dir()) and any(
            option.startswith(flag) for option in options
        )
    return any(flag.startswith(option) for option in options if not option.startswith("--"))


def _setting(argument: str, following: str | None, there: Composed, flags: Sequence[str]) -> tuple[str, bool]:
    """The override for a flag, and whether it takes the word that follows it as its value."""
    flag, has_value, value = argument.partition("=")
    key = flag.lstrip("-")
    if key not in there:
        raise _unknown(flag, value if has_value else None, there, flags)
    if has_value:
        return f"{key}={value}", False
    if isinstance(there.value(key), bool) and following not in _TRUTH:
        return f"{key}=true", False
    if following is None or "=" in following or following.startswith("--"):
        raise ConfigError(flag, None, "has no value", f"Write {flag}=VALUE")
    return f"{key}={following}", True


def _unknown(flag: str, value: str | None, there: Composed, flags: Sequence[str]) -> ConfigError:
    key = flag.lstrip("-")
    if key.partition(".")[0] in there:
        error = there.unknown(key, value)
        return ConfigError(flag, value, error.problem, error.remedy)
    hint = near_misses(flag, [*flags, *(f"--{name}" for name in there.settings())])
    return ConfigError(flag, value, f"no such flag or setting{hint}", "`--help` says which there are")
