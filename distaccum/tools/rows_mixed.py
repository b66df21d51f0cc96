"""Whether a loss weighs its samples by one another, as class weights that are computed of a micro-batch do.

The operators between the model's outputs and the loss are noted in a loop, and run again with the labels of
two samples in the places of all. What the labels of some places change in a sum over samples, and in a mean over a
count that both samples share, does not depend on those of the others; nor does the gradient of an output, where
outputs are exchanged, too. There are as many rows as there were, so that shapes in the loop's code stay right.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

from distaccum.data.batches import map_tensors
from distaccum.engines.base import Engine
from distaccum.engines.compiled import BesideCompiled
from distaccum.losses.normalize import SINGLE, Count, LossSum, as_counts, as_loss_sums
from distaccum.precision.selection import SIXTEEN_BIT
from distaccum.tools.kept import Kept
from distaccum.tools.loss_terms import terms_of
from distaccum.tools.weight_terms import MANY, close, digits
from distaccum.verification.additivity import rows_of

_log = logging.getLogger(__name__)
_PAIR, _OTHERS, _LOOKS = 2, 4, 4  # samples; those that the first one is paired with; micro-batches
_MOST, _ELEMENTS = 2_000, 2**24  # operators, and numbers in a tensor: more are another model, or too many to keep
_ROUNDING, _ROUNDING_16 = 1e-3, 3e-2  # of a loss, whose sum has another order
_NOTHING = 1e-5  # of a gradient of all samples
MIXES = (
    "the gradient of a sample's output depends on the other samples of its micro-batch, by what is detached or read of "
    "them (a mean, a ratio of terms): it depends on the micro-batch size. Compute that of each sample, or once a "
    "window, before its micro-batches"
)
MISCOUNTS = (
    "the loss is a mean over something else than its count, which it is multiplied by: a sample weighs more beside "
    "samples that count more, and the gradient depends on the micro-batch size. Count what it is a mean over, as the "
    "samples where it is a mean of their means"
)
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
        self._compares = self._guessed_compares = False
        self._totals = set[float]()  # counts by which a mean over something else is multiplied
        self._kept = Kept(engine.unwrapped_model)
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
        self._batch, self._tail = batch, _Tail(found[0].shape[0], found, self._kept)
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
        self._kept.ends(as_loss_sums(losses).values())
        known = given if isinstance(given, Mapping) else {}
        sums = {name: loss for name, loss in as_loss_sums(losses).items() if known.get(name) != 1.0}
        try:
            counts = None if count is None else [as_counts(count(row)) for row in rows_of(batch, tail.rows) or []]
            if counts is None:
                self._apart &= given == tail.rows
            alike = [other for other in tail.rows_apart() if counts is None or counts[other] == counts[0]]
            pairs = [(0, other) for other in tail.others() if other in alike]
            for pair in pairs[:_OTHERS]:
                said = tail.compare(sums, *pair)
                self._found = self._found or (said if counts is not None else "")
                self._guessed = self._guessed or said
            for other in alike[:_OTHERS]:
                compares = tail.mixes(sums, 0, other)
                self._compares |= compares and counts is not None
                self._guessed_compares |= compares
            if total := _multiplied_by(sums, known or ({} if given is None else {SINGLE: given})):
                each = [] if counts is None else [next(iter(one.values())) for one in counts]
                first, *others = (
                    [0, *tail.rows_again()] if not each else [i for i, own in enumerate(each) if own] or [0]
                )
                if others and tail.rows_again() and (each or tail.has_read(total)):
                    pairs = [(first, other) for other in others[:_OTHERS]]
                    self._totals |= {total for pair in pairs if tail.mixes(sums, *pair, total=total, counts=each)}
            self._looked += _LOOKS if self._guessed else bool(alike)
        except Exception as problem:  # operators that want other rows than these
            _log.info("the rows of a loss were not mixed: %s: %s", type(problem).__name__, problem)

    @property
    def problem(self) -> str:
        """Of this rank, in words; empty where there is none."""
        return self._found or (self._guessed if self._apart else "")

    @property
    def compares(self) -> bool:
        """Whether a loss on this rank depends on samples together, by their outputs, be these detached."""
        return self._compares or (self._guessed_compares and self._apart)

    @property
    def miscounts(self) -> bool:
        """Whether a loss on this rank is a mean over something else than its count, which it is multiplied by."""
        return len(self._totals) > 1  # a factor may be the count of one micro-batch by chance

    @property
    def carried(self) -> bool:
        """Whether a loss on this rank is computed of what the micro-batch before has left, outside of the model."""
        return self._kept.read

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
        kept: is told of each operator.
    """

    def __init__(self, rows: int, batch: Sequence[Tensor], kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self._kept = rows, kept
        kept.begins(batch)
        self._inputs = {id(tensor): tensor for tensor in batch}
        self._labels = [tensor for tensor in batch if not (tensor.is_floating_point() or tensor.is_complex())]
        self._outputs: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}
        self._steps: list[tuple[Any, Any, Any, Any, bool]] = []
        self._on = self._lost = self._sixteen = False
        self._counts = False  # whether the loop has read a number that may be a count, of samples that others replace

    def begin(self) -> None:
        """Notes from here on."""
        if not (self._on or self._lost):
            self.__enter__()
            self._on = True

    def end(self) -> None:
        """Until here; what lies within another mode of the user's cannot be left, and notes nothing more."""
        if self._on and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
            self._on = False
        elif self._on:
            self._lost = True

    def outputs(self, output: Tensor) -> None:
        """A tensor that the model has returned."""
        self._kept.given([output])
        if id(output) not in self._inputs and output.ndim and output.shape[0] == self.rows:
            self._outputs[id(output)] = output
        elif output.requires_grad:
            self._lost = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, and notes it."""
        found = function(*args, **(kwargs or {}))
        self._kept.note(function, (args, kwargs or {}), found)
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
        if torch.Tag.nondeterministic_seeded in function.tags:
            return False
        if name in _READS and depends:
            if not isinstance(found, int | float) or isinstance(found, bool):
                return False
            self._counts |= float(found).is_integer()
        strangers = [one for one in given if id(one) not in known]
        if any(one.ndim and one.shape[0] == self.rows for one in strangers) or (
            function._schema.is_mutable and strangers and any(one is two for one in strangers for two in gives)
        ):
            return False
        self._steps.append((function, args, kwargs, found, torch.is_grad_enabled()))
        self._made |= {id(one): one for one in gives if id(one) not in self._inputs | self._outputs}
        self._sixteen |= any(one.dtype in SIXTEEN_BIT for one in given)
        return all(one.numel() <= _ELEMENTS for one in gives)

    def rows_again(self) -> Sequence[int]:
        """All but the first one, where they can be run again."""
        return [] if self._lost or not self._outputs or self.rows < _PAIR else range(1, self.rows)

    def rows_apart(self) -> Sequence[int]:
        """These, where no count of them is in the loop's own hands."""
        return [] if self._counts else self.rows_again()

    def others(self) -> Sequence[int]:
        """Samples that may be weighed otherwise than the first one: of other labels, where there are such."""
        if not self.rows_apart():
            return []
        differ = [(one != one[:1]).reshape(self.rows, -1).any(1) for one in self._labels]
        others: list[int] = torch.stack(differ).any(0).nonzero()[:, 0].tolist() if differ else [*range(1, self.rows)]
        return others

    def compare(self, losses: Mapping[str, Tensor], one: int, other: int) -> str:
        """In words, a loss that weighs the labels of two samples by one another; empty where there is none."""
        rows, rounding = torch.arange(self.rows), _ROUNDING_16 if self._sixteen else _ROUNDING
        if not self._repeats(losses):
            return ""
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

    def mixes(
        self, losses: Mapping[str, Tensor], one: int, other: int, *, total: float = 0.0, counts: Any = None
    ) -> bool:
        """Whether the gradient of a sample's output is another beside another sample, also by what is detached.

        Args:
            losses: by name.
            one, other: the samples.
            total: the count of all that the losses are multiplied by, where these are others of other samples.
            counts: of each sample; else the total is a number that the loop has read.
        """
        rows, rounding = torch.arange(self.rows), _ROUNDING_16 if self._sixteen else _ROUNDING
        if not self._repeats(losses):
            return False
        places = ([one, one], [other, other], [one, other])
        first, second, both = (self._gradients(losses, torch.tensor(pair)[rows % 2]) for pair in places)
        for pair, (gradients, read) in zip(places, (first, second, both), strict=True) if total else ():
            by = sum(counts[pair[row % 2]] for row in range(self.rows)) if counts else read[self._reads().index(total)]
            gradients[:] = [gradient * by for gradient in gradients]
        size = sum(float(gradient.norm()) for gradient in both[0])
        for row, alone in enumerate((first[0], second[0])):
            for gradient, beside in zip(alone, both[0], strict=True):
                own, other_own = gradient[row::2], beside[row::2]
                largest = max(rounding * max(float(own.norm()), float(other_own.norm())), _NOTHING * size)
                if float((own - other_own).norm()) > largest:
                    return True
        if total:
            return False
        mixed = {
            now for a, b, now in zip(first[1], second[1], both[1], strict=True) if not (close(now, a) or close(now, b))
        }
        read = [value for value, now in zip(self._reads(), both[1], strict=True) if now in mixed]
        return any(_is_made_of(number, read) for number in self._factors())

    def has_read(self, number: float) -> bool:
        """Whether it is one that the loop has read of its samples."""
        return number in self._reads()

    def _reads(self) -> list[float]:
        """The numbers that the loop has read of its samples."""
        return [found for *_, found, _ in self._steps if isinstance(found, int | float)]

    def _factors(self) -> Iterator[float]:
        """The numbers that something with a gradient is multiplied or divided by, and that no person writes."""
        for function, args, _, found, _ in self._steps:
            if re.fullmatch(r"aten::(mul|div)_?", function._schema.name) and found.requires_grad:
                yield from (one for one in args if isinstance(one, float) and one and digits(one) == MANY)

    def _repeats(self, losses: Mapping[str, Tensor]) -> bool:
        """Whether the operators alone give the losses, with no other part in them as a gathering has."""
        rows, rounding = torch.arange(self.rows), _ROUNDING_16 if self._sixteen else _ROUNDING
        again = self._run(losses, rows, rows)
        return all(abs(value - float(losses[name].detach())) <= rounding * abs(value) for name, value in again.items())

    def _gradients(self, losses: Mapping[str, Tensor], index: Tensor) -> tuple[list[Tensor], list[float]]:
        """Of the losses with respect to the outputs, with rows of the micro-batch; and the numbers that are read."""
        rows: Callable[[Tensor], Tensor] = lambda tensor: tensor.detach()[index.to(tensor.device)]  # noqa: E731
        leaves = {key: rows(tensor) for key, tensor in self._outputs.items()}
        for leaf in leaves.values():
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        values = {key: rows(tensor) for key, tensor in self._inputs.items()}
        values |= {key: leaf.clone() for key, leaf in leaves.items()}
        read = list[float]()
        with torch.autocast(_device(self._inputs), enabled=False):
            for step in self._steps:
                with torch.set_grad_enabled(step[-1]):
                    again = _again(step, values)
                read += [again] if isinstance(step[3], int | float) else []
        total = [values[id(loss)] for loss in losses.values() if id(loss) in values and values[id(loss)].requires_grad]
        reached = [leaf for leaf in leaves.values() if leaf.requires_grad]
        if not total:
            return [], read
        found = torch.autograd.grad(torch.stack([*map(Tensor.double, total)]).sum(), reached, allow_unused=True)
        return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(reached, found, strict=True)], read

    def _run(self, losses: Mapping[str, Tensor], index: Tensor, outputs: Tensor) -> dict[str, float]:
        """The losses of rows of the micro-batch, with some of the outputs; without what comes of no operators."""
        values = {key: tensor.detach()[index.to(tensor.device)] for key, tensor in self._inputs.items()}
        values |= {key: tensor.detach()[outputs.to(tensor.device)] for key, tensor in self._outputs.items()}
        with torch.no_grad(), torch.autocast(_device(self._inputs), enabled=False):
            for step in self._steps:
                _again(step, values)
        return {name: float(values[id(loss)]) for name, loss in losses.items() if id(loss) in values}


