"""``Accumulator.save`` and ``Accumulator.resume``: the Trainer's sealed checkpoints, for a loop of one's own.

A checkpoint has the files of ``distaccum/checkpoint/state.py``, and beside them::

    loop-R.pt    of rank 0 the schedulers, the global batch that was set, and what the loop gave as ``state``; of
                 another rank the last alone, where it differs from rank 0's. Read with ``weights_only``
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint.files import Pieces, listed, retried
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.checks import require_count, whole_number
from distaccum.data.batches import map_tensors
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError, ConfigError, shorten
from distaccum.train.run_dir import check_shared

_log = logging.getLogger(__name__)

_CHECKPOINTS, _FILE = "checkpoints", "loop-{}.pt"
_IN_FILE = ("per_sample", "schedulers", "batch", "memory")  # of what an Accumulator gives beside the engine's state


class LoopCheckpoints:
    """Saves and resumes one accumulator's loop; every rank makes each call.

    Args:
        accumulator: between two windows in each call.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator, self._world = accumulator, accumulator.world
        self._stores: dict[tuple[Path, int], CheckpointStore] = {}
        self._known: set[Path] = set()  # folders that this loop has saved to or resumed from

    def save(self, folder: Path, *, keep: int, own: Mapping[str, Any]) -> Path:
        """See :meth:`Accumulator.save`."""
        keep = whole_number("keep", keep)
        require_count("keep", keep, off="0 to keep all")
        accumulator, world = self._accumulator, self._world
        state = accumulator.state_of_loop("save()")
        if (folder, keep) not in self._stores:
            _begin(folder, world, resumed=folder in self._known)
            self._stores[folder, keep] = CheckpointStore(folder / _CHECKPOINTS, keep=keep)
        self._known.add(folder)
        run = checkpoint.RunState(
            progress=Progress(**state["progress"]),
            position=state["position"],
            wandb_id="",
            config={},
            callbacks={},
            spikes=state["spikes"],
            hooks=state["hooks"],
        )
        _bytes({"data": state["data"]}, "the data: their state")
        part = checkpoint.Part.of(accumulator.engine, run, state["data"], world)
        loop = {**{name: state[name] for name in _IN_FILE}, "classes": self._classes(), "own": _states(own)}
        part = replace(part, rest={**part.rest, **_files(loop, world)})
        path = self._stores[folder, keep].save(run.progress.step, world, part.write, again=True)
        accumulator.replicas.saved = path
        _log.info("saved %s", path)
        return path

    def resume(self, folder: Path, *, own: MutableMapping[str, Any]) -> int:
        """See :meth:`Accumulator.resume`."""
        accumulator, world = self._accumulator, self._world
        store = CheckpointStore(folder / _CHECKPOINTS, keep=0)
        path = Path(_agreed(world, lambda: _newest(store)))
        if not path.name:
            self._known.add(folder)
            _log.info("%s has no checkpoint yet: the loop begins anew", folder)
            return 0
        saved = checkpoint.read(path)
        loop = _read(path, 0)
        if loop["classes"] != self._classes():
            before, given = (", ".join(names) or "none" for names in (loop["classes"], self._classes()))
            raise CheckpointError(f"scheduler={given}: {path} has the state of {before}. Continue with the same")
        values = _own_of(path, saved.world_size, world, loop["own"])
        left = _left_over(path, values, own)
        if left and world.is_main:
            problem = "is not restored: resume(state=) does not name it"
            _log.warning("%s has a state of %s, which %s", path, shorten(left), problem)
        continued, data = checkpoint.restore(saved, accumulator.engine, world)
        state: dict[str, Any] = {name: loop[name] for name in _IN_FILE}
        run = saved.run
        progress = {"progress": vars(run.progress), "position": run.position, "spikes": run.spikes, "hooks": run.hooks}
        accumulator.load_state_of_loop(state | progress | {"data": data})
        for name, kept in values["objects"].items():
            if name in own:
                own[name].load_state_dict(kept)
        own.update(values["values"])
        self._known.add(folder)
        accumulator.replicas.saved = path
        note = "" if continued else "; on another number of ranks: what draws outside of micro-steps draws anew"
        _log.info("resuming %s, saved on %d ranks%s", path, saved.world_size, note)
        return run.progress.step

    def _classes(self) -> list[str]:
        """Of the schedulers: another class would misread their states."""
        return [scheduler.kind.__name__ for scheduler in self._accumulator.tracker.schedulers]


