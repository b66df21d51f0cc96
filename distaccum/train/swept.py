"""What a sweep chooses for a run: a run that was made with another choice is not gone on with under its name."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from distaccum.errors import ConfigError
from distaccum.train.run_dir import RunDir

OVERRIDES = ".hydra/overrides.yaml"


def require_same_choice(chosen: Mapping[str, str], run_dir: RunDir) -> None:
    """Refuses to resume the run of a folder that a sweep has made with other values.

    Its result would stand there, and at the sweeper, as that of the new ones.

    Args:
        chosen: value by key, of what is swept alone: all else may change in a resumed run.
        run_dir: of the run.

    Raises:
        ConfigError: it names the first key.
    """
    file = run_dir.path / OVERRIDES
    if not run_dir.holds_checkpoints() or not file.is_file():
        return
    try:
        overrides = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError:  # damaged
        return
    made_with = dict(_split(str(one)) for one in overrides or [])
    for key, value in chosen.items():
        before = made_with.get(key)
        if before is None or not _is_same(value, before):
            how = f"with {before}" if before is not None else "without it"
            problem = f"the run in {run_dir.path} was made {how}, and resume=auto would take its result for this one's"
            remedy = "hydra.sweep.subdir='${hydra.job.override_dirname}' gives each choice a folder"
            seed = "hydra.sweeper.sampler.seed has Optuna choose the same again"
            raise ConfigError(key, value, problem, f"Use another hydra.sweep.dir; {remedy}, and {seed}")


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def _is_same(one: str, other: str) -> bool:
    try:  # 1e-3 and 0.001 are one number
        return one == other or float(one) == float(other)
    except ValueError:
        return False
