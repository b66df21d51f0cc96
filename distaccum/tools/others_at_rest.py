"""Whether the weights that a loop calls beside the model's own stay as they are within a window.

A teacher may be a module of the loop's, or a dictionary of weights that ``functional_call`` puts in the model's places.
Where it follows the model in every micro-step, each micro-batch has another one.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distaccum.engines.base import Engine
from distaccum.engines.compiled import compiled_parts
from distaccum.engines.modules import to_local
from distaccum.errors import shorten
from distaccum.tools.weights_at_rest import values_of
from distaccum.verification.expected import NAMED


class _Seen(NamedTuple):
    name: str
    address: int
    values: list[float]


class OthersAtRest:
    """Compares what the modules of the first micro-step hold with what the same ones hold in the last.

    What needs a gradient is another matter: it is trained, or computed of the micro-batch itself.

    Args:
        engine: runs the forwards.
        micro_batches: of this rank.
    """

    def __init__(self, engine: Engine, micro_batches: int) -> None:
        self._engine, self._last, self._step = engine, micro_batches - 1, 0
        self._own = {id(parameter) for parameter in engine.unwrapped_model.parameters()}
        self._modules = {id(module) for module in engine.unwrapped_model.modules()}
        self._calls: dict[int, int] = {}  # of each module, in this micro-step
        self._first: dict[tuple[int, str, int], _Seen] = {}
        self._moved: dict[str, bool] = {}  # by name; whether in the same memory
        self._thread = 0
        self._hook: Any = None

    def before_forward(self) -> None:
        """Called before each micro-step's forward."""
        plain = self._engine.compiled is None and not compiled_parts(self._engine.unwrapped_model)
        if plain and self._last > 0 and self._step in (0, self._last):
            self._calls, self._thread = {}, threading.get_ident()
            self._hook = register_module_forward_pre_hook(self._called)

    def after_forward(self) -> None:
        """Called after its loss."""
        self._step += 1
        self.forget()

    def forget(self) -> None:
        """Leaves all modules alone."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _called(self, module: nn.Module, _: Any) -> None:
        own = id(module) in self._modules
        if threading.get_ident() != self._thread or (own and self._engine.facts.forward_communicates):
            return  # another rank's; or gathered
        call = self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Tensor) and not parameter.requires_grad and id(parameter) not in self._own:
                self._look((id(module), name, call), f"{type(module).__name__}.{name}", to_local(parameter))

    def _look(self, key: tuple[int, str, int], name: str, weight: Tensor) -> None:
        now = _Seen(name, weight.data_ptr(), values_of(weight))
        if self._step == 0:
            self._first[key] = now
        elif key in self._first and self._first[key].values != now.values:
            self._moved[name] = self._moved.get(name, False) or self._first[key].address == now.address

    def in_words(self) -> tuple[str, bool]:
        """What has moved, and whether it was written in place and not computed anew; a collective."""
        world = self._engine.world
        names, written = (
            world.all_gather_names(list(found))
            for found in (self._moved, [n for n, same in self._moved.items() if same])
        )
        if not names:
            return "", False
        return (
            f"{shorten(names, NAMED)}, which the loop calls without a gradient, is another in the window's last "
            "micro-step than in its first: a step's gradient then depends on their number. Move a teacher once a step, "
            "after it (`if acc.last is not before`, a hook's after_step, or ema in the trainer)"
        ), bool(written)
