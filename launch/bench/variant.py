"""What is compared: variants of one run, each a loop with settings of its own, and the two loops that benches share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distaccum.accumulation.step import run_window
from distaccum.config.engine import EngineConfig
from distaccum.config.schema import RunConfig
from distaccum.data.batches import to_device
from distaccum.data.counter import GlobalCounter
from distaccum.data.factory import build_loader
from distaccum.data.loader import WindowLoader
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.losses.base import Loss
from distaccum.precision.policy import PrecisionPolicy
from distaccum.train.components import TrainingComponents, components_from_config
from distaccum.train.run import build_accumulator

Step = Callable[[], object]
"""One optimizer step: a window of micro-batches, which it takes from its own data."""


def nothing() -> None:
    """Does nothing: for moments at which nobody measures."""


def loader_of(components: TrainingComponents, world: World) -> WindowLoader:
    """The windows of the training data on this rank."""
    return build_loader(components.data, components.plan, world)


def full_windows(components: TrainingComponents, world: World) -> Iterator[Window]:
    """Windows of the training data, epoch after epoch without an end; the ragged last ones of epochs are left out."""
    loader, counter = loader_of(components, world), GlobalCounter(world, components.loss.count)
    windows = chain.from_iterable(loader.windows(epoch, 0, counter) for epoch in count())
    full = components.plan.as_dict()["accumulation_steps"]
    return (window for window in windows if len(window.micro_batches) == full)


class WindowLoop:
    """Runs full windows by ``run_window``, on the engine that ``distaccum train`` makes; prints and saves nothing."""

    def __init__(self, components: TrainingComponents, world: World) -> None:
        self.engine, (self.optimizer,) = build_accumulator(components, world).engine, components.optimizers
        self._loss, self._windows = components.loss, full_windows(components, world)

    def __call__(
        self, *, before_boundary: Callable[[], None] = nothing, before_step: Callable[[], None] = nothing
    ) -> Window:
        """Runs one window and returns it.

        Args:
            before_boundary: called when all its micro-steps but the last are done.
            before_step: called when the optimizer begins.
        """
        window, seen = next(self._windows), 0

        def loss(model: nn.Module, batch: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == len(window.micro_batches):
                before_boundary()
            return self._loss(model, batch)

        hook = register_optimizer_step_pre_hook(lambda *_: before_step())  # of any: a foreign one on it is refused
        try:
            assert run_window(self.engine, window, cast(Loss, loss)).applied
        finally:
            hook.remove()
        return window


def handwritten_ddp(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    device: torch.device,
    *,
    policy: PrecisionPolicy,
    micro_steps: int,
    accumulation_steps: int | None = None,
    reduces_every: bool = False,
    clip_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    log_every: int = 0,
) -> Step:
    """The loop that people write: DDP, ``no_sync``, GradScaler, clipping, step, ``zero_grad``.

    Args:
        model: gives logits of shape (..., classes).
        optimizer: over the model's parameters.
        batches: inputs and integer labels of micro-batches; a window takes ``micro_steps`` of them.
        device: of this rank.
        policy: of the forward.
        micro_steps: micro-batches of a window.
        accumulation_steps: the divisor of each micro-batch's mean loss; None: ``micro_steps``.
        reduces_every: leaves ``no_sync`` out, so that each backward reduces the gradient.
        clip_norm: the largest norm of the gradient; None or 0: it is not clipped.
        schedule: factor of the learning rate by step.
        log_every: windows between two reads of loss and gradient norm; 0: none is read.
    """
    ddp = DistributedDataParallel(model.to(device))
    scaler = torch.amp.GradScaler(device.type, enabled=policy.scales_loss)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule is not None else None
    divisor, windows = accumulation_steps or micro_steps, 0

    def step() -> None:
        nonlocal windows
        running = torch.zeros((), device=device)
        for i in range(micro_steps):
            inputs, labels = to_device(next(batches), device)
            reduces = reduces_every or i == micro_steps - 1
            with nullcontext() if reduces else ddp.no_sync(), policy.autocast(device):
                logits = ddp(inputs)
                loss = nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten()) / divisor
                scaler.scale(loss).backward()
            running = running + loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm) if clip_norm else None
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        windows += 1
        if log_every and windows % log_every == 0:
            _ = (running.item(), norm.item() if norm is not None else None)  # as loops log: one read a number

    return step


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A loop, and the settings that it has in place of the run's.

    ``make`` builds the loop; ``engine`` (None: the run's) and ``precision`` replace settings; ``needs`` is a package.
    """

    make: Callable[[TrainingComponents, World], Step] = WindowLoop
    engine: EngineConfig | None = None
    precision: dict[str, str] = field(default_factory=dict)
    needs: str = ""

    def config(self, config: RunConfig) -> RunConfig:
        """The run's configuration with this variant's settings, and without the first window's proof."""
        precision, trainer = replace(config.precision, **self.precision), replace(config.trainer, verify="never")
        return replace(config, engine=self.engine or config.engine, precision=precision, trainer=trainer)

    def components(self, config: RunConfig, world: World) -> TrainingComponents:
        """The model, optimizer and data of the run with this variant's settings, new with each call."""
        return components_from_config(self.config(config), world_size=world.size, device=world.device)

    @property
    def version(self) -> str | None:
        """The version of the package that it needs: empty where it needs none, None where it is absent."""
        return installed_version(self.needs) if self.needs else ""


def installed_version(*packages: str) -> str | None:
    """The version of the first package; None where one of the packages is not installed."""
    return version(packages[0]) if all(map(find_spec, packages)) else None
