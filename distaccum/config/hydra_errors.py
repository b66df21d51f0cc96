"""Hydra's errors as ConfigError: key, value, problem, remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from distaccum.config.composed import composed
from distaccum.config.extras import install_command
from distaccum.config.schema import RunConfig, translate, unknown_key
from distaccum.errors import ConfigError, near_misses


def from_hydra(error: BaseException, arguments: Sequence[str], name: str = "config") -> ConfigError:
    """The ConfigError for an error that Hydra raised while it composed ``arguments`` over ``conf/NAME.yaml``."""
    given = dict(argument.lstrip("+~").split("=", 1) for argument in arguments if "=" in argument)
    message = str(error).strip()
    if isinstance(error, MissingConfigException):
        return _no_such_option(error, message)
    if isinstance(error, OverrideParseException):
        remedy = "Write overrides as key=value, and quote what holds spaces, commas or brackets"
        return ConfigError("command line", error.override, message.splitlines()[0], remedy)
    if found := re.match(r"Could not override '([^']+)'", message):
        key = found[1].split("@")[0]
        there, engine = composed(arguments, name), given.get("engine", RunConfig().engine.name)
        value = given.get(key)
        return unknown_key(key, value, engine) if there is None else there.unknown(key, value)
    for cause in (error, error.__cause__):
        if isinstance(cause, OmegaConfBaseException):
            return translate(cause)
    if isinstance(error, OSError):
        path = error.filename or given.get("hydra.run.dir")
        return ConfigError("hydra.run.dir", path, f"cannot be written ({error.strerror})", "Choose a writable folder")
    return ConfigError("command line", None, message.replace("\n", " "), "Correct the overrides")


def check_overrides(overrides: Sequence[str], engine: str) -> None:
    """Raises ConfigError where ``engine.name`` differs from the chosen group ``engine``."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "engine.name" and value != engine:
            raise ConfigError(key, value, "engine=... chooses its settings too", f"Write engine={value}")


def _no_such_option(error: MissingConfigException, message: str) -> ConfigError:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = list(error.options or [])
    if group == "hydra/launcher" and option.startswith("submitit"):
        return ConfigError(
            group, option, "Hydra's submitit launcher is not installed", f"Run {install_command('slurm')}"
        )
    if (group, option) == ("hydra/sweeper", "optuna"):
        return ConfigError(group, option, "Hydra's Optuna sweeper is not installed", f"Run {install_command('sweep')}")
    if not group:
        return ConfigError("command line", error.missing_cfg_file, message.splitlines()[0], "Give a config that exists")
    return ConfigError(
        group, option, f"no such choice{near_misses(option, options)}", f"Use one of {', '.join(options)}"
    )
