"""Whether a forward of a user's loop depends on what the forwards before it have left behind in the model.

The loss is the loop's own, and nobody can compute it again; the model's calls can be run once more. Those of the
window's last micro-step run again with the buffers and attributes that the window began with: where another output
comes of it, a micro-batch's loss depends on how many came before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from math import inf, isclose, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from distaccum.data.batches import map_tensors
from distaccum.distributed.random import RNGState
from distaccum.engines.base import Engine
from distaccum.engines.buffers import state_restored
from distaccum.engines.compiled import uncompiled
from distaccum.losses.normalize import LossSum, as_loss_sums
from distaccum.tools.compared import nodes_above
from distaccum.tools.plain_state import PlainState
from distaccum.tools.weights_at_rest import values_of

_log = logging.getLogger(__name__)
_SAME, _REPEATED = 1e-4, 1e-3  # of an output: by another state, and by the same one
_LEAST, _NOISES = 2e-6, 10.0  # by another state, where the same one gives so much less: power iterations move little
_MATRIX, _NUMBERS = 4, 1e-6  # elements that are not the same by chance; of their sum and norm


@dataclass
class _Call:
    """Of the model, in the last micro-step."""

    leaves: list[Any]
    tree: Any
    random: RNGState
    outputs: list[Tensor] = field(default_factory=list)
    ends: set[tuple[Any, int]] = field(default_factory=set)  # these, in the graph


class _BuffersOf:
    """A module's buffers, as attributes of an object."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__ = module._buffers


class Carried:
    """Notes the state of the window's begin, and the model's calls in its last micro-step; see :meth:`problem`.

    What the loop itself sets once it is given a micro-batch, such as a mask of its samples, is left as the loop set it.

    Args:
        engine: runs the forwards.
        micro_batches: of this rank.
    """

    def __init__(self, engine: Engine, micro_batches: int) -> None:
        self._engine, self._model, self._last = engine, engine.unwrapped_model, micro_batches - 1
        self._step = 0
        self._first: PlainState | None = None
        self._given: PlainState | None = None  # with the last micro-batch
        self._calling: PlainState | None = None  # as the model is called with it
        self._carried: set[tuple[int, str]] | None = None
        self._calls: list[_Call] = []
        self._read = ""  # by the loss itself
        self._hooks: list[Any] = []

    def gives(self) -> None:
        """Called before the loop is given a micro-batch."""
        if self._last > 0 and self._step == 0 and self._engine.compiled is None:
            self._first = self._state()
        elif self._first is not None and self._step == self._last:
            self._given = self._state()

    def before_forward(self) -> None:
        """Called before each micro-step's forward."""
        if self._given is not None and not isinstance(self._model, torch.jit.ScriptModule):
            begins = self._model.register_forward_pre_hook(self._called, with_kwargs=True)
            self._hooks = [begins, self._model.register_forward_hook(self._returned)]

    def after_forward(self, losses: LossSum) -> None:
        """Called after its loss."""
        self._step += 1
        self._unhook()
        if self._calls:
            ends = {end for call in self._calls for end in call.ends}
            with suppress(Exception):  # torch promises nothing of its nodes
                self._read = self._kept_by(
                    [node for one in as_loss_sums(losses).values() for node in nodes_above(one, ends)]
                )

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _kept_by(self, nodes: Iterable[Any]) -> str:
        """The name of what is carried that a node between the model and the loss keeps for its backward."""
        assert self._calling is not None
        assert self._carried is not None
        state = [(name, one) for name, one in self._calling.kept(self._carried) if isinstance(one, Tensor)]
        for node in nodes:
            for key in [key for key in dir(node) if key.startswith("_saved_")]:
                if getattr(getattr(node, f"_raw{key}", None), "unpack_hook", None) is not None:
                    continue
                saved = getattr(node, key)
                for name, one in state:
                    if isinstance(saved, Tensor) and _holds(saved, one):
                        return name
        return ""

    def forget(self) -> None:
        """Frees what was noted, and leaves the model alone."""
        self._unhook()
        self._first = self._given = self._calling = None
        self._calls = []

    def _state(self) -> PlainState:
        modules = list(self._model.modules())
        return PlainState([*modules, *map(_BuffersOf, modules)])

    def _called(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        assert self._first is not None
        assert self._given is not None
        if self._carried is None:
            self._carried = self._first.moved() - self._given.moved()
            self._calling = self._state() if self._carried else None
        if self._carried:
            leaves, tree = tree_flatten((args, kwargs))
            kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._calls.append(_Call(kept, tree, RNGState.capture(self._engine.device)))

    def _returned(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._calls:
            self._calls[-1].outputs = _numbers(output)
            map_tensors(output, lambda one: self._calls[-1].ends.add((one.grad_fn, one.output_nr)))

    def problem(self, *, fits: bool) -> str:
        """The names of what is carried over to where it changes an output or a loss; a collective.

        Args:
            fits: whether a rank can hold the whole model.
        """
        sharded, whole = self._engine.facts.forward_communicates, self._engine.probe.whole_weights
        ready, read = self._engine.world.all_reduce_host([bool(self._calls), bool(self._read)])
        if read or ready < self._engine.world.size or (sharded and (whole is None or not fits)):
            return self._read
        with whole() if sharded and whole is not None else nullcontext():
            try:
                return self._compared()
            except Exception as problem:  # the user's code, run a second time
                _log.info("the state of a loop was not compared: %s: %s", type(problem).__name__, problem)
                return ""

    def _compared(self) -> str:
        assert self._first is not None
        assert self._calling is not None
        assert self._carried is not None
        with state_restored(self._engine), uncompiled, torch.no_grad():
            self._calling.restore()
            self._first.restore_some(self._carried)
            begun = self._again()
            there = [output for call in self._calls for output in call.outputs]
            if _apart(begun, there) <= _LEAST:
                return ""
            self._calling.restore()
            after = self._again()
        noise = _apart(after, there)
        least = max(_LEAST, min(_NOISES * noise, _SAME))
        if not noise <= _REPEATED or min(_apart(begun, there), _apart(begun, after)) <= least:
            return ""  # another autocast, a generator of its own
        return ", ".join(sorted({name for _, name in self._carried}))

    def _again(self) -> list[Tensor]:
        found: list[Tensor] = []
        torch.clear_autocast_cache()
        for call in self._calls:
            args, kwargs = tree_unflatten(call.leaves, call.tree)
            call.random.restore()
            with self._engine.autocast():
                found += _numbers(self._model(*args, **kwargs))
        return found


def _holds(saved: Tensor, state: Tensor) -> bool:
    """Whether a tensor has the numbers of another, perhaps transposed."""
    if saved.numel() != state.numel() or not state.is_floating_point() or saved.numel() < _MATRIX:
        return False
    one, other = values_of(saved), values_of(state)
    return all(isclose(a, b, rel_tol=_NUMBERS) for a, b in zip(one, other, strict=True))


def _numbers(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(output, lambda one: found.append(one.detach().clone()) if one.is_floating_point() else None)
    return found


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """How much of an output two runs differ by at most."""
    if len(one) != len(other) or any(a.shape != b.shape for a, b in zip(one, other, strict=True)):
        return inf
    off = [float((a - b).norm()) / max(float(b.norm()), 1e-30) for a, b in zip(one, other, strict=True)]
    return inf if any(map(isnan, off)) else max(off, default=0.0)
