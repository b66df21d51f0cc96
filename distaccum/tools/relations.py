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
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.data.window import MicroBatch, Window
from distaccum.engines.base import Engine
from distaccum.engines.modules import to_local, trained
from distaccum.errors import VerificationError, shorten
from distaccum.losses.normalize import SINGLE, Count, LossSum, as_counts
from distaccum.tools.carried import Carried
from distaccum.tools.compared import Compared
from distaccum.tools.function_state import FunctionState
from distaccum.tools.others_at_rest import OthersAtRest
from distaccum.tools.rates_at_rest import RatesAtRest
from distaccum.tools.rows_mixed import MISCOUNTS, MIXES, RowsMixed
from distaccum.tools.samples_apart import DEPENDS, SamplesApart
from distaccum.tools.samples_run import SamplesRun
from distaccum.tools.weights_at_rest import WeightsAtRest
from distaccum.verification.additivity import in_16_bits, rows_of
from distaccum.verification.expected import NAMED, closing, whole_numel, wide
from distaccum.verification.parts import gradients_differ

_log = logging.getLogger(__name__)
_LARGER = (1.0, 1e3)  # of a gradient, at which a hook has to be linear: one that clamps now and then is not
_LINEAR, _LINEAR_16 = 1e-4, 3e-2
_CALLS, _MOST_CALLS = 8, 64  # of a hook, with one gradient
_Hook = Callable[[Tensor], Tensor | None]
_SAMPLES = 64  # whose counts are looked at
_NOISE = 2e-7  # of the whole gradient: fp16 flushes small numbers to zero, and nothing else is rounded
_FACTOR, _FACTOR_SCALED = 4.0, 0.25  # powers of two, which round nothing; fp16 overflows where a loss scale grows
_SAME, _SAME_EXACT = 1e-4, 2e-6  # of a loss; where the same operators give the same
_MOVE_ONCE = (
    "so that the gradient depends on the number of micro-batches. Where that is a teacher, a queue or a temperature, "
    "move it once a step, after it"
)


