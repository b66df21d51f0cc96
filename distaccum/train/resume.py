"""Resume: the checkpoint or the weights that a run starts from, found, checked and restored in this file alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint import weights
from distaccum.checkpoint.state import SavedState
from distaccum.checkpoint.store import CheckpointStore, find, verify
from distaccum.config.engine import BY_PARAMETER
from distaccum.data.agreement import differs
from distaccum.data.cursor import has_grown, position_mismatch
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState
from distaccum.engines.modules import is_meta
from distaccum.errors import CheckpointError, ConfigError
from distaccum.program import NEWEST, load
from distaccum.train import ema
from distaccum.train.adapters import check_base
from distaccum.train.callbacks import restore as restore_callbacks
from distaccum.train.components import TrainingComponents
from distaccum.train.config_diff import Change, compare, shown
from distaccum.train.optimizer import SELECTS
from distaccum.train.run_dir import RunDir

_log = logging.getLogger(__name__)


def find_checkpoint(components: TrainingComponents, run_dir: RunDir) -> SavedState | None:
    """Finds the checkpoint that ``resume`` asks for, verifies it and checks that this run can resume from it.

    Args:
        components: of the run; no engine has wrapped the model yet.
        run_dir: must hold no results of another run unless ``resume`` is ``auto``: the newest valid one is there.

    Returns:
        None to start from zero.

    Raises:
        ConfigError: the named checkpoint is damaged or another model's; ``auto`` finds none that can be used where some
            were saved; the data position means something else in this run; the results of another run are in the way;
            ``auto`` finds optimizer state of another format than this run's engine has; or a setting has changed that
            gives the saved state its meaning.
    """
    config, record, facts = components.config, components.record, components.facts
    if config.resume == "auto":
        store = CheckpointStore(run_dir.checkpoints, keep=config.checkpoint.keep)
        store.recover()
        path = load(NEWEST)(store, run_dir)
        saved = None if path is None else checkpoint.read(path)
    else:
        run_dir.refuse_to_mix()
        saved = None if config.resume == "never" else _read_named(config.resume)
    if saved is None:
        return None
    path, readable = saved.folder, saved.run.optimizer_format == BY_PARAMETER
    if (path / "loop-0.pt").is_file():
        problem = f"{path} is of Accumulator.save(), and keeps what a Trainer has no place for"
        raise ConfigError("resume", config.resume, problem, f"Use acc.resume() in its loop, or init_from={path}")
    if config.resume == "auto" and not readable:
        problem = f"cannot resume {path}: its optimizer state is {saved.run.optimizer_format}, this run's would be "
        remedy = f"Continue with that engine and world, or begin another run from its weights with resume={path}"
        raise ConfigError("engine", None, problem + BY_PARAMETER, remedy)
    mismatch = position_mismatch(saved.run.position, components.plan.position)
    grown = has_grown(saved.run.position, components.plan.position)
    if mismatch is not None and not (grown and "data" in config.resume_allow):
        key, before, value = mismatch
        remedy = f"Continue with {key}={before}, or start a new run in another hydra.run.dir"
        if grown:
            remedy += "; or resume_allow=[data] ends the epoch that was begun, and goes on with the next one"
        raise ConfigError(key, value, f"but {path} counts its windows with {key}={before}", remedy)
    if grown:
        _check_end(saved.run.progress, components)
    if readable:
        _check_optimizers(saved.run.config, record, path)
        _check_groups(saved.run.config, record, path)
    check_base(saved.run.facts, facts, path)
    weights.check(components.model, path, key="resume")
    _check_changes(saved.run, record, facts, path, config.resume_allow)
    _tell_of_kernels(saved.run.facts.get("kernels", {}), facts.get("kernels", {}))
    return replace(saved, folder=path.resolve())


def _check_end(progress: Progress, components: TrainingComponents) -> None:
    """Raises ConfigError where epochs of fewer samples lie behind, and the schedule's end would not be the run's."""
    plan, (_, epochs) = components.plan, components.config.trainer.limits
    if epochs is None or plan.is_stream:
        return
    begun = min(epochs, progress.epoch + (progress.epoch_window > 0))
    end, total = progress.step + plan.updates(epochs) - plan.updates(begun), components.total_steps
    if total > end:
        problem = f"counts {total} updates, and with the epochs that had fewer samples it ends after {end}"
        raise ConfigError("trainer.max_epochs", epochs, problem, f"State trainer.max_steps={end} too, for the schedule")


def _tell_of_kernels(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Warns where a run whose bits are promised computes them with something else from here on."""
    other = [f"{key}: {before[key]} -> {now[key]}" for key in before.keys() & now.keys() if before[key] != now[key]]
    if other:
        _log.warning("numerics=reproducible: from here on bits may be others than before: %s", "; ".join(sorted(other)))


