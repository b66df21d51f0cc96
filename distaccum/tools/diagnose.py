"""Finds where a window's gradient became NaN or infinite: each rank runs its part again under hooks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.data.batches import map_tensors, to_device
from distaccum.data.window import Window
from distaccum.distributed.random import KeyedRandom
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.buffers import state_restored
from distaccum.engines.modules import clean, to_local
from distaccum.errors import MisuseError, shorten
from distaccum.losses.base import AnyLoss, Loss, is_window_loss
from distaccum.losses.normalize import SINGLE, LossSum, as_loss_sums, normalize_loss

_MOST_RANKS = 4  # in a message


class Stage(Enum):
    """The part of a micro-step where the first value that is not finite appears."""

    INPUT = "input"
    PARAMETER = "parameter"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first micro-batch of one rank's window with a loss or gradient that is not finite.

    ``micro_batch`` counts from 0. ``samples`` are its samples' numbers in the dataset or in the rank's stream; empty
    where they are unknown. ``module`` is the dotted name of the module that holds the parameter, gave the output or
    received the gradient; "" for the whole model, an input or a loss. ``parameters`` are those whose accumulated
    gradient is not finite after this micro-batch, in the order in which the backward reached them.
    """

    rank: int
    micro_batch: int
    samples: tuple[int, ...]
    stage: Stage
    module: str
    parameters: tuple[str, ...]


def diagnose(engine: Engine, window: Window, loss: AnyLoss, world: World) -> tuple[NonFinite, ...]:
    """Runs a window again whose gradient was not finite, and finds where that began.

    A collective, which reduces no gradient; ranks may have different numbers of micro-batches, or none. A compiled
    model runs eagerly, and dropout draws the numbers of the first time. Weights, buffers and random number generators
    are left as they were, and gradients zero.

    Returns:
        At most one finding per rank, sorted by rank and the same on every rank. Empty where no micro-batch shows it
        again: :func:`explain` names the possible causes.

    Raises:
        MisuseError: the losses have other names than the counts; or the loss compares the samples of a window.
    """
    if is_window_loss(loss):
        problem = "diagnose() with a loss that compares the samples of a window, and no micro-batch has its loss"
        raise MisuseError(f"{problem}: give one that sums the representations of a micro-batch")
    finding = _first_finding(engine, window, loss, world.rank)
    texts = world.all_gather_names(
        [] if finding is None else [json.dumps(asdict(finding) | {"stage": finding.stage.value})]
    )
    return tuple(sorted(map(_decoded, texts), key=lambda found: found.rank))


def where_it_began(engine: Engine, window: Window, loss: Loss, world: World) -> str:
    """What :func:`diagnose` finds, as one line for an error message."""
    return explain(diagnose(engine, window, loss, world))


def explain(findings: Sequence[NonFinite]) -> str:
    """One line for an error message: rank, micro-batch, samples and module of the first few findings."""
    if not findings:
        return (
            "Run again, no single micro-batch showed it: it came of the sum over micro-batches or ranks, or of what is "
            "not the same a second time (a lower loss scale, a compiled kernel, random numbers that are not torch's)"
        )
    left = len(findings) - _MOST_RANKS
    return f"It began {'; '.join(map(_clause, findings[:_MOST_RANKS]))}" + (
        f"; and on {left} more ranks" if left > 0 else ""
    )


def _clause(found: NonFinite) -> str:
    module = found.module or "the model itself"
    began = {
        Stage.INPUT: "its input holds NaN or infinity",
        Stage.PARAMETER: f"a parameter of {module} is NaN or infinite already",
        Stage.FORWARD: f"the first output that is not finite is that of {module}",
        Stage.LOSS: "the model's outputs are finite, the loss is not",
        Stage.BACKWARD: f"the loss is finite, the gradient is not from {module} on",
    }[found.stage]
    samples = f" (samples {shorten(found.samples)})" if found.samples else ""
    gradients = f"; not finite are the gradients of {shorten(found.parameters)}" if found.parameters else ""
    return f"on rank {found.rank} in micro-batch {found.micro_batch}{samples}: {began}{gradients}"


def _decoded(text: str) -> NonFinite:
    values = json.loads(text)
    tuples = {name: tuple(values[name]) for name in ("samples", "parameters")}
    return NonFinite(**values | tuples | {"stage": Stage(values["stage"])})


