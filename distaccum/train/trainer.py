"""Level 3: no loop at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import RunConfig, from_node
from distaccum.data.adapters import to_data_spec
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.signals import StopSignals, die_with_parent
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.losses.base import Loss
from distaccum.train.callbacks import Callback
from distaccum.train.components import build_components
from distaccum.train.evaluate import EvaluationMetric
from distaccum.train.resume import find_start
from distaccum.train.run import train
from distaccum.train.run_dir import RunDir


class Trainer:
    """Model, loss, data and configuration; ``fit()`` does the rest::

        trainer = Trainer(model, CrossEntropy(), dataset, {"batch": {"global_size": 64}, "trainer": {"max_steps": 100}})
        results = trainer.fit()

    What ``launch/train.py`` does from the command line: metrics, checkpoints, resuming and reports are the same.

    Args:
        model: trained in place.
        loss: a sum and what it sums over; see ``distaccum.losses.base.Loss``.
        data: a ``DataSpec``, a map-style dataset, or a stream of this rank's samples.
        config: what ``conf/`` sets, by the same keys; what is left out is the default. ``model``, ``data`` and ``loss``
            in it are not used, and ``optim.optimizer`` only where no ``optimizer`` is given.
        optimizer: over the model's parameters, or several, over disjoint sets of them; their rates are the schedule's
            peak.
        callbacks: called on every rank, before those of the configuration.
        metrics: further results of an evaluation by name, as torchmetrics has them; the loss needs ``predictions``.
        run_dir: where everything is written; by default a new folder below ``runs/``.

    Raises:
        ConfigError: whatever cannot work, before there is a process group.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        config: RunConfig | Mapping[str, Any] | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        callbacks: Sequence[Callback] = (),
        metrics: Mapping[str, EvaluationMetric] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self._began, self._ranks = monotonic(), LaunchEnvironment.from_environment()
        self.preempted = False
        """Whether :meth:`fit` saved and left before its end, as a signal or ``trainer.max_time`` asked it to."""
        if run_dir is None and isinstance(config, Mapping) and config.get("resume") == "auto":
            raise ConfigError(
                "run_dir", None, "is not given, and resume=auto looks for its run there", "Give the folder"
            )
        self._config = config if isinstance(config, RunConfig) else from_node(config or {})
        self._parts = build_components(
            self._config,
            to_data_spec(data),
            model,
            loss,
            world_size=self._ranks.size,
            device=self._ranks.device(),
            optimizers=[optimizer] if isinstance(optimizer, Optimizer) else optimizer,
            callbacks=callbacks,
            metrics=metrics,
        )
        self._run_dir = run_dir

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, the one that writes and prints."""
        return self._ranks.rank == 0

    def fit(self) -> dict[str, float]:
        """Trains to the end, or to where a callback stops it; returns the last evaluation, empty without one.

        SIGTERM, SIGUSR1 and SIGUSR2 preempt it: it saves, sets :attr:`preempted` and returns; the same with
        ``resume="auto"`` goes on.

        Raises:
            ConfigError: the run directory cannot be used, or the checkpoint to resume from.
            NonFiniteError: too many gradients were NaN or infinite; on every rank alike. The weights are untouched.
            DataError: an epoch gives nothing to train on.
        """
        start = None
        run_dir = RunDir(Path(self._run_dir or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}"))
        store = CheckpointStore(run_dir.checkpoints, keep=self._config.checkpoint.keep)
        if self._ranks.rank == 0:
            run_dir.make()
            run_dir.forget_failure()
            parts = self._parts
            start = find_start(
                self._config, run_dir, store, parts.plan.position, model=parts.model, world_size=self._ranks.size
            )
        world = World.join()
        run_dir = RunDir(Path(world.broadcast_str(str(run_dir.path))))
        store = CheckpointStore(run_dir.checkpoints, keep=self._config.checkpoint.keep)
        if self._ranks.launched:
            die_with_parent()
        try:
            with StopSignals() as signals:
                ending = train(self._parts, start, store, run_dir, world, signals=signals, began=self._began)
        except BaseException as error:  # written while the group is open, as the other ranks' failures follow from it
            run_dir.write_failure(f"rank {world.rank}: {type(error).__name__}: {error}")
            raise
        self.preempted = ending.preempted
        return ending.evaluation
