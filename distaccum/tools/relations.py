"""What holds in every right program, whatever it computes: looked at in the window that a proof looks at.

A proof computes a gradient once more, and shares the program's code with what it checks. These ask the code itself:
whether weights stay as they are while a window's forwards run, whether a micro-batch's loss depends on what earlier
ones left behind, whether a hook of a parameter is linear, and whether a backward looks at the size of its gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isclose

import torch
from torch import Tensor, nn

from distaccum.data.window import Window
from distaccum.engines.base import Engine
from distaccum.engines.modules import to_local, trained
from distaccum.errors import VerificationError, shorten
from distaccum.losses.normalize import SINGLE, Count, as_counts
from distaccum.tools.samples_apart import SamplesApart
from distaccum.tools.samples_run import SamplesRun
from distaccum.tools.weights_at_rest import WeightsAtRest
from distaccum.verification.additivity import in_16_bits, rows_of
from distaccum.verification.expected import NAMED, closing, whole_numel, wide
from distaccum.verification.parts import gradients_differ

_log = logging.getLogger(__name__)
_LARGER = (1.0, 1e3)  # of a gradient, at which a hook has to be linear: one that clamps now and then is not
_LINEAR, _LINEAR_16 = 1e-4, 3e-2
_SAMPLES = 64  # whose counts are looked at
_NOISE = 2e-7  # of the whole gradient: fp16 flushes small numbers to zero, and nothing else is rounded
_FACTOR, _FACTOR_SCALED = 4.0, 0.25  # powers of two, which round nothing; fp16 overflows where a loss scale grows
_SAME = 1e-4  # of a loss


class Relations:
    """Of one window; every rank has one, and what one rank finds all raise.

    Args:
        engine: runs the window.
        micro_batches: of this rank.
    """

    def __init__(self, engine: Engine, micro_batches: int) -> None:
        self._engine, self._world = engine, engine.world
        self.allow: Sequence[str] = ()
        """Those that a program breaks on purpose, of ``config.checks.RELATIONS``."""
        self._several = micro_batches > 1 or engine.world.size > 1
        self.weights, self.samples, self.apart = WeightsAtRest(engine), SamplesRun(engine), SamplesApart(engine)
        self._moved = ""  # what a forward leaves to the next one, and how its loss depends on that
        self._size = ""  # how a backward depends on the size of its gradient

    # --- counts add up

    def check_counts(self, window: Window, count: Count) -> None:
        """Compares each micro-batch's counts with those of its samples alone; a collective, before the window.

        Raises:
            VerificationError: they are no sums; on all ranks.
        """
        found = ""
        with suppress(Exception):  # the user's code, on a batch of one sample
            found = _counts_in_words(window, count)
        problems = self._world.all_gather_names([found] if found else [])
        self._refuse("counts", problems[0] if problems else "")

    # --- a micro-batch does not depend on the ones before it

    def moved(self, names: Sequence[str], losses: tuple[float, float]) -> None:
        """Compares the last micro-batch's loss in the window with the one that it has in the window's first state.

        Args:
            names: of the buffers and attributes that the window's forwards have changed.
            losses: both.
        """
        there, alone = losses
        if not abs(there - alone) <= _SAME * max(abs(there), abs(alone)):
            self._moved = (
                f"a micro-batch has the loss {there:.6g} after others, and {alone:.6g} before them: it depends on what "
                f"their forwards leave in {shorten(names, NAMED)}, so that the gradient depends on the number of "
                "micro-batches. Where that is a teacher, a queue or a temperature, move it once a step, after it"
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
            given = gradient.to(device=self._engine.device, dtype=dtype, copy=True)  # a hook may change it in place
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

    # --- the gradients of samples add up

    def _parts_in_words(self, *, fits: bool) -> str:
        """A collective."""
        found = "" if "parts" in self.allow else self.apart.problem(fits=fits)
        others = self._world.all_gather_names([found] if found else [])
        if not others:
            return ""
        why = "A hook or a function in the backward looks at the whole micro-batch, or adds a gradient for each"
        remedy = "write it as a term of the loss, summed over samples"
        return f"the model's outputs are those of its samples, and its gradient is not: {others[0]}. {why}: {remedy}"

    # --- all of them

    def check(self, held: Mapping[str, Tensor], unit: float, *, fits: bool) -> None:
        """Before the step; a collective.

        Args:
            held: the reduced gradients, or this rank's pieces of them.
            unit: what they are multiplied by.
            fits: whether a rank can hold the whole model.

        Raises:
            VerificationError: a relation does not hold; on all ranks.
        """
        others = self._world.all_gather_names([self.samples.problem] if self.samples.problem else [])
        self._refuse("samples", others[0] if others else "")
        self._refuse("weights", self.weights.in_words(several=self._several))
        self._refuse("hooks", self._hooks_in_words(held, unit))
        size, moved = self._size_in_words(), self._world.all_gather_names([self._moved] if self._moved else [])
        if size and self._engine.loss_scale is not None:
            self._refuse("size", f"{size}, and fp16's loss scale changes what it does. Use precision=bf16")
        elif size:
            where = "exact where it treats each sample by itself, and depends on the micro-batch size elsewhere"
            self._tell("size", f"{size}. That is {where}: acc.verify(window, loss) tells")
        if moved:
            self._tell("state", moved[0])
        self._refuse("parts", self._parts_in_words(fits=fits))

    def _refuse(self, relation: str, problem: str) -> None:
        """Ends the window, unless that is allowed; every rank gives the same."""
        if problem and relation not in self.allow:
            raise VerificationError(f"{problem}. No step was made. {closing(relation)}")

    def _tell(self, relation: str, problem: str) -> None:
        if self._world.is_main and relation not in self.allow:
            _log.warning("%s", problem)


def _counts_in_words(window: Window, count: Count) -> str:
    """What does not add up; of a named term that counts each micro-batch as one, as balanced experts have, nothing."""
    left, odd, known, guessed = _SAMPLES, dict[str, str](), dict[str, set[float]](), False
    for i, (micro, ids) in enumerate(zip(window.micro_batches, window.ids(), strict=False)):
        rows = rows_of(micro.batch, len(ids))
        if rows is None or left < len(ids):
            break
        left -= len(ids)
        guessed = guessed or len(rows) > len(ids)  # an item of a stream may be a micro-batch, or one sample
        alone = [as_counts(count(row)) for row in rows]
        for name, together in micro.counts.items():
            each = [one[name] for one in alone]
            known.setdefault(name, set()).update((together, *each))
            if not isclose(sum(each), together, rel_tol=1e-6):
                counted = f"{sum(each):g} alone and {together:g} together"
                odd.setdefault(name, f"the samples of micro-batch {i} count {counted}")
    found = [name for name in odd if len(known[name]) > 1] or [name for name in odd if name == SINGLE and not guessed]
    if not found:
        return ""
    of = "" if found[0] == SINGLE else f", for {found[0]!r}"
    return (
        f"{odd[found[0]]}{of}: the loss would be divided by another count at another micro-batch size. Return the "
        "plain sum from count=, and no max(1, n): a micro-batch may count 0"
    )
