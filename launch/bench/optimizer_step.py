"""What the boundary of a window costs: unscaling, clipping by norm and the optimizer's step, without the backward.

Torch's textbook sequence, with its default optimizer and with the fused one, and distaccum's run on the same gradients.
Memory traffic and operators are counted; times are taken in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from distaccum.config.precision import ScalerConfig
from distaccum.distributed.world import World
from distaccum.engines.optimizer_step import FusedUpdate, StepOptions, zero_in_place
from distaccum.precision.loss_scale import LossScale

SCALER = ScalerConfig()
SCALE = SCALER.initial_scale  # of the loss
CLIP_NORM, NORM = 1.0, 3.0  # the largest norm; the gradient's, so that it is clipped
LAYERS = 8
DEFAULT, FUSED, OURS, OURS_UNFUSED = "textbook", "textbook, fused", "distaccum", "distaccum, not fused"
OptimizerStep = Callable[[], None]
Figures = dict[str, Any]


class GradientTraffic(TorchDispatchMode):
    """Counts operators, and the bytes of ``gradients`` that they read and write.

    A tensor is a gradient if it lies in a gradient's memory. An operator reads each gradient among its arguments once,
    and writes those that its schema says it changes in place; ``fill`` and the like only write, and views do neither.
    The schemas of fused optimizers say that gradients change, which they do only where there is something to divide
    them by: there the gradients are compared with a copy.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self._gradients = gradients
        self._places = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        self.operators = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts, then runs the operator."""
        kwargs, schema = kwargs or {}, function._schema
        self.operators += str(function).startswith("aten.")
        if function.is_view:
            return function(*args, **kwargs)
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        read = {id(tensor): tensor for value in given.values() for tensor in self._among(value)}
        written = {id(tensor): tensor for name in changed for tensor in self._among(given.get(name))}
        if "_fused_" in schema.name and written:
            before = [gradient.clone() for gradient in self._gradients]
            result = function(*args, **kwargs)
            if all(map(torch.equal, self._gradients, before)):
                written = {}
        else:
            result = function(*args, **kwargs)
        if any(name in schema.name for name in ("zero", "fill", "copy")):  # they do not look at what they overwrite
            read = {key: tensor for key, tensor in read.items() if key not in written}
        self.bytes += sum(tensor.nbytes for tensors in (read, written) for tensor in tensors.values())
        return result

    def _among(self, value: Any) -> list[Tensor]:
        tensors = value if isinstance(value, list | tuple) else [value]
        return [t for t in tensors if isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self._places]


def shapes(size: int) -> list[tuple[int, ...]]:
    """The shapes of a GPT with about ``size`` parameters: 33 matrices and 49 vectors."""
    width = max(8, round((size / (12 * LAYERS + 16)) ** 0.5 / 8) * 8)
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(width,), (width,), (3 * width,), (width,), (4 * width,), (width,)]
    return [(16 * width, width), *LAYERS * (layer + vectors), (width,)]


def textbook(parameters: list[nn.Parameter], device: torch.device, **options: Any) -> OptimizerStep:
    """The sequence of torch's documentation."""
    optimizer, scaler = AdamW(parameters, **options), torch.amp.GradScaler(device.type, init_scale=SCALE)
    scaler.scale(torch.zeros((), device=device))  # it makes the scale in its first call

    def boundary() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()

    return boundary


def distaccum(parameters: list[nn.Parameter], device: torch.device, **options: Any) -> OptimizerStep:
    """The sequence of ``DDPEngine.step``."""
    named = {str(i): parameter for i, parameter in enumerate(parameters)}
    scaler = LossScale.of(SCALER, device)
    update = FusedUpdate([AdamW(parameters, **options)], named, StepOptions(clip_norm=CLIP_NORM, scaler=scaler))

    def boundary() -> None:
        update.step()

    return boundary


VARIANTS: dict[str, Callable[[list[nn.Parameter], torch.device], OptimizerStep]] = {
    DEFAULT: textbook,
    FUSED: lambda parameters, device: textbook(parameters, device, fused=True),
    OURS: lambda parameters, device: distaccum(parameters, device, fused=True),
    OURS_UNFUSED: lambda parameters, device: distaccum(parameters, device, fused=False),
}


def seconds(work: OptimizerStep, device: torch.device) -> float:
    """Seconds of ``work`` until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began


def measure(size: int, device: torch.device, *, pairs: int) -> Figures:
    """All figures of one size; each variant has its own weights, equal at first, and steps on the same gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in shapes(size)]
    elements = sum(weight.numel() for weight in weights)
    rough = NORM * SCALE / elements**0.5
    source = [(torch.randn(weight.shape, generator=generator) * rough).to(device) for weight in weights]
    gradients = [gradient.clone() for gradient in source]
    models = {name: [nn.Parameter(weight.to(device, copy=True)) for weight in weights] for name in VARIANTS}
    for parameter, gradient in ((p, g) for model in models.values() for p, g in zip(model, gradients, strict=True)):
        parameter.grad = gradient
    variants = {name: make(models[name], device) for name, make in VARIANTS.items()}

    def refill() -> None:
        torch._foreach_copy_(gradients, source)

    figures: Figures = {"parameters": elements, "tensors": len(weights)}
    for name, variant in variants.items():
        for _ in range(2):  # the first step makes the optimizer's state
            refill()
            variant()
        refill()
        with GradientTraffic(gradients) as traffic:
            variant()
        figures[name] = {
            "gradient bytes / parameters": traffic.bytes / (4 * elements),
            "aten ops": traffic.operators,
            "weights off": max(
                (a - b).detach().abs().max().item() for a, b in zip(models[name], models[DEFAULT], strict=True)
            ),
        }
    with GradientTraffic(gradients) as traffic:
        zero_in_place(models[OURS])
    times: dict[str, list[float]] = {name: [] for name in variants}
    zeroing = []
    for _ in range(pairs):
        for name, variant in variants.items():
            refill()
            times[name].append(seconds(variant, device))
        zeroing.append(seconds(lambda: zero_in_place(models[OURS]), device))
    for name in variants:
        figures[name] |= {"ms": _summary([1e3 * time for time in times[name]])} | {
            f"time / {base}": _summary([a / b for a, b in zip(times[name], times[base], strict=True)])
            for base in (DEFAULT, FUSED)
        }
    figures["zeroing in place"] = {
        "gradient bytes / parameters": traffic.bytes / (4 * elements),
        "aten ops": traffic.operators,
        "ms": _summary([1e3 * time for time in zeroing]),
    }
    return figures


def _summary(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values)}


def compare(world: World, sizes: Sequence[int], *, pairs: int) -> Figures:
    """The figures by size; each variant is timed ``pairs`` times, in turn."""
    return {str(size): measure(size, world.device, pairs=pairs) for size in sizes}


def show(figures: Figures, device: torch.device) -> None:
    """Prints a table for each size; times are minimum / median."""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    for row in figures.values():
        title = f"boundary of {row['parameters']:,} parameters in {row['tensors']} tensors, {device.type}{threads}"
        caption = "time: minimum / median of pairs"
        table = Table("", "bytes", "ops", "ms", f"/ {DEFAULT}", f"/ {FUSED}", title=title, caption=caption)
        for name, found in row.items():
            if not isinstance(found, dict):
                continue
            times = [
                f"{found[key]['min']:.2f} / {found[key]['median']:.2f}" if key in found else "-"
                for key in ("ms", f"time / {DEFAULT}", f"time / {FUSED}")
            ]
            table.add_row(name, f"{found['gradient bytes / parameters']:.2f}x", str(found["aten ops"]), *times)
        Console().print(table)
