"""Where a window's gradient stopped being finite: the window is run again, on each rank for itself, and looked at."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distaccum.data.prefetch import map_tensors, to_device
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.dtensor import to_local
from distaccum.losses.base import Loss
from distaccum.losses.normalize import SINGLE, LossSum, as_loss_sums, normalize_loss

_FEW = 4  # names, ids or ranks that a message shows


class Stage(Enum):
    """The first thing of a micro-step that is not finite."""

    INPUT = "input"
    PARAMETER = "parameter"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first micro-batch of one rank's window that is not finite.

    ``micro_batch`` counts from 0. ``samples`` are its samples' numbers in the dataset or in the rank's stream; none
    where they are unknown. ``module`` is the dotted name of the one that holds the parameter, gave the output or got
    the gradient; "" for the whole model, an input or a loss. ``parameters`` are those whose accumulated gradient is
    not finite after this micro-batch, in the order in which the backward reached them.
    """

    rank: int
    micro_batch: int
    samples: tuple[int, ...]
    stage: Stage
    module: str
    parameters: tuple[str, ...]


def diagnose(engine: Engine, window: Window, loss: Loss, world: World) -> tuple[NonFinite, ...]:
    """Runs a window again whose gradient was not finite, and says where that began: at most one finding a rank.

    A collective, though it reduces no gradient; ranks may have different numbers of micro-batches, or none. The
    findings are the same on every rank, by rank. There are none where no micro-batch shows it again: see
    :func:`explain`. What a compiled model does is run eagerly. Afterwards weights, buffers and random generators are
    as they were, and gradients zero.

    Raises:
        MisuseError: as in training, where the loss goes by other names than what was counted.
    """
    finding = _first_finding(engine, window, loss, world.rank)
    everyone = world.all_gather_names(
        [] if finding is None else [json.dumps(asdict(finding) | {"stage": finding.stage.value})]
    )
    return tuple(sorted(map(_decoded, everyone), key=lambda found: found.rank))


def explain(findings: Sequence[NonFinite]) -> str:
    """One line for an error message: rank, micro-batch, samples, and where in them it began; of a few ranks."""
    if not findings:
        return (
            "Run again, no single micro-batch showed it: it came of the sum over micro-batches or ranks, or of what is "
            "not the same a second time (dropout, a lower loss scale, a compiled kernel)"
        )
    left = len(findings) - _FEW
    return f"It began {'; '.join(map(_clause, findings[:_FEW]))}" + (f"; and on {left} more ranks" if left > 0 else "")


def _clause(found: NonFinite) -> str:
    module = found.module or "the model itself"
    began = {
        Stage.INPUT: "its input holds NaN or infinity",
        Stage.PARAMETER: f"a parameter of {module} is NaN or infinite already",
        Stage.FORWARD: f"the first output that is not finite is that of {module}",
        Stage.LOSS: "the model's outputs are finite, the loss is not",
        Stage.BACKWARD: f"the loss is finite, the gradient is not from {module} on",
    }[found.stage]
    samples = f" (samples {_shortened(found.samples)})" if found.samples else ""
    gradients = f"; not finite are the gradients of {_shortened(found.parameters)}" if found.parameters else ""
    return f"on rank {found.rank} in micro-batch {found.micro_batch}{samples}: {began}{gradients}"


def _shortened(names: Sequence[object]) -> str:
    left = len(names) - _FEW
    return ", ".join(map(str, names[:_FEW])) + (f" and {left} more" if left > 0 else "")


def _decoded(text: str) -> NonFinite:
    kept = json.loads(text)
    tuples = {name: tuple(kept[name]) for name in ("samples", "parameters")}
    return NonFinite(**kept | tuples | {"stage": Stage(kept["stage"])})