def _begin(folder: Path, world: World, *, resumed: bool) -> None:
    """Before the first save into a folder; a collective.

    Raises:
        ConfigError: it cannot be written, some ranks do not see it, or it has another run's checkpoints.
    """

    def look() -> str:
        (folder / _CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        for pattern in (".saving-*", ".removing-*"):  # of a process that died
            for left in listed(folder / _CHECKPOINTS, pattern):
                shutil.rmtree(left, ignore_errors=True)
        steps = CheckpointStore(folder / _CHECKPOINTS, keep=0).steps()
        return shorten([path.name for path in steps])

    if (there := _agreed(world, look)) and not resumed:
        problem = f"holds checkpoints of another run ({there})"
        raise ConfigError("save", folder, problem, "Call acc.resume(folder) before the first window, or name another")
    try:
        check_shared(folder, world)
    except ConfigError as error:
        raise ConfigError("save", folder, error.problem, "Give a folder that all hosts share") from error


def _newest(store: CheckpointStore) -> str:
    """The newest whole checkpoint; empty where none was ever saved."""
    store.recover()
    if path := store.newest_valid():
        return str(path.resolve())
    if there := [path.name for path in listed(store.root, "*step-*") if not path.name.startswith(".")]:
        problem = f"{store.root} has no whole checkpoint to resume from ({shorten(sorted(there))})"
        raise CheckpointError(f"{problem}. Restore one, or begin anew in another folder")
    return ""


def _agreed(world: World, look: Callable[[], str]) -> str:
    """What rank 0 finds by ``look``, on every rank; a collective.

    Raises:
        CheckpointError: as ``look``; on every rank.
        ConfigError: rank 0 cannot read or write there; on every rank.
    """
    found = problem = where = ""
    if world.is_main:
        try:
            found = look()
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem, where = error.strerror or str(error), str(error.filename)
    found, problem, where = json.loads(world.broadcast_str(json.dumps([found, problem, where])))
    if where:
        raise ConfigError("folder", where, f"cannot be used ({problem})", "Choose a folder that you can write to")
    if problem:
        raise CheckpointError(problem)
    return str(found)


def _read(path: Path, rank: int) -> dict[str, Any]:
    file = path / _FILE.format(rank)
    if not file.exists():
        remedy = "resume it there, or load its weights (distaccum export)"
        raise CheckpointError(f"{path} is no checkpoint of Accumulator.save(), but of a Trainer: {remedy}")
    try:
        content: dict[str, Any] = retried(lambda: torch.load(file, map_location="cpu", weights_only=True), of=file)
    except (OSError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return content


# What is the loop's own: the mapping ``state``. Objects are told from values, which go back into the mapping.


def _states(own: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """States of objects, and values, on the host."""
    objects = {name: one.state_dict() for name, one in own.items() if _has_state(one)}
    values = {name: one for name, one in own.items() if name not in objects}
    return map_tensors({"objects": objects, "values": values}, _on_host)  # type: ignore[no-any-return]


def _on_host(tensor: Tensor) -> Tensor:
    """A copy that is stored by itself, and not with all that it is a view of."""
    return tensor.detach().cpu().clone()


def _has_state(one: object) -> bool:
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


def _files(loop: Mapping[str, Any], world: World) -> dict[str, Pieces]:
    """This rank's file by name: rank 0's, and another's where it has a state of its own."""
    own = _bytes(loop["own"])
    first, *_ = world.all_gather_object(hashlib.sha256(own).digest())
    name = _FILE.format(world.rank)
    if world.is_main:
        return {name: [_bytes(loop)]}
    return {} if hashlib.sha256(own).digest() == first else {name: [_bytes({"own": loop["own"]})]}


def _bytes(content: Mapping[str, Any], what: str = "save(state=):") -> bytes:
    """As a file holds it.

    Raises:
        CheckpointError: reading it would execute code.
    """
    stream = BytesIO()
    try:
        torch.save(content, stream)
        stream.seek(0)
        torch.load(stream, map_location="meta", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        _refuse(what, error)
    return stream.getvalue()


def _refuse(what: str, error: Exception) -> NoReturn:
    lines = str(error).splitlines() or [type(error).__name__]
    reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0]).partition(" was not an allowed")[0]
    remedy = "give numbers, strings, tensors, and lists and dicts of them, or objects whose state_dict() is of these"
    raise CheckpointError(f"{what} cannot be saved ({reason}): {remedy}") from error


def _own_of(path: Path, saved_on: int, world: World, first: dict[str, Any]) -> dict[str, Any]:
    """The loop's own state for this rank; ``first`` is rank 0's.

    Raises:
        CheckpointError: the ranks that saved it had different ones, and there is another number of ranks now.
    """
    if saved_on == world.size:
        differs = (path / _FILE.format(world.rank)).exists()
        return dict(_read(path, world.rank)["own"]) if differs else first
    if any((path / _FILE.format(rank)).exists() for rank in range(1, saved_on)):
        problem = f"{path}: state= differed between the {saved_on} ranks that saved it, and there are {world.size} now"
        raise CheckpointError(f"{problem}. Resume on {saved_on}, or save with state= what is the same on every rank")
    return first


def _left_over(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """The names in the checkpoint that nobody takes.

    Raises:
        CheckpointError: an object has no state in the checkpoint, or a value has.
    """
    objects, values = saved["objects"], saved["values"]
    for name, one in own.items():
        if (name in objects) is not _has_state(one):
            there = f"{path} has {shorten([*objects, *values]) or 'nothing of the loop'}"
            raise CheckpointError(f"resume(state=): there is no state of {name}: {there}. Name what save() was given")
    return [name for name in objects if name not in own] + ([] if own else list(values))
