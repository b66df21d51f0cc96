"""Where a run starts: at zero, or where a checkpoint of it left off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint import weights
from distaccum.checkpoint.store import CheckpointStore, verify
from distaccum.config.schema import RunConfig
from distaccum.errors import CheckpointError, ConfigError
from distaccum.train.run_dir import RunDir


def find_start(
    config: RunConfig,
    run_dir: RunDir,
    store: CheckpointStore,
    position: Mapping[str, int],
    *,
    model: nn.Module,
    world_size: int,
) -> Path | None:
    """The verified checkpoint that ``resume`` (``never``, ``auto`` or a path) asks for; None to start at zero.

    Raises:
        ConfigError: the named checkpoint is damaged or another model's, the data position means something else in this
            run, or a new run would be mixed into the results of an old one; or the optimizer state of what ``auto``
            found is not in the format that this run's engine keeps.
    """
    resume, optimizer_format = config.resume, config.optimizer_format(world_size)
    if resume == "auto":
        path = store.newest_valid()
    else:
        run_dir.refuse_to_mix()
        path = None if resume == "never" else _named(resume)
    if path is None:
        return None
    run = checkpoint.read(path)
    if resume == "auto" and run.optimizer_format != optimizer_format:
        problem = f"cannot go on from {path}: its optimizer state is {run.optimizer_format}, this run's would be "
        remedy = f"Continue with that engine and world, or begin another run from its weights with resume={path}"
        raise ConfigError("engine", None, problem + optimizer_format, remedy)
    saved = run.position
    for key, value in position.items():
        if saved.get(key) != value:
            problem = f"but {path} counts its windows with {key}={saved.get(key)}"
            remedy = f"Continue with {key}={saved.get(key)}, or start anew in another hydra.run.dir"
            raise ConfigError(key, value, problem, remedy)
    weights.check(model, path, key="resume")
    return path.resolve()


def _named(resume: str) -> Path:
    path = Path(resume)
    try:
        verify(path)
        checkpoint.read(path)
    except CheckpointError as error:
        remedy = "Name a whole checkpoint, a folder checkpoints/step-N"
        raise ConfigError("resume", resume, str(error), remedy) from error
    return path
