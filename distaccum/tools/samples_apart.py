"""Whether a backward treats samples one by one where no loss is at hand, or the model is sharded.

The gradient that the model's output has got takes the place of a loss: two samples of it, and of what the model was
called with, give a gradient apart and together. What a loss itself compares is not seen, nor a model that returns one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from distaccum.data.batches import map_tensors
from distaccum.engines.base import Engine
from distaccum.tools.samples_run import address
from distaccum.verification.additivity import in_16_bits
from distaccum.verification.parts import gradient_of_parts

_log = logging.getLogger(__name__)
_PAIR = 2
_OTHER = 1e-3  # of outputs along their gradients

DEPENDS = (
    "a sample's outputs depend on the other samples of its micro-batch (on statistics, attention or a capacity across "
    "rows), and the gradient on the micro-batch size. Compute each sample by itself, or a micro-batch as one sample"
)


class SamplesApart:
    """Notes two samples of the window's first call of the model that is trained by; see :meth:`problem`.

    Args:
        engine: runs the forwards.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._model = engine, engine.unwrapped_model
        self._inputs: list[Any] = []  # of that call: leaves, of two samples where they are tensors of all
        self._tree: Any = None
        self._samples = 0  # of that call
        self._cotangents: dict[int, Tensor] = {}  # by the number of an output
        self._hooks: list[Any] = []
        self._ended = False
        self._size = 0.0  # of two samples' outputs along their gradients, which may cancel out
        self.strange = set[int]()
        """Outputs, by number, that have as many rows as the micro-batch, and are not of samples: prototypes, scales."""
        self.depends = False
        """Whether a sample's outputs are others in other company, in a model without statistics of the batch."""

    def before_forward(self) -> None:
        """Called before each micro-step's forward."""
        if self._ended or self._engine.compiled is not None or isinstance(self._model, torch.jit.ScriptModule):
            return
        begins = self._model.register_forward_pre_hook(self._called, with_kwargs=True, prepend=True)
        self._hooks = [begins, self._model.register_forward_hook(self._returned)]

    def after_forward(self) -> None:
        """Called after its loss; the gradients of the outputs come later."""
        self._ended = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def forget(self) -> None:
        """Frees what was noted."""
        self.after_forward()
        self._inputs, self._cotangents = [], {}

    def _called(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._samples or not torch.is_grad_enabled():
            return
        leaves, tree = tree_flatten((args, kwargs))
        of_samples = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim and address(leaf)]
        if of_samples and of_samples[0].shape[0] >= _PAIR:
            self._samples, self._tree = of_samples[0].shape[0], tree
            self._inputs = [self._two(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _two(self, tensor: Tensor) -> Tensor:
        """Two samples of a tensor of all, else all of it; a copy, as loops write into their batches."""
        own = tensor.detach()
        rows = own[:_PAIR] if self._is_of_samples(own) else own
        return rows.clone().requires_grad_(tensor.requires_grad)

    def _is_of_samples(self, tensor: Tensor) -> bool:
        return tensor.shape[:1] == (self._samples,)

    def _returned(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._inputs and not self._cotangents:
            for number, one in enumerate(_tensors(output)):
                with suppress(RuntimeError):  # of torch.func's transforms
                    if one.requires_grad and (self._is_of_samples(one) or not one.ndim):
                        one.register_hook(partial(self._note, number))  # type: ignore[no-untyped-call]

    def _note(self, number: int, cotangent: Tensor | None) -> None:
        """The last one stays: the engine's own backward comes behind those that look at its graph.

        It is None where the loss takes other outputs of the same function, as an LSTM's without its states.
        """
        if self._inputs and cotangent is not None:
            rows = cotangent.detach()
            self._cotangents[number] = (rows[:_PAIR] if self._is_of_samples(rows) else rows).clone()

    def problem(self, *, fits: bool) -> str:
        """In words, a gradient that is no sum over samples where outputs are theirs; empty else.

        Args:
            fits: whether a rank can hold the whole model. Where it is sharded this is a collective then.
        """
        sharded, whole = self._engine.facts.forward_communicates, self._engine.probe.whole_weights
        if sharded and (whole is None or not fits):
            return ""
        with whole() if sharded and whole is not None else nullcontext() as weights, torch.enable_grad():
            if not self._cotangents or not any(self._is_pair(leaf) for leaf in self._inputs):
                return ""
            try:
                return self._compared(weights)
            except Exception as problem:  # the user's code, on one sample
                _log.info("two samples of a loop were not compared: %s: %s", type(problem).__name__, problem)
                return ""

    def _compared(self, weights: Mapping[str, Tensor] | None) -> str:
        own = {n: c for n, c in self._cotangents.items() if c.ndim} or self._cotangents
        while own:
            pair = {"inputs": self._inputs, "cotangents": own}
            apart = [map_tensors(pair, _rows(self._is_pair, i)) for i in range(_PAIR)]
            said, losses = gradient_of_parts(self._engine, self._along, apart, pair, weights)
            if not self.strange & own.keys():
                self.depends = self._add_up_to_another(losses)
                return said
            own = {n: c for n, c in own.items() if n not in self.strange}
        return ""

    def _add_up_to_another(self, losses: Sequence[Mapping[str, float]]) -> bool:
        """Whether what two samples' outputs are along their gradients is not the sum of each one's alone."""
        together, *apart = (sum(each.values()) for each in losses) if losses else [0.0]
        statistics = any(isinstance(module, _BatchNorm) and module.training for module in self._model.modules())
        rounds = statistics or in_16_bits(self._engine)
        return not rounds and abs(together - sum(apart)) > _OTHER * self._size

    def _is_pair(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.shape[:1] == (_PAIR,)

    def _along(self, model: nn.Module, batch: Any) -> Tensor:
        """The outputs along their gradients: as steep as the loss, and a sum over samples where they are theirs."""
        args, kwargs = tree_unflatten(batch["inputs"], self._tree)
        outputs = _tensors(model(*args, **kwargs))
        self.strange |= {n for n, c in batch["cotangents"].items() if c.ndim and outputs[n].shape[:1] != c.shape[:1]}
        along = [outputs[n] * c for n, c in batch["cotangents"].items()]
        self._size = max(self._size, float(sum(one.detach().abs().sum() for one in along)))
        return torch.stack([one.sum().float() for one in along]).sum()


def _rows(is_pair: Callable[[Any], bool], number: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[number : number + 1] if is_pair(tensor) else tensor


def _tensors(output: Any) -> Sequence[Tensor]:
    found: list[Tensor] = []
    map_tensors(output, found.append)
    return found