class Relations:
    """Of one window; every rank has one, and what one rank finds all raise.

    Args:
        engine: runs the window.
        window: has not begun.
    """

    def __init__(self, engine: Engine, window: Window) -> None:
        self._engine, self._world = engine, engine.world
        self._micro_batches = micro_batches = len(window.micro_batches)
        self.allow: Sequence[str] = ()
        """Those that a program breaks on purpose, of ``config.checks.RELATIONS``."""
        self._several = micro_batches > 1 or engine.world.size > 1
        self._weights, self._samples, self._apart = WeightsAtRest(engine), SamplesRun(engine), SamplesApart(engine)
        self._carried, self._others = Carried(engine, micro_batches), OthersAtRest(engine, micro_batches)
        self._rates = RatesAtRest(engine, micro_batches)
        self._sizes = [len(ids) for ids in window.ids()]  # of the micro-batches, in samples
        self._compared, self._mixed = Compared(engine, next(iter(self._sizes), 1)), RowsMixed(engine)
        self._count: Count | None = None
        self._alone = False  # whether the losses are those of a loop
        self._counts: Mapping[str, float] = {}  # of the micro-batch that runs, where they are known
        self._moved = ""  # what a forward leaves to the next one, and how its loss depends on that
        self._size = ""  # how a backward depends on the size of its gradient

    # --- what is noted as the window runs

    def gives(self) -> None:
        """Called before a loop of the user's is given a micro-batch."""
        self._carried.gives()

    def before_forward(self, given: MicroBatch | None, *, alone: bool, batch: Any = None) -> None:
        """Called before each forward.

        Args:
            given: the micro-batch, where a loop of the user's runs it.
            alone: whether the forward's loss is not at hand.
            batch: what the loss is called with, where it is at hand.
        """
        self._alone = alone
        self._rates.look()
        if given is not None:
            self._samples.begins(given.batch)
        self._weights.before_forward()
        if alone or self._engine.facts.forward_communicates:  # else the check of the loss has looked
            self._apart.before_forward()
        if given is not None and alone:
            self._carried.before_forward()
            self._others.before_forward()
            self._counts = given.counts
        batch = batch if given is None else given.batch
        if batch is not None:
            self._compared.before_forward(batch)
            self._mixed.before_forward(batch, self._sizes.pop(0) if self._sizes else 1)

    def after_forward(self, losses: LossSum, counts: Any) -> None:
        """Called after its loss, before the backward."""
        self._mixed.after_forward(losses, self._count, self._counts or counts)  # first: it notes operators until here
        for one in (self._weights, self._samples, self._apart, self._others):
            one.after_forward()
        self._carried.after_forward(losses)
        self._compared.after_forward(losses, self._counts or counts)

    def micro_step_ended(self) -> None:
        """Leaves torch and modules that are not the model's alone, also after an error."""
        self._others.forget()
        self._mixed.forget()

    def forget(self) -> None:
        """Frees what was noted, and leaves the model alone."""
        for one in (self._weights, self._samples, self._apart, self._carried, self._others):
            one.forget()
        self._compared.forget()
        self._mixed.forget()

    # --- counts add up

    def check_counts(self, window: Window, count: Count) -> None:
        """Compares each micro-batch's counts with those of its samples alone; a collective, before the window.

        Raises:
            VerificationError: they are no sums; on all ranks.
        """
        found, self._count = "", count
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
        repeats = self._engine.device.type == "cpu" and not in_16_bits(self._engine)  # others round anew each time
        if not abs(there - alone) <= (_SAME_EXACT if repeats else _SAME) * max(abs(there), abs(alone)):
            self._moved = (
                f"a micro-batch has the loss {there:.6g} after others, and {alone:.6g} before them: it depends on what "
                f"their forwards leave in {shorten(names, NAMED)}, {_MOVE_ONCE}"
            )

    def _carried_in_words(self, *, fits: bool) -> str:
        """Of a loop, whose loss nobody can compute; a collective."""
        names = "" if "state" in self.allow else self._of_all(self._carried.problem(fits=fits))
        names = names or self._of_all("a tensor outside of the model" if self._alone and self._mixed.carried else "")
        return names and f"a micro-batch depends on what those before it leave in {names}, {_MOVE_ONCE}"

    # --- hooks of parameters are linear

    def _hooks_in_words(self, held: Mapping[str, Tensor], unit: float) -> str:
        """Of hooks that see each micro-batch's gradient, and are no linear function of it; a collective."""
        found, counting = list[str](), list[str]()
        sees_parts = self._several or self._engine.loss_scale is not None
        for name, parameter in trained(self._engine.unwrapped_model).items() if sees_parts else ():
            hooks = self._engine.probe.gradient_hooks(parameter)
            if not hooks or name not in held:
                continue
            state = FunctionState(hooks)
            trial = _Trial(self._engine, hooks, parameter, held[name], unit)
            if not trial.repeats(min(_MOST_CALLS, max(_CALLS, 2 * self._micro_batches))):
                counting.append(name)
            elif not trial.is_linear():
                found.append(name)
            state.restore()
        counts, names = self._world.all_gather_names(counting), self._world.all_gather_names(found)
        if counts:
            return (
                f"what register_hook was given for {shorten(counts, NAMED)} gives the same gradient otherwise at "
                "another call: it is called once for each micro-batch, whose number then changes the step. Change the "
                "step's gradient in optimizer.register_step_pre_hook"
            )
        if not names:
            return ""
        return (
            f"what register_hook was given for {shorten(names, NAMED)} is no linear function of the gradient: it gets "
            "each micro-batch's, and their sum is stepped. Clip by clip_value or clip_norm, decay by weight_decay, add "
            "a penalty to the loss, or change the step's gradient in optimizer.register_step_pre_hook"
        )

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
        found = "" if "parts" in self.allow else self._apart.problem(fits=fits)
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
        self._tell("state", self._rates.in_words())
        self._refuse("samples", self._of_all(self._samples.problem))
        self._refuse("weights", self._weights.in_words(several=self._several))
        others, written = self._others.in_words()
        (self._refuse if written else self._tell)("weights", others)
        self._refuse("hooks", self._hooks_in_words(held, unit))
        size, moved = self._size_in_words(), self._of_all(self._moved)
        if size and self._engine.loss_scale is not None:
            self._refuse("size", f"{size}, and fp16's loss scale changes what it does. Use precision=bf16")
        elif size:
            where = "exact where it treats each sample by itself, and depends on the micro-batch size elsewhere"
            self._tell("size", f"{size}. That is {where}: acc.verify(window, loss) tells")
        self._tell("state", moved or self._carried_in_words(fits=fits))
        parts = self._parts_in_words(fits=fits)
        if self._apart.strange:  # rows that are no samples' have been looked at as theirs
            self._compared.found, self._mixed = False, RowsMixed(self._engine)
        compared, mixed = self._compared.in_words(self._micro_batches), self._of_all(self._mixed.problem)
        if self._several and not (compared or mixed):  # a rank that has no micro-batch takes part
            own = MIXES if self._mixed.compares else MISCOUNTS if self._mixed.miscounts else ""
            compared = self._of_all(own if self._alone else "")
        self._tell("parts", compared if self._alone else "")  # else the check of the loss has told
        if self._several and mixed and not compared:
            doubtful = self._of_all("rows" if self._mixed.doubtful else "")
            (self._tell if doubtful else self._refuse)("parts", mixed)
        self._refuse("parts", parts)
        company = self._of_all(DEPENDS if self._alone and self._several and self._apart.depends else "")
        self._tell("parts", "" if compared or mixed else company)

    def _of_all(self, problem: str) -> str:
        """The first of all ranks' problems; a collective."""
        return next(iter(self._world.all_gather_names([problem] if problem else [])), "")

    def _refuse(self, relation: str, problem: str) -> None:
        """Ends the window, unless that is allowed; every rank gives the same."""
        if problem and relation not in self.allow:
            raise VerificationError(f"{problem}. No step was made. {closing(relation)}")

    def _tell(self, relation: str, problem: str) -> None:
        if problem and self._world.is_main and relation not in self.allow:
            _log.warning("%s", problem)


