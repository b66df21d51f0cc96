"""distaccum's configuration, read out of a DeepSpeed JSON, and the schedule that DeepSpeed's are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from distaccum.config.checks import require, require_choice, require_count, require_positive
from distaccum.config.engine import DeepSpeedConfig
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.engines.deepspeed.config.generate import check, generate, get, held, read, shown
from distaccum.errors import ConfigError

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_STATE = "State it here"
_SCHEDULE = "Name a schedule of distaccum's or your own as schedule._target_"
_OPTIMIZER = "Name its class as optim.optimizer._target_"
_OWN_OPTIMIZERS = ("lamb", "lion", "muon", "muadam", "muadamw", "musgd", "onebitadam", "zerooneadam", "onebitlamb")
_OF_TORCH = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adamax",
    "LBFGS",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)
_DECAYS = {"WarmupLR": "none", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


class DeepSpeedWarmup:
    """DeepSpeed's ``WarmupLR``, ``WarmupDecayLR`` and ``WarmupCosineLR``, as a factor of the peak rate.

    Args:
        total_steps: updates until the end of the decay.
        warmup_steps: updates of the rise, from 1 on; DeepSpeed takes 1 for 2.
        curve: of the rise: ``log`` or ``linear``.
        decay: ``none``, ``linear`` down to ``first_ratio``, or ``cosine`` down to ``final_ratio``.
        first_ratio: the factor that the rise starts from.
        final_ratio: the factor at the end of a cosine.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        warmup_steps: int = 1000,
        curve: str = "log",
        decay: str = "none",
        first_ratio: float = 0.0,
        final_ratio: float = 0.0,
    ) -> None:
        require_choice("schedule.curve", curve, ("log", "linear"))
        require_choice("schedule.decay", decay, ("none", "linear", "cosine"))
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
            problem = "not a positive whole number"
            raise ConfigError("schedule.warmup_steps", warmup_steps, problem, "Use 1 or more updates")
        self._total, self._rise = total_steps, max(2, warmup_steps)
        self._curve, self._decay = curve, decay
        self._first, self._final = first_ratio, final_ratio

    def __call__(self, step: int) -> float:
        """Starts one update late, as DeepSpeed's do: the first two updates have the rate that the rise starts from."""
        done = step - 1
        if done < 0:
            return 0.0 if self._decay == "cosine" else self._first
        length = max(1, self._total - self._rise)
        if done < self._rise:
            share = math.log(done + 1) / math.log(self._rise) if self._curve == "log" else done / self._rise
        elif self._decay == "cosine":
            progress = min(1.0, (done - self._rise + 1) / length)
            return self._final + (1 - self._final) * (1 + math.cos(math.pi * progress)) / 2
        else:
            share = 1.0 if self._decay == "none" else max(0.0, (self._total - done) / length)
        return self._first + (1 - self._first) * share


def from_deepspeed_json(source: str | PathLike[str] | Mapping[str, Any], *, world_size: int) -> dict[str, Any]:
    """The settings that train as this JSON does on ``world_size`` ranks, by the keys of ``conf/``.

    They are for ``RunConfig.from_dict`` or for a YAML file. A setting that the JSON leaves out or states as "auto" has
    DeepSpeed's default: ``gradient_clipping`` is 1.0, and in fp16 and bf16 gradients travel in 16 bits. A batch that is
    not stated has distaccum's default. Without a ``scheduler`` the rate is constant. ``generate`` returns all that the
    JSON states, except for the settings of a format that "auto" switches off; ``engine.json`` holds what only DeepSpeed
    knows.

    Args:
        source: a file or a mapping.
        world_size: of the runs that the JSON is for, since its numbers depend on it.

    Raises:
        ConfigError: everything that has no counterpart, by name.
    """
    require_count("world_size", world_size, least=1)
    theirs = read(source)
    sections = {key: theirs.pop(key, None) for key in ("optimizer", "scheduler")}
    check(theirs, held())
    batch, steps = _batch(theirs, world_size)
    engine = _engine(theirs)
    precision = _precision(theirs, engine.stage)
    sizes: dict[str, Any] = {
        "global_batch_size": batch.get("global_size"),
        "micro_batch_size": batch.get("micro_size"),
        "micro_steps": steps,
    }
    clip_norm = get(theirs, "gradient_clipping")
    clip_norm = 1.0 if clip_norm is None else _number("gradient_clipping", clip_norm) or None
    require_positive("gradient_clipping", clip_norm)
    known: dict[str, Any] = {"clip_norm": clip_norm, "clip_value": None, "world_size": world_size, **sizes}
    generate(replace(engine, json=theirs), precision, **known)
    rest = _beyond(theirs, generate(engine, precision, **known))
    for name in ("fp16", "bf16"):
        if get(theirs, f"{name}.enabled") is None:  # "auto", and off: its other settings mean nothing
            rest.pop(name, None)
    lr, optimizer = _optimizer(sections["optimizer"])
    lr, schedule, total = _schedule(sections["scheduler"], lr)
    return {
        **({"batch": batch} if batch else {}),
        "engine": {
            "name": "deepspeed",
            "stage": engine.stage,
            "offload_optimizer": engine.offload_optimizer,
            "offload_parameters": engine.offload_parameters,
            "json": rest or None,
        },
        "precision": _as_node(precision),
        "optim": {**({} if lr is None else {"lr": lr}), "clip_norm": clip_norm, **optimizer},
        "schedule": schedule,
        **({} if total is None else {"trainer": {"max_steps": total}}),
    }