def _first_finding(engine: Engine, window: Window, loss: Loss, rank: int) -> NonFinite | None:
    counts = window.counts or {SINGLE: float(window.samples)}  # where they are known only at the window's end
    found: NonFinite | None = None
    random = KeyedRandom(engine.device)
    harmless: set[tuple[Stage, str]] = set()  # what is not finite in micro-batches with a finite loss and gradient
    local_gradients = engine.probe.local_gradients() if engine.probe.local_gradients else nullcontext(dict)
    with _state_restored(engine), local_gradients as accumulated, _watching(engine.unwrapped_model) as watch:
        engine.begin_window(len(window.micro_batches))
        if not window.micro_batches:
            engine.shadow_micro_step(sync=False)
        for i, micro in enumerate(window.micro_batches):
            batch = to_device(micro.batch, engine.device)
            watch.before_forward(batch)
            with random.keyed(window.keys, i), engine.micro_step(sync=False):
                with engine.autocast():
                    total = loss(engine.model, batch)
                watch.after_forward(total)
                engine.backward(normalize_loss(total, counts, gradient_divide_factor=engine.gradient_divide_factor))
            watch.after_backward(accumulated())
            # The rest of the window runs after a finding too: where the model communicates in its forwards, as
            # SyncBatchNorm does, all ranks must run the same number.
            if found is not None:
                continue
            nonfinite = watch.nonfinite()
            if not any(stage in (Stage.LOSS, Stage.BACKWARD) for stage, _ in nonfinite):
                harmless.update(nonfinite)
                continue
            stage, name = next(where for where in nonfinite if where not in harmless)
            found = NonFinite(
                rank=rank,
                micro_batch=i,
                samples=tuple(map(int, next(islice(window.ids(), i, None), ()))),
                stage=stage,
                module=clean(name if stage is Stage.FORWARD else name.rpartition(".")[0]),
                parameters=tuple(clean(name) for stage, name in nonfinite if stage is Stage.BACKWARD),
            )
    return found


class _Watch:
    """The values that one micro-step produced, in order: stage, name, and whether they are finite.

    Only a loss or gradient that is not finite makes a micro-step a finding: inputs may have missing values, and
    modules may mask with minus infinity.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = [(Stage.PARAMETER, name, _finite(weight)) for name, weight in model.named_parameters()]
        self._seen: list[tuple[Stage, str, Tensor]] = []

    def before_forward(self, batch: Any) -> None:
        """Begins a micro-step. Minus infinity in an input counts as a mask, and as finite."""
        self._seen = [(Stage.INPUT, "", (tensor < torch.inf).all()) for tensor in _floating(batch)]
        self._seen += self._weights

    def on_output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """A forward hook; an activation checkpoint calls it again in the backward, which adds nothing new."""
        self._seen += [(Stage.FORWARD, name, _finite(tensor)) for tensor in _floating(output)]

    def after_forward(self, total: LossSum) -> None:
        """Notes the losses, before their backward."""
        self._seen += [(Stage.LOSS, "", _finite(part)) for part in as_loss_sums(total).values()]

    def after_backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Notes accumulated gradients that hooks on the parameters do not see."""
        self._seen += [(Stage.BACKWARD, name, _finite(gradient)) for name, gradient in gradients.items()]

    def on_gradient(self, name: str, parameter: Tensor) -> None:
        """A hook that runs after a parameter's gradient was accumulated."""
        if parameter.grad is not None:
            self._seen.append((Stage.BACKWARD, name, _finite(parameter.grad)))

    def nonfinite(self) -> list[tuple[Stage, str]]:
        """The stages and names that are not finite, each once, in order; reads the device."""
        return list(dict.fromkeys((stage, name) for stage, name, finite in self._seen if not bool(finite)))


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Watch]:
    """Hooks a watch into every module and parameter, within the block."""
    watch = _Watch(model)
    with ExitStack() as hooks:
        # Compiled code does not call hooks that were added after compilation.
        hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(watch.on_output, name)).remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(watch.on_gradient, name)
                )
                hooks.callback(hook.remove)
        yield watch


@contextmanager
def _state_restored(engine: Engine) -> Iterator[None]:
    """As :func:`state_restored`, and zeroes the gradients that the block accumulated."""
    engine.zero_gradients()
    try:
        with state_restored(engine):
            yield
    finally:
        engine.zero_gradients()


def _floating(value: Any) -> list[Tensor]:
    """The dense floating tensors in ``value``."""
    tensors: list[Tensor] = []
    map_tensors(value, tensors.append)
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.layout is torch.strided]


def _finite(tensor: Tensor) -> Tensor:
    return to_local(tensor.detach()).isfinite().all()
