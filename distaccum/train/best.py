"""The checkpoint with the best evaluation, which is kept beside the newest ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import CheckpointConfig
from distaccum.distributed.world import World
from distaccum.errors import ConfigError


class BestCheckpoint:
    """Which evaluation has been the best of the run, also across resumes; a collective to make.

    Args:
        config: ``best`` names a result of the evaluation, null: none; ``best_mode`` says what is better.
        store: keeps the checkpoint, and which it is.
        world: this rank.
    """

    def __init__(self, config: CheckpointConfig, store: CheckpointStore, world: World) -> None:
        self._config, self._store = config, store
        self._value, self._name = math.nan, ""
        if config.best is not None:
            kept = json.loads(world.broadcast_str(json.dumps(store.best() if world.is_main else None)))
            if kept is not None and kept["metric"] == config.best:
                self._value, self._name = float(kept["value"]), str(kept["checkpoint"])

    def improves(self, evaluation: Mapping[str, float]) -> bool:
        """Whether this evaluation, the same on every rank, is better than any before; NaN never is.

        Raises:
            ConfigError: it has no such result.
        """
        name = self._config.best
        if name is None:
            return False
        if name not in evaluation:
            known = ", ".join(evaluation)
            raise ConfigError("checkpoint.best", name, f"the evaluation gives {known}", "Name one of these")
        sign = 1.0 if self._config.best_mode == "min" else -1.0
        value = sign * evaluation[name]
        return value < (math.inf if math.isnan(self._value) else sign * self._value)

    def is_of(self, step: int, evaluation: Mapping[str, float]) -> bool:
        """Whether this evaluation is the best one as this process began, and its checkpoint that of this step."""
        name = self._config.best
        return name is not None and self._name == f"step-{step}" and evaluation.get(name) == self._value

    def mark(self, path: Path, evaluation: Mapping[str, float]) -> None:
        """Keeps ``path``, which is of the weights that were evaluated; the one before is pruned like any other.

        Rank 0 calls it before ``path`` is there, so that a run which dies then does not forget that it was the best.
        """
        assert self._config.best is not None
        self._store.mark_best(path, metric=self._config.best, value=evaluation[self._config.best])

    def note(self, evaluation: Mapping[str, float]) -> None:
        """From here on a better one has to be better than this; every rank calls it."""
        assert self._config.best is not None
        self._value = evaluation[self._config.best]
