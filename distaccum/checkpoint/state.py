"""What a checkpoint holds: tensors as safetensors, everything else as JSON. Loading executes no code.

::

    model.safetensors       parameters and buffers by name
    optimizer.safetensors   optimizer tensors by parameter name
    state.json              version, clocks, position, optimizer values, scaler, W&B run, config, callbacks, world size
    random-R.json           random number generators of rank R
    data-R.pt               where rank R's stream stands, if its data is one; read with ``weights_only``
    manifest.json           SHA-256 of the files above
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from distaccum.clocks import Clocks
from distaccum.engines.base import Engine, EngineState
from distaccum.errors import CheckpointError
from distaccum.world import World

VERSION = 2


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The part of a checkpoint that is not the engine's.

    ``position`` are the plan's numbers that give ``clocks.window`` its meaning: a checkpoint is only good for a run in
    which they are the same.
    """

    clocks: Clocks
    position: Mapping[str, int]
    wandb_id: str
    config: Mapping[str, Any]
    callbacks: Mapping[str, Mapping[str, Any]]


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
    if world.is_main:
        save_file(_storable(state.model), folder / "model.safetensors")
        save_file(_storable(state.optimizer), folder / "optimizer.safetensors")
        record = {
            "version": VERSION,
            "world_size": world.size,
            **asdict(run),
            "scaler": state.scaler,
            "optimizer_values": state.optimizer_values,
        }
        (folder / "state.json").write_text(json.dumps(record, indent=2))
    (folder / f"random-{world.rank}.json").write_text(json.dumps(_random_state()))
    if data is not None:
        torch.save(data, folder / f"data-{world.rank}.pt")


def read(folder: Path) -> RunState:
    """The run's part of a verified checkpoint.

    Raises:
        CheckpointError: it is of another version, or a part is missing.
    """
    record = _record(folder)
    fields = ("position", "wandb_id", "config", "callbacks")
    return RunState(clocks=Clocks(**record["clocks"]), **{name: record[name] for name in fields})


def load(folder: Path, engine: Engine, world: World) -> tuple[bool, Any]:
    """Takes up a verified checkpoint; returns whether the random number generators continue too, and the feed's state.

    They do at the same world size. At another one there is no state to continue, and they keep the run's fresh seeds.

    Raises:
        CheckpointError: it belongs to another model or optimizer.
    """
    record = _record(folder)
    try:
        engine.load_state(
            EngineState(
                model=load_file(folder / "model.safetensors"),
                optimizer=load_file(folder / "optimizer.safetensors"),
                optimizer_values=record["optimizer_values"],
                scaler=record["scaler"] or {},
            )
        )
    except (RuntimeError, KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} does not fit this model and optimizer: {error}") from error
    if record["world_size"] != world.size:
        return False, None
    _set_random_state(json.loads((folder / f"random-{world.rank}.json").read_text()))
    data = folder / f"data-{world.rank}.pt"
    return True, torch.load(data, weights_only=True) if data.exists() else None


def _record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: no readable state.json ({error})") from error
    if record.get("version") != VERSION:
        raise CheckpointError(f"{folder} has format {record.get('version')}, this distaccum reads {VERSION}")
    return record


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, as safetensors wants them: a tied weight is stored under each name."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        pointer = plain.untyped_storage().data_ptr()
        result[name] = plain.clone() if pointer in seen else plain
        seen.add(pointer)
    return result


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  users' code may draw here
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
        "torch": {name: base64.b64encode(bytes(state.tolist())).decode() for name, state in generators.items()},
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    generators = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in state["torch"].items()
    }
    torch.set_rng_state(generators["cpu"])
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])
