"""DeepSpeed's JSON, generated from the settings and merged with a user's file. Needs neither DeepSpeed nor torch.

Every key has one owner. What distaccum's settings decide is theirs, and a file that says otherwise is refused; the rest
of a file is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distaccum.config.checks import require
from distaccum.config.engine import DeepSpeedConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.engines.deepspeed.config.merge import Owned, check, held, merged, needs, put, read, shown
from distaccum.errors import ConfigError

_ZERO = "zero_optimization"
_NEVER = 1_000_000_000  # steps: older versions print every ten of them by default
# What a user's file may say otherwise.
_DEFAULTS: dict[str, Any] = {
    "steps_per_print": _NEVER,
    "wall_clock_breakdown": False,
    # At a window's end the backward passes are over, and leave nothing to overlap with.
    _ZERO: {"reduce_scatter": True, "overlap_comm": False},
}


def generate(
    engine: DeepSpeedConfig,
    precision: PrecisionConfig,
    *,
    clip_norm: float | None,
    clip_value: float | None,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    micro_steps: int | None,
    world_size: int,
) -> dict[str, Any]:
    """The whole DeepSpeed JSON, with what the user's own adds.

    DeepSpeed insists on batch = micro-batch x accumulation steps x ranks. Where the global batch does not divide so,
    the generated ``train_batch_size`` lies above it: nothing is computed from the three, as the loss is divided by its
    count and the engine says where a window ends. A file's ``train_batch_size`` is compared with the global batch.

    Args:
        engine: stage, offloads, and the user's own JSON.
        precision: formats and loss scaler; its ``max_scale`` has no place in the JSON, and is the engine's to keep.
        clip_norm: the largest global norm, or None.
        clip_value: refused.
        global_batch_size: samples of one update over all ranks, where they are known.
        micro_batch_size: samples of one forward/backward on one rank at most, where they are known.
        micro_steps: micro-steps of a full window, where they are known.
        world_size: number of ranks.

    Raises:
        ConfigError: what DeepSpeed cannot do; or all at once that is wrong with the user's JSON.
    """
    _check_engine(engine)
    _check_precision(precision)
    if clip_value is not None:
        remedy = "Use optim.clip_norm, or another engine"
        raise ConfigError("optim.clip_value", clip_value, "DeepSpeed clips by the global norm only", remedy)
    owned = [
        *_batch(global_batch_size, micro_batch_size, micro_steps, world_size),
        Owned(path="gradient_clipping", value=clip_norm or 0.0, by=f"optim.clip_norm={shown(clip_norm)}"),
        *_formats(precision, engine.stage),
        *_zero(engine),
        *held(),
    ]
    ours: dict[str, Any] = {}
    for one in owned:
        if one.emitted:
            put(ours, one.path, one.value)
    theirs = {} if engine.json is None else read(engine.json)
    check(theirs, owned)
    return merged(merged(_DEFAULTS, theirs), ours)


def _check_engine(engine: DeepSpeedConfig) -> None:
    stage = engine.stage
    if engine.offload_optimizer and stage not in (2, 3):
        problem = f"engine.stage={stage} shards no gradients for the CPU to step on"
        raise ConfigError("engine.offload_optimizer", True, problem, "Use engine.stage=2 or 3, or switch it off")
    if engine.offload_parameters and stage != 3:  # noqa: PLR2004
        problem = f"engine.stage={stage} does not shard parameters"
        raise ConfigError("engine.offload_parameters", True, problem, "Use engine.stage=3, or switch it off")


def _check_precision(precision: PrecisionConfig) -> None:
    for key, globs in (("keep_fp32", precision.keep_fp32), ("only", precision.only)):
        remedy = "Leave it empty, or use precision=fp32 or another engine"
        require(
            not (precision.casts and globs), f"precision.{key}", globs, "DeepSpeed casts the model as a whole", remedy
        )
    problem = "DeepSpeed makes its own 16-bit weights, and fp32 masters that are not distaccum's"
    remedy = "Use precision=bf16, whose weights DeepSpeed has in bf16 too, or engine=ddp, zero1 or fsdp2"
    require(not precision.keeps_masters, "precision", precision.name, problem, remedy)
    if precision.name != "fp16":
        return
    key, scaler = "precision.scaler", precision.scaler
    for name, value, fixed in (("growth", scaler.growth_factor, 2.0), ("backoff", scaler.backoff_factor, 0.5)):
        fits, remedy = scaler.static_scale is not None or value == fixed, f"Use {fixed:g}, or another engine"
        require(fits, f"{key}.{name}_factor", value, f"DeepSpeed's is {fixed:g}, always", remedy)
    whole = float(scaler.min_scale).is_integer()
    require(whole, f"{key}.min_scale", scaler.min_scale, "DeepSpeed takes whole numbers only", "Use 1 or more")


def _batch(
    global_batch_size: int | None, micro_batch_size: int | None, micro_steps: int | None, world_size: int
) -> Iterator[Owned]:
    micro, steps = micro_batch_size or 1, micro_steps or 1
    of_size, of_micro = f"batch.global_size={shown(global_batch_size)}", f"batch.micro_size={shown(micro_batch_size)}"
    yield Owned(path="train_batch_size", value=micro * steps * world_size, by=of_size, stated=global_batch_size)
    yield Owned(path="train_micro_batch_size_per_gpu", value=micro, by=of_micro)
    made = f"{of_size} and {of_micro} on {world_size} ranks make {shown(micro_steps)}"
    yield Owned(path="gradient_accumulation_steps", value=steps, by=made)
    # Its opposite reduces gradients after every micro-step at stages 2 and 3, and forbids coalesce_grad_reduction() and
    # set_gradient_accumulation_boundary(), with which the engine tells where a window ends.
    yield needs("managed_gradient_accumulation", True, "it says where a window ends, and reduces there")
    yield Owned(path="data_parallel_size", value=world_size, by=f"the world size is {world_size}", emitted=False)


def _formats(precision: PrecisionConfig, stage: int) -> Iterator[Owned]:
    name, scaler = precision.name, precision.scaler
    by = f"precision={name}"
    # Stage 0 refuses to accumulate in another format than that of the forward.
    kept = name if stage == 0 and precision.casts else "fp32"
    compute = name if precision.casts else "fp32"
    reduce = precision.reduce_dtype
    yield Owned(path="communication_data_type", value=reduce, by=f"precision.reduce_dtype={reduce}")
    yield Owned(path="data_types.grad_accum_dtype", value=kept, by=f"{by} at engine.stage={stage} has {kept}")
    yield Owned(path="data_types.param_dtype", value=compute, by=by, emitted=False)
    yield Owned(path="bf16.enabled", value=name == "bf16", by=by)
    yield Owned(path="fp16.enabled", value=name == "fp16", by=by)
    if name != "fp16":
        return
    for key, ours, value in (
        ("loss_scale", "static_scale", scaler.static_scale or 0),  # 0: a dynamic one
        ("initial_scale_power", "initial_scale_power", scaler.initial_scale_power),
        ("loss_scale_window", "growth_interval", scaler.growth_interval),
        ("hysteresis", "hysteresis", scaler.hysteresis),
        ("consecutive_hysteresis", "consecutive_hysteresis", scaler.consecutive_hysteresis),
        ("min_loss_scale", "min_scale", int(scaler.min_scale)),
    ):
        setting = f"precision.scaler.{ours}={shown(getattr(scaler, ours))}"
        yield Owned(path=f"fp16.{key}", value=value, by=setting)


def _zero(engine: DeepSpeedConfig) -> Iterator[Owned]:
    yield Owned(path=f"{_ZERO}.stage", value=engine.stage, by=f"engine.stage={engine.stage}")
    yield needs(f"{_ZERO}.contiguous_gradients", True, "without it some versions drop buckets on the CPU, in silence")
    for key, setting, on in (
        ("offload_optimizer", "offload_optimizer", engine.offload_optimizer),
        ("offload_param", "offload_parameters", engine.offload_parameters),
    ):
        device = "cpu" if on else "none"
        by = f"engine.{setting}={shown(on)} asks for {device}"
        yield Owned(path=f"{_ZERO}.{key}.device", value=device, by=by, emitted=on)
    # The optimizer is always the user's own, whatever it is, and DeepSpeed takes it for untested.
    yield needs("zero_allow_untested_optimizer", True, "optim.optimizer chooses it")
    yield needs("zero_force_ds_cpu_optimizer", False, "optim.optimizer chooses it")
