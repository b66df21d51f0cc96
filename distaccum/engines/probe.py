"""An engine's gradient and weights, shown to whoever compares them with the truth; no step and no loop asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distaccum.engines.modules import trained
from distaccum.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from distaccum.engines.activation_checkpoint import Checkpoints
    from distaccum.engines.base import Engine

WholeWeights = Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
LocalGradients = Callable[[], AbstractContextManager[Callable[[], Mapping[str, Tensor]]]]


class GradientProbe:
    """What verification asks of one engine. An engine overrides an answer that is another than that of whole weights.

    Args:
        engine: whose gradient and weights they are.
        policy: what forwards compute in, and what gradients travel in between ranks.
    """

    leaves_out_unused: bool = True
    """Whether a parameter without a gradient is left out of a step, and not a fault."""
    activation_checkpoints: Checkpoints | None = None
    """What is computed again in a backward, if anything; the factory sets it."""

    def __init__(self, engine: Engine, policy: PrecisionPolicy) -> None:
        self._engine, self._policy = engine, policy

    # --- the gradient

    def reduced_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Between boundary and step: names, and this rank's part of the reduced gradient, whatever it is scaled by.

        All ranks have the whole of a parameter's, or each the elements that follow those of the rank before.
        """
        for name, parameter in trained(self._engine.unwrapped_model).items():
            if parameter.grad is not None:
                yield name, parameter.grad

    def gradient_hooks(self, parameter: nn.Parameter) -> Sequence[Callable[[Tensor], Tensor | None]]:
        """What the user gave ``register_hook`` of a trained parameter: each micro-batch's gradient goes through it."""
        hooks: Mapping[int, Any] = parameter._backward_hooks or {}
        return [hook for hook in hooks.values() if not _is_of_a_library(hook)]

    @property
    def leaves(self) -> Iterable[Tensor]:
        """What a backward gives gradients to, in the place of the trained parameters; after a forward."""
        return trained(self._engine.unwrapped_model).values()

    @property
    def local_gradients(self) -> LocalGradients | None:
        """A context in which no micro-step reduces; its function gives what this rank has accumulated, by name.

        None where hooks on the parameters see that.
        """
        return None

    @property
    def walks_twice(self) -> bool:
        """Whether the graph of a loss may be walked once more, before the engine's own backward."""
        selective = self.activation_checkpoints is not None and self.activation_checkpoints.selective
        return not (selective or self._engine.facts.forward_communicates)

    def known_fault(self) -> str:
        """In words, what this rank knows to be wrong with the open window, and the step would say; a collective."""
        return ""

    def unit_roundoff(self, parameter: Tensor) -> float:
        """Of the coarsest number format that a gradient of ``parameter`` passes through, as its roundings differ."""
        formats = {self._policy.reduce_dtype, parameter.dtype if parameter.is_floating_point() else torch.float32}
        if self._policy.casts:
            formats.add(self._policy.compute_dtype)
        if parameter.dtype == torch.float64:
            formats = {torch.float64}
        return max(torch.finfo(one).eps / 2 for one in formats) * self._policy.amplifies

    # --- what is stepped

    @property
    def stepped_groups(self) -> AbstractContextManager[object]:
        """Within this context the optimizers' groups hold what the step gives them: on some engines a rank's part."""
        return nullcontext()

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """What the optimizers step of each trained parameter, by its name: itself, or its fp32 master."""
        return trained(self._engine.unwrapped_model)

    # --- the weights

    def replicated(self) -> Mapping[str, Tensor]:
        """The weights that every rank holds whole, and the same bit by bit, by name."""
        if self._engine.facts.forward_communicates:
            return {}
        return dict(self._engine.unwrapped_model.named_parameters())

    def replicated_state(self) -> tuple[int, dict[str, Tensor]]:
        """What a save compares beside :meth:`replicated`: which ranks hold the same (a number of theirs), and what.

        That is what the optimizers keep on more ranks than one, by names for people. By default nothing.
        """
        return 0, {}

    @property
    def whole_weights(self) -> WholeWeights | None:
        """A context where forwards of the unwrapped model are local, on whole weights: it gives the trained ones.

        Entering it is a collective where the model is sharded, between boundary and step. None where it cannot be.
        """
        if self._engine.facts.forward_communicates:
            return None
        return lambda: nullcontext(trained(self._engine.unwrapped_model))

    @contextmanager
    def shifted(self, direction: Mapping[str, Tensor], distance: float) -> Iterator[Mapping[str, Tensor]]:
        """Within the block forwards compute with the weights plus ``distance`` times ``direction``.

        Gives by how much this rank's weights have moved, flat and in fp64: of 16 bits they move by whole steps. The
        direction is given in the parts of :meth:`reduced_gradients`.
        """
        own = self._parts(direction)
        before = {name: part.clone() for name, part in own.items()}
        try:
            for name, part in own.items():
                part.add_(direction[name].reshape(part.shape).to(part.dtype), alpha=distance)
            self._parts_changed()
            yield {name: (part.double() - before[name].double()).flatten() for name, part in own.items()}
        finally:
            for name, part in self._parts(direction).items():
                part.copy_(before[name])
            self._parts_changed()

    def _parts(self, direction: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's part of each weight that ``direction`` names, where it lies."""
        weights = trained(self._engine.unwrapped_model)
        return {name: weights[name].data for name in direction}

    def _parts_changed(self) -> None:
        """Called after :meth:`shifted` has written into them: the next forward has to compute with what is there."""


def _is_of_a_library(hook: Any) -> bool:
    return str(getattr(hook, "func", hook).__module__).partition(".")[0] in ("distaccum", "deepspeed")
