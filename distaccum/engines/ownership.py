"""Which optimizers and parameters an engine has: a second engine over them would train wrongly, in silence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from distaccum.errors import MisuseError

_owners: MutableMapping[Any, Ownership] = WeakIdKeyDictionary()


def is_owned(thing: object) -> bool:
    """Whether an engine that is not closed has this optimizer or parameter."""
    return thing in _owners


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaves of a graph that need a gradient: one walk over its nodes."""
    return (leaf for node in nodes_of(loss) if isinstance(leaf := getattr(node, "variable", None), Tensor))


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """The nodes of a graph, each once."""
    waiting = [loss.grad_fn]
    seen = {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


class Ownership:
    """One engine's claim to its optimizers and to the parameters that it trains, until :meth:`release`.

    Args:
        model: not wrapped yet.
        optimizers: over its parameters.

    Raises:
        MisuseError: another engine has one of them.
    """

    spent: bool = False
    """Whether the optimizers are left with a share of their state, after :meth:`release`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        # Its own list: engines of other threads come and go while it is walked.
        self._claimed: list[ref[Any]] = []
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for thing, what in (
            *((optimizer, f"optimizer {type(optimizer).__name__}") for optimizer in optimizers),
            *((parameter, f"model {type(model).__name__}") for parameter in parameters),
        ):
            if thing in _owners and _owners[thing].spent:
                problem = f"the {what} was in another Accumulator (engine), which left each rank a share of its state"
                raise MisuseError(f"{problem}: make a new one over model.parameters()")
            if thing in _owners:
                problem = f"the {what} is in another Accumulator (engine) that is not closed"
                raise MisuseError(
                    f"{problem}: for another global batch call its set_global_batch_size(n), else its close() first"
                )
        self.add([*optimizers, *parameters])

    def add(self, things: Iterable[object]) -> None:
        """Claims these as well: an engine may put other parameters in the place of the model's."""
        for thing in things:
            _owners[thing] = self
            self._claimed.append(ref(thing))

    def release(self, *, keeps_optimizers: bool = False) -> None:
        """Gives up the claim; later calls do nothing.

        Args:
            keeps_optimizers: where a rank is left with a share of their state, nobody can go on with them.
        """
        self.spent = keeps_optimizers
        for thing in [reference() for reference in self._claimed]:
            kept = keeps_optimizers and isinstance(thing, Optimizer)
            if thing is not None and not kept and _owners.get(thing) is self:
                del _owners[thing]
