"""What holds in every right program, whatever it computes: looked at in the window that a proof looks at.

A proof computes a gradient once more, and shares the program's code with what it checks. These ask the code itself:
whether weights stay as they are while a window's forwards run, whether a hook of a parameter is linear, and whether a
backward looks at the size of its gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.data.window import Window
from distaccum.engines.base import Engine
from distaccum.engines.modules import is_sharded, to_local, trained
from distaccum.errors import VerificationError, shorten
from distaccum.losses.normalize import SINGLE, Count, as_counts
from distaccum.verification.additivity import in_16_bits, rows_of
from distaccum.verification.expected import CLOSING, NAMED, whole_numel, wide
from distaccum.verification.parts import gradients_differ

_log = logging.getLogger(__name__)
_LARGER = (1.0, 1e3)  # of a gradient, at which a hook has to be linear: one that clamps now and then is not
_LINEAR, _LINEAR_16 = 1e-4, 3e-2
_SAMPLES = 64  # whose counts are looked at
_NOISE = 2e-7  # of the whole gradient: fp16 flushes small numbers to zero, and nothing else is rounded
_FACTOR, _FACTOR_SCALED = 4.0, 0.25  # powers of two, which round nothing; fp16 overflows where a loss scale grows


class Relations:
    """Of one window; every rank has one, and what one rank finds all raise.

    Args:
        engine: runs the window.
        micro_batches: of this rank.
    """

    def __init__(self, engine: Engine, micro_batches: int) -> None:
        self._engine, self._world = engine, engine.world
        self._several = micro_batches > 1 or engine.world.size > 1
        self._written: dict[str, None] = {}  # by a forward, in order
        self._before: list[tuple[str, nn.Parameter, tuple[int, int], list[float]]] = []
        self._hooks: list[Any] = []
        self._looked = False  # at the values, of the first forward
        self._size = ""  # how a backward depends on the size of its gradient

    # --- counts add up

    def check_counts(self, window: Window, count: Count) -> None:
        """Compares each micro-batch's counts with those of its samples alone; a collective, before the window.

        Raises:
            VerificationError: they are no sums; on all ranks.
        """
        found, meant = "", False
        with suppress(Exception):  # the user's code, on a batch of one sample
            found, meant = _counts_in_words(window, count)
        if found and meant:
            if self._world.is_main:
                _log.warning("%s", found)
            found = ""
        if problems := self._world.all_gather_names([found] if found else []):
            raise VerificationError(f"{problems[0]} {CLOSING}")

    # --- weights are at rest while a forward runs

    def before_forward(self) -> None:
        """Notes the weights; where a forward gathers them, as each module begins to run."""
        model = self._engine.unwrapped_model
        if not self._engine.facts.forward_communicates:
            self._before = list(self._noted(model.named_parameters()))
        elif not self._looked and self._engine.compiled is None:
            for name, module in model.named_modules():
                self._watch(name, module)

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

    def _watch(self, name: str, module: nn.Module) -> None:
        """Compares what a module has gathered for its forward, before that is let go."""
        running: list[list[tuple[str, nn.Parameter, tuple[int, int], list[float]]]] = []
        prefix = f"{name}." if name else ""

        def begins(*_: Any) -> None:
            held = ((prefix + key, p) for key, p in module.named_parameters() if not is_sharded(p))
            running.append(list(self._noted(held)))

        def ends(*_: Any) -> None:
            if running:
                self._written |= dict.fromkeys(self._changed(running.pop()))

        # After the hook that gathers, and before the one that lets go.
        self._hooks += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends, prepend=True)]

    def _noted(
        self, parameters: Iterator[tuple[str, nn.Parameter]]
    ) -> Iterator[tuple[str, nn.Parameter, tuple[int, int], list[float]]]:
        for name, parameter in parameters:
            values = [] if self._looked else _values(parameter)
            yield name, parameter, (parameter._version, parameter.data_ptr()), values

    def _changed(self, before: Sequence[tuple[str, nn.Parameter, tuple[int, int], list[float]]]) -> Iterator[str]:
        gathers = self._engine.facts.forward_communicates  # and lets go, so that the same weights lie elsewhere
        for name, parameter, (version, address), numbers in before:
            moved = parameter._version != version or (parameter.data_ptr() != address and not gathers)
            if moved or (numbers and (_values(parameter) or numbers) != numbers):
                yield name

    def _written_in_words(self) -> str:
        """A collective."""
        names = self._world.all_gather_names(list(self._written))
        if not names or not self._several:
            return ""
        parameters = dict(self._engine.unwrapped_model.named_parameters())
        what = f"the forward writes {shorten(names, NAMED)}"
        if frozen := [name for name in names if not parameters[name].requires_grad]:
            return (
                f"the forward writes {shorten(frozen, NAMED)}, which moves once for each micro-batch: a step's "
                "gradient then depends on their number. Move it once a step, after it (a teacher's average in a hook's "
                "after_step, or ema in the trainer)"
            )
        facts = self._engine.facts
        if facts.steps_parts or facts.forward_communicates or facts.rounds_weights:
            return (
                f"{what}, and this engine steps other memory than forwards read, so that the change is lost or differs "
                "by rank. Do it in the model's parametrization (torch.nn.utils.parametrize), after the step, or on "
                "engine=ddp in fp32"
            )
        if self._world.size == 1:
            return ""
        own = {name: _values(parameters[name]) for name in names}
        everyone = self._world.all_gather_object(own)
        differ = self._world.all_gather_names([n for n in names if any(each[n] != own[n] for each in everyone)])
        if not differ:
            return ""
        return (
            f"the forward writes {shorten(differ, NAMED)}, and ranks hold other values after it, by what their samples "
            "are. Do it after the step, on all ranks alike, or in the model's parametrization"
        )

    # --- hooks of parameters are linear

    def _hooks_in_words(self, held: Mapping[str, Tensor], unit: float) -> str:
        """Of hooks that see each micro-batch's gradient, and are no linear function of it; a collective."""
        found: list[str] = []
        sees_parts = self._several or self._engine.loss_scale is not None
        for name, parameter in trained(self._engine.unwrapped_model).items() if sees_parts else ():
            hooks = self._engine.probe.gradient_hooks(parameter)
            if hooks and name in held and not self._is_linear(hooks, parameter, held[name], unit):
                found.append(name)
        names = self._world.all_gather_names(found)
        if not names:
            return ""
        return (
            f"what register_hook was given for {shorten(names, NAMED)} is no linear function of the gradient: it gets "
            "each micro-batch's, and their sum is stepped. Clip by clip_value or clip_norm, decay by weight_decay, add "
            "a penalty to the loss, or change the step's gradient in optimizer.register_step_pre_hook"
        )

    def _is_linear(
        self, hooks: Sequence[Callable[[Tensor], Tensor | None]], parameter: nn.Parameter, held: Tensor, unit: float
    ) -> bool:
        elements, own = whole_numel(parameter), wide(to_local(held))
        size = float(own.square().mean().sqrt()) / unit if own.numel() else 0.0
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if not size or not elements:
            return True
        draws = torch.Generator().manual_seed(0)
        dtype = parameter.dtype if parameter.dtype.is_floating_point else torch.float32
        tolerance = _LINEAR_16 if dtype.itemsize < 4 else _LINEAR  # noqa: PLR2004  bytes of fp32

        def apply(gradient: Tensor) -> Tensor:
            given = gradient.to(device=self._engine.device, dtype=dtype)
            for hook in hooks:
                given = given if (changed := hook(given)) is None else changed
            return given.detach().double()

        for larger in _LARGER:
            a, b = (torch.randn(shape, generator=draws) * size * larger for _ in range(2))
            with torch.no_grad():
                apart, together = apply(a) + apply(b), apply(a + b)
            if not float((apart - together).norm()) <= tolerance * float(apart.norm()) + 1e-30:
                return False
        return True

    # --- a backward does not look at the size of its gradient

    @property
    def factor(self) -> float:
        """What a loss is multiplied by, to see whether its gradient is that much larger."""
        return _FACTOR if self._engine.loss_scale is None else _FACTOR_SCALED

    def sizes(self, names: Sequence[str], once: Sequence[Tensor | None], larger: Sequence[Tensor | None]) -> None:
        """Compares a micro-batch's gradient with that of its loss times :attr:`factor`."""
        expected = [None if gradient is None else gradient * self.factor for gradient in once]
        what, sixteen = "does not grow with the loss", in_16_bits(self._engine)
        self._size = gradients_differ(names, larger, [expected], sixteen=sixteen, what=what, noise=_NOISE)

    def _size_in_words(self) -> str:
        """A collective."""
        found = self._world.all_gather_names([self._size] if self._size else [])
        if not found:
            return ""
        why = "a hook clips a gradient inside the backward, or a function adds one of its own"
        return f"{found[0]} where that is {self.factor:g} times as large: {why}"

    # --- all of them

    def check(self, held: Mapping[str, Tensor], unit: float) -> None:
        """Before the step; a collective.

        Args:
            held: the reduced gradients, or this rank's pieces of them.
            unit: what they are multiplied by.

        Raises:
            VerificationError: a relation does not hold; on all ranks.
        """
        problem = self._written_in_words() or self._hooks_in_words(held, unit)
        size = self._size_in_words()
        if size and self._engine.loss_scale is not None:
            problem = problem or f"{size}, and fp16's loss scale changes what it does. Use precision=bf16"
        if problem:
            raise VerificationError(f"{problem}. No step was made. {CLOSING}")
        if size and self._world.is_main:
            where = "exact where it treats each sample by itself, and depends on the micro-batch size elsewhere"
            _log.warning("%s. That is %s: acc.verify(window, loss) tells", size, where)


