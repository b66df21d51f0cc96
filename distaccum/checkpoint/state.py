"""What a checkpoint holds: tensors as safetensors, everything else as JSON. Loading these executes no code.

Tensors are whole, whatever engine held them, and each is in one file: any engine on any number of ranks reads what it
needs. An engine whose optimizer state is in a format of its own keeps that beside, for itself alone.

::

    model.safetensors       parameters and buffers by name; model-R.safetensors where several ranks write some each
    optimizer.safetensors   optimizer tensors by parameter name; or optimizer-R.safetensors
    state.json              version, clocks, position, optimizer values, scaler, W&B run, config, callbacks, world size,
                            and in what format the optimizer state is
    random-R.json           random number generators of rank R
    data-R.pt               where rank R's stream stands, if its data is one; read with ``weights_only``
    manifest.json           SHA-256 of the files above
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import tensors
from distaccum.config.engine import BY_PARAMETER
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState, StateLayout
from distaccum.engines.state import merged
from distaccum.errors import CheckpointError

VERSION = 3
_READ = (2, 3)  # 2 had one file of each kind, written by rank 0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The part of a checkpoint that is not the engine's.

    ``position`` are the plan's numbers that give ``progress.window`` its meaning: a checkpoint is only good for a run
    in which they are the same. ``optimizer_format`` says which engines can read the optimizer state.
    """

    progress: Progress
    position: Mapping[str, int]
    wandb_id: str
    config: Mapping[str, Any]
    callbacks: Mapping[str, Mapping[str, Any]]
    optimizer_format: str = BY_PARAMETER


def save(folder: Path, engine: Engine, run: RunState, data: Any, world: World) -> None:
    """Writes this rank's part of a checkpoint into ``folder``; all ranks call it.

    Args:
        folder: there already.
        engine: whose state is saved.
        run: the rest.
        data: the state of this rank's feed; None for data whose position says it all.
        world: this rank.
    """
    state = engine.state()
    shared = engine.state_layout is StateLayout.SHARDED
    tensors.write(folder, "model", state.model, world, shared=shared)
    tensors.write(folder, "optimizer", state.optimizer, world, shared=shared)
    values = merged(state.optimizer_values, world) if shared else state.optimizer_values
    engine.save_files(folder)
    if world.is_main:
        record = {
            "version": VERSION,
            "world_size": world.size,
            "clocks": asdict(run.progress),
            **{name: value for name, value in asdict(run).items() if name != "progress"},
            "scaler": state.scaler,
            "optimizer_values": values,
        }
        (folder / "state.json").write_text(json.dumps(record, indent=2))
    (folder / f"random-{world.rank}.json").write_text(json.dumps(RNGState.capture(world.device).to_json()))
    if data is not None:
        torch.save(data, folder / f"data-{world.rank}.pt")


def read(folder: Path) -> RunState:
    """The run's part of a verified checkpoint.

    Raises:
        CheckpointError: it is of another version, or a part is missing.
    """
    record = _record(folder)
    fields = ("position", "wandb_id", "config", "callbacks", "optimizer_format")
    return RunState(progress=Progress(**record["clocks"]), **{name: record[name] for name in fields})


def load(
    folder: Path, engine: Engine, world: World, *, with_model: bool = True, with_optimizer: bool = True
) -> tuple[bool, Any]:
    """Takes up a verified checkpoint; returns whether the random number generators continue too, and the feed's state.

    They do at the same world size. At another one there is no state to continue, and they keep the run's fresh seeds.

    Args:
        folder: of the checkpoint.
        engine: takes up its state.
        world: this rank.
        with_model: False where the engine has the weights already.
        with_optimizer: False where its optimizer state is in a format that the engine cannot read; without it the loss
            scale begins anew as well.

    Raises:
        CheckpointError: it belongs to another model or optimizer.
    """
    record = _record(folder)
    state = EngineState(model=tensors.TensorFiles(folder, "model"), optimizer={}, optimizer_values={})
    if with_optimizer:
        optimizer, values = tensors.TensorFiles(folder, "optimizer"), record["optimizer_values"]
        state = replace(state, optimizer=optimizer, optimizer_values=values, scaler=record["scaler"] or {})
    try:
        if with_model:
            engine.load_state(state)
        if with_optimizer:
            engine.load_files(folder)
    except (RuntimeError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder} does not fit this model and optimizer: {error}") from error
    if record["world_size"] != world.size:
        return False, None
    generators = json.loads((folder / f"random-{world.rank}.json").read_text())
    RNGState.from_json(generators, world.device).restore()
    data = folder / f"data-{world.rank}.pt"
    return True, torch.load(data, weights_only=True) if data.exists() else None


def _record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: no readable state.json ({error})") from error
    if record.get("version") not in _READ:
        raise CheckpointError(f"{folder} has format {record.get('version')}, this distaccum reads {VERSION}")
    return {"optimizer_format": BY_PARAMETER} | record
