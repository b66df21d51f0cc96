"""One window's gradient by another road, compared with what the optimizers are about to step on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from distaccum.data.window import Window
from distaccum.engines.base import Engine
from distaccum.engines.compiled import compiled_parts
from distaccum.engines.modules import to_local
from distaccum.errors import MisuseError, VerificationError, shorten
from distaccum.losses.base import InOrder
from distaccum.losses.normalize import Counts, LossSum
from distaccum.program import FAULT, HOOKED, SLOPE, load
from distaccum.verification.comparison import Comparison, compare
from distaccum.verification.expected import CLOSING, Expected, first_line, whole_numel
from distaccum.verification.optimizer_watch import OptimizerWatch
from distaccum.verification.plain_autograd import PlainGradient
from distaccum.verification.recorded import RecordedWindow

_log = logging.getLogger(__name__)
MOST_ELEMENTS = 2**25
"""Of a sharded model that is proved as a whole one is: 256 MiB of weights and gradients in fp32, on every rank."""
_BY_DESIGN = (
    "by design where the loss detaches a part of itself, or a backward gives another gradient than the forward's (a "
    "straight-through estimator, gradient reversal, a hook that scales); else a fault: compare on engine=ddp with "
    "verify=first"
)


class GradientProof:
    """The gradient of one window, computed once more without the engine.

    Where a rank can hold the whole model, by plain autograd over the bare model: micro-batch after micro-batch with the
    same random numbers, summed over the ranks. With the loss at hand the forward is run again; in a loop of the user's
    the graph of the loss is walked once more, past the engine. Where a model is sharded and large, by the difference of
    the window's losses at two points on a line: see ``tools/directional.py``.

    Two things are compared: before the step the gradient that the engine holds, parameter by parameter, up to one
    factor (the loss scale); and in the optimizers' own ``step``, before they move a weight, the norm of what they are
    given.

    Args:
        engine: whose step is looked at.
        window: has not begun.
        clip_norm, clip_value: what the engine was told.
    """

    def __init__(self, engine: Engine, window: Window, *, clip_norm: float | None, clip_value: float | None) -> None:
        self.conclusive = False
        """Whether no other window is to be tried: the gradient was compared and found right, or cannot be compared."""
        self.summary = ""
        """What was found, for people; known after the step."""
        self.doubtful = False
        """Whether :attr:`summary` tells of a gradient that is right only if the loss's is no slope by design."""
        self._engine, self._world = engine, engine.world
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self.records = RecordedWindow(engine, window)
        """What is noted of the window."""
        self._plain = PlainGradient(engine, self.records)
        self._problem = ""  # of this rank: why the gradient cannot be compared
        self._nothing = False  # whether no rank holds a gradient
        self._watch: OptimizerWatch | None = None

    # --- while the window runs

    def before_backward(self, total: LossSum, provisional_count: float, counts: float | Tensor | Counts | None) -> None:
        """Walks the graph of a micro-batch's loss in a user's loop, unless the window is to be run again.

        Args:
            total: the loss that the loop gave.
            provisional_count: what it is divided by where the count is not known yet.
            counts: what the loop gave as the micro-batch's count.
        """
        self.records.note(total, counts)
        self.records.provisional_count = provisional_count
        if self.records.loss is not None or self._problem:
            return
        if not self._engine.probe.walks_twice:
            self._problem = "this engine does not let its graph be walked twice: call acc.verify(window, loss)"
            return
        try:
            self._plain.walk(total, self.records.counts)
        except Exception as error:  # reentrant checkpoints, compiled backwards, functions that free their tensors
            self._problem = f"its graph cannot be walked twice ({first_line(error)}): call acc.verify(window, loss)"

    # --- before the step

    def before_step(self, divisor: float) -> None:
        """See ``Verifier.before_step``."""
        held = dict(self._engine.probe.reduced_gradients())
        sharded, whole = self._engine.facts.forward_communicates, self._fits_a_rank()
        if sharded and self.records.loss is None:
            self._problem = self._problem or "this engine shards the model: call acc.verify(window, loss)"
        infinite, too_large, empty = self._world.all_reduce_host([not self._is_finite(held), not whole, not held])
        if infinite:
            return  # the step is skipped, and the next window verified
        self.records.means.check(self._world, sums=self.records.sums)
        if isinstance(self.records.loss, InOrder):
            fault = self.records.loss.fault
            if faults := self._world.all_gather_names([fault] if fault else []):
                raise MisuseError(faults[0])
        if sharded and empty == self._world.size:
            self._nothing = True  # the engine says so
            return
        if self.records.loss is not None and not too_large:
            self._run_again()
        self.records.relations.check(held, self.records.loss_scale * divisor, fits=not too_large)
        (failed,) = self._world.all_reduce_host([bool(self._problem)])
        if failed and (not sharded or self.records.loss is None):
            self._give_up()
            return
        by_slope = sharded and (too_large or failed)
        self._problem = ""
        expected = self._by_slope(held, divisor) if by_slope else self._by_autograd(held, divisor)
        if expected is not None:
            self._watch = OptimizerWatch(self._engine, expected, clip_norm=self._clip_norm, measures=self._measures())

    def _fits_a_rank(self) -> bool:
        """Whether a rank can hold the whole model beside its part of it."""
        elements = sum(whole_numel(p) for p in self._engine.unwrapped_model.parameters())
        whole = elements <= MOST_ELEMENTS or not self._engine.facts.forward_communicates
        return whole and self._engine.probe.whole_weights is not None

    def _is_finite(self, held: Mapping[str, Tensor]) -> bool:
        """Also of what was frozen after it was wrapped: the engine looks at it too, and does not step."""
        model = self._engine.unwrapped_model
        frozen = [p.grad for p in model.parameters() if not p.requires_grad and p.grad is not None]
        return all(bool(to_local(gradient).isfinite().all()) for gradient in (*held.values(), *frozen))

    def _run_again(self) -> None:
        try:
            self._plain.run()
        except Exception as error:  # the user's code, run a second time
            self._problem = f"it cannot be run a second time ({type(error).__name__}: {first_line(error)})"

    def _give_up(self) -> None:
        """Says why nothing was compared; every rank calls it."""
        problems = self._world.all_gather_names([self._problem] if self._problem else [])
        self.conclusive = True
        if self._world.is_main:
            _log.warning("the step's gradient was not verified: %s", "; ".join(problems))

    def _by_slope(self, held: Mapping[str, Tensor], divisor: float) -> Expected | None:
        """Where the model is sharded, and too large for a rank; a collective. None where nothing can be told."""
        options = {"divisor": divisor, "clip_value": self._clip_value}
        found: Expected | str = load(SLOPE)(self._engine, self.records, held, **options)
        if isinstance(found, Expected):
            return found
        self._problem = found
        self._give_up()
        return None

    def _by_autograd(self, held: Mapping[str, Tensor], divisor: float) -> Expected | None:
        """Where a rank can hold the whole model; a collective. None where nothing can be told."""
        road: Callable[..., Comparison] = partial(compare, self._engine, self.records, self._plain, held)
        found = road(divisor=divisor, clip_value=self._clip_value)
        plain = self._plain.parts
        if found.wrong and (hooked := load(HOOKED)(self._engine.unwrapped_model, plain)) is not None:
            self._plain.parts = hooked
            again = road(divisor=divisor, clip_value=self._clip_value)
            self._plain.parts, found = plain, found if again.wrong else again
        if not found.wrong:
            self._expect_reached(held)
            return found.expected
        if self.records.loss is not None and (problem := self._another_run(found)):
            if self._engine.facts.forward_communicates:
                return self._by_slope(held, divisor)
            self._problem = problem
            self._give_up()
            return None
        fault = self._engine.probe.known_fault()
        faults = self._world.all_gather_names([fault] if fault else [])
        if faults:
            raise MisuseError(faults[0])
        raise VerificationError(load(FAULT)(self._engine, self._plain, held, found, self._measures()))

    def _expect_reached(self, held: Mapping[str, Tensor]) -> None:
        """Where the model is compiled: a parameter that the loss does not reach must not be stepped; a collective.

        Raises:
            MisuseError: compiled code gives it a gradient of zero, by which weight decay and momentum would move it.
        """
        if self.records.loss is None or not compiled_parts(self._engine.unwrapped_model):
            return
        reached = self._world.all_gather_names(sorted(self._plain.reached_uncompiled()))
        given = set(self._world.all_gather_names(sorted(self._plain.parts)))
        left_out = self._engine.probe.leaves_out_unused
        zeros = [name for name in held if name not in reached and (name in given or not left_out)]
        if found := sorted(set(self._world.all_gather_names(zeros))):
            problem = f"the loss does not depend on {shorten(found)}, and compiled code gives it a gradient of zero"
            remedy = "freeze it, leave it out of what a compiled forward returns, or do not compile"
            raise MisuseError(f"{problem}, by which weight decay and momentum move it: {remedy}")

    def _another_run(self, found: Comparison) -> str:
        """In words, why the second run may be another than the window's; empty where it is not. A collective."""
        assert self.records.buffers is not None
        unseen = {name for name, part in found.parts.items() if not part.expected and part.found}
        own = self._plain.own_backwards if unseen else set()
        if functions := self._world.all_gather_names(sorted(own)):
            return f"{', '.join(functions)} has a backward of its own, whose gradients only the engine gets"
        repeats = self._plain.repeats({name: part.allowed for name, part in found.parts.items()})
        (noisy,) = self._world.all_reduce_host([not repeats])
        if noisy:
            return "the loss is not the same a second time"
        bare = bool(self._plain.differing_losses()) and not self._engine.facts.forward_communicates
        changed, differ, other = self._world.all_reduce_host(
            [not self.records.buffers.hold(), self._plain.remembers, bare]
        )
        if other:  # with the same weights, and no engine in the forward
            return "its forward or the loss has a memory, and gives another loss the second time"
        if changed and differ:
            return "its forward changes buffers of the model, and does not give the same from the first ones"
        return ""

    # --- after it

    def after_step(self, reported: Tensor) -> None:
        """See ``Verifier.stepping``; a collective where the gradient was compared.

        Args:
            reported: the norm of the gradient as the engine says it.
        """
        if not math.isfinite(float(reported)):
            return  # the engine has found a fault of its own, and says so
        if self._nothing:
            raise VerificationError(f"no parameter has a gradient, on any rank: the step moves nothing. {CLOSING}")
        if self._watch is None:
            return
        watch, expected = self._watch, self._watch.expected
        watch.finish(float(reported))
        self.conclusive = watch.agrees
        if watch.factor is not None or expected.reversed:
            factor = math.copysign(1.0 if watch.factor is None else watch.factor, -1.0 if expected.reversed else 1.0)
            self.doubtful = self.conclusive
            self.summary = f"the step's gradient is {factor:.2f}x the loss's slope along it: {_BY_DESIGN}"
            return
        self.summary = (
            f"the step's gradient, of norm {expected.norm:.4g}, agrees with {expected.road}, and the optimizer is "
            f"given it ({len(expected.own)} parameters, {self._world.size} ranks)"
        )

    def close(self) -> None:
        """Leaves the optimizers alone, and frees what was computed."""
        if self._watch is not None:
            self._watch.close()
        self.records.forget()
        self._plain.forget()

    def _measures(self) -> dict[str, float]:
        """Numbers that a wrong factor may be made of, with their names."""
        counts = self.records.window.counts
        return {
            "ranks": self._world.size,
            "micro-batches": self.records.micro_batches,
            "(loss scale)": self.records.loss_scale,
            "(count of the window)": next(iter(counts.values())) if len(counts) == 1 else 1.0,
        }