def _check_optimizers(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError where the saved state is another optimizer's: its entries would be ignored or misread."""
    saved, given = _optimizers_of(before), _optimizers_of(now)
    if saved and given and saved != given:
        problem = f"and {path} has the state of {', '.join(saved)}"
        remedy = f"Continue with the same, or begin another run from its weights with init_from={path}"
        raise ConfigError("optimizer", ", ".join(given), problem, remedy)


def _check_groups(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError where the parameters were grouped otherwise; what a group states for them may change."""
    saved, given = _groups_of(before), _groups_of(now)
    if saved is not None and given is not None and saved != given:
        problem = f"and {path} has the state of optimizers whose groups take {saved or 'no parameters'}"
        remedy = f"Continue with the same, or begin another run from its weights with init_from={path}"
        raise ConfigError("optim.groups", given, problem, remedy)


def _check_changes(
    saved: checkpoint.RunState, record: Mapping[str, Any], facts: Mapping[str, Any], path: Path, allowed: Sequence[str]
) -> None:
    """Raises ConfigError where the saved state would mean something else in this run."""
    refused = [change for change in changes_since(saved, record, facts, allowed) if change.refused]
    if refused:
        keys = ", ".join(dict.fromkeys(change.key.partition(" ")[0] for change in refused))
        problem = f"the run has changed since {path}: {shown(refused)}"
        remedy = (
            f"Continue with what was, begin anew with init_from={path}, or answer for it with resume_allow=[{keys}]"
        )
        raise ConfigError(refused[0].key.partition(" ")[0], None, problem, remedy)


def changes_since(
    saved: checkpoint.RunState, record: Mapping[str, Any], facts: Mapping[str, Any], allowed: Sequence[str] = ()
) -> list[Change]:
    """What a run has changed since its checkpoint; nothing where one of them has no record."""
    if not record or not saved.config:
        return []
    before, now = saved.facts, facts
    known = bool(before.get("data")) and bool(now.get("data"))
    return compare(
        saved.config,
        record,
        facts=(before, now),
        data=differs(before["data"], now["data"]) if known else None,
        allowed=allowed,
    )


def _optimizers_of(record: Mapping[str, Any]) -> list[str]:
    """The names of the optimizers' classes; empty where they are not known."""
    optim = record.get("optim", {})
    kept = optim.get("optimizer", [])
    nodes = kept if isinstance(kept, list) else [kept]
    nodes = [*nodes, *(group["optimizer"] for group in optim.get("groups", []) if "optimizer" in group)]
    return [str(node.get("_target_", "")).rpartition(".")[2] for node in nodes if node]


def _groups_of(record: Mapping[str, Any]) -> list[Any] | None:
    """What each group takes, and whether an optimizer of its own steps it; None where a program has made them."""
    optim = record.get("optim", {})
    if "lr" not in optim:  # no optimizer was built of it
        return None
    return [
        {key: group[key] for key in SELECTS if key in group} | ({"optimizer": True} if "optimizer" in group else {})
        for group in optim.get("groups", [])
    ]


def _read_named(resume: str) -> SavedState:
    try:
        path = find(Path(resume))
        verify(path)
        return checkpoint.read(path)
    except CheckpointError as error:
        remedy = "Name a whole checkpoint, a folder checkpoints/step-N"
        raise ConfigError("resume", resume, str(error), remedy) from error


class Restore:
    """Restores a run: as it is made, before an engine wraps the model, and after that.

    Weights that come without optimizer state are copied into the model before an engine wraps it, since not every
    engine can load them later. A model on the meta device has no memory yet: its engine loads the weights after.

    Args:
        saved: the checkpoint that :func:`find_checkpoint` found; None on the ranks that did not look for it.
        components: of the run; ``init_from`` of their configuration counts only where there is no checkpoint.
        world: this rank. Rank 0's checkpoint is restored on all.
    """

    def __init__(self, saved: SavedState | None, components: TrainingComponents, world: World) -> None:
        folder = world.broadcast_str(str(saved.folder) if saved else "")
        if folder and saved is None:
            saved = checkpoint.read(Path(folder))
        config = components.config
        self._saved, self._components, self._is_main = saved, components, world.is_main
        self._init_from = Path(config.init_from) if config.init_from and saved is None else None
        self._with_optimizer = saved is not None and saved.run.optimizer_format == BY_PARAMETER
        self._on_meta = is_meta(components.model)
        # By the names of the model that is not wrapped yet: which of them are tied is known here.
        self._differences, self._tensors = weights.Differences(), None
        if self._init_from is not None:
            init = config.init
            self._differences = weights.check(
                components.model, self._init_from, missing=init.missing, unexpected=init.unexpected
            )
        if self._on_meta and self._init_from is not None:
            self._tensors = weights.read(components.model, self._init_from, unexpected=self._differences.unexpected)
        path = self._saved.folder if self._saved else self._init_from
        if path is not None and not self._on_meta and not self._with_optimizer:
            weights.fill(components.model, path, missing=self._differences.missing)

    def after_wrap(self, accumulator: Accumulator, *, wandb_id: str) -> tuple[str, str]:
        """Restores engine, random numbers, progress, data position and callbacks.

        Returns:
            The id of the W&B run, which is ``wandb_id`` but for a run that resumes its own; and a note for the header.

        Raises:
            CheckpointError: the checkpoint belongs to another model or optimizer.
        """
        callbacks = self._components.callbacks
        if self._saved is None:
            note = self._init_weights(accumulator.engine)
            ema.begin(callbacks, accumulator.engine, None)
            return wandb_id, note
        run = self._saved.run
        continued, data = checkpoint.restore(
            self._saved,
            accumulator.engine,
            accumulator.world,
            with_optimizer=self._with_optimizer,
            with_model=self._with_optimizer or self._on_meta,
        )
        progress, position = run.progress, run.position
        if has_grown(position, self._components.plan.position):  # find_checkpoint has allowed it
            progress = progress.next_epoch() if progress.epoch_window else progress
            position = self._components.plan.position
        accumulator.restore(progress, position, data, run.spikes, run.hooks)
        restore_callbacks(callbacks, run.callbacks)
        averaged = ema.begin(callbacks, accumulator.engine, self._saved.folder)
        # A run started from a named checkpoint is another run.
        own = self._components.config.resume == "auto"
        note = self._note(self._saved, continued=continued)
        return run.wandb_id if own else wandb_id, "; ".join(filter(None, (note, averaged)))

    @property
    def memory(self) -> Mapping[str, Any]:
        """What the checkpoint says of memory; the same on every rank."""
        return {} if self._saved is None else self._saved.run.memory

    @property
    def logged(self) -> Mapping[str, int]:
        """Window and step of the last record of this run's own past; empty where it has none, or none is known."""
        own = self._saved is not None and self._components.config.resume == "auto"
        return self._saved.run.logged if self._saved is not None and own else {}

    def _init_weights(self, engine: Engine) -> str:
        if self._init_from is None:
            return ""
        if self._on_meta:
            assert self._tensors is not None
            engine.load_state(EngineState(model=self._tensors, optimizer={}, optimizer_values={}))
        return f"weights of {self._init_from}" + (f"; {self._differences}" if str(self._differences) else "")

    def _note(self, saved: SavedState, *, continued: bool) -> str:
        run, ranks = saved.run, saved.world_size
        carried = "everything carries over"
        if not self._with_optimizer:
            lost = f"optimizer state ({run.optimizer_format}) and loss scale do not"
            carried = f"weights, progress and data carry over, {lost}"
        record, facts = self._components.record, self._components.facts if self._is_main else {}
        if has_grown(run.position, self._components.plan.position):
            carried += "; with other samples from the next epoch on, and the one that was begun ends here"
        if changes := changes_since(run, record, facts):
            carried += f"; changed since: {shown(changes)}"
        engine = run.config.get("engine", {}).get("name", "unknown")
        by = f"saved by engine {engine} on {ranks} rank{'s' if ranks > 1 else ''}"
        note = f"resuming {saved.folder} at step {run.progress.step}; {carried} ({by})"
        return note if continued else f"{note}; another world size: what draws outside micro-steps draws anew"
