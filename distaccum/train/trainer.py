"""Level 3: the ``Trainer``, which runs the loop itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distaccum.config.checks import require_type
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import EngineConfig, engine_config
from distaccum.config.precision import PrecisionConfig
from distaccum.config.schema import RunConfig, schedule_named
from distaccum.data.adapters import to_data_spec
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.signals import die_with_parent
from distaccum.distributed.world import World
from distaccum.engines.modules import leave_evaluating, train_again
from distaccum.errors import CheckpointError, ConfigError
from distaccum.losses.base import AnyLoss
from distaccum.program import BEST, PREDICT, SCORE, load
from distaccum.train.callbacks import Callback, named
from distaccum.train.components import build_components
from distaccum.train.evaluate import EvaluationMetric
from distaccum.train.failure import group_timeout
from distaccum.train.metrics.loggers import Logger
from distaccum.train.rates import built_with, name_of
from distaccum.train.run import Launch, Start, run
from distaccum.train.run_dir import RunDir


class Trainer:
    """Trains a model on data with a loss::

        trainer = Trainer(model, CrossEntropy(), dataset, global_batch_size=64, micro_batch_size=8, max_steps=100)
        results = trainer.fit()

    ``launch/train.py`` does the same from the command line: metrics, checkpoints, resuming and reports are the same.

    The keywords state what most runs state; ``config`` has every setting, and a keyword replaces its value there.

    Args:
        model: trained in place.
        loss: a sum and what it sums over; see ``distaccum.Loss``, and ``distaccum.WindowLoss`` for one that compares
            samples.
        data: a ``DataSpec``, a map-style dataset, or a stream of this rank's samples.
        global_batch_size: samples of one optimizer step, over all ranks.
        micro_batch_size: the most samples of one forward and backward on one rank.
        max_steps: applied updates; with 0, :meth:`fit` evaluates the weights once. Where this or ``max_epochs`` is
            given, neither limit is taken from ``config``.
        max_epochs: passes over the data; the earlier of the two limits ends the run.
        engine: ``ddp``, ``zero1``, ``fsdp2`` or ``deepspeed``, or the settings of one.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``, or a ``PrecisionConfig``.
        compile: ``none``, ``blocks`` or ``model``, or a ``CompileConfig``.
        clip_norm: the largest norm of the global gradient.
        schedule: the factor of every learning rate, by applied updates: ``cosine``, ``linear``, ``wsd``, ``constant``
            or ``one_cycle``, as on the command line; a function of the number of applied updates; a scheduler of
            torch's over ``optimizer``, or its class, or a function that makes it of an optimizer, with arguments in a
            ``functools.partial``; or a mapping with a ``_target_``.
        eval_every: updates between two evaluations; ``epoch``: after the last update of each; 0: none.
        log_every: updates between two records.
        checkpoint_every: updates between two checkpoints; ``epoch`` and 0 as of ``eval_every``.
        seed: of the order of samples and of random numbers.
        resume: ``never``, ``auto`` (the newest checkpoint of ``run_dir``) or a checkpoint's path.
        optimizer: over the model's parameters, or several, over disjoint sets of them. Their rates stay where no
            schedule is stated. By default that of ``config``.
        callbacks: called on every rank, before those of ``config``.
        metrics: further results of an evaluation by name, as torchmetrics has them; the loss needs ``predictions``.
        loggers: called on rank 0, beside those of ``config``.
        run_dir: where everything is written; by default a new folder below ``runs/``.
        config: every other setting; its ``model``, ``data`` and ``loss`` are not used. Of nested plain values,
            ``RunConfig.from_dict`` makes one.

    Raises:
        ConfigError: whatever cannot work, before there is a process group.
    """

    run_dir: Path | None
    """Where :meth:`fit` writes, or has written; None before it, where no folder was given."""
    preempted = False
    """Whether :meth:`fit` saved and returned before its end, as a signal or ``trainer.max_time`` asked it to."""

    def __init__(
        self,
        model: nn.Module,
        loss: AnyLoss,
        data: Any,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        engine: str | EngineConfig | None = None,
        precision: str | PrecisionConfig | None = None,
        compile: str | CompileConfig | None = None,  # noqa: A002  torch's own word
        clip_norm: float | None = None,
        schedule: Any = None,
        eval_every: int | str | None = None,
        log_every: int | None = None,
        checkpoint_every: int | str | None = None,
        seed: int | None = None,
        resume: str | Path | None = None,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        callbacks: Sequence[Callback] = (),
        metrics: Mapping[str, EvaluationMetric] | None = None,
        loggers: Sequence[Logger] = (),
        run_dir: str | Path | None = None,
        config: RunConfig | None = None,
    ) -> None:
        self._began = monotonic()
        self._environment = LaunchEnvironment.current()
        self._run_dir, self.run_dir = run_dir, None if run_dir is None else Path(run_dir)
        config, limits = _checked(config), _limits(max_steps, max_epochs)
        config = replace(
            config,
            batch=replace(config.batch, **_given(global_size=global_batch_size, micro_size=micro_batch_size)),
            trainer=replace(config.trainer, **limits, **_given(eval_every=eval_every, log_every=log_every)),
            checkpoint=replace(config.checkpoint, **_given(every=checkpoint_every)),
            optim=replace(config.optim, **_given(clip_norm=clip_norm)),
            engine=config.engine if engine is None else engine_config(engine),
            precision=config.precision if precision is None else PrecisionConfig.of(precision),
            compile=config.compile if compile is None else CompileConfig.of(compile),
            **_given(seed=seed, resume=str(resume) if isinstance(resume, Path) else resume),
        )
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        schedule, config = _with_schedule(config, schedule, optimizers)
        _check_given(config, run_dir, callbacks, loggers)
        spec = to_data_spec(data, self._environment.size)
        self._components = build_components(
            config,
            spec,
            model,
            loss,
            world_size=self._environment.size,
            device=self._environment.device(config.trainer.backend, key="trainer.backend"),
            optimizers=optimizers,
            schedule=schedule,
            callbacks=callbacks,
            metrics=metrics,
            loggers=loggers,
            record=_record(config, (model, loss, data), spec.description, callbacks, optimizers),
        )

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, the one that writes and prints."""
        return self._environment.rank == 0

    def fit(self) -> dict[str, float]:
        """Trains to the end, or to where a callback stops it; returns the last evaluation, empty without one.

        SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C preempt it: it saves, sets :attr:`preempted` and returns; the same
        program with ``resume="auto"`` continues it. A second Ctrl-C ends the process at once.

        The model is left in evaluation mode (``model.eval()``), with the last weights; see :meth:`load_best`. Another
        ``fit`` trains in the modes of this one.

        Raises:
            ConfigError: the run directory cannot be used, or the checkpoint to resume from.
            NonFiniteError: too many gradients were NaN or infinite, on every rank; the weights are untouched.
            DataError: an epoch gives nothing to train on.
        """
        if self._environment.launched:
            die_with_parent()
        train_again(self._components.model)
        folder = Path(self._run_dir or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}-{token_hex(2)}")
        start = Start(
            make_components=lambda: self._components,
            run_dir=RunDir(folder),
            launch=Launch(self._environment),
            began=self._began,
        )
        result = run(start)
        leave_evaluating(self._components.model)
        self.preempted, self.run_dir = result.preempted, result.run_dir
        return result.evaluation

    def load_best(self) -> Path:
        """Loads the weights with the best evaluation, which ``checkpoint.best`` keeps, into the model.

        On any engine and number of ranks, all of which call it. They may be of an earlier process, in a ``run_dir``
        that was given. An optimizer's state stays as it is. Where an ``EMA`` is what was evaluated, it is that average.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: there is none, or it is damaged.
            ConfigError: it is another model's.
        """
        if self.run_dir is None:
            raise CheckpointError("load_best() looks in the run directory: call fit() before, or give run_dir=")
        found: Path = load(BEST)(self._components, self._world(), self.run_dir)
        return found

    def test(self, dataset: Any) -> dict[str, Any]:
        """Evaluates the model as it is: ``test_loss``, and what else an evaluation's record has, ``metrics`` included.

        All ranks call it, with the same dataset, and get the same results: each sample counts once.

        Args:
            dataset: of samples as those to train on, with ``len()`` and ``[index]``, or a ``DataLoader`` over it; or
                several by name, with results ``test_NAME_loss``.

        Raises:
            MisuseError: it is no such dataset, or has no samples.
        """
        found: dict[str, Any] = load(SCORE)(self._components, self._world(), dataset)
        return found

    def predict(self, dataset: Any, function: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """The model's output for each sample, once, in the dataset's order, in evaluation mode and without gradients.

        All ranks call it, with the same dataset; each computes a part, and all get the whole, on the host. Write it to
        a file where :attr:`is_main`.

        Args:
            dataset: as of :meth:`test`; samples may have no labels.
            function: ``function(model, batch)`` gives what to keep of a batch in place of that, such as ``lambda model,
                batch: model(batch[0]).argmax(-1)``: tensors, in dicts and tuples, with a row for each sample.

        Returns:
            A tensor ``(samples, ...)``, in fp32 where it is in 16 bits; a list of a tensor a sample where they differ
            in shape, as of padded tokens. Of transformers' outputs it is the logits; of a ``WindowLoss`` what it
            represents; of other dicts and tuples, those of such tensors.

        Raises:
            MisuseError: as :meth:`test`; or there is no row for each sample.
        """
        return load(PREDICT)(self._components, self._world(), dataset, function)

    def _world(self) -> World:
        trainer = self._components.config.trainer
        return World.join(group_timeout(trainer), backend=trainer.backend)


def _checked(config: RunConfig | None) -> RunConfig:
    if config is None:
        return RunConfig()
    if not isinstance(config, RunConfig):
        remedy = "Give settings as keywords, or config=RunConfig.from_dict({...})"
        raise ConfigError("config", type(config).__name__, "not a RunConfig", remedy)
    return config


def _limits(max_steps: int | None, max_epochs: int | None) -> dict[str, Any]:
    require_type("trainer.max_steps", max_steps, int | None)  # RunConfig takes a text of digits, as a variable's is
    stated = max_steps is not None or max_epochs is not None
    return {"max_steps": max_steps, "max_epochs": max_epochs} if stated else {}


def _given(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}


def _with_schedule(config: RunConfig, given: Any, optimizers: Sequence[Any]) -> tuple[Any, RunConfig]:
    """The schedule that is given as an object, or None; and the configuration with its name, or description."""
    if isinstance(given, str):
        group = optimizers[0].param_groups[0] if optimizers and isinstance(optimizers[0], Optimizer) else None
        return None, replace(config, schedule=schedule_named(given, lr=built_with(group or {"lr": config.optim.lr})))
    if given is None or isinstance(given, Mapping):
        return None, config if given is None else replace(config, schedule=dict(given))
    target = given.func if isinstance(given, partial) else given
    return given, replace(config, schedule={"_target_": name_of(target)})


def _check_given(config: RunConfig, run_dir: str | Path | None, callbacks: Any, loggers: Any) -> None:
    if run_dir is None and config.resume == "auto":
        problem = "is not given, and resume=auto looks for its run there"
        raise ConfigError("run_dir", None, problem, "Give the folder")
    for name, given in (("callbacks", callbacks), ("loggers", loggers)):
        if not isinstance(given, list | tuple):
            raise ConfigError(name, type(given).__name__, "is no list", "Give them as a list")
    for logger in loggers:
        if not isinstance(logger, Logger):
            remedy = "Give objects of classes that inherit from distaccum.Logger"
            raise ConfigError("loggers", type(logger).__name__, "is no Logger", remedy)


def _record(
    config: RunConfig,
    objects: tuple[Any, Any, Any],
    description: str,
    callbacks: Sequence[Callback],
    optimizers: Sequence[Any],
) -> dict[str, Any]:
    """The configuration that trains, with descriptions of what is given in Python in place of what it names."""
    record = asdict(config)
    given: dict[str, Any] = dict(zip(("model", "loss", "data"), map(_describe, objects), strict=True))
    given["data"]["description"] = description
    given["callbacks"] = {name: _describe(one) for name, one in named(callbacks).items()} | record["callbacks"]
    described = [_describe_optimizer(one) for one in optimizers if isinstance(one, Optimizer)]
    if described:  # lr and fused are settings of an optimizer that is not built
        clip = {name: record["optim"][name] for name in ("clip_norm", "clip_value")}
        record["optim"] = {**clip, "optimizer": described[0] if len(described) == 1 else described}
    return {**record, **given}


def _describe(thing: object) -> dict[str, Any]:
    return {"_target_": name_of(type(thing))}


def _describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """The class and the settings of each parameter group, with its number of parameters in place of them."""
    groups = [
        {
            name: sum(parameter.numel() for parameter in value) if name == "params" else _plain(value)
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    return {**_describe(optimizer), "param_groups": groups}


def _plain(value: Any) -> Any:
    """A setting as JSON holds it; a text where it cannot."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
