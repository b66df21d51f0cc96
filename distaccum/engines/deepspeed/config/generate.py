"""DeepSpeed's JSON, generated from the settings and merged with a user's file. Needs neither DeepSpeed nor torch.

Every key has one owner. What distaccum's settings decide is theirs, and a file that says otherwise is refused; the rest
of a file is passed on as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from distaccum.config.checks import require
from distaccum.config.engine import STAGES, DeepSpeedConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.errors import ConfigError, near_misses

# What DeepSpeed's JSON may hold, as of 0.19.8, and which of it distaccum cannot let stand. Tables, no torch.


def _of(kind: type, names: str, section: str = "") -> dict[str, type]:
    return {f"{section}{name}": kind for name in names.split()}


# By dotted path; a dict is a section, object is not looked into.
KINDS: dict[str, type] = {
    **_of(
        int,
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print vocabulary_size"
        " sequence_parallel_size data_parallel_size",
    ),
    **_of(float, "gradient_clipping gradient_predivide_factor"),
    **_of(str, "communication_data_type seq_parallel_communication_data_type gradient_allreduce_op log_level"),
    **_of(
        bool,
        "managed_gradient_accumulation dump_state disable_python_gc disable_allgather prescale_gradients"
        " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown"
        " use_data_before_expert_parallelism dataloader_drop_last",
    ),
    **_of(
        dict,
        "zero_optimization fp16 bf16 bfloat16 data_types torch_autocast optimizer scheduler activation_checkpointing"
        " comms_logger flops_profiler autotuning hybrid_engine pipeline data_efficiency checkpoint aio datastates_ckpt"
        " weight_quantization compile timers tensor_parallel expert_parallel tensorboard wandb csv_monitor comet",
    ),
    **_of(bool, "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads", "fp16."),
    **_of(int, "initial_scale_power loss_scale_window hysteresis min_loss_scale", "fp16."),
    **_of(float, "loss_scale", "fp16."),
    **_of(
        bool,
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
        "bf16.",
    ),
    **_of(str, "grad_accum_dtype param_dtype buffer_dtype", "data_types."),
    **_of(object, "keep_in_fp32_modules", "data_types."),
    **_of(
        int,
        "stage reduce_bucket_size allgather_bucket_size sub_group_size prefetch_bucket_size"
        " stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold"
        " model_persistence_threshold stage3_model_persistence_threshold max_live_parameters"
        " stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance module_granularity_threshold"
        " stage3_module_granularity_threshold zero_hpz_partition_size",
        "zero_optimization.",
    ),
    **_of(
        bool,
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm"
        " compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload cpu_offload_param"
        " cpu_offload_use_pin_memory gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save"
        " stage3_gather_fp16_weights_on_model_save use_all_reduce_for_fetch_params"
        " stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential"
        " ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_quantized_weights"
        " zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear"
        " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks"
        " save_muon_momentum_buffer_in_memory",
        "zero_optimization.",
    ),
    **_of(dict, "offload_optimizer offload_param zenflow leaf_module", "zero_optimization."),
    **_of(str, "device", "zero_optimization.offload_optimizer."),
    **_of(int, "buffer_count", "zero_optimization.offload_optimizer."),
    **_of(float, "ratio cpuadam_cores_perc", "zero_optimization.offload_optimizer."),
    **_of(
        bool, "pin_memory pipeline_read pipeline_write fast_init super_offload", "zero_optimization.offload_optimizer."
    ),
    **_of(object, "nvme_path", "zero_optimization.offload_optimizer."),
    **_of(str, "device", "zero_optimization.offload_param."),
    **_of(int, "buffer_count buffer_size max_in_cpu", "zero_optimization.offload_param."),
    **_of(bool, "pin_memory", "zero_optimization.offload_param."),
    **_of(object, "nvme_path", "zero_optimization.offload_param."),
}
# The sections (and the top level, "") listed completely above: what else is in them is a spelling mistake. At the top
# level DeepSpeed itself ignores it in silence.
CLOSED = (
    "",
    "fp16",
    "bf16",
    "data_types",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)

_OWN_OPTIMIZER = "optim=... owns it (from_deepspeed_json translates a file)"
_OWN_SCHEDULE = "schedule=... owns it (from_deepspeed_json translates a file)"
_REMOVED = "DeepSpeed has removed it, and refuses or ignores it"

# Sections that must not be there at all, with the reason.
REFUSED: dict[str, str] = {
    "optimizer": _OWN_OPTIMIZER,
    "scheduler": _OWN_SCHEDULE,
    "amp": "Apex is not used, precision=... chooses the format",
    "elasticity": "it changes the batch, which batch.global_size states for any number of ranks",
    "curriculum_learning": "it changes the data of a batch, which distaccum plans",
    "progressive_layer_drop": "it changes what the gradient is of",
    "sparse_gradients": _REMOVED,
    "pipeline": "every rank holds a replica or a shard of the whole model, none a stage of it",
    "nebula": _REMOVED,
    "compression_training": _REMOVED,
    "quantize_training": _REMOVED,
    "eigenvalue": _REMOVED,
    "sparse_attention": _REMOVED,
    "graph_harvesting": _REMOVED,
    "zero_optimization.zenflow": "it applies gradients late, each to other weights than they were taken at",
    "zero_optimization.mics_shard_size": _REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.zeropp_loco_param": _REMOVED,
}

_ONE_NORMALISER = "distaccum divides the loss once, by its count"
_MASTERS = "parameters and accumulated gradients are fp32"
_REPLICAS = "every rank computes other samples"

# Settings that may be left out, or else must have this value, with the reason.
HELD: dict[str, tuple[Any, str]] = {
    "torch_autocast.enabled": (
        False,
        "in 0.19.8 its fp16 at stages 1 and 2 clips by the scaled norm and never backs off, so set precision=...",
    ),
    "prescale_gradients": (False, _ONE_NORMALISER),
    "gradient_predivide_factor": (1.0, _ONE_NORMALISER),
    "gradient_allreduce_op": ("mean", _ONE_NORMALISER),
    "sequence_parallel_size": (1, _REPLICAS),
    "tensor_parallel.autotp_size": (0, _REPLICAS),
    "expert_parallel.enabled": (False, _REPLICAS),
    "data_efficiency.enabled": (False, "it changes the data of a batch, which distaccum plans"),
    "autotuning.enabled": (False, "it changes the batch, which batch.global_size states"),
    "hybrid_engine.enabled": (False, "it is another engine, for generation in between"),
    "compile.deepcompile": (False, "it reduces gradients on its own, not once a window"),
    "fp16.fp16_master_weights_and_grads": (False, _MASTERS),
    "bf16.bf16_master_weights_and_grads": (False, _MASTERS),
    "bf16.bf16_optimizer_states": (False, _MASTERS),
    "bf16.check_grad_overflow": (True, "a gradient that is not finite must not be applied"),
    "zero_optimization.compute_grad_norm": (True, "every update reports its norm"),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed has removed it"),
    "zero_optimization.zero_quantized_gradients": (False, "quantised gradients are not the batch's"),
    "zero_optimization.zero_quantized_weights": (False, "quantised weights give another gradient"),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, "quantised weights give another gradient"),
}


# A user's DeepSpeed JSON: read, compared with what distaccum decides, merged. Needs no DeepSpeed.

_KEY = "engine.json"
_ZERO = "zero_optimization"
_AGREE = 'Change one of each pair, or write "auto" in the file'
_LEAVE_OUT = "Leave out what distaccum needs otherwise"
_SHOWN = 60  # characters of a value
_FORMATS = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
# "auto" means something to DeepSpeed itself here.
_OWN_AUTO = ("replace_method", "keep_in_fp32_modules")


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A value that distaccum decides: where in the JSON, and ``by`` which setting.

    ``stated``: what a file has to say there, where that is not the value itself. ``emitted``: whether the generated
    JSON says it, too. ``remedy``: for a file that says otherwise.
    """

    path: str
    value: Any
    by: str
    stated: Any = None
    emitted: bool = True
    remedy: str = _AGREE


