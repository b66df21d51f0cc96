"""Where a run's weights and optimizer state come from: a checkpoint, weights alone, or the model as it was built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from distaccum.accumulation.accumulator import Accumulator
from distaccum.checkpoint import state as checkpoint
from distaccum.checkpoint import weights
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState
from distaccum.train.components import TrainingComponents


@dataclass(frozen=True, kw_only=True)
class Restore:
    """What there is to start from, and how much of it this run's engine can take up.

    Weights that come without their optimizer state are given to the model before an engine wraps it, as not every
    engine can be given any later; but for a model without memory, which only the engine gives any.
    """

    path: Path | None
    """The checkpoint."""
    carries_optimizer: bool
    init_from: Path | None
    model: nn.Module
    fills_model: bool

    @classmethod
    def of(cls, checkpoint_path: str, parts: TrainingComponents, world: World) -> Restore:
        """For a verified checkpoint's path, or none."""
        path, config = Path(checkpoint_path) if checkpoint_path else None, parts.config
        own_format = config.optimizer_format(world.size)
        return cls(
            path=path,
            carries_optimizer=path is not None and checkpoint.read(path).optimizer_format == own_format,
            init_from=Path(config.init_from) if config.init_from and path is None else None,
            model=parts.model,
            fills_model=not weights.is_meta(parts.model),
        )

    def fill_model(self) -> None:
        """Before the engine wraps it."""
        if self.fills_model and not self.carries_optimizer:
            for path in filter(None, (self.init_from, self.path)):
                weights.fill(self.model, path)

    def init(self, engine: Engine) -> str:
        """After the engine has wrapped it; returns a line for the report."""
        if self.init_from is None:
            return ""
        if not self.fills_model:
            engine.load_state(EngineState(model=TensorFiles(self.init_from), optimizer={}, optimizer_values={}))
        return f"weights of {self.init_from}"

    def saved_by(self, run: checkpoint.RunState) -> str:
        """Which engine wrote the checkpoint, on how many ranks."""
        assert self.path is not None
        ranks = len(list(self.path.glob("random-*.json")))
        return f"saved by engine {run.config['engine']['name']} on {ranks} rank{'s' if ranks > 1 else ''}"

    def take_up(self, accumulator: Accumulator) -> tuple[checkpoint.RunState, bool, Any]:
        """The checkpoint's run, whether random numbers go on, and the state of this rank's data.

        Raises:
            CheckpointError: it belongs to another model or optimizer.
        """
        assert self.path is not None
        continued, data = checkpoint.load(
            self.path,
            accumulator.engine,
            accumulator.world,
            with_optimizer=self.carries_optimizer,
            with_model=self.carries_optimizer or not self.fills_model,
        )
        return checkpoint.read(self.path), continued, data
