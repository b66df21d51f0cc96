"""The content of a checkpoint: tensors as safetensors, everything else as JSON. Loading these executes no code.

Tensors are whole, whatever engine held them, and each is in one file: any engine on any number of ranks reads what it
needs.

::

    model.safetensors       parameters and buffers by name; model-R.safetensors where several ranks write some each
    optimizer.safetensors   optimizer tensors by parameter name; or optimizer-R.safetensors; a large one in parts,
                            optimizer-I.safetensors or optimizer-R-I.safetensors
    ema.safetensors         the moving average of the weights that a run keeps; or ema-R.safetensors
    state.json              version, progress (as "clocks"), position, optimizer values, scaler, W&B run, config,
                            callbacks, world size, the format of the optimizer state, and what tells the model and
                            the data
    random-R.json           random number generators of rank R
    data-R.pt               the position in rank R's stream, if its data is one; read with ``weights_only``
    manifest.json           digests of the files above
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import tensors
from distaccum.checkpoint.files import HashingWriter, Pieces, retried
from distaccum.checkpoint.store import await_files
from distaccum.config.engine import BY_PARAMETER
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState, StateLayout
from distaccum.engines.state import merged
from distaccum.errors import CheckpointError, shorten

VERSION = 3
_NONE = type(None)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "clocks": dict,
    "position": dict,
    "wandb_id": str,
    "config": dict,
    "callbacks": (dict, list),
    "world_size": int,
    "scaler": (dict, _NONE),
    "optimizer_values": dict,
    "optimizer_format": str,
    "facts": dict,
    "spikes": dict,
    "hooks": dict,
    "logged": dict,
    "memory": dict,
}


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The part of a checkpoint that is not the engine's.

    ``position`` holds the plan's numbers that give ``progress.window`` its meaning: a run can only resume from a
    checkpoint in which they are the same. ``optimizer_format`` says which engines can read the optimizer state.
    ``facts`` tell another model or other data than the configuration does, ``spikes`` is what gradient norms are judged
    by, ``hooks`` what looks at windows has found, ``logged`` has the window and the step of the last record, and
    ``memory`` the micro-batch that was found and the shapes that fit.
    """

    progress: Progress
    position: Mapping[str, int]
    wandb_id: str
    config: Mapping[str, Any]
    callbacks: Mapping[str, Mapping[str, Any]]
    optimizer_format: str = BY_PARAMETER
    facts: Mapping[str, Any] = field(default_factory=dict)
    spikes: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[str, Any] = field(default_factory=dict)
    logged: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)


class Average(Protocol):
    """An average of the weights, next to the model."""

    @property
    def kind(self) -> str:
        """Begins the names of its files."""

    def whole(self, owns: Callable[[int], bool]) -> dict[str, Tensor]:
        """Its tensors by name, those of the numbers that this rank ``owns``; a collective where they are sharded."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank writes of a checkpoint; tensors are where they are trained."""

    model: tensors.Share
    optimizer: tensors.Share
    average: tensors.Share | None
    rest: Mapping[str, Pieces]

    @classmethod
    def of(cls, engine: Engine, run: RunState, data: Any, world: World, *, average: Average | None = None) -> Part:
        """This rank's, between two windows; a collective. ``data``: its loader's state; None if its position is all."""
        state = engine.state()
        shared = engine.facts.state_layout is StateLayout.SHARDED
        model = tensors.share("model", state.model, world, shared=shared)
        optimizer = tensors.share("optimizer", state.optimizer, world, shared=shared)
        averaged = None
        if average is not None:
            own = average.whole(lambda i: not shared or i % world.size == world.rank)
            averaged = tensors.share(average.kind, own, world, shared=shared)
        values = merged(state.optimizer_values, world) if shared else state.optimizer_values
        rest: dict[str, Pieces] = {}
        if world.is_main:
            record = {
                "version": VERSION,
                "world_size": world.size,
                "clocks": asdict(run.progress),
                **{name: value for name, value in asdict(run).items() if name != "progress"},
                "scaler": state.scaler,
                "optimizer_values": values,
            }
            rest["state.json"] = [json.dumps(record, indent=2).encode()]
        random = RNGState.capture(world.device).to_json()
        rest[f"random-{world.rank}.json"] = [json.dumps(random).encode()]
        if data is not None:
            stream = BytesIO()
            torch.save(data, stream)
            rest[f"data-{world.rank}.pt"] = [stream.getbuffer()]
        return cls(model=model, optimizer=optimizer, average=averaged, rest=rest)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each tensor, in no order."""
        shares = [share for share in (self.model, self.optimizer, self.average) if share is not None]
        return [tensor.nbytes for share in shares for tensor in (share.tensors or {}).values()]

    def files(self, host: Callable[[Tensor], Tensor] = Tensor.cpu) -> Iterator[tuple[str, Pieces]]:
        """Its files by name. What is given of tensors is as good as ``host`` makes it, which brings one to the host."""
        yield from self.model.files(host=host)
        yield from self.optimizer.files(in_parts=True, host=host)
        if self.average is not None:
            yield from self.average.files(host=host)
        yield from self.rest.items()

    def write(self, folder: Path) -> dict[str, str]:
        """Writes it into a folder that is there, durably; gives by name the digests of its files."""
        with HashingWriter(folder) as writer:
            for name, content in self.files():
                writer.write(name, content)
            return writer.digests


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A checkpoint's ``state.json``, read once and handed on. The tensors are still in ``folder``."""

    folder: Path
    run: RunState
    world_size: int
    scaler: Mapping[str, Any]
    optimizer_values: Mapping[str, Any]