def _counts_in_words(window: Window, count: Count) -> tuple[str, bool]:
    """What does not add up, and whether it may be meant: a term of each micro-batch, as one that balances experts."""
    left, odd, known = _SAMPLES, dict[str, str](), dict[str, set[float]]()
    for i, (micro, ids) in enumerate(zip(window.micro_batches, window.ids(), strict=False)):
        rows = rows_of(micro.batch, len(ids))
        if rows is None or left < len(ids):
            break
        left -= len(ids)
        alone = [as_counts(count(row)) for row in rows]
        for name, together in micro.counts.items():
            each = [one[name] for one in alone]
            known.setdefault(name, set()).update((together, *each))
            if not isclose(sum(each), together, rel_tol=1e-6):
                counted = f"{sum(each):g} alone and {together:g} together"
                odd.setdefault(name, f"the samples of micro-batch {i} count {counted}")
    found = [name for name in odd if len(known[name]) > 1] or [name for name in odd if name == SINGLE]
    if not found:
        return "", True
    of = "" if found[0] == SINGLE else f", for {found[0]!r}"
    text = (
        f"{odd[found[0]]}{of}: the loss would be divided by another count at another micro-batch size. Return the "
        "plain sum from count=, and no max(1, n): a micro-batch may count 0."
    )
    return text, len(known[found[0]]) == 1


def _values(parameter: Tensor) -> list[float]:
    """Two numbers that tell a tensor's values from others; none of what is not here. Reads the device."""
    if not parameter.numel():
        return []
    with suppress(RuntimeError, NotImplementedError):  # of quantised weights, or ones without memory
        numbers = parameter.detach()
        norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
        return torch.stack((numbers.sum(dtype=torch.float64), norm)).tolist()
    return []
