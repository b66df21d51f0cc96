"""Whether a loss compares the samples of its micro-batch, where nobody but the loop can compute it.

Its gradient says so: that of one sample's output changes with another sample's output where the loss compares the two,
and does not in a sum over samples. What ranks gather from each other is looked at as well.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from distaccum.data.batches import map_tensors
from distaccum.engines.base import Engine
from distaccum.engines.modules import is_of_an_engine
from distaccum.losses.normalize import LossSum, as_loss_sums

_log = logging.getLogger(__name__)
_NOTHING = 1e-4  # of what a sample's gradient changes with its own output
_PAIR = 2
_MOST = 2_000  # nodes between the model and the loss: more are another model
_VIEWS = (1, 2)  # of a sample, one after the other
_PROBLEM = (
    "the loss compares the samples of a micro-batch: the gradient is not that of the whole window's comparison, and "
    "depends on the micro-batch size. Run the window by acc.step(window, loss) with a loss of representations, as "
    "distaccum.InfoNCE is"
)


class Compared:
    """Of the window's first micro-batch in a loop; see :meth:`in_words`.

    Args:
        engine: runs the forwards.
        samples: of that micro-batch, as far as the window knows; 1 of an item that may be several.
    """

    def __init__(self, engine: Engine, samples: int) -> None:
        self._engine, self._samples = engine, samples
        self._outputs: list[Tensor] = []
        self._hook: Any = None
        self._ended = False
        self.found = self.gathered = False
        """Whether it compares samples on this rank, and whether functions such as a gathering are between."""

    def before_forward(self, batch: Any) -> None:
        """Called before each micro-step's forward."""
        model = self._engine.unwrapped_model
        if self._ended or self._engine.compiled is not None or isinstance(model, torch.jit.ScriptModule):
            return
        rows = set[int]()
        map_tensors(batch, lambda tensor: rows.add(tensor.shape[0] if tensor.ndim else 0))
        if len(rows) == 1 and (self._samples in rows or self._samples == 1):
            (self._samples,) = rows
            self._hook = self._engine.model.register_forward_hook(self._returned)  # behind the engine's own

    def _returned(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Where an engine's hooks wait for an output's gradient, the loss gets another name of it."""
        if not torch.is_grad_enabled() or not self._engine.facts.forward_communicates:
            map_tensors(output, self._outputs.append)
            return None
        output = map_tensors(output, lambda one: one.view_as(one) if one.requires_grad else one)
        map_tensors(output, self._outputs.append)
        return output

    def after_forward(self, total: LossSum, counts: Any) -> None:
        """Looks at its loss, before its backward."""
        if self._outputs and not self._ended:
            known = counts if isinstance(counts, Mapping) else {}
            losses = [loss for name, loss in as_loss_sums(total).items() if known.get(name) != 1.0]
            try:
                for loss in losses:
                    if loss.requires_grad:
                        self._look(loss)
            except Exception as problem:  # what cannot be differentiated twice
                _log.info("the loss of a loop was not looked at twice: %s: %s", type(problem).__name__, problem)
        self.forget()

    def _look(self, loss: Tensor) -> None:
        outputs = {(one.grad_fn, one.output_nr) for one in self._outputs}
        ranks = (1, self._engine.world.size)
        functions, ends = _edges(loss, outputs, {self._samples * views * by for views in _VIEWS for by in ranks})
        if _compares(loss, functions or ends, self._samples):
            self.found, self.gathered = True, self.gathered or bool(functions)

    def in_words(self, micro_batches: int) -> str:
        """What one rank has found; empty where nobody has. A collective.

        Args:
            micro_batches: of this rank: what is gathered of all ranks may be the whole window.
        """
        world = self._engine.world
        found, alone, steps = world.all_reduce_host([self.found, self.found and not self.gathered, micro_batches])
        several = steps > world.size or (alone and world.size > 1)
        return _PROBLEM if found and several else ""

    def forget(self) -> None:
        """Leaves the model alone."""
        self._ended, self._outputs = True, []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _compares(loss: Tensor, edges: Sequence[GradientEdge], samples: int) -> bool:
    """Whether the gradient of the first sample changes with another's row."""
    if samples < _PAIR or not edges:
        return False
    given = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
    draws = torch.Generator().manual_seed(0)
    along = [
        (one[::samples] * torch.randn(one[::samples].shape, generator=draws).to(one)).sum()
        for one in given
        if one is not None and one.requires_grad
    ]
    if not along:
        return False
    changes = torch.autograd.grad(torch.stack(along).sum(), edges, retain_graph=True, allow_unused=True)
    own, others = 0.0, 0.0
    for change in changes:
        if change is not None:
            square = change.double().flatten(1).square().sum(1) if change.ndim > 1 else change.double().square()
            own += float(square[::samples].sum())
            others += float(square.sum() - square[::samples].sum())
    return others > _NOTHING**2 * own and others > 0.0


def nodes_above(loss: Tensor, outputs: Container[tuple[Any, int]]) -> Iterator[Any]:
    """The nodes of a graph between the model's outputs and the loss; none where these are too many."""
    left, seen = [(loss.grad_fn, loss.output_nr)], set[tuple[Any, int]]()
    while left and len(seen) < _MOST:
        node, number = left.pop()
        if node is not None and (node, number) not in seen and (node, number) not in outputs:
            seen.add((node, number))
            left += node.next_functions
    if not left:
        yield from {node for node, _ in seen}


def _edges(
    loss: Tensor, outputs: Container[tuple[Any, int]], rows: Container[int]
) -> tuple[list[GradientEdge], list[GradientEdge]]:
    """Where rows of samples enter the loss: out of functions that may run once only, as a gathering, and the model."""
    functions, ends = list[GradientEdge](), list[GradientEdge]()
    left, seen = [(loss.grad_fn, 0)], set[Any]()
    while left and len(seen) < _MOST:
        node, number = left.pop()
        if node is None or (node, number) in seen:
            continue
        seen.add((node, number))
        edge = GradientEdge(node, number)
        made_by = getattr(type(node), "_forward_cls", None)
        if made_by is not None and is_of_an_engine(made_by):
            return [], []  # within the model, past its outputs: what the loss takes of it is not looked at twice
        if made_by is not None:
            functions.append(edge)
        elif (node, number) in outputs:
            ends.append(edge)
        else:
            left += node.next_functions
    of_functions, of_model = ([edge for edge in found if _rows(edge) in rows] for found in (functions, ends))
    return ([], []) if left else (of_functions, [] if functions else of_model)


def _rows(edge: GradientEdge) -> int:
    shape = edge.node._input_metadata[edge.output_nr].shape
    return int(shape[0]) if len(shape) else 0
