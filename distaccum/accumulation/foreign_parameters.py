"""Learned tensors outside of the model, which reach a loss: nobody reduces their gradients over the ranks.

As a temperature, a prompt or the weights of several losses, in an optimizer of the user's own.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distaccum.data.hooks import WindowHook
from distaccum.data.window import Window
from distaccum.engines.base import Engine
from distaccum.engines.optimizer_step import is_guarded
from distaccum.engines.ownership import is_owned, nodes_of
from distaccum.errors import MisuseError

_WINDOWS = 2  # whose graphs are walked


class ForeignParameters(WindowHook):
    """Finds the leaves of a loss that no engine owns, and refuses an optimizer that steps on what they got from it.

    Many are no fault: an input whose gradient is wanted, a critic that is not frozen, a model that is trained on
    another loss by other means. What is refused is a step on the very gradient that the accumulator's backward left.

    Args:
        engine: whose backward leaves the gradients.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._windows = engine, _WINDOWS
        self._leaves: list[Tensor] = []  # of the backward that comes next, or runs
        # What the accumulator's backward has left in a foreign parameter: the gradient, and its version.
        self._left: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]] = {}
        self._hooks: list[Any] = []
        self._within = False

    def after_step(self, window: Window) -> None:
        """Notes that a window's losses were looked at; after the last one, the leaves say themselves what they get.

        What has no gradient by now is none: the engine has gathered it for the forward, and freed it.
        """
        self._windows -= 1
        if self._windows == 0:
            leaves = [reference() for reference, _, _ in self._left.values()]
            for leaf in leaves:
                if leaf is not None and leaf.grad is not None:
                    note: Any = self._note
                    self._hooks.append(leaf.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
            if not self._hooks:
                self._engine.hooks.remove(self)

    def before_backward(self, loss: Tensor) -> None:
        """Looks for foreign leaves in the first windows, and for what gives a wrong gradient there."""
        self._leaves = []
        if self._windows > 0:
            from distaccum.program import GATHERED, load  # noqa: PLC0415  in the first windows

            load(GATHERED)(nodes := list(nodes_of(loss)))
            leaves = (getattr(node, "variable", None) for node in nodes)
            self._leaves = [leaf for leaf in leaves if leaf is not None and not is_owned(leaf)]
        self._within = True

    def after_backward(self) -> None:
        """Notes what they got."""
        self._within = False
        for leaf in self._leaves:
            self._note(leaf, known=True)
        self._leaves = []

    def window_dropped(self) -> None:
        """After an error in the backward as well."""
        self._within, self._leaves = False, []

    def close(self) -> None:
        """Removes all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._windows = [], 0

    def _note(self, leaf: Tensor, *, known: bool = False) -> None:
        if leaf.grad is None or not (self._within or known):
            return
        if not self._hooks:
            self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        number, left = id(leaf), self._left
        reference = weakref.ref(leaf, lambda _: left.pop(number, None))
        left[number] = (reference, weakref.ref(leaf.grad), leaf.grad._version)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._left or is_guarded(optimizer):
            return
        held: Iterator[Tensor] = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for parameter in held:
            found = self._left.get(id(parameter))
            if found is None or found[0]() is not parameter:
                continue
            gradient, version = found[1](), found[2]
            if gradient is not None and parameter.grad is gradient and gradient._version == version:
                raise MisuseError(_message(optimizer, parameter))


def _message(optimizer: Optimizer, parameter: Tensor) -> str:
    what = f"a learned tensor of shape {list(parameter.shape)}{_name_of(parameter)}"
    return (
        f"{type(optimizer).__name__} is about to step {what}, which is not in the accumulator's model: its gradient is "
        "of this rank's samples alone. Register it on the model before the Accumulator is made, as in "
        "model.temperature = nn.Parameter(...), use it as acc.model.temperature or in a forward, and give it to the "
        "accumulator's optimizer"
    )


def _name_of(tensor: Tensor) -> str:
    """The attribute that holds it, if one does."""
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, dict):
            for name, value in holder.items():
                if value is tensor and isinstance(name, str) and name.isidentifier():
                    return f" ({name})"
    return ""