def _batch(theirs: Mapping[str, Any], ranks: int) -> tuple[dict[str, int], int | None]:
    """``batch``, and the accumulation steps; DeepSpeed's rules for what is left out of the three."""
    total, micro, steps = (None if theirs.get(key) is None else int(theirs[key]) for key in _SIZES)
    for key, value in zip(_SIZES, (total, micro, steps), strict=True):
        if value is not None and value < 1:
            raise ConfigError(key, value, "must be at least 1", "State a positive number")
    if total is None and micro is None:
        if steps is not None:
            raise ConfigError(_SIZES[2], steps, "steps of unknown size", f"State {_SIZES[0]} or {_SIZES[1]} too")
        return {}, None
    if micro is None:
        assert total is not None
        micro = total // ((steps or 1) * ranks)
    if steps is None:
        steps = 1 if total is None else total // (micro * ranks) if micro else 0
    made = micro * steps * ranks
    if total not in (None, made) or not made:
        problem = f"is not {_SIZES[1]}={micro} x {_SIZES[2]}={steps} x {ranks} ranks"
        raise ConfigError(_SIZES[0], total, problem, "Correct one of them, or give the world size that it is for")
    return {"global_size": made, "micro_size": micro}, steps


def _engine(theirs: Mapping[str, Any]) -> DeepSpeedConfig:
    zero = "zero_optimization"
    offloads = (get(theirs, f"{zero}.{key}.device") for key in ("offload_optimizer", "offload_param"))
    optimizer, parameters = (device not in (None, "none") for device in offloads)
    stage = int(get(theirs, f"{zero}.stage") or 0)
    return DeepSpeedConfig(stage=stage, offload_optimizer=optimizer, offload_parameters=parameters)


def _precision(theirs: Mapping[str, Any], stage: int) -> PrecisionConfig:
    name = next((name for name in ("fp16", "bf16") if get(theirs, f"{name}.enabled")), "fp32")
    reduce = get(theirs, "communication_data_type") or name
    if name != "fp16":
        return PrecisionConfig(name=name, reduce_dtype=reduce)
    # At stage 0 DeepSpeed backs off at the first overflow, whatever its default.
    said = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2 if stage else 1, **theirs["fp16"]}
    power = int(said["initial_scale_power"])
    scaler = ScalerConfig(
        initial_scale_power=power,
        growth_interval=int(said["loss_scale_window"]),
        hysteresis=int(said["hysteresis"]),
        consecutive_hysteresis=said.get("consecutive_hysteresis", False),
        min_scale=float(said.get("min_loss_scale", 1)),
        max_scale=max(2.0**24, 2.0**power),  # DeepSpeed has no ceiling
        static_scale=float(said.get("loss_scale", 0)) or None,
    )
    return PrecisionConfig(name=name, reduce_dtype=reduce, scaler=scaler)


def _as_node(precision: PrecisionConfig) -> dict[str, Any]:
    node: dict[str, Any] = {"name": precision.name, "reduce_dtype": precision.reduce_dtype}
    return {**node, "scaler": dict(vars(precision.scaler))} if precision.name == "fp16" else node


