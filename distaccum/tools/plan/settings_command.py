"""Commands other than the main one: Hydra reads their settings; errors in these are one line, and exit code 2."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from distaccum import program
from distaccum.config.command_line import check_overrides, register_aliases
from distaccum.config.extras import install_command
from distaccum.config.schema import conf_dir, plain
from distaccum.errors import ConfigError
from distaccum.tools.command_line import composed, flags_as_settings, from_hydra
from distaccum.tools.help import show


def command(name: str, run: Callable[[dict[str, Any], Path], int]) -> int:
    """Calls ``run`` with the plain values of ``conf/NAME.yaml`` and the run directory; returns the exit code."""
    program.start()
    if name == "plan" and (topic := program.help_asked(sys.argv[1:])) is not None:
        return show(name, topic)
    exit_code = 0
    try:
        sys.argv[1:] = register_aliases(flags_as_settings(sys.argv[1:], compose=partial(composed, name=name)))
    except ConfigError as error:
        return print_error(name, error)
    said, composing, began = io.StringIO(), ExitStack(), False

    def task(node: DictConfig) -> None:
        nonlocal exit_code, began
        composing.close()
        began = True
        folder = Path(HydraConfig.get().runtime.output_dir)
        try:
            check_overrides(HydraConfig.get().overrides.task, str(HydraConfig.get().runtime.choices.get("engine")))
            exit_code = run(plain(node), folder)
        except ConfigError as error:
            exit_code = print_error(name, error)
            if not any(folder.iterdir()):
                folder.rmdir()

    composing.enter_context(redirect_stderr(said))  # Hydra prints its own errors, in its own words
    try:
        hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(task)()
    except SystemExit as stop:
        if began or not stop.code:
            raise
        composing.close()
        return print_error(name, from_hydra(stop.__context__ or stop, sys.argv[1:], name))
    finally:
        composing.close()
    return exit_code


def print_error(name: str, error: Exception) -> int:
    """Prints one line on stderr; returns the exit code of bad settings."""
    kind = "configuration error: " if isinstance(error, ConfigError) else ""
    sys.stderr.write(f"{name}: {kind}{error}\n")
    return 2


def plot_file(key: str, asked: str | Path | None, default: Path) -> Path | None:
    """The file of a plot: ``asked``, the value of ``key``, or else ``default``; None, and a notice, without matplotlib.

    Raises:
        ConfigError: a plot is asked for, and matplotlib is missing.
    """
    if find_spec("matplotlib") is not None:
        return Path(asked or default)
    if asked is not None:
        raise ConfigError(key, asked, "matplotlib is missing", f"Run {install_command('plot')}")
    print(f"no {default.name}: matplotlib is missing; {install_command('plot')}", file=sys.stderr)  # noqa: T201
    return None
