"""The gradient noise scale, of what windows compute anyway: no backward more, no reduction more, and nobody waits.

Source: S. McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1: ``B_simple = tr(S) /
|G|^2``, of the true gradient G and the covariance S of one item's gradient, from the squared norms of a small batch's
gradient and of a large one's. The small ones are the micro-batches of all ranks, the large one is their window.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.step import Outcome
from distaccum.data.hooks import WindowHook
from distaccum.data.window import Window
from distaccum.engines.modules import HostCopy, from_host
from distaccum.engines.optimizer_step import norms_of
from distaccum.errors import ConfigError
from distaccum.losses.base import is_window_loss

if TYPE_CHECKING:
    from distaccum.train.checks import Stated
    from distaccum.train.components import TrainingComponents

_log = logging.getLogger(__name__)
_NUMBERS = 6  # that ride in a count
_SAME = 1e-9  # of two products: blocks as large as their windows tell nothing
_KEY = "batch.noise"


def check(run: Stated) -> None:
    """Refuses what no run can measure, before there are ranks.

    Raises:
        ConfigError: its windows have no parts with gradients of their own.
    """
    if is_window_loss(run.loss):
        problem = f"{type(run.loss).__name__} compares the samples of a window, so that none has its own gradient"
        raise ConfigError(_KEY, True, problem, "Leave it out")
    plan = run.plan
    if plan.world_size == 1 and plan.items_of_window == 1 and not (plan.is_stream or run.config.batch.rehearses):
        problem = "one rank runs each step as one micro-batch, and no part of it has a gradient of its own"
        raise ConfigError(_KEY, True, problem, "Lower batch.micro_size, or run on more ranks")


def of_run(components: TrainingComponents, accumulator: Accumulator) -> None:
    """Adds a :class:`GradientNoise` to a run's windows, before the first one.

    Raises:
        ConfigError: ranks come and go.
    """
    if components.engine.builder is not None:
        problem = "with ranks that come and go its parts are dealt anew in the middle of a window"
        raise ConfigError(_KEY, True, problem, "Leave it out, or start the run with torchrun")
    accumulator.engine.hooks.add(GradientNoise(accumulator))


class GradientNoise(WindowHook):
    """Estimates the gradient noise scale of the windows of an accumulator.

    A block is b of the C items (samples or tokens) that a window's loss counts. The gradient of a sum over b items,
    over C, has the expected squared norm ``(b/C)^2 |G|^2 + b/C^2 tr(S)``, for blocks as for the whole window, where b
    is C. Both sides are added over the blocks of a window, and averaged over windows with exponentially falling
    weights: of the blocks, and of the windows, that makes two equations for ``|G|^2`` and ``tr(S)``. With blocks of one
    size they are the paper's two moving averages. Items are taken to be independent; tokens of one sample are not, so
    that ``tr(S)`` is then a token's share of a sample's.

    The sums stay on the device. A copy of those after the window before the last rides in the window's count, when the
    device has computed it long ago. A checkpoint has every rank's: a run that is resumed on as many goes on bit by bit.

    Args:
        accumulator: whose windows are measured, by ``accumulator.engine.hooks.add``.
        decay: of a window's weight with every window that follows.
    """

    def __init__(self, accumulator: Accumulator, *, decay: float = 0.99) -> None:
        self._accumulator, self._engine, self._world = accumulator, accumulator.engine, accumulator.world
        self._decay = decay
        self._handles: list[RemovableHandle] = []
        self._norms: list[Tensor] = []
        self._seen: Outcome | None = None
        self._told = False
        self._older: HostCopy | None = None
        self._newer: HostCopy | None = None
        self._sums = torch.zeros(_NUMBERS, dtype=torch.float64)
        self._begin(looks=False)
        self.restarted()

    def _begin(self, *, looks: bool) -> None:
        self._leave()
        self._looks = looks
        self._squares: list[Tensor] = []  # of the micro-batches' gradients

    def _leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """This rank's sums after the window before the last."""
        found: list[float] = [0.0] * _NUMBERS if self._older is None else self._older.read()
        return found

    def incoming(self, sums: list[float]) -> None:
        """Solves the two equations; without blocks that are smaller than their windows there is nothing to tell."""
        of_blocks, blocks_g, blocks_s, of_windows, windows_g, windows_s = sums
        first, second = blocks_g * windows_s, blocks_s * windows_g
        if second - first <= _SAME * second:
            self.metrics = {}
            return
        gradient = (of_windows * blocks_s - of_blocks * windows_s) / (second - first)
        trace = (of_blocks * windows_g - of_windows * blocks_g) / (second - first)
        self.metrics = {"noise_scale_grad_sq": gradient, "noise_scale_trace": trace}
        if gradient > 0 and trace > 0:  # estimates of few windows may be negative
            self.metrics["noise_scale"] = trace / gradient

    def window_begins(self, window: Window) -> None:
        """See :class:`WindowHook`.

        Raises:
            ConfigError: there is not one count, that of the gradient's items; on every rank.
        """
        counts, own = set(window.counts.values()), window.micro_batches
        if len(counts) != 1:
            problem = f"the losses have the counts {dict(window.counts)}" if counts else "nothing is counted beforehand"
            raise ConfigError(_KEY, True, f"{problem}, and a gradient is of one number of items", "Leave it out")
        alone = self._world.size == 1 and len(own) == 1
        if alone and not self._told:
            self._told = True
            _log.warning("no noise scale of a step that one rank runs as one micro-batch: lower the micro-batch")
        self._begin(looks=not alone)

    def before_backward(self, loss: Tensor) -> None:
        """Has the gradients of a micro-batch measured as they come."""
        self._leave()
        if self._looks:
            self._norms = []
            leaves: Iterable[Any] = self._engine.probe.leaves
            self._handles = [leaf.register_hook(self._note) for leaf in leaves]

    def _note(self, gradient: Tensor) -> None:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        self._norms.append(norms_of([torch.view_as_real(gradient) if gradient.is_complex() else gradient]))

    def after_backward(self) -> None:
        """The squared norm of the micro-batch's gradient, unscaled."""
        self._leave()
        if self._looks:
            scale = self._engine.loss_scale
            norms = torch.cat(self._norms) if self._norms else torch.zeros(1, device=self._engine.device)
            self._squares.append((norms.double() / (1.0 if scale is None else scale)).square().sum())

    def after_step(self, window: Window) -> None:
        """Adds the window, unless its gradient is not finite; reads nothing from the device."""
        outcome = self._accumulator.tracker.last
        if outcome is None or outcome is self._seen or outcome.step is None:
            self._begin(looks=False)
            return
        self._seen = outcome
        whole, (total,) = outcome.grad_norm.double().square(), set(window.counts.values())
        shares = [count / total for micro in window.micro_batches for count in set(micro.counts.values())]
        square = torch.zeros_like(whole)
        if len(self._squares) != len(shares):  # there are no parts, or it ran out of memory and began again
            shares = []
        elif shares:
            square = torch.stack(self._squares).sum().to(whole.device)
        # Every rank adds the window's norm, which all know: as often on both sides of its equation.
        numbers = from_host([sum(one**2 for one in shares), sum(shares) / total, 1.0, 1.0 / total], whole)
        own, sums = torch.stack([square, *numbers[:2], whole, *numbers[2:]]), self._sums.to(whole.device)
        self._sums = torch.where(whole.isfinite(), self._decay * sums + own, sums)
        self._older, self._newer = self._newer, HostCopy(self._sums)
        self._begin(looks=False)

    def window_dropped(self) -> None:
        """See :class:`WindowHook`."""
        self._begin(looks=False)

    def restarted(self) -> None:
        """Begins anew: the averages are of other weights."""
        self._sums = torch.zeros(_NUMBERS, dtype=torch.float64)
        self._older = self._newer = None
        self.metrics: dict[str, float] = {}

    def state(self) -> list[list[list[float]]]:
        """Every rank's sums after the last but one window, and after the last: a collective that reads the device."""
        nothing = [0.0] * _NUMBERS
        return self._world.all_gather_object(
            [nothing if copy is None else copy.read() for copy in (self._older, self._newer)]
        )

    def load_state(self, state: list[list[list[float]]]) -> None:
        """Takes this rank's sums; of another number of ranks all that these have added, which the first one takes."""
        saved = torch.tensor(state, dtype=torch.float64)  # ranks x 2 x numbers
        if len(saved) == self._world.size:
            older, newer = saved[self._world.rank]
        else:  # each rank adds every window's own norm
            blocks = saved[..., :3].sum(0) * float(self._world.is_main)
            older, newer = torch.cat([blocks, saved[..., 3:].mean(0)], -1)
        self._sums = newer.clone()
        self._older, self._newer = HostCopy(older.clone()), HostCopy(newer.clone())

    def close(self) -> None:
        """See :class:`WindowHook`."""
        self._begin(looks=False)
