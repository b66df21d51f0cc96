"""Whether a loss weighs its samples by one another, as class weights that are computed of a micro-batch do.

The operators between the model's outputs and the loss are noted in a loop, and run again with the labels of
two samples in the places of all. What the labels of some places change in a sum over samples, and in a mean over a
count that both samples share, does not depend on those of the others. There are as many rows as there were, so that
shapes in the loop's code stay right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

from distaccum.data.batches import map_tensors
from distaccum.engines.base import Engine
from distaccum.engines.compiled import BesideCompiled
from distaccum.losses.normalize import Count, LossSum, as_counts, as_loss_sums
from distaccum.precision.selection import SIXTEEN_BIT
from distaccum.verification.additivity import rows_of

_log = logging.getLogger(__name__)
_PAIR, _OTHERS, _LOOKS = 2, 4, 4  # samples; those that the first one is paired with; micro-batches
_MOST, _ELEMENTS = 2_000, 2**24  # operators, and numbers in a tensor: more are another model, or too many to keep
_ROUNDING, _ROUNDING_16 = 1e-3, 3e-2  # of a loss, whose sum has another order
_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::item")  # what a program goes on with nobody sees


class RowsMixed:
    """Of a window's micro-batches in their order, until one says something; see :meth:`problem`.

    Args:
        engine: runs the forwards.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._looked = engine, 0
        self._tail: _Tail | None = None
        self._batch: Any = None
        self._hooks: list[Any] = []
        self._apart = True  # whether every micro-batch so far counts its samples, as far as the loop says
        self._guessed = ""  # what holds only where that is so
        self._found = ""
        self.doubtful = False
        """Whether the rows may not be samples, as in an item of a stream that is a whole micro-batch."""

    def before_forward(self, batch: Any, samples: int) -> None:
        """Called before each micro-step's forward, with the micro-batch and its number of samples, 1 of a stream's."""
        model = self._engine.model
        if self._looked >= _LOOKS or self._engine.compiled is not None:
            return
        if isinstance(self._engine.unwrapped_model, torch.jit.ScriptModule) or rows_of(batch, samples, parts=1) is None:
            return
        found: list[Tensor] = []
        map_tensors(batch, found.append)
        self._batch, self._tail = batch, _Tail(found[0].shape[0], found)
        self.doubtful |= samples != self._tail.rows
        self._hooks = [
            model.register_forward_pre_hook(self._calls, prepend=True),
            model.register_forward_hook(self._returned),
        ]
        self._tail.begin()

    def _calls(self, *_: Any) -> None:
        if self._tail is not None:
            self._tail.end()

    def _returned(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._tail is not None:
            map_tensors(output, self._tail.outputs)
            self._tail.begin()

    def after_forward(self, losses: LossSum, count: Count | None, given: Any) -> None:
        """Called after its loss, before the backward; reads the device.

        Args:
            losses: the sums.
            count: what a loop's micro-batches are counted by, where that is known.
            given: the micro-batch's count else.
        """
        tail, batch = self._tail, self._batch
        self.forget()
        if tail is None:
            return
        known = given if isinstance(given, Mapping) else {}
        sums = {name: loss for name, loss in as_loss_sums(losses).items() if known.get(name) != 1.0}
        try:
            counts = None if count is None else [as_counts(count(row)) for row in rows_of(batch, tail.rows) or []]
            if counts is None:
                self._apart &= given == tail.rows
            pairs = [(0, other) for other in tail.others() if counts is None or counts[other] == counts[0]]
            for pair in pairs[:_OTHERS]:
                said = tail.compare(sums, *pair)
                self._found = self._found or (said if counts is not None else "")
                self._guessed = self._guessed or said
            self._looked += _LOOKS if self._guessed else bool(pairs)
        except Exception as problem:  # operators that want other rows than these
            _log.info("the rows of a loss were not mixed: %s: %s", type(problem).__name__, problem)

    @property
    def problem(self) -> str:
        """Of this rank, in words; empty where there is none."""
        return self._found or (self._guessed if self._apart else "")

    def forget(self) -> None:
        """Leaves the model and torch alone, also where a forward has failed."""
        if self._tail is not None:
            self._tail.end()
        self._tail = self._batch = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Tail(BesideCompiled):
    """Notes operators outside of the model; what is compiled runs compiled, and what it does not show is not judged.

    Args:
        rows: of the micro-batch.
        batch: its tensors.
    """

    def __init__(self, rows: int, batch: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self._inputs = {id(tensor): tensor for tensor in batch}
        self._labels = [tensor for tensor in batch if not (tensor.is_floating_point() or tensor.is_complex())]
        self._outputs: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._on = self._lost = self._sixteen = False

    def begin(self) -> None:
        """Notes from here on."""
        if not (self._on or self._lost):
            self.__enter__()  # type: ignore[no-untyped-call]
            self._on = True

    def end(self) -> None:
        """Until here; what lies within another mode of the user's cannot be left, and notes nothing more."""
        if self._on and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._on = False
        elif self._on:
            self._lost = True

    def outputs(self, output: Tensor) -> None:
        """A tensor that the model has returned."""
        if id(output) not in self._inputs and output.ndim and output.shape[0] == self.rows:
            self._outputs[id(output)] = output
        elif output.requires_grad:
            self._lost = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, and notes it."""
        found = function(*args, **(kwargs or {}))
        if not self._lost:
            self._lost = not self._note(function, args, kwargs or {}, found)
            self._lost |= len(self._steps) > _MOST
        return found

    def _note(self, function: Any, args: Any, kwargs: Any, found: Any) -> bool:
        """Whether it can be run again, on other rows."""
        known = self._inputs | self._outputs | self._made
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        gives = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        name, depends = function._schema.name, any(id(one) in known for one in given)
        if not (given or gives):
            return True  # a profiler's
        if not name.startswith("aten::") or any(type(one) not in (Tensor, nn.Parameter) for one in given):
            return False
        if torch.Tag.nondeterministic_seeded in function.tags or (name in _READS and depends):
            return False
        strangers = [one for one in given if id(one) not in known]
        if any(one.ndim and one.shape[0] == self.rows for one in strangers) or (
            function._schema.is_mutable and strangers and any(one is two for one in strangers for two in gives)
        ):
            return False
        self._steps.append((function, args, kwargs, found))
        self._made |= {id(one): one for one in gives if id(one) not in self._inputs | self._outputs}
        self._sixteen |= any(one.dtype in SIXTEEN_BIT for one in given)
        return all(one.numel() <= _ELEMENTS for one in gives)

    def others(self) -> Sequence[int]:
        """Samples that may be weighed otherwise than the first one: of other labels, where there are such."""
        if self._lost or not self._outputs or self.rows < _PAIR:
            return []
        differ = [(one != one[:1]).reshape(self.rows, -1).any(1) for one in self._labels]
        others: list[int] = torch.stack(differ).any(0).nonzero()[:, 0].tolist() if differ else [*range(1, self.rows)]
        return others

    def compare(self, losses: Mapping[str, Tensor], one: int, other: int) -> str:
        """In words, a loss that weighs the labels of two samples by one another; empty where there is none."""
        rows, rounding = torch.arange(self.rows), _ROUNDING_16 if self._sixteen else _ROUNDING
        again = self._run(losses, rows, rows)
        if not all(abs(value - float(losses[name].detach())) <= rounding * abs(value) for name, value in again.items()):
            return ""  # something else than operators has a part in it, as a gathering
        places = [[first, second] for first in (one, other) for second in (one, other)]  # of even rows, of odd ones
        found = [self._run(losses, torch.tensor(pair)[rows % 2], rows * 0 + one) for pair in places]
        for name in found[0]:
            alike, mixed, turned, others = (losses_of[name] for losses_of in found)
            changes = alike - mixed - turned + others  # 0 of a sum, also where a sample's place weighs it
            if isfinite(changes) and not abs(changes) <= rounding * max(map(abs, (alike, mixed, turned, others))):
                of = "" if name == "loss" else f" {name!r}"
                return (
                    f"the loss{of} of some samples' labels depends on the labels of others ({alike:.6g} of one's alone "
                    f"and {others:.6g} of another's, {mixed:.6g} and {turned:.6g} of both): their weights, or what "
                    "they are divided by, are computed of the micro-batch, and the gradient depends on its size. "
                    'Compute weights of classes once, of the data set; take reduction="sum", and have count= count '
                    "what the loss is to be divided by, as the weights of the labels"
                )
        return ""

    def _run(self, losses: Mapping[str, Tensor], index: Tensor, outputs: Tensor) -> dict[str, float]:
        """The losses of rows of the micro-batch, with some of the outputs; without what comes of no operators."""
        values = {key: tensor.detach()[index.to(tensor.device)] for key, tensor in self._inputs.items()}
        values |= {key: tensor.detach()[outputs.to(tensor.device)] for key, tensor in self._outputs.items()}
        get: Callable[[Any], Any] = lambda leaf: values.get(id(leaf), leaf)  # noqa: E731
        with torch.no_grad(), torch.autocast(_device(self._inputs), enabled=False):
            for function, args, kwargs, found in self._steps:
                given, by_name = tree_map(get, (args, kwargs))
                again = function(*given, **by_name)
                values |= {
                    id(before): now
                    for before, now in zip(tree_leaves(found), tree_leaves(again), strict=True)
                    if isinstance(before, Tensor)
                }
        return {name: float(values[id(loss)]) for name, loss in losses.items() if id(loss) in values}


def _device(tensors: Mapping[int, Tensor]) -> str:
    return next(iter(tensors.values())).device.type
