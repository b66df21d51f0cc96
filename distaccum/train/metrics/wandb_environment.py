"""What W&B's environment variables say where the configuration says nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from secrets import token_hex

from distaccum.config.checks import require_choice
from distaccum.config.schema import WANDB_CONSOLES, WANDB_MODES, WandbConfig
from distaccum.errors import ConfigError

_MODES = {**{mode: mode for mode in WANDB_MODES}, "dryrun": "offline", "run": "online"}  # W&B's older names


def resolved(settings: WandbConfig, environment: Mapping[str, str] = os.environ) -> WandbConfig:
    """The settings with what distaccum itself decides by: mode, project and folder.

    What W&B alone uses stays None, and W&B reads its variables itself: entity, name, group, job type, notes, tags. A
    run of a sweep's agent is online, and W&B takes the sweep's project.

    Raises:
        ConfigError: ``WANDB_MODE`` is none of W&B's modes, or ``WANDB_CONSOLE`` none of its consoles.
    """
    mode = settings.mode
    if mode is None and (given := environment.get("WANDB_MODE")):
        if given not in _MODES:
            raise ConfigError("WANDB_MODE", given, "no such mode", f"Use one of {', '.join(WANDB_MODES)}")
        mode = _MODES[given]
    console = settings.console
    if console is None and (console := environment.get("WANDB_CONSOLE")):
        require_choice("WANDB_CONSOLE", console, WANDB_CONSOLES)
    sweeps = bool(environment.get("WANDB_SWEEP_ID"))
    return replace(
        settings,
        mode=mode or ("online" if sweeps else "offline"),
        project=settings.project or environment.get("WANDB_PROJECT") or "distaccum",
        dir=settings.dir or environment.get("WANDB_DIR") or None,
        console=console or "off",
    )


def run_id(environment: Mapping[str, str] = os.environ) -> str:
    """The id of a new run: ``WANDB_RUN_ID``, as a sweep's agent gives one, or random letters."""
    return environment.get("WANDB_RUN_ID") or token_hex(4)