def _beyond(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """What ``theirs`` says and ``ours`` does not say already."""
    rest: dict[str, Any] = {}
    for key, value in theirs.items():
        under = ours.get(key)
        if isinstance(value, dict):
            below = _beyond(value, under if isinstance(under, dict) else {})
            if below:
                rest[key] = below
        elif value != under or isinstance(value, bool) != isinstance(under, bool):
            rest[key] = value
    return rest


def _parts(key: str, section: Any) -> tuple[str, dict[str, Any]]:
    """Type and parameters of an ``optimizer`` or ``scheduler`` section."""
    params = section.get("params", {}) if isinstance(section, dict) else None
    if not isinstance(params, dict) or not isinstance(section.get("type"), str):
        raise ConfigError(key, shown(section), "names no type and params", 'Write {"type": "...", "params": {...}}')
    _none_left(key, {name: value for name, value in section.items() if name not in ("type", "params")})
    return section["type"], dict(params)


def _none_left(key: str, left: Mapping[str, Any]) -> None:
    if left:
        listed = "; ".join(f"{key}.{name}={shown(value)}" for name, value in left.items())
        raise ConfigError(
            key, None, f"no counterpart of {listed}", "Delete it, and set what comes closest in distaccum"
        )


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(key, shown(value), "not a number", "State one number")
    return value


def _optimizer(section: Any) -> tuple[float | None, dict[str, Any]]:
    """The learning rate and ``optim.optimizer``; None and nothing where the program makes its own optimizer."""
    if section is None:
        return None, {}
    kind, params = _parts("optimizer", section)
    key = "optimizer.params"
    node: dict[str, Any]
    if kind.lower() in _OWN_OPTIMIZERS:
        raise ConfigError("optimizer.type", kind, "DeepSpeed's own", _OPTIMIZER)
    if kind.lower() in ("adam", "adamw"):
        # DeepSpeed makes AdamW of "Adam" unless it is told otherwise, with its own default of no decay.
        decoupled = params.pop("adam_w_mode", True) is not False or kind.lower() == "adamw"
        torchs = params.pop("torch_adam", False) is True
        params = {"lr": 1e-3, "weight_decay": 0.01 if torchs and decoupled else 0.0, **params}
        for name in ("bias_correction", "fp32_optimizer_states"):
            if params.get(name) is True:
                del params[name]
        kind = "AdamW" if decoupled else "Adam"
        node = {name: params.pop(name) for name in ("betas", "eps", "weight_decay", "amsgrad") if name in params}
        _none_left(key, {name: value for name, value in params.items() if name != "lr"})
    elif "max_grad_norm" in params:
        _none_left(key, {"max_grad_norm": params["max_grad_norm"]})
    else:
        kind = "Adagrad" if kind.lower() == "adagrad" else kind
        require(kind in _OF_TORCH, "optimizer.type", kind, "no optimizer of torch.optim", _OPTIMIZER)
        node = {name: value for name, value in params.items() if name != "lr"}
    if "lr" not in params:
        raise ConfigError(f"{key}.lr", None, "is not stated", _STATE)
    return _number(f"{key}.lr", params["lr"]), {"optimizer": {"_target_": f"torch.optim.{kind}", **node}}


def _schedule(section: Any, lr: float | None) -> tuple[float | None, dict[str, Any], int | None]:
    """The peak rate, ``schedule``, and the number of updates that the schedule is made for."""
    if section is None:
        return lr, {"_target_": "distaccum.train.schedules.Constant"}, None
    kind, params = _parts("scheduler", section)
    if kind not in _DECAYS:
        raise ConfigError("scheduler.type", kind, "no counterpart", _SCHEDULE)
    key, decay = "scheduler.params", _DECAYS[kind]
    node: dict[str, Any] = {"_target_": "distaccum.tools.from_deepspeed.DeepSpeedWarmup", "decay": decay}
    node["warmup_steps"] = params.pop("warmup_num_steps", 1000)
    node["curve"] = params.pop("warmup_type", "log")
    total = None if decay == "none" else params.pop("total_num_steps", None)
    if decay == "cosine":
        node["first_ratio"] = float(_number(key, params.pop("warmup_min_ratio", 0.0)))
        node["final_ratio"] = float(_number(key, params.pop("cos_min_ratio", 0.0001)))
    else:
        peak = params.pop("warmup_max_lr", 0.001 if decay == "linear" else lr)
        least = _number(f"{key}.warmup_min_lr", params.pop("warmup_min_lr", 0.0))
        if peak is None and least:
            raise ConfigError(f"{key}.warmup_max_lr", None, "is not stated, nor is an optimizer's rate", _STATE)
        lr = None if peak is None else _number(f"{key}.warmup_max_lr", peak)
        node["first_ratio"] = least / lr if lr else 0.0
    _none_left(key, params)
    DeepSpeedWarmup(total_steps=1, **{name: value for name, value in node.items() if name != "_target_"})
    return lr, node, None if total is None else int(_number(f"{key}.total_num_steps", total))
