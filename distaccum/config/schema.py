"""The settings: frozen dataclasses that are the schema of ``conf/``.

A group whose content is the user's to choose (model, data, loss, schedule, ``optim.optimizer``) is a plain mapping with
a ``_target_``; everything else is typed here and checked in ``__post_init__``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Optional, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf import errors as oc

from distaccum.config.batch import BatchConfig
from distaccum.config.checks import (
    AUTO,
    NUMERICS,
    REPRODUCIBLE,
    ROLLBACK,
    Node,
    as_yaml_has_it,
    is_one_of,
    require,
    require_annotated,
    require_choice,
    require_named,
    require_seed,
)
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import DDPConfig, engine_config, settings_of, unknown_setting
from distaccum.config.metrics import MetricsConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.config.trainer import (
    CheckpointConfig,
    ElasticConfig,
    EvalConfig,
    InitConfig,
    OptimConfig,
    ProfileConfig,
    TrainerConfig,
)
from distaccum.errors import ConfigError, near_misses
from distaccum.program import MODEL_AND_DATA, load


def conf_dir() -> Path:
    """The YAML groups: packaged inside an installed distaccum, at the top of a checkout."""
    package = Path(__file__).parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def schedule_named(name: str, *, lr: Any) -> Node:
    """What the file of this name in ``conf/schedule`` holds, as ``schedule=NAME`` has it on the command line.

    Args:
        name: of the file.
        lr: what ``optim.lr`` stands for in it.

    Raises:
        ConfigError: there is none.
    """
    files = {path.stem: path for path in sorted((conf_dir() / "schedule").glob("*.yaml"))}
    if name not in files:
        remedy = f"Use one of {', '.join(files)}, a function of the applied updates, or a scheduler of torch's"
        raise ConfigError("schedule", name, f"no such schedule{near_misses(name, files)}", remedy)
    node = OmegaConf.create({"optim": {"lr": lr}, "schedule": OmegaConf.load(files[name])})
    return cast(Node, plain(node)["schedule"])


_COSINE = {"_target_": "distaccum.train.schedules.Cosine", "warmup_ratio": 0.1, "final_ratio": 0.05}


# OmegaConf reads `Optional[X]` but not `X | None` in schemas on every version supported, hence the noqa marks.


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of a run.

    Args:
        seed: Random seed for initial weights, data order and dropout.
        numerics (fast | reproducible): ``reproducible`` makes a run's numbers the same bits on any number of ranks.
        deterministic: Use kernels that give the same bits in every run; an operator that has none ends the run.
        resume (never | auto | path): Where to start: from zero (``never``), from the newest valid checkpoint in the run
            directory (``auto``), or from a checkpoint, such as ``runs/first/checkpoints/step-100``.
        resume_allow: Settings that may differ from the checkpoint's although they change what its state means, as
            ``[data]`` or ``[data.path]``.
        init_from (path | null): Weights to start from: a safetensors file or a folder with one. Optimizer and progress
            start from zero. ``resume=auto`` ignores it once there is a checkpoint.
        batch: How the global batch is stated: in ``samples`` or in ``tokens``.
        engine: How parameters, gradients and optimizer state are distributed over the ranks.
        precision: The number format.
        compile: The part of the model that ``torch.compile`` compiles.
        model: The model: a group's name, or a ``_target_`` of your own.
        data: The data: a group's name, or a ``_target_`` of your own.
        loss: The loss: a group's name, or a ``_target_`` of your own.
        optim: The optimizer, its learning rate, clipping and parameter groups.
        schedule: The learning rate schedule: a factor of ``optim.lr`` for each step. Default: warm-up and cosine;
            constant for an optimizer that is made in Python.
        trainer: The length of the run, and its intervals.
        callbacks: Callbacks by name, each with a ``_target_``.
        checkpoint: When checkpoints are saved, and which are kept.
        metrics: The loggers.
        init: Differences between the files of ``init_from`` and the model that are allowed.
        profile: The steps that are profiled.
        eval: Texts that the model writes at evaluations.
        elastic: An elastic job's reaction to ranks that die or come back.
        objective (str | list[str] | null): The metric a sweeper optimizes: one name or a list, from the last evaluation
            or log entry, such as ``eval_accuracy``. null: ``eval_loss``, if the run evaluates.
    """

    seed: int = 0
    numerics: str = "fast"
    deterministic: bool = False
    objective: Any = None
    resume: str = "never"
    resume_allow: list[str] = field(default_factory=list)
    init_from: Optional[str] = None  # noqa: UP045
    batch: BatchConfig = field(default_factory=BatchConfig)
    engine: Any = field(default_factory=DDPConfig)  # an EngineConfig: OmegaConf has no union of dataclasses
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    model: Node = field(default_factory=dict)
    data: Node = field(default_factory=dict)
    loss: Node = field(default_factory=dict)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: Node = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: Node = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    init: InitConfig = field(default_factory=InitConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        for name in ("missing", "unexpected"):
            globs = getattr(self.init, name, [])
            needed = self.init_from is not None or not globs
            require(needed, f"init.{name}", globs, "and init_from is null, so that nothing is read", "State init_from")
        for name, made in (("engine", engine_config), ("precision", PrecisionConfig.of), ("compile", CompileConfig.of)):
            object.__setattr__(self, name, made(getattr(self, name)))  # which may be a name
        require_annotated("", self)
        named = [self.objective] if isinstance(self.objective, str | None) else self.objective
        texts = isinstance(named, list | tuple) and named and all(isinstance(one, str | None) for one in named)
        remedy = "Give one, as eval_loss, or several, as [eval_loss,tokens_per_s]"
        require(bool(texts), "objective", self.objective, "is not a name", remedy)
        require_choice("numerics", self.numerics, NUMERICS)
        require_named("callbacks", self.callbacks)
        self._check_units()
        rolls_back = self.trainer.on_spike == ROLLBACK
        problem = "and checkpoint.every=0 saves nothing to roll back to"
        saves = not rolls_back or self.checkpoint.saves
        require(saves, "trainer.on_spike", self.trainer.on_spike, problem, "Give a number of updates, or use skip")
        self.metrics.check_checkpoints(self.checkpoint)
        require_seed("seed", self.seed)
        if self.resume not in ("never", "auto"):
            exists = os.path.exists(self.resume)  # noqa: PTH110  which takes a name that is too long for none
            require(exists, "resume", self.resume, "no such checkpoint folder", "Use never, auto or an existing path")
            problem = f"and resume={self.resume} has weights too"
            require(self.init_from is None, "init_from", self.init_from, problem, "Leave one of them out")

    @property
    def reproducible(self) -> bool:
        """Whether its numbers are the same on any number of ranks."""
        return self.numerics == REPRODUCIBLE

    def with_schedule(self, *, own_optimizer: bool) -> RunConfig:
        """The same with its schedule written out; ``own_optimizer``: whether the optimizer is not this one's."""
        if "_target_" in self.schedule:
            return self
        constant = {"_target_": "distaccum.train.schedules.Constant"}
        return replace(self, schedule=constant if own_optimizer and not self.schedule else _COSINE | self.schedule)

    def _check_units(self) -> None:
        size, remedy = self.batch.unit_size, "Use numerics=reproducible, or state batch.micro_size"
        used = size is None or self.reproducible
        require(used, "batch.unit_size", size, "and numerics=fast knows no units", remedy)
        found = self.reproducible and self.batch.rehearses
        problem = "is found by rate and memory, and with numerics=reproducible a run's numbers depend on it"
        key = "batch.micro_tokens" if is_one_of((AUTO,), self.batch.micro_tokens) else "batch.micro_size"
        require(not found, key, AUTO, problem, "State a number, as batch.unit_size")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The configuration of nested plain values, by the keys of ``conf/``; what is left out has its default.

        An engine, a precision, a schedule or what to compile may be given by its name alone.

        Raises:
            ConfigError: an unknown key, or a value of the wrong type or out of range.
        """
        return _from_plain(values)


def _writable(node: Any) -> Any:
    """Removes OmegaConf's read-only flag of frozen dataclasses at every depth, so that YAML can be merged."""
    if isinstance(node, DictConfig):
        OmegaConf.set_readonly(node, False)
        for key in node:
            _writable(node._get_node(key))
    return node


def plain(node: DictConfig) -> Node:
    """A composed Hydra node as plain values, interpolations resolved.

    Raises:
        ConfigError: a required value was left out, or an interpolation leads nowhere.
    """
    try:
        return cast(Node, OmegaConf.to_container(node, resolve=True, throw_on_missing=True))
    except oc.InterpolationResolutionError as error:
        raise load(MODEL_AND_DATA)(translate(error), node) from error
    except oc.OmegaConfBaseException as error:
        raise translate(error) from error


def names_of(objective: Any) -> list[str]:
    """The names of an objective, which is a name, several, or None."""
    if objective is None:
        return []
    return [objective] if isinstance(objective, str) else list(objective)


def as_typed(overrides: Any) -> list[str]:
    """Hydra's list of overrides; an interpolation in one is not resolved, as each look at its list would do."""
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def _without_another_optimizers(schema: DictConfig, node: Mapping[str, Any]) -> DictConfig:
    """Empties the optimizer's node where ``node`` names a ``_target_``: its defaults are not for that target."""
    optim = node.get("optim")
    optimizer = optim.get("optimizer") if isinstance(optim, Mapping) else None
    if isinstance(optimizer, Mapping) and "_target_" in optimizer:
        OmegaConf.update(schema, "optim.optimizer", {}, merge=False)
    return schema


def _from_plain(node: Mapping[str, Any]) -> RunConfig:
    named = {key: {"name": node[key]} for key in ("engine", "precision", "compile") if isinstance(node.get(key), str)}
    node = {**node, **named}
    if isinstance(schedule := node.get("schedule"), str):
        optim = node.get("optim")
        lr = optim.get("lr", OptimConfig.lr) if isinstance(optim, Mapping) else OptimConfig.lr
        node["schedule"] = schedule_named(schedule, lr=lr)
    if is_dataclass(node.get("engine", "")) and not isinstance(node["engine"], type):
        node["engine"] = asdict(engine_config(node["engine"]))
    engine_schema = settings_of(_name_of(node))
    try:
        schema = _without_another_optimizers(_writable(OmegaConf.structured(RunConfig)), node)
        OmegaConf.update(schema, "batch.micro_size", None)  # OmegaConf reads the defaults of a made BatchConfig
        OmegaConf.update(schema, "engine", OmegaConf.structured(engine_schema), merge=False)
        typed = OmegaConf.merge(_writable(schema), node)
    except oc.OmegaConfBaseException as error:
        raise translate(error, node) from error
    return cast(RunConfig, _construct(RunConfig, OmegaConf.to_container(typed), engine=engine_schema))


def _name_of(node: Mapping[str, Any]) -> Any:
    """The name of the node's engine."""
    engine = node.get("engine", "ddp")
    return engine.get("name", "ddp") if isinstance(engine, Mapping) else engine


def _construct(schema: type, values: Any, **chosen: type) -> Any:
    """Makes the frozen dataclass of plain values, with some fields' types ``chosen``.

    OmegaConf's own conversion loses the errors that ``__post_init__`` raises.
    """
    hints = get_type_hints(schema) | chosen
    return schema(**{k: _construct(hints[k], v) if is_dataclass(hints[k]) else v for k, v in values.items()})


def translate(error: oc.OmegaConfBaseException, node: Mapping[str, Any] | None = None) -> ConfigError:
    """The ConfigError for an error of OmegaConf; the value is looked up in ``node``."""
    key = str(error.full_key or "")
    value = None if node is None else OmegaConf.select(OmegaConf.create(dict(node), flags={"allow_objects": True}), key)
    first_line = str(error.msg or error).splitlines()[0]
    match error:
        case oc.MissingMandatoryValue():
            key = key or first_line.rsplit(" ", 1)[-1]
            return ConfigError(key, "???", "is required and was not given", f"Add {key}=... to the command line")
        case oc.ConfigKeyError() | oc.ConfigAttributeError():
            return unknown_key(key, value, _name_of(node or {}))
        case oc.InterpolationResolutionError():
            return ConfigError(key, value, first_line, "Choose groups that go together, or state the value yourself")
        case oc.UnsupportedValueType():
            return ConfigError(key, value, first_line, "Give a number, a text, a list or a mapping")
        case oc.ValidationError():
            return ConfigError(key, value, first_line, as_yaml_has_it(value))
        case _:
            return ConfigError(key or "configuration", value, first_line, "Correct this value")


def unknown_key(key: str, value: object, engine: str, known: Iterable[str] = ()) -> ConfigError:
    """The ConfigError for a setting that ``engine`` does not have, with similar names.

    ``known`` are the names of all settings; by default those of this schema.
    """
    group, _, setting = key.partition(".")
    if group == "engine" and setting:
        return unknown_setting(engine, setting, value)
    hint = near_misses(key, known or dotted(OmegaConf.to_container(OmegaConf.structured(RunConfig))))
    return ConfigError(key, value, f"no such setting{hint}", "`--cfg job` prints all settings there are")


def dotted(node: Any, prefix: str = "") -> list[str]:
    """The names of all settings in nested plain values, as ``optim.lr``."""
    found = []
    for key, value in node.items() if isinstance(node, dict) else ():
        found += [f"{prefix}{key}", *dotted(value, f"{prefix}{key}.")]
    return found
