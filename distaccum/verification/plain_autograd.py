"""The true gradient where a rank can hold the whole model: plain autograd over the bare model, past the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from distaccum.data.batches import to_device
from distaccum.engines.base import Engine
from distaccum.engines.buffers import Buffers, state_restored
from distaccum.engines.compiled import uncompiled
from distaccum.engines.modules import trained
from distaccum.losses.normalize import Counts, LossSum, as_loss_sums, normalize_loss
from distaccum.program import PLAIN_STATE, load
from distaccum.verification.expected import wide
from distaccum.verification.recorded import RecordedWindow

_OTHER = 1e-4  # of a loss: what the window and a run of its own may differ by
_SAME = 1e-6  # of a loss: what two runs of one kind may
_SAME_BUFFERS = 1e-5
_UNKNOWN: Counts = MappingProxyType({})  # a micro-batch's counts: the engine says what a loss without a gradient is
_REENTRANT = "CheckpointFunction"  # of torch's own functions the only one with a backward in its backward


class PlainGradient:
    """This rank's part of the window's gradient, times loss scale and the engine's divisor; local throughout.

    Args:
        engine: whose bare model, device and autocast are used, and nothing else.
        recorded: the window.
    """

    def __init__(self, engine: Engine, recorded: RecordedWindow) -> None:
        self.parts: dict[str, Tensor] = {}
        """By parameter; none where no loss reached it."""
        self.sizes: dict[str, float] = {}
        """By parameter: the norms of its micro-batches' gradients, added up. Rounding is measured by these."""
        self.own_backwards: set[str] = set()
        """Functions that may hold backwards of their own: what they add to a parameter is not seen here."""
        self._engine, self._recorded = engine, recorded
        self._totals: list[float] = []  # of each micro-batch's losses, in the last run
        self._buffers_after: Buffers | None = None
        self._other_memory = False  # the buffers that a second run ends with are others

    def walk(self, total: LossSum, counts: Counts) -> None:
        """Walks the graph of a micro-batch's losses, which the engine's backward walks afterwards.

        Raises:
            RuntimeError: it cannot be walked twice; or it may not be, as backwards that are no autograd's may free or
                change what they have kept.
        """
        value = normalize_loss(total, counts, self._engine.gradient_divide_factor, own_counts=_UNKNOWN)
        if own := own_backwards(value):
            raise RuntimeError(f"{', '.join(own)} has a backward of its own, which may run once only")
        parameters = trained(self._engine.unwrapped_model)
        before = load(PLAIN_STATE)(list(self._engine.unwrapped_model.modules()))  # which hooks may move
        if not self.parts:
            self._looks_at_size(value, parameters)
        self._add(value, parameters, keep=True)
        before.restore()

    def run(self) -> None:
        """Runs the window's forwards and backwards once more, as they began, and sets everything back.

        A collective where the model is sharded; local within that, so that an error on one rank leaves none waiting.
        """
        weights = self._engine.probe.whole_weights
        assert weights is not None
        with weights() as parameters:
            self._run(parameters)

    def _run(self, parameters: Mapping[str, Tensor]) -> None:
        recorded = self._recorded
        self.parts, self.sizes, totals = {}, {}, []
        factor = self._engine.gradient_divide_factor
        moved: Sequence[str] = []
        if self._buffers_after is None:
            self._buffers_after = Buffers(self._engine)
            moved = recorded.moved() if len(recorded.batches) > 1 and recorded.users else []
        with state_restored(self._engine, *recorded.users):
            assert len(recorded.states) == len(recorded.batches)
            if recorded.scale is not None and recorded.batches and not self._totals:  # in fp16, and once
                recorded.begin_again()
                self._looks_at_size(
                    normalize_loss(self._forward(0), recorded.counts, factor, own_counts=_UNKNOWN), parameters
                )
            recorded.begin_again()
            for i in range(len(recorded.batches)):
                total = self._forward(i)
                totals.append(_host(total))
                value = normalize_loss(total, recorded.counts, factor, own_counts=_UNKNOWN)
                self.own_backwards |= own_backwards(value)
                self._add(value, parameters, keep=False)
            self._other_memory = not self._buffers_after.hold(within=_SAME_BUFFERS)
            if moved:
                recorded.begin_again()
                recorded.relations.moved(moved, (totals[-1], _host(self._forward(len(totals) - 1))))
        self._totals = totals

    def _forward(self, i: int) -> LossSum:
        """The losses of a micro-batch, which begins as it did in the window."""
        assert self._recorded.loss is not None
        batch = to_device(self._recorded.batches[i], self._engine.device)
        self._recorded.draw_again(i)
        with self._engine.autocast():
            return self._recorded.loss(self._engine.unwrapped_model, batch)

    def _looks_at_size(self, value: Tensor, parameters: Mapping[str, Tensor]) -> None:
        """Walks a graph twice; it may be walked again."""
        if not value.requires_grad:
            return
        weights, relations = list(parameters.values()), self._recorded.relations
        once, larger = (
            torch.autograd.grad(scaled, weights, retain_graph=True, allow_unused=True)
            for scaled in (self._scaled(value), self._scaled(value) * relations.factor)
        )
        relations.sizes(list(parameters), once, larger)

    def _add(self, value: Tensor, parameters: Mapping[str, Tensor], *, keep: bool) -> None:
        """Adds the gradient of one micro-batch, times the loss scale, so that fp16 rounds as in the engine."""
        if not value.requires_grad:
            return
        found = torch.autograd.grad(
            self._scaled(value), list(parameters.values()), retain_graph=keep, allow_unused=True
        )
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is None:
                continue
            part = wide(gradient)
            self.sizes[name] = self.sizes.get(name, 0.0) + float(torch.linalg.vector_norm(part))
            if name in self.parts:
                self.parts[name] += part
            else:
                self.parts[name] = part.clone() if part is gradient else part

    def _scaled(self, value: Tensor) -> Tensor:
        return value if self._recorded.scale is None else value * self._recorded.scale

    # --- whether it is the window's

    def repeats(self, allowed: dict[str, float]) -> bool:
        """Whether a third run gives the second's losses and gradients, each within what is ``allowed``."""
        parts, sizes, totals = self.parts, self.sizes, self._totals
        try:
            self.run()
        except Exception:  # the user's code
            return False
        finally:
            again, self.parts, self.sizes = self.parts, parts, sizes
        for first, second in zip(totals, self._totals, strict=False):
            if not abs(first - second) <= _SAME * abs(first):
                return False
        return all(
            name in again and float(torch.linalg.vector_norm(part - again[name])) <= allowed[name] + 1e-12
            for name, part in parts.items()
        )

    def reached_uncompiled(self) -> set[str]:
        """The parameters that a run without compiled code reaches.

        Compiled code gives a gradient of zero to what only an output reaches that the loss leaves out, and tells DDP of
        all that it reads.
        """
        parts, sizes, totals = self.parts, self.sizes, self._totals
        try:
            with uncompiled:
                self.run()
            return set(self.parts)
        finally:
            self.parts, self.sizes, self._totals = parts, sizes, totals

    def differing_losses(self) -> list[tuple[int, float, float]]:
        """The micro-batches whose loss was another in the window than in the bare model, and both."""
        if not self._totals or len(self._recorded.totals) != len(self._totals):
            return []
        own = [sum(float(part) for part in parts.values()) for parts in self._recorded.totals]
        pairs = enumerate(zip(own, self._totals, strict=True))
        return [(i, a, b) for i, (a, b) in pairs if abs(a - b) > _OTHER * max(abs(a), abs(b))]

    @property
    def remembers(self) -> bool:
        """Whether buffers ended otherwise than in the window, or losses were others."""
        return self._other_memory or bool(self.differing_losses())

    def forget(self) -> None:
        """Frees what was computed."""
        self.parts, self._buffers_after = {}, None


def _host(total: LossSum) -> float:
    return sum(float(part.detach()) for part in as_loss_sums(total).values())


def own_backwards(value: Tensor) -> set[str]:
    """The ``autograd.Function`` classes in a graph that are not torch's, and reentrant checkpoints, by name.

    Those that say ``walks_twice`` are left out: they keep what they need, and give the same gradient again.
    """
    seen: set[Any] = set()
    found: set[str] = set()
    left: list[Any] = [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function: Any = getattr(type(node), "_forward_cls", None)
        once = function is not None and not getattr(function, "walks_twice", False)
        if once and (function.__name__ == _REENTRANT or not function.__module__.startswith("torch.")):
            found.add(function.__name__)
        left += [following for following, _ in node.next_functions]
    return found