def read(folder: Path) -> SavedState:
    """Reads the ``state.json`` of a verified checkpoint; waits for files that this machine does not see yet.

    Raises:
        CheckpointError: it is of another version, or a part is missing or not what it should be.
    """
    await_files(folder)
    try:
        record: dict[str, Any] = json.loads(retried((folder / "state.json").read_text, of=folder / "state.json"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: no readable state.json ({error})") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{folder}: state.json is no record of a checkpoint")
    record.setdefault("hooks", {})  # of one that is older
    if record.get("version") != VERSION:
        raise CheckpointError(f"{folder} has format {record.get('version')}, this distaccum reads {VERSION}")
    _check_types(folder, record)
    return SavedState(
        folder=folder,
        run=RunState(
            progress=Progress(**record["clocks"]),
            **{one.name: record[one.name] for one in fields(RunState) if one.name != "progress"},
        ),
        world_size=record["world_size"],
        scaler=record["scaler"] or {},
        optimizer_values=record["optimizer_values"],
    )


def _check_types(folder: Path, record: Mapping[str, Any]) -> None:
    wrong = [name for name, kinds in _TYPES.items() if name not in record or not isinstance(record[name], kinds)]
    if not wrong and not all(isinstance(n, int) for n in record["logged"].values()):
        wrong = ["logged"]
    numbers = {one.name for one in fields(Progress)}
    if not wrong and not all(name in numbers and isinstance(n, int | float) for name, n in record["clocks"].items()):
        wrong = ["clocks"]
    if wrong:
        raise CheckpointError(f"{folder}: state.json has no {shorten(wrong)}, or one of another kind")


def restore(
    saved: SavedState, engine: Engine, world: World, *, with_model: bool = True, with_optimizer: bool = True
) -> tuple[bool, Any]:
    """Restores the engine's state and this rank's random number generators.

    The generators are restored at the world size that saved them. At another one there is no state for each rank, and
    they keep the run's fresh seeds.

    Args:
        saved: of a verified checkpoint.
        engine: loads its state.
        world: this rank.
        with_model: False where the engine has the weights already.
        with_optimizer: False where the optimizer state is in a format that the engine cannot read; the loss scale then
            starts from its initial value as well.

    Returns:
        Whether the generators were restored, and the state of this rank's loader.

    Raises:
        CheckpointError: the checkpoint belongs to another model or optimizer.
    """
    folder = saved.folder
    try:
        state = EngineState(model=tensors.TensorFiles(folder, "model"), optimizer={}, optimizer_values={})
        if with_optimizer:
            values, scaler = saved.optimizer_values, dict(saved.scaler)
            optimizer = tensors.TensorFiles(folder, "optimizer")
            state = replace(state, optimizer=optimizer, optimizer_values=values, scaler=scaler)
        if with_model:
            engine.load_state(state)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        problem = " ".join(str(error).split())  # one line, whatever torch said
        raise CheckpointError(f"{folder} does not fit this model and optimizer: {problem}") from error
    if saved.world_size != world.size:
        return False, None
    _restore_generators(folder / f"random-{world.rank}.json", world)
    return True, _position(folder / f"data-{world.rank}.pt")


def _restore_generators(file: Path, world: World) -> None:
    try:
        RNGState.from_json(json.loads(retried(file.read_bytes, of=file)), world.device).restore()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{file} holds no state of random number generators ({error})") from error


def _position(file: Path) -> Any:
    """Where this rank's stream stood; None where its data is none."""
    try:
        return retried(lambda: torch.load(file, weights_only=True) if file.exists() else None)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{file} holds more than a position in data ({_first(error)})") from error


def _first(error: Exception) -> str:
    """What torch says of a file that it does not unpickle: a line of many."""
    return next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error).partition("\n")[0])