class _Trial:
    """Calls a parameter's hooks with random numbers as large as its gradient.

    Args:
        engine: of the parameter.
        hooks: in their order.
        parameter: what they were registered for.
        held: its gradient, or this rank's piece of it.
        unit: what that is multiplied by.
    """

    def __init__(
        self, engine: Engine, hooks: Sequence[_Hook], parameter: nn.Parameter, held: Tensor, unit: float
    ) -> None:
        own = wide(to_local(held))
        self._device, self._hooks, self._draws = engine.device, hooks, torch.Generator().manual_seed(0)
        self._size = float(own.square().mean().sqrt()) / unit if own.numel() and whole_numel(parameter) else 0.0
        self._shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        self._dtype = parameter.dtype if parameter.dtype.is_floating_point else torch.float32
        self._within = _LINEAR_16 if self._dtype.itemsize < 4 else _LINEAR  # noqa: PLR2004  bytes of fp32

    def repeats(self, calls: int) -> bool:
        """Whether they give the same for the same gradient, so many times."""
        gradient = self._drawn(_LARGER[-1])
        first = self._apply(gradient)
        return all(self._alike(self._apply(gradient), first) for _ in range(calls if self._size else 0))

    def is_linear(self) -> bool:
        """Whether they give for a sum what they give for its parts."""
        for larger in _LARGER if self._size else ():
            a, b = self._drawn(larger), self._drawn(larger)
            if not self._alike(self._apply(a) + self._apply(b), self._apply(a + b)):
                return False
        return True

    def _drawn(self, larger: float) -> Tensor:
        return torch.randn(self._shape, generator=self._draws) * self._size * larger

    @torch.no_grad()
    def _apply(self, gradient: Tensor) -> Tensor:
        given = gradient.to(device=self._device, dtype=self._dtype, copy=True)  # a hook may change it in place
        for hook in self._hooks:
            given = given if (changed := hook(given)) is None else changed
        return given.detach().double()

    def _alike(self, one: Tensor, other: Tensor) -> bool:
        return float((one - other).norm()) <= self._within * float(one.norm()) + 1e-30


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