def needs(path: str, value: Any, why: str, *, emitted: bool = True) -> Owned:
    """A value that no setting decides."""
    by = f"distaccum needs {shown(value)}: {why}"
    return Owned(path=path, value=value, by=by, emitted=emitted, remedy=_LEAVE_OUT)


def held() -> list[Owned]:
    """The keys that may be left out of the JSON, or else must have one value."""
    return [needs(path, value, why, emitted=False) for path, (value, why) in HELD.items()]


def read(source: object) -> dict[str, Any]:
    """A DeepSpeed JSON from a file or a mapping, without the keys that say "auto" or null, and in today's spelling.

    Raises:
        ConfigError: no such file, not JSON, not a mapping, or a key stated twice.
    """
    if isinstance(source, str | PathLike):
        path = Path(fspath(source))
        try:
            node = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        except OSError as error:
            remedy = "Give an existing file, or a mapping"
            raise ConfigError(_KEY, path, f"cannot be read ({error.strerror})", remedy) from error
        except ValueError as error:
            raise ConfigError(_KEY, path, f"not JSON ({error})", "Correct the file") from error
    else:
        path, node = None, source
    if not isinstance(node, Mapping):
        problem = f"holds no mapping but {shown(node)}"
        raise ConfigError(_KEY, path, problem, 'Give DeepSpeed\'s JSON: {"key": value, ...}, or a file of it')
    return _renamed(_without_auto(node))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    node = dict(pairs)
    if len(node) != len(pairs):
        twice = sorted({key for key in node if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"stated twice: {', '.join(twice)}")
    return node


def _without_auto(node: Mapping[str, Any]) -> dict[str, Any]:
    """At every depth: "auto" asks for our value, or for DeepSpeed's default, and both mean leaving it out."""
    plain: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            plain[str(key)] = _without_auto(value)
        elif value is not None and (value != "auto" or key in _OWN_AUTO):
            plain[str(key)] = deepcopy(value)
    return plain


def _renamed(node: dict[str, Any]) -> dict[str, Any]:
    """Old spellings, which DeepSpeed ignores or refuses next to the new ones, and other names of number formats."""
    if "bfloat16" in node:
        if "bf16" in node:
            raise ConfigError(_KEY, None, "bf16 and bfloat16 are two names of one section", "Delete bfloat16")
        node["bf16"] = node.pop("bfloat16")
    zero = node.get(_ZERO)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if isinstance(zero, dict) and isinstance(zero.get(old), bool):
            if new in zero:
                raise ConfigError(_KEY, None, f"{_ZERO}.{old} is the old name of {new}", f"Delete {old}")
            if zero.pop(old):
                zero[new] = {"device": "cpu"}
    for path in ("communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype"):
        value = get(node, path)
        if isinstance(value, str):
            put(node, path, _FORMATS.get(value.lower(), value))
    return node


def check(theirs: dict[str, Any], owned: list[Owned]) -> None:
    """Raises one ConfigError of all that is wrong with a user's JSON, each with both values."""
    owners = {one.path: one for one in owned}
    faults: list[str] = []
    remedies: dict[str, None] = {}
    for section, key, value in _walk(theirs):
        fault, remedy = _fault(section, key, value, owners)
        if fault:
            faults.append(fault)
            remedies[remedy] = None
    if get(theirs, "fp16.enabled") is True and get(theirs, "bf16.enabled") is True:
        faults.append("fp16.enabled=true and bf16.enabled=true exclude each other")
        remedies["Keep that of precision=..."] = None
    if faults:
        raise ConfigError(_KEY, None, "; ".join(faults), ". ".join(remedies))


def _fault(section: str, key: str, value: Any, owners: Mapping[str, Owned]) -> tuple[str, str]:
    """What is wrong with one key of a user's JSON, and what to do; or two empty strings."""
    path = _path(section, key)
    what, owner = f"{path}={shown(value)}", owners.get(path)
    if path in REFUSED:
        return f"{what}: {REFUSED[path]}", f"Delete {path}"
    kind = KINDS.get(path)
    if section in CLOSED and (kind is None or "." in key):
        known = [name for name in KINDS if name.rpartition(".")[0] == section]
        hint = near_misses(path, known)
        return f"{what}: no such key of DeepSpeed's{hint}", "Correct or delete what it does not know"
    kind = kind or (object if owner is None else type(owner.value))
    ours = "" if owner is None else owner.by
    if not _is(value, kind):
        also = f", and {ours}" if ours else ""
        return f"{what} is not {_NAMES[kind]}{also}", "Write numbers, true and false without quotes"
    if path == f"{_ZERO}.stage" and value not in STAGES:
        return f"{what} is no stage of ZeRO, and {ours}", "Use 0, 1, 2 or 3 in both places"
    if owner is not None and value != (owner.value if owner.stated is None else owner.stated):
        return f"{what} but {ours}", owner.remedy
    return "", ""


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section"}


def _is(value: Any, kind: type) -> bool:
    if kind is object:
        return True
    if kind in (int, float):  # a whole number may be written 5e8
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind is float or float(value).is_integer())
    return isinstance(value, kind)


def _walk(node: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every key and its section, sections before what they hold; not what is below a refused one."""
    for key, value in node.items():
        yield section, key, value
        if isinstance(value, dict) and _path(section, key) not in REFUSED:
            yield from _walk(value, _path(section, key))


def _path(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def get(node: Mapping[str, Any], path: str) -> Any:
    """What lies at a dotted path, or None."""
    value: Any = node
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def put(node: dict[str, Any], path: str, value: Any) -> None:
    """Puts a value at a dotted path, and makes the sections on the way."""
    *sections, key = path.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[key] = value


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both at every depth; where they disagree, what is ``above``."""
    both = dict(below)
    for key, value in above.items():
        under = both.get(key)
        both[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else deepcopy(value)
    return both


def shown(value: object) -> str:
    """As JSON has it, cut short; text without quotes unless it looks like something else."""
    if isinstance(value, str) and value.lower() not in ("", "true", "false", "null") and value[0].isalpha():
        return value
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


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
