"""Importing DeepSpeed when it is needed, without its output, and refusing what it cannot do or does wrongly."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from distaccum.config.engine import STAGES, DeepSpeedConfig
from distaccum.config.extras import install_command
from distaccum.engines.context import EngineContext
from distaccum.engines.deepspeed.config.generate import generate
from distaccum.engines.deepspeed.internals import check_version
from distaccum.engines.optimizer_step import StepGuard
from distaccum.errors import ConfigError, MisuseError

# Hooks on DeepSpeed's model that cast, and a lock on its engine's methods.


def compute_in(dtype: torch.dtype, model: nn.Module) -> None:
    """Casts a model's floating inputs to ``dtype``, which DeepSpeed does not, and its outputs to fp32.

    Losses are sums, for which 16 bits are too few.
    """

    def to(wanted: torch.dtype, values: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.to(wanted) if t.is_floating_point() else t, values)

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return to(dtype, (args, kwargs))

    def widen(_: nn.Module, __: Any, output: Any) -> Any:
        return to(torch.float32, output)

    model.register_forward_pre_hook(cast, with_kwargs=True)
    model.register_forward_hook(widen)


def gathered(parameters: Sequence[nn.Parameter], *, changes: bool) -> AbstractContextManager[None]:
    """Within the block partitioned parameters are whole on every rank; afterwards ranks have parts of rank 0's."""
    deepspeed = import_module("deepspeed")
    found: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=0 if changes else None
    )
    return found


