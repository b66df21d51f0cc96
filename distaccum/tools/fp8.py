"""``precision=fp8``: linear layers whose products torchao computes in 8-bit floats; everything else is as in ``bf16``.

Each row of an input, of a weight and of a gradient has a scale of its own, a power of two. So a sample's rounding does
not depend on the others of its micro-batch, but for elements below 2**-15 of the largest of their row. By one scale for
the tensor, which is no power of two, every rounding of a sample would depend on the whole micro-batch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distaccum.config.extras import install_command
from distaccum.engines.blocks import blocks_of
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import SPECS
from distaccum.errors import ConfigError, near_misses, shorten
from distaccum.precision import hardware
from distaccum.precision.selection import select

NAME = "fp8"
_MULTIPLE = 16  # of the sizes that GPUs multiply in fp8
_CAPABLE = (8, 9)
_log = logging.getLogger(__name__)


def check(model: nn.Module, context: EngineContext) -> None:
    """Raises ConfigError for what fp8 cannot do, where that is the precision."""
    if context.precision.name == NAME:
        _check_settings(context)
        _check_hardware(context)
        _chosen(model, context)
        if find_spec("torchao") is None:
            raise ConfigError("precision", NAME, "torchao is not installed", f"Run {install_command('fp8')}")
        try:
            with _quiet():
                import_module("torchao.float8")
        except ImportError as error:
            problem = f"this torchao cannot be imported with torch {torch.__version__}: {error}"
            raise ConfigError("precision", NAME, problem, "Use a newer torch, or precision=bf16") from error


class Fp8:
    """The model's layers that compute in fp8, in place: hooks, names and parameters stay theirs.

    Args:
        model: checked, and not wrapped yet.
        context: whose precision says whether there are any, and which.
    """

    def __init__(self, model: nn.Module, context: EngineContext) -> None:
        self._model, self._context = model, context
        self._undo: list[Callable[[], None]] = []

    def convert(self) -> None:
        """Where the precision is another, it does nothing."""
        if self._context.precision.name != NAME:
            return
        chosen = _chosen(self._model, self._context)
        for linear in chosen.values():
            self._undo.append(_convert(linear, self._context))
        others = sum(isinstance(module, nn.Linear) for module in self._model.modules()) - len(chosen)
        _log.info("fp8: %d linear layers (%s); %d others in bf16", len(chosen), shorten(chosen), others)

    def undo(self) -> None:
        """Makes them plain linear layers again; what is sharded itself stays so, as ``close()`` says."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def _convert(linear: nn.Linear, context: EngineContext) -> Callable[[], None]:
    with _quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  an optional extra

        config = Float8LinearConfig.from_recipe_name(context.precision.fp8_recipe)
        # Padded with zeros, a micro-batch may have any number of tokens: the weight's gradient is a sum over them.
        config = replace(config, emulate=context.precision.fp8_emulate, pad_inner_dim=True)
        made = convert_to_float8_training(linear, config=config)
    added = {name: value for name, value in vars(made).items() if name not in vars(linear)}
    linear.__dict__.update(added)
    linear.__class__ = kind = type(made)
    handle: RemovableHandle = linear.register_forward_pre_hook(_cast_input, with_kwargs=True)

    def undo() -> None:
        handle.remove()
        if type(linear) is kind:
            linear.__class__ = nn.Linear
            for name in added:
                linear.__dict__.pop(name)

    return undo


def _cast_input(linear: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """As autocast does for a plain layer: torchao's asks for that of CUDA alone, whatever the device."""
    return tuple(map(_cast, inputs)), {name: _cast(value) for name, value in named.items()}


def _cast(value: Any) -> Any:
    if isinstance(value, Tensor) and torch.is_autocast_enabled(value.device.type):
        return value.to(torch.get_autocast_dtype(value.device.type))
    return value


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao warns of kernels of its own that this machine cannot load, and of torch's newer names."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _check_settings(context: EngineContext) -> None:
    """Refuses other engines and settings by name."""
    precision, engine = context.precision, context.engine
    if not engine.multiplies_fp8:
        able = [name for name, spec in SPECS.items() if spec.config.multiplies_fp8]
        problem = f"runs on {' and '.join(able)}, not on engine={engine.name}"
        raise ConfigError("precision", NAME, problem, f"Use engine={' or '.join(able)}, or precision=bf16")
    odd = {
        "elastic training": context.builder is not None,
        "numerics=reproducible": context.numerics.fixed_order,
        "precision.only": bool(precision.only),
        "precision.reduce_dtype=fp16": precision.scales_loss,
    }
    if found := next((name for name, stated in odd.items() if stated), None):
        remedy = "Use precision.fp8_modules" if found == "precision.only" else "Leave it out, or use precision=bf16"
        raise ConfigError("precision", NAME, f"does not go together with {found}", remedy)


def _check_hardware(context: EngineContext) -> None:
    if context.precision.fp8_emulate:
        return
    gpu = hardware.gpu_of(context.device)
    if gpu is None or gpu.capability is None or gpu.capability < _CAPABLE or torch.version.hip:
        problem = f"{'a CPU' if gpu is None else gpu} has no fp8 arithmetic that torchao uses"
        remedy = "Use precision=bf16; precision.fp8_emulate=true rounds as fp8 does, and is slower than fp32"
        raise ConfigError("precision", NAME, problem, remedy)


def _chosen(model: nn.Module, context: EngineContext) -> Mapping[str, nn.Linear]:
    """The layers to convert, by name: those of ``fp8_modules``, or else of the model's blocks.

    Raises:
        ConfigError: a glob names none, there are none, or one cannot be multiplied in fp8.
    """
    globs = context.precision.fp8_modules
    key, value = "precision.fp8_modules", ",".join(globs)
    kept = {part for module in select(model, context.policy)[0].values() for part in module.modules()}
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module not in kept  # a subclass has a forward of its own
    }
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            problem = f"does not go together with adapters ({name} is PEFT's {type(module).__name__})"
            raise ConfigError("precision", NAME, problem, "Use precision=bf16")
    if globs:
        for glob in globs:
            if not any(_named(name, glob) for name in linears):
                problem = (
                    f"names no linear layer of {type(model).__name__} outside keep_fp32{near_misses(glob, linears)}"
                )
                raise ConfigError(key, glob, problem, "Use names as of model.named_modules(); * matches any part")
        found = {name: one for name, one in linears.items() if any(_named(name, glob) for glob in globs)}
    else:
        inside = {part for block in blocks_of(model, context.engine.blocks) for part in block.modules()}
        found = {name: one for name, one in linears.items() if one in inside}
        if not found:
            problem = f"{type(model).__name__} has no list of blocks with linear layers"
            raise ConfigError("precision", NAME, problem, f"Name the layers: {key}=[layer*]")
    for name, one in found.items():
        sizes = f"{one.in_features} to {one.out_features} features"
        if one.in_features % _MULTIPLE or one.out_features % _MULTIPLE:
            problem, remedy = f"{name} has {sizes}, no multiples of {_MULTIPLE}", "Name the others"
        elif one.weight.dtype is not torch.float32:
            problem, remedy = f"{name} has weights in {one.weight.dtype}".replace("torch.", ""), "Load it in float32"
        else:
            continue
        raise ConfigError(key, value or "the model's blocks", problem, f"{remedy}, or use precision=bf16")
    return found


def _named(name: str, glob: str) -> bool:
    """Whether a glob names a module, or one that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), glob) for end in range(1, len(parts) + 1))
