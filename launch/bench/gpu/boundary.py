"""The boundary on GPT-2's own shapes: clipping by norm and AdamW's step, beside torch's sequences.

``optimizer_step.py`` has the variants in fp16, with a loss scale. Here they are those of bf16 too, which training on a
GPU is mostly in: ``clip_grad_norm_`` and ``AdamW.step``. Zeroing is measured alone, as it can be left out by hand.

What an operator has to move is counted: each tensor that it reads once, and each that it writes. These bytes over the
device's seconds are put beside a plain copy on the same card in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from distaccum.config.instantiate import build
from distaccum.engines.optimizer_step import FusedUpdate, StepOptions, zero_in_place
from launch.bench import optimizer_step
from launch.bench.gpu.figures import Figure, Options
from launch.bench.gpu.runs import run_config
from launch.bench.gpu.timing import device_seconds

FOREACH, FUSED, OURS, ZEROING = "torch, foreach", "torch, fused", "distaccum", "zeroing in place"
COPIED_BYTES, COPIED_BYTES_SMALL = 2**32, 2**20  # by the plain copy: far more than a GPU's cache
SHARE = 0.78  # of the copy's bandwidth
_WARM_UP = 2  # steps: the first makes the optimizer's state
_OVERWRITING = ("zero", "fill", "copy")
Step = Callable[[], object]


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write: ``bytes``.

    An operator reads each tensor among its arguments once, but for what it only overwrites; it writes what its schema
    says it changes, and what it returns in memory of its own. Views move nothing. A fused optimizer changes gradients
    where it has something to divide them by, and not elsewhere, though its schema always says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, then counts."""
        kwargs, schema = kwargs or {}, function._schema
        result = function(*args, **kwargs)
        if function.is_view:
            return result
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if "_fused_" in schema.name and given.get("grad_scale") is None:
            changed.remove("grads")
        read = _by_place(given.values())
        written = _by_place(given[name] for name in changed if name in given)
        self.bytes += sum(written.values()) + sum(size for at, size in _by_place([result]).items() if at not in read)
        if any(name in schema.name for name in _OVERWRITING):
            read = {place: size for place, size in read.items() if place not in written}
        self.bytes += sum(read.values())
        return result


def _by_place(values: Any) -> dict[tuple[int, int], int]:
    """Bytes of the tensors among these values, by where they lie: one that is there twice is read once."""
    flat = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
    tensors = [part for part in flat if isinstance(part, Tensor)]
    return {(tensor.data_ptr(), tensor.nbytes): tensor.nbytes for tensor in tensors if tensor.nbytes}


def clipped_step(parameters: list[nn.Parameter], **options: Any) -> Step:
    """Torch's sequence without a loss scale."""
    optimizer = AdamW(parameters, **options)

    def boundary() -> None:
        nn.utils.clip_grad_norm_(parameters, optimizer_step.CLIP_NORM)
        optimizer.step()

    return boundary


def fused_update(parameters: list[nn.Parameter]) -> Step:
    """The sequence of ``DDPEngine.step`` without a loss scale."""
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    options = StepOptions(clip_norm=optimizer_step.CLIP_NORM)
    return FusedUpdate([AdamW(parameters, fused=True)], named, options).step


def variants(weights: Sequence[Tensor], gradients: Sequence[Tensor], *, scaled: bool) -> dict[str, Step]:
    """The sequences, each over weights of its own, which are equal, with the same gradients."""
    device = weights[0].device

    def parameters() -> list[nn.Parameter]:
        made = [nn.Parameter(weight.clone()) for weight in weights]
        for parameter, gradient in zip(made, gradients, strict=True):
            parameter.grad = gradient
        return made

    if scaled:
        return {
            FOREACH: optimizer_step.textbook(parameters(), device, foreach=True),
            FUSED: optimizer_step.textbook(parameters(), device, fused=True),
            OURS: optimizer_step.distaccum(parameters(), device, fused=True),
        }
    return {
        FOREACH: clipped_step(parameters(), foreach=True),
        FUSED: clipped_step(parameters(), fused=True),
        OURS: fused_update(parameters()),
    }


def shapes_of(options: Options, model: str) -> list[tuple[int, ...]]:
    """The shapes of a model's parameters."""
    config = run_config(options, model, micro_size=1, accumulation=1)
    with torch.device("meta"):
        made: nn.Module = build("model", config.model)
    return [tuple(parameter.shape) for parameter in made.parameters()]


def copy_bandwidth(options: Options) -> float:
    """Bytes per second that a plain copy on the device reads and writes."""
    size = COPIED_BYTES_SMALL if options.small else COPIED_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    seconds = device_seconds({"copy": lambda: target.copy_(source)}, options.device, rounds=10)["copy"]
    return 2 * size / statistics.median(seconds)


def measure(options: Options, model: str, *, scaled: bool, bandwidth: float) -> list[Figure]:
    """Milliseconds, bytes and share of the bandwidth of each sequence."""
    generator = torch.Generator(options.device).manual_seed(0)
    shapes = shapes_of(options, model)
    weights = [torch.randn(shape, device=options.device, generator=generator) for shape in shapes]
    elements = sum(weight.numel() for weight in weights)
    norm = optimizer_step.NORM * (optimizer_step.SCALE if scaled else 1.0)  # so that it is clipped
    source = [weight * (norm / elements**0.5) for weight in weights]
    gradients = [gradient.clone() for gradient in source]
    steps = variants(weights, gradients, scaled=scaled)
    del weights
    like = [nn.Parameter(gradient, requires_grad=False) for gradient in gradients]
    for parameter, gradient in zip(like, gradients, strict=True):
        parameter.grad = gradient
    steps[ZEROING] = lambda: zero_in_place(like)

    def refill() -> None:
        torch._foreach_copy_(gradients, source)

    moved: dict[str, int] = {}
    for name, step in steps.items():
        for _ in range(_WARM_UP):
            refill()
            step()
        refill()
        with Traffic() as traffic:
            step()
        moved[name] = traffic.bytes
    seconds = device_seconds(steps, options.device, rounds=3 if options.small else 10, before=refill)
    of = f"{model}, {len(shapes)} tensors, {'fp16' if scaled else 'bf16'}"
    figures = []
    for name in steps:
        taken = statistics.median(seconds[name])
        share, ours = moved[name] / taken / bandwidth, name == OURS
        figures += [
            Figure(of=of, name=f"{name}, time", value=1e3 * taken, unit="ms"),
            Figure(of=of, name=f"{name}, bytes of a parameter moved", value=moved[name] / elements, unit="bytes"),
            Figure(
                of=of,
                name=f"{name}, share of a copy's bandwidth",
                value=share,
                target=f"at least {SHARE}" if ours else "",
                holds=share >= SHARE if ours and not options.small else None,
            ),
        ]
    for name in (FOREACH, FUSED):
        ratio = statistics.median(a / b for a, b in zip(seconds[OURS], seconds[name], strict=True))
        figures.append(Figure(of=of, name=f"{OURS}, time over {name}", value=ratio))
    return figures
