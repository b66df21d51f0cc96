"""Whether a window's forwards leave the weights as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distaccum.engines.base import Engine
from distaccum.engines.modules import is_sharded
from distaccum.errors import shorten
from distaccum.verification.expected import NAMED


class _Noted(NamedTuple):
    name: str
    parameter: nn.Parameter
    version: int
    address: int
    values: list[float]


class WeightsAtRest:
    """Notes the weights before each forward, and compares them after it.

    Args:
        engine: runs the forwards.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._written: dict[str, None] = {}  # by a forward, in order
        self._before: list[_Noted] = []
        self._hooks: list[Any] = []
        self._looked = False  # at the values, of the first forward

    def before_forward(self) -> None:
        """Notes the weights; where a forward gathers them, as each module begins to run."""
        model = self._engine.unwrapped_model
        if not self._engine.facts.forward_communicates:
            self._before = list(self._noted("", model))
        elif not self._looked and self._engine.compiled is None:
            for name, module in model.named_modules():
                self._watch(f"{name}." if name else "", module)

    def after_forward(self) -> None:
        """Compares them."""
        self._written |= dict.fromkeys(self._changed(self._before))
        self._looked = True
        self.forget()

    def forget(self) -> None:
        """Leaves the modules alone, also where a forward has failed."""
        self._before = []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _watch(self, prefix: str, module: nn.Module) -> None:
        """Compares what a module has gathered for its forward, before that is let go."""
        running: list[list[_Noted]] = []

        def begins(*_: Any) -> None:
            running.append(list(self._noted(prefix, module)))

        def ends(*_: Any) -> None:
            if running:
                self._written |= dict.fromkeys(self._changed(running.pop()))

        # After the hook that gathers, and before the one that lets go.
        self._hooks += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends, prepend=True)]

    def _noted(self, prefix: str, module: nn.Module) -> Iterator[_Noted]:
        for name, parameter in module.named_parameters():
            if not is_sharded(parameter):
                values = [] if self._looked else values_of(parameter)
                yield _Noted(prefix + name, parameter, parameter._version, parameter.data_ptr(), values)

    def _changed(self, before: Sequence[_Noted]) -> Iterator[str]:
        gathers = self._engine.facts.forward_communicates  # and lets go, so that the same weights lie elsewhere
        for noted in before:
            now = noted.parameter
            moved = now._version != noted.version or (now.data_ptr() != noted.address and not gathers)
            if moved or (noted.values and (values_of(now) or noted.values) != noted.values):
                yield noted.name

    def in_words(self, *, several: bool) -> str:
        """What a window loses by what its forwards wrote, empty where that is nothing; a collective.

        Args:
            several: whether it has more than one micro-batch or rank.
        """
        engine, world = self._engine, self._engine.world
        names = world.all_gather_names(list(self._written))
        if not names or not several:
            return ""
        parameters = dict(engine.unwrapped_model.named_parameters())
        if frozen := [name for name in names if not parameters[name].requires_grad]:
            return (
                f"the forward writes {shorten(frozen, NAMED)}, which moves once for each micro-batch: a step's "
                "gradient then depends on their number. Move it once a step, after it (a teacher's average in a hook's "
                "after_step, or ema in the trainer)"
            )
        facts = engine.facts
        if facts.steps_parts or facts.forward_communicates or facts.rounds_weights:
            return (
                f"the forward writes {shorten(names, NAMED)}, and this engine steps other memory than forwards read, "
                "so that the change is lost or differs by rank. Do it in the model's parametrization "
                "(torch.nn.utils.parametrize), after the step, or on engine=ddp in fp32"
            )
        if world.size == 1:
            return ""
        own = {name: values_of(parameters[name]) for name in names}
        everyone = world.all_gather_object(own)
        differ = world.all_gather_names([n for n in names if any(each[n] != own[n] for each in everyone)])
        if not differ:
            return ""
        return (
            f"the forward writes {shorten(differ, NAMED)}, and ranks hold other values after it, by what their samples "
            "are. Do it after the step, on all ranks alike, or in the model's parametrization"
        )


def values_of(parameter: Tensor) -> list[float]:
    """Two numbers that tell a tensor's values from others; none of what is not here. Reads the device."""
    if not parameter.numel():
        return []
    with suppress(RuntimeError, NotImplementedError):  # of quantised weights, or ones without memory
        numbers = parameter.detach()
        norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
        return torch.stack((numbers.sum(dtype=torch.float64), norm)).tolist()
    return []