def _multiplied_by(losses: Mapping[str, Tensor], counts: Mapping[str, float]) -> float:
    """The count of a micro-batch's one loss, where that is a factor of all that it is the sum of; else 0."""
    name, total = next(iter(losses), ""), float(next(iter(counts.values()), 0.0))
    if len(losses) != 1 or len(counts) != 1 or total <= 1.0:
        return 0.0
    terms = terms_of(losses[name].grad_fn)
    times = all(any(close(by, total) for by in term.multipliers) for term in terms)
    return total if terms and times else 0.0


def _again(step: Sequence[Any], values: dict[int, Tensor]) -> Any:
    """Runs an operator with ``values`` in the places of what they stand for, and adds what it gives."""
    function, args, kwargs, found, _ = step
    given, by_name = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
    again = function(*given, **by_name)
    values |= {
        id(before): now
        for before, now in zip(tree_leaves(found), tree_leaves(again), strict=True)
        if isinstance(before, Tensor)
    }
    return again


def _is_made_of(number: float, read: Sequence[float]) -> bool:
    """Whether a factor is a number that was read, one of two, or one over one, times what a person writes."""
    made = [a / b for a in (1.0, *read) for b in (1.0, *read) if b and a is not b]
    return any(digits(abs(number / one)) < MANY for one in made if one and digits(abs(one)) == MANY)


def _device(tensors: Mapping[int, Tensor]) -> str:
    return next(iter(tensors.values())).device.type