class EngineLock:
    """Within the ``with`` block DeepSpeed's engine and its optimizer step; anywhere else both raise MisuseError.

    DeepSpeed's ``zero_grad`` raises while a window is open only: between two windows it drops what no window counts.
    """

    def __init__(self, engine: Any, guard: StepGuard, window_open: Callable[[], bool]) -> None:
        self._guard, self._window_open = guard, window_open
        self._open = False
        for name in ("step", "backward", "zero_grad"):
            setattr(engine, name, partial(self._guarded, name, getattr(engine, name)))

    def __enter__(self) -> None:
        self._open = True
        self._guard.__enter__()

    def release(self) -> None:
        """Removes the guards of model and optimizer; DeepSpeed's engine stays locked."""
        self._guard.release()

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._guard.__exit__(*error)

    def _guarded(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._open and (name != "zero_grad" or self._window_open()):
            remedy = "delete the line, as the window's end steps and zeroes by itself"
            raise MisuseError(f"{name}() of DeepSpeed's engine was called by hand: {remedy}")
        return method(*args, **kwargs)


PACKAGE = "deepspeed"
"""The name of the package, and of distaccum's extra."""
_LARGEST_BUCKET = 500_000_000  # elements: DeepSpeed's own default
_MENDED = (0, 19, 8)
_STAGE_3_MENDED = (0, 19, 3)
_ZERO_KEY = "engine.json.zero_optimization"
# Said at the import and at each skipped window. That there is no GPU is known; skips are logged by distaccum.
_KNOWN = ("Setting accelerator to CPU", "[deepspeed] OVERFLOW!", "You are using ZeRO with an untested optimizer")


def check(model: nn.Module, context: EngineContext) -> dict[str, Any]:
    """DeepSpeed's JSON for a model; see ``factory.EngineSpec``.

    Raises:
        ConfigError: DeepSpeed is not installed, or cannot do, or does wrongly, what the settings ask for.
    """
    assert isinstance(context.engine, DeepSpeedConfig)
    check_parameters(model, context.engine.stage)
    settings = generate(
        context.engine,
        context.precision,
        clip_norm=context.clip_norm,
        clip_value=context.clip_value,
        global_batch_size=context.global_batch_size,
        micro_batch_size=context.micro_batch_size,
        micro_steps=context.micro_steps,
        world_size=context.world_size,
    )
    deepspeed = load_deepspeed(context.device, planned=context.planned)
    check_known_bugs(settings, deepspeed.__version__, context.device.type)
    check_values(settings)
    if context.policy.compute_dtype is torch.float16:
        check_fp16(deepspeed, context.device)
    # By default 500 million elements, which stage 3 sets aside, however small the model.
    elements = sum(parameter.numel() for parameter in model.parameters())
    settings["zero_optimization"].setdefault("reduce_bucket_size", min(_LARGEST_BUCKET, elements))
    return settings


def load_deepspeed(device: torch.device, *, planned: bool = False) -> Any:
    """The module ``deepspeed``, set to ``device``'s kind of accelerator.

    ``planned``: only to check a run whose processes are not launched yet. DeepSpeed's logger, which writes
    to stdout, keeps warnings but for those that say nothing new.

    Raises:
        ConfigError: it is not installed, cannot be imported, or is a version that is not known to be exact.
    """
    # It calls torch by names that torch is about to give up.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logger = logging.getLogger("DeepSpeed")
    if _says_something_new not in logger.filters:
        logger.addFilter(_says_something_new)
    try:
        with suppress_output():
            deepspeed: Any = import_module("deepspeed")
    except ModuleNotFoundError as error:
        problem = "DeepSpeed is not installed" if error.name == "deepspeed" else f"DeepSpeed needs {error.name}"
        remedy = f"Run {install_command('deepspeed')}"
        raise ConfigError("engine", "deepspeed", problem, remedy) from error
    except ImportError as error:
        remedy = "Install versions of deepspeed and torch that go together, or use another engine"
        raise ConfigError("engine", "deepspeed", f"DeepSpeed cannot be imported ({error})", remedy) from error
    if not planned and not {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & set(os.environ):
        problem = "DeepSpeed reads LOCAL_RANK, which a launcher sets"
        raise ConfigError("engine", "deepspeed", problem, "Start with torchrun, with one process too")
    if device.type == "cpu":  # what it would compile at its first use, for inference alone, which takes a compiler
        with suppress_output():  # it tries the compiler for every kernel it has
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device.type == "cpu" and deepspeed.accelerator.get_accelerator().device_name() != "cpu":
        cpu = import_module("deepspeed.accelerator.cpu_accelerator")
        deepspeed.accelerator.set_accelerator(cpu.CPU_Accelerator())
    check_version(deepspeed)
    return deepspeed


@contextmanager
def suppress_output() -> Iterator[None]:
    """Around what DeepSpeed prints, and has setuptools log; its own logger, whose warnings count, is not affected."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)


def _says_something_new(record: logging.LogRecord) -> bool:
    return not any(known in record.getMessage() for known in _KNOWN)


def check_parameters(model: nn.Module, stage: int) -> None:
    """Raises ConfigError for a parameter that DeepSpeed cannot flatten, send or step, or trains wrongly."""
    tables = {f"{name}.weight": module for name, module in model.named_modules() if getattr(module, "sparse", None)}
    for name, parameter in model.named_parameters():
        fault, remedy = _fault(parameter), "Use engine=zero1, or change the model"
        if parameter.requires_grad and name in tables and parameter is getattr(tables[name], "weight", None):
            fault, remedy = "whose gradient is sparse", "Use sparse=False, which gives the same gradient"
        if fault:
            raise ConfigError("engine", "deepspeed", f"cannot take {name}, {fault}", remedy)
    trained = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
    if torch.float64 in trained:  # at stage 0 it reduces no such gradient at all
        problem = f"steps {trained[torch.float64]} in float32, which is in float64"
        raise ConfigError("engine", "deepspeed", problem, "Train in float32, or use engine=ddp, zero1 or fsdp2")
    if len(trained) > 1 and stage == STAGES[-1]:
        mixed = " and ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in trained.items())
        remedy = "Train all in float32, or use engine.stage=2"
        raise ConfigError("engine.stage", stage, f"DeepSpeed gathers one format, not {mixed}", remedy)


def _fault(parameter: nn.Parameter) -> str:
    if parameter.dim() == 0:
        return "which has no dimension"
    if parameter.numel() == 0:
        return "which has no elements"
    if parameter.is_complex():
        return "which is complex"
    if parameter.dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        return f"which is {str(parameter.dtype).removeprefix('torch.')}: no process group sends it"
    return ""


def check_values(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value among those passed on that DeepSpeed itself refuses."""
    with suppress_output():
        of_zero: Any = import_module("deepspeed.runtime.zero.config")
    try:
        of_zero.get_zero_config(dict(settings))
    except ValueError as error:  # pydantic's is one
        found: list[dict[str, Any]] = getattr(error, "errors", list)()
        first: dict[str, Any] = found[0] if found else {"loc": (), "input": None, "msg": str(error)}
        key = ".".join([_ZERO_KEY, *map(str, first["loc"])])
        problem = f"DeepSpeed refuses it ({first['msg']})"
        raise ConfigError(key, first["input"], problem, "Correct the value, or leave it out") from error


def check_fp16(deepspeed: Any, device: torch.device) -> None:
    """Raises ConfigError where DeepSpeed's fp16 does not run on ``device``."""
    if not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        problem = f"DeepSpeed does not compute in fp16 on this {device.type}"
        raise ConfigError("precision", "fp16", problem, "Use precision=bf16, engine=ddp, or a GPU")


def check_known_bugs(settings: Mapping[str, Any], version: str, device: str) -> None:
    """Refuses settings with which ``version`` of DeepSpeed trains wrongly on ``device`` (its type), and says nothing.

    Raises:
        ConfigError: naming the setting.
    """
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if zero.get("round_robin_gradients"):
        problem = f"DeepSpeed {version} mixes its fp32 weights up there when they are asked for by name"
        raise ConfigError(f"{_ZERO_KEY}.round_robin_gradients", True, problem, "Leave it false")
    number = tuple(map(int, version.split("+", maxsplit=1)[0].split(".")[:3]))
    if number >= _MENDED:
        return
    install = "install deepspeed>="
    if stage == 3 and number < _STAGE_3_MENDED:  # noqa: PLR2004
        problem = f"DeepSpeed {version} dies there when it gives a module's parameters back"
        remedy = f"Use engine.stage=2, or {install}{'.'.join(map(str, _STAGE_3_MENDED))}"
        raise ConfigError("engine.stage", stage, problem, remedy)
    mended = install + ".".join(map(str, _MENDED))
    if stage == 1 and settings.get("fp16", {}).get("enabled"):
        problem = f"DeepSpeed {version} reduces a copy of fp16 gradients there, and each rank steps on its own"
        raise ConfigError("engine.stage", stage, problem, f"Use engine.stage=2 or precision=bf16, or {mended}")
    remedy = f"Leave it true, or {mended}"
    if stage in (1, 2) and device == "cpu" and zero.get("contiguous_gradients") is False:
        problem = f"DeepSpeed {version} leaves gradients on the CPU unreduced there"
        raise ConfigError(f"{_ZERO_KEY}.contiguous_gradients", False, problem, remedy)
    if stage in (1, 2) and zero.get("reduce_scatter") is False:
        problem = f"DeepSpeed {version} loses reduced gradients there"
        raise ConfigError(f"{_ZERO_KEY}.reduce_scatter", False, problem, remedy)