def _first_finding(engine: Engine, window: Window, loss: Loss, rank: int) -> NonFinite | None:
    counts = window.counts or {SINGLE: float(window.samples)}  # where they are known at the end of the window only
    found: NonFinite | None = None
    usual: set[tuple[Stage, str]] = set()
    unreduced = engine.local_gradients() if engine.local_gradients else nullcontext(dict)
    with _left_as_it_was(engine), unreduced as accumulated, _watching(engine.unwrapped_model) as watch:
        engine.begin_window(len(window.micro_batches))
        if not window.micro_batches:
            engine.shadow_micro_step(sync=False)
        for i, micro in enumerate(window.micro_batches):
            batch = to_device(micro.batch, engine.device)
            watch.before_forward(batch)
            with engine.micro_step(sync=False):
                with engine.autocast():
                    total = loss(engine.model, batch)
                watch.after_forward(total)
                engine.backward(normalize_loss(total, counts, gradient_divide_factor=engine.gradient_divide_factor))
            watch.after_backward(accumulated())
            # The rest of the window runs after a finding too: the forwards of all ranks stay in step, should the model
            # itself communicate in them, as SyncBatchNorm does.
            if found is not None:
                continue
            spoiled = watch.spoiled()
            if not any(stage in (Stage.LOSS, Stage.BACKWARD) for stage, _ in spoiled):
                usual.update(spoiled)
                continue
            stage, name = next(where for where in spoiled if where not in usual)
            found = NonFinite(
                rank=rank,
                micro_batch=i,
                samples=tuple(map(int, next(islice(window.ids(), i, None), ()))),
                stage=stage,
                module=_plain(name if stage is Stage.FORWARD else name.rpartition(".")[0]),
                parameters=tuple(_plain(name) for stage, name in spoiled if stage is Stage.BACKWARD),
            )
    return found


class _Watch:
    """What one micro-step met, in that order: stage, name, and whether it is finite.

    A micro-step is to blame by its loss and gradients alone: finite ones may come of missing values in an input, or of
    a module that masks by minus infinity.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = [(Stage.PARAMETER, name, _finite(weight)) for name, weight in model.named_parameters()]
        self._met: list[tuple[Stage, str, Tensor]] = []

    def before_forward(self, batch: Any) -> None:
        """A micro-step begins. Minus infinity in an input is taken for a mask."""
        self._met = [(Stage.INPUT, "", (tensor < torch.inf).all()) for tensor in _floating(batch)]
        self._met += self._weights

    def on_output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """A forward hook; an activation checkpoint calls it again, in the backward, with what is known already."""
        self._met += [(Stage.FORWARD, name, _finite(tensor)) for tensor in _floating(output)]

    def after_forward(self, total: LossSum) -> None:
        """Between the loss and its backward."""
        self._met += [(Stage.LOSS, "", _finite(part)) for part in as_loss_sums(total).values()]

    def after_backward(self, gradients: Mapping[str, Tensor]) -> None:
        """With what hooks do not see."""
        self._met += [(Stage.BACKWARD, name, _finite(gradient)) for name, gradient in gradients.items()]

    def on_gradient(self, name: str, parameter: Tensor) -> None:
        """A hook after the accumulation of a parameter's gradient."""
        if parameter.grad is not None:
            self._met.append((Stage.BACKWARD, name, _finite(parameter.grad)))

    def spoiled(self) -> list[tuple[Stage, str]]:
        """What is not finite, each once; reads the device, at a time when nobody counts on speed."""
        return list(dict.fromkeys((stage, name) for stage, name, finite in self._met if not bool(finite)))


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Watch]:
    """A watch over every module and parameter, within the block."""
    watch = _Watch(model)
    with ExitStack() as hooks:
        # Hooks on compiled code are not called.
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
def _left_as_it_was(engine: Engine) -> Iterator[None]:
    """The block may draw and overwrite buffers; what it accumulates is zeroed."""
    modules = engine.unwrapped_model.modules()
    buffers = [(module, *named) for module in modules for named in module.named_buffers(recurse=False)]
    copies = [buffer.detach().clone() for _, _, buffer in buffers]
    plain, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  users' code may draw here
    devices = [engine.device] if engine.device.type == "cuda" else []
    engine.zero_gradients()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)  # noqa: NPY002
        engine.zero_gradients()
        for (module, name, buffer), copy in zip(buffers, copies, strict=True):
            with torch.no_grad():
                buffer.copy_(copy)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


def _floating(value: Any) -> list[Tensor]:
    """The dense floating tensors in ``value``."""
    tensors: list[Tensor] = []
    map_tensors(value, tensors.append)
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.layout is torch.strided]


def _finite(tensor: Tensor) -> Tensor:
    return to_local(tensor.detach()).isfinite().all()


def _plain(name: str) -> str:
    """The name in the model as it was written, without what torch.compile puts in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
