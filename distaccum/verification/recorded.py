"""What a window ran: all that it takes to run it once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.random import RNGState
from distaccum.engines.base import Engine
from distaccum.engines.buffers import Buffers
from distaccum.losses.base import InOrder, Loss
from distaccum.losses.normalize import SINGLE, LossSum, as_loss_sums
from distaccum.program import MEANS, PLAIN_STATE, RELATIONS, load


class RecordedWindow:
    """A window, the random numbers and buffers that its forwards began with, and the losses that it gave.

    Args:
        engine: runs it.
        window: has not begun.
    """

    def __init__(self, engine: Engine, window: Window) -> None:
        self.window = window
        self.loss: Loss | None = None
        """What the forwards are run again with; None where they cannot be."""
        self.states: list[RNGState] = []
        """At each micro-batch's forward."""
        self.totals: list[Mapping[str, Tensor]] = []
        """The losses of each micro-batch, as the window gave them."""
        self.buffers: Buffers | None = None
        """That the window begins with; with :attr:`loss`."""
        self.plain = load(PLAIN_STATE)([])
        """What model and loss hold as plain attributes when the window begins; with :attr:`loss`."""
        scale = engine.loss_scale
        self.provisional_count = float(window.samples)
        """What losses are divided by where the count is known at the window's end only."""
        self.scale = None if scale is None else scale.clone()
        """The loss scale of the whole window: 0-dim, on the device; None without a loss scaler."""
        self.batches = [micro.batch for micro in window.micro_batches]
        """The micro-batches as they were run, on the host; they may be smaller than the window's."""
        self.means = load(MEANS)(window)
        """What the graphs of its losses say."""
        self.sums = False
        """Whether the losses of samples are known to add up, whatever their graphs look like."""
        self.relations = load(RELATIONS)(engine, window)
        """What holds while it runs, whatever it computes."""
        self._engine = engine

    @property
    def users(self) -> Sequence[object]:
        """The loss, where it is the user's own and not a window's second pass."""
        return [] if self.loss is None or isinstance(self.loss, InOrder) else [self.loss]

    def rerun_with(self, loss: Loss) -> None:
        """The forwards are to be run again with ``loss``; called before the first of them."""
        self.loss = loss
        self.buffers = Buffers(self._engine)
        self.plain = load(PLAIN_STATE)([*self._engine.unwrapped_model.modules(), *self.users])

    def recording(self, loss: Loss) -> Any:
        """``loss``, noting the random numbers that it begins with and what it gives."""
        self.rerun_with(loss)

        def recorded(model: nn.Module, batch: Any) -> LossSum:
            self.before_forward(batch=None if isinstance(loss, InOrder) else batch)
            try:
                total = loss(model, batch)
            except BaseException:
                self.relations.micro_step_ended()
                raise
            self.note(total)
            return total

        return recorded

    def begin(self, window: Window) -> None:
        """The window is run from here on, perhaps once more and in smaller micro-batches."""
        self.states, self.totals, self.means = [], [], load(MEANS)(window)
        self.batches = [micro.batch for micro in window.micro_batches]

    def moved(self) -> Sequence[str]:
        """The buffers and plain attributes that are no longer what the window began with; reads the device."""
        assert self.buffers is not None
        return sorted({name for _, name in self.buffers.changed()} | set(self.plain.changed()))

    def begin_again(self) -> None:
        """Sets buffers and plain attributes to what the window begins with."""
        assert self.buffers is not None
        self.buffers.restore()
        self.plain.restore()
        torch.clear_autocast_cache()

    def before_forward(self, given: MicroBatch | None = None, batch: Any = None) -> None:
        """Notes the random numbers that a micro-batch's forward begins with, and the weights.

        Args:
            given: the micro-batch, where a loop of the user's runs it.
            batch: what the loss is called with, where it is at hand.
        """
        self.relations.before_forward(given, alone=self.loss is None, batch=batch)
        self.states.append(RNGState.capture(self._engine.device))

    def draw_again(self, i: int) -> None:
        """The random numbers of the ``i``-th forward are drawn once more from here on."""
        self.states[i].restore()
        if isinstance(self.loss, InOrder):
            self.loss.begin(i)

    def note(self, total: LossSum, counts: Any = None) -> None:
        """Notes a micro-batch's losses, and its counts where the window does not know them; its forward has ended."""
        self.relations.after_forward(total, counts)
        if not isinstance(self.loss, InOrder):
            self.means.note(total, counts)
        self.totals.append({name: part.detach() for name, part in as_loss_sums(total).items()})

    @property
    def loss_scale(self) -> float:
        """:attr:`scale` on the host; 1.0 without a loss scaler."""
        return 1.0 if self.scale is None else float(self.scale)

    @property
    def counts(self) -> Mapping[str, float]:
        """What the losses are divided by."""
        return self.window.counts or {SINGLE: self.provisional_count}

    @property
    def micro_batches(self) -> int:
        """How many this rank has run."""
        return len(self.batches)

    def forget(self) -> None:
        """Frees what was recorded."""
        self.relations.forget()
        self.states, self.batches, self.loss, self.buffers = [], [], None, None
