"""One window's gradient by another road, compared with what the optimizers are about to step on."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.data.batches import to_device
from distaccum.data.window import Window
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.buffers import Buffers, state_restored
from distaccum.engines.dtensor import to_local
from distaccum.engines.gradient_watch import CHANGED_BY_HAND
from distaccum.engines.modules import trained
from distaccum.errors import MisuseError, VerificationError, shorten
from distaccum.losses.base import Loss
from distaccum.losses.normalize import SINGLE, LossSum, as_loss_sums, normalize_loss
from distaccum.verification.directional import DirectionalRoad

_log = logging.getLogger(__name__)
# Roundings of one term of a gradient: it is scaled, accumulated and reduced; kernels add up in an order of their own.
_ROUNDINGS = 64
_OF_NORM = 1e-5  # what a clip's epsilon and a divisor in fp32 do to a norm
_OF_SLOPE, _OF_SLOPE_16 = 0.03, 0.15  # of a difference of losses, in fp32 and in 16 bits
_OF_WHOLE, _OF_WHOLE_16 = 0.03, 0.06  # of a factor that is a whole number, by such a difference
_ONE_FACTOR = 0.01  # of a factor, from rank to rank
_CHANGE, _CHANGE_16 = 0.04, 0.2  # of the loss, between the points of a difference: rounding drowns in it
_FARTHEST = 0.01  # of the norm of the weights, for the points of a difference
_CLOSING = "See docs/verification.md; trainer.verify=never, or Accumulator(verify='never'), trains without this check"
_BY_DESIGN = (
    "by design where the loss detaches a part of itself, or a backward gives another gradient than the forward's (a "
    "straight-through estimator, gradient reversal, a hook that scales); else a fault: compare on engine=ddp with "
    "verify=first"
)
_MOST_RANKS_TOLD_APART = 8
_NAMED = 4
_SHORT = (0.01, 1e4)  # factors that are written out
_ABOUT = 0.02


@dataclass
class _Parts:
    """What this rank knows of one parameter's gradient; squares and products in fp64."""

    expected: float  # the squared norm of the true one, of the elements that this rank's engine holds
    found: float  # of the engine's
    product: float
    allowed: float  # the norm of a difference that rounding explains

    def error(self, scale: float) -> float:
        """The norm of the difference between the engine's and ``scale`` times the true one."""
        return math.sqrt(max(0.0, self.found - 2 * scale * self.product + scale * scale * self.expected))

    def is_wrong(self, scale: float) -> bool:
        """Whether rounding does not explain it."""
        if self.found == 0.0:
            return math.sqrt(self.expected) > self.allowed
        return not self.error(scale) <= self.allowed * abs(scale) + 1e-7 * math.sqrt(self.found)


class GradientProof:
    """The gradient of one window, computed once more without the engine.

    Where every rank holds the whole model, by plain autograd over the bare model: micro-batch after micro-batch with
    the same random numbers, summed over the ranks. With the loss at hand the forward is run again; in a loop of the
    user's the graph of the loss is walked once more, past the engine. Where the model is sharded, by the difference of
    the window's losses at two points on a line: see ``directional.py``.

    Two things are compared: before the step the gradient that the engine holds, parameter by parameter, up to one
    factor (the loss scale); and in the optimizers' own ``step``, before they move a weight, the norm of what they are
    given.

    Args:
        engine: whose step is looked at.
        world: this rank.
        window: has not begun.
        clip_norm, clip_value: what the engine was told.
    """

    def __init__(
        self,
        engine: Engine,
        world: World,
        window: Window,
        *,
        clip_norm: float | None,
        clip_value: float | None,
    ) -> None:
        self.conclusive = False
        """Whether no other window is to be tried: the gradient was compared and found right, or cannot be compared."""
        self.summary = ""
        """What was found, for people; known after the step."""
        self.doubtful = False
        """Whether :attr:`summary` tells of a gradient that is right only if the loss's is no slope by design."""
        self._engine, self._world, self._window = engine, world, window
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._loss: Loss | None = None
        self._states: list[RNGState] = []  # at each micro-batch's forward
        self._totals: list[float] = []  # of each micro-batch's losses, in a run of its own
        self._own_totals: list[Mapping[str, Tensor]] = []
        self._local: dict[str, Tensor] = {}  # this rank's part of the true gradient
        self._sizes: dict[str, float] = {}  # by parameter, the norms of its micro-batches' gradients, added up
        self._problem = ""
        self._expected: dict[str, float] = {}  # by name, the squared norm of what the optimizers should be given
        self._found, self._seen, self._left, self._called = 0.0, 0, 0, False
        self._names: Mapping[int, str] | None = None
        self._replicated = True
        self._parts: dict[str, _Parts] = {}
        self._whole = self._expected_whole = 0.0  # squared norms: of the true gradient, and after clipping by value
        self._coefficient, self._held_scale, self._scale_of_true = 1.0, 1.0, 1.0
        self._tolerance, self._allowed = _OF_NORM, 0.0
        self._road = "plain autograd over the bare model"
        self._whole_factors: set[int] | None = None  # that no loss is likely to give by design; None: each is a fault
        self._off: float | None = None  # a factor that may be by design
        self._within_whole = _OF_WHOLE
        self._buffers: Buffers | None = None  # that the window begins with
        self._buffers_after: Buffers | None = None
        self._other_memory = False  # the buffers that a second run ends with are others
        self._squares: dict[int, float] = {}  # by optimizer, before foreign hooks
        self._hooked = False
        self._spoiled = False  # the engine has made a finite gradient NaN, and says why
        self._hooks: list[Any] = []
        scale = engine.loss_scale
        self._scale = None if scale is None else scale.clone()  # of the whole window

    # --- while the window runs

    def rerun_with(self, loss: Loss) -> None:
        """The forward is to be run again with ``loss``."""
        self._loss = loss
        self._buffers = Buffers(self._engine)

    def recording(self, loss: Loss) -> Callable[[nn.Module, Any], LossSum]:
        """``loss``, noting the random numbers that it begins with."""
        self.rerun_with(loss)

        def recorded(model: nn.Module, batch: Any) -> LossSum:
            self.before_forward()
            total = loss(model, batch)
            self._note(total)
            return total

        return recorded

    def before_forward(self) -> None:
        """Notes the random numbers that a micro-batch's forward begins with."""
        self._states.append(RNGState.capture(self._engine.device))

    def before_backward(self, total: LossSum, provisional_count: float) -> None:
        """Walks the graph of a micro-batch's loss in a user's loop, unless the window is to be run again.

        Args:
            total: the loss that the loop gave.
            provisional_count: what it is divided by where the count is not known yet.
        """
        self._note(total)
        if self._loss is not None or self._problem:
            return
        if self._engine.forward_communicates or self._engine.watches_backward:
            self._problem = "this engine does not let its graph be walked twice: call acc.verify(window, loss)"
            return
        try:
            counts = self._window.counts or {SINGLE: provisional_count}
            factor = self._engine.gradient_divide_factor
            self._add(normalize_loss(total, counts, gradient_divide_factor=factor), keep=True)
        except RuntimeError as error:  # reentrant checkpoints, compiled backwards, functions that free their tensors
            self._problem = f"its graph cannot be walked twice ({_line(error)}): call acc.verify(window, loss)"

    def _note(self, total: LossSum) -> None:
        self._own_totals.append({name: part.detach() for name, part in as_loss_sums(total).items()})

    # --- the true gradient

    def _add(self, value: Tensor, *, keep: bool) -> None:
        """Adds the gradient of one micro-batch, times the loss scale, so that fp16 rounds as in the engine."""
        parameters = trained(self._engine.unwrapped_model)
        if not value.requires_grad:
            return
        scaled = value if self._scale is None else value * self._scale
        found = torch.autograd.grad(scaled, list(parameters.values()), retain_graph=keep, allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is None:
                continue
            part = _wide(gradient)
            self._sizes[name] = self._sizes.get(name, 0.0) + float(_norm(part))
            if name in self._local:
                self._local[name] += part
            else:
                self._local[name] = part.clone() if part is gradient else part

    def _run_again(self) -> list[float]:
        """This rank's part of the true gradient, in ``_local``; returns the micro-batches' losses."""
        assert self._loss is not None
        self._local, self._sizes, totals = {}, {}, []
        model, counts = self._engine.unwrapped_model, self._counts()
        assert self._buffers is not None
        if self._buffers_after is None:
            self._buffers_after = Buffers(self._engine)
        with state_restored(self._engine):
            self._buffers.restore()
            for state, micro in zip(self._states, self._window.micro_batches, strict=True):
                state.restore()
                batch = to_device(micro.batch, self._engine.device)
                with self._engine.autocast():
                    total = self._loss(model, batch)
                totals.append(sum(float(part.detach()) for part in as_loss_sums(total).values()))
                factor = self._engine.gradient_divide_factor
                self._add(normalize_loss(total, counts, gradient_divide_factor=factor), keep=False)
            self._other_memory = not self._buffers_after.hold(within=_OF_NORM)
        return totals

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self._scale is None else float(self._scale)

    def _counts(self) -> Mapping[str, float]:
        return self._window.counts or {SINGLE: float(self._window.samples)}

    # --- the comparison

    def before_step(self, divisor: float) -> None:
        """See ``Verifier.before_step``."""
        held = dict(self._engine.reduced_gradients())
        # Also of what was frozen after it was wrapped: the engine looks at it too, and does not step.
        frozen = [
            p.grad for p in self._engine.unwrapped_model.parameters() if not p.requires_grad and p.grad is not None
        ]
        finite = all(bool(to_local(gradient).isfinite().all()) for gradient in (*held.values(), *frozen))
        if self._sharded():
            self._prove_by_differences(held, divisor, finite=finite)
            return
        if self._loss is not None and finite:
            self._try(self._run_again)
        infinite, failed = self._world.all_reduce_host([not finite, bool(self._problem)])
        if infinite:
            return  # the step is skipped, and the next window verified
        if failed:
            self._give_up()
            return
        wrong = self._compare(held, divisor)
        if not wrong:
            self._watch_optimizers()
            return
        if self._loss is not None and not self._is_repeatable():
            self._problem = "the loss is not the same a second time"
            self._give_up()
            return
        if self._loss is not None and self._remembers():
            self._problem = "its forward changes buffers of the model, and does not give the same from the first ones"
            self._give_up()
            return
        by_hand = self._world.all_gather_names([CHANGED_BY_HAND] if self._engine.gradients_changed else [])
        if by_hand:
            raise MisuseError(by_hand[0])
        raise VerificationError(self._mismatch(held, wrong))

    def _sharded(self) -> bool:
        return self._engine.forward_communicates

    def _try(self, run: Callable[[], list[float]]) -> None:
        try:
            self._totals = run()
        except Exception as error:  # the user's code, run a second time
            self._problem = f"it cannot be run a second time ({type(error).__name__}: {_line(error)})"

    def _give_up(self) -> None:
        """Says why nothing was compared; every rank calls it."""
        problems = self._world.all_gather_names([self._problem] if self._problem else [])
        self.conclusive = True
        if self._world.is_main:
            _log.warning("the window's gradient was not verified: %s", "; ".join(problems))

    def _compare(self, held: Mapping[str, Tensor], divisor: float) -> list[tuple[int, str, float]]:
        """The rank, name and factor of what rounding does not explain; the same on every rank."""
        parameters = trained(self._engine.unwrapped_model)
        starts = self._starts(held)
        names = list(parameters)
        sizes = torch.tensor([self._sizes.get(name, 0.0) for name in names], dtype=torch.float64)
        summed = self._world.all_reduce_(sizes.to(self._engine.device).unsqueeze(1)).squeeze(1).tolist()
        size_of = dict(zip(names, summed, strict=True))
        steps = max(self._world.all_gather_object(len(self._window.micro_batches)))
        roundings = _ROUNDINGS * (steps + self._world.size)
        self._scale_of_true = self._loss_scale * self._engine.gradient_divide_factor * divisor
        for name, parameter in parameters.items():
            true = self._true(name, parameter)
            size = size_of[name]
            unit = self._engine.unit_roundoff(parameter)
            accumulated = torch.finfo(true.dtype).eps / 2
            if name in held:
                mine = _piece(true, held[name], starts[name])
            else:  # on no rank, or on another
                mine = true if self._replicated else true.flatten()[:0]
            found = (
                torch.zeros_like(mine) if name not in held else _wide(to_local(held[name])).flatten()[: mine.numel()]
            )
            allowed = (roundings * accumulated + 8 * unit) * size
            wide, other = mine.double().flatten(), found.double().flatten()
            self._parts[name] = _Parts(
                expected=float(wide @ wide), found=float(other @ other), product=float(wide @ other), allowed=allowed
            )
            self._note_expected(name, true, mine)
        own = [(part.product / part.expected, part.expected) for part in self._parts.values() if part.expected > 0]
        scale = _median([pair for pairs in self._world.all_gather_object(own) for pair in pairs])
        self._held_scale = scale
        self._allowed = math.sqrt(sum(part.allowed**2 for part in self._parts.values())) / abs(self._scale_of_true)
        wrong = [
            (self._world.rank, name, part.product / part.expected / scale if part.expected and scale else math.nan)
            for name, part in self._parts.items()
            if part.is_wrong(scale)
        ]
        return [one for each in self._world.all_gather_object(wrong) for one in each]

    def _starts(self, held: Mapping[str, Tensor]) -> dict[str, int]:
        """Where this rank's pieces begin in their parameters: ranks hold consecutive ones, or all the whole."""
        lengths = {name: to_local(piece).numel() for name, piece in held.items()}
        everyone = self._world.all_gather_object(lengths)
        whole = {name: _numel(p) for name, p in trained(self._engine.unwrapped_model).items()}
        total = sum(length for each in everyone for length in each.values())
        # A parameter that one rank has and another has not is an error where ranks hold the same, and no shard.
        self._replicated = self._world.size == 1 or total > 1.5 * sum(whole.values()) or not total
        before = everyone[: self._world.rank]
        return {
            name: 0 if length >= whole.get(name, 0) else sum(each.get(name, 0) for each in before)
            for name, length in lengths.items()
        }

    def _true(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The true gradient, over all ranks; a collective."""
        own = self._local.get(name)
        if own is None:
            like = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            own = torch.zeros_like(like, dtype=_widened(like.dtype))
        return self._world.all_reduce_(own.detach().clone().contiguous())

    def _note_expected(self, name: str, true: Tensor, mine: Tensor) -> None:
        """Keeps the squared norms of a parameter's true gradient, and of what of it the optimizers should get."""
        scale = self._scale_of_true
        self._whole += float(true.double().square().sum()) / scale**2
        bound = math.inf if self._clip_value is None else abs(self._clip_value * scale)
        self._expected[name] = float(mine.double().clamp(-bound, bound).square().sum()) / scale**2
        self._expected_whole += float(true.double().clamp(-bound, bound).square().sum()) / scale**2

    # --- what the optimizers are given

    def _watch_optimizers(self) -> None:
        """Until :meth:`close`, looks at what each optimizer is given before it moves a weight; a collective."""
        optimizers = self._engine.optimizers
        by_id = {id(p): name for name, p in trained(self._engine.unwrapped_model).items()}
        with self._engine.stepped_groups:
            held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        (known,) = self._world.all_reduce_host([any(id(p) in by_id for p in held)])
        # An engine may step on copies of its own, which hold several parameters end to end.
        self._names = by_id if known else None
        self._left = sum(p.numel() for p in held)
        norm = math.sqrt(self._whole)
        self._coefficient = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + 1e-6))
        for optimizer in optimizers:
            hooks = cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks)
            foreign = any(
                not (getattr(hook, "__module__", "") or "").startswith("distaccum.") for hook in hooks.values()
            )
            first = optimizer.register_step_pre_hook(self._before_optimizer)
            hooks.move_to_end(first.id, last=False)  # what a hook of the user's does is the user's
            self._hooks.append(first)
            if foreign:
                self._hooks.append(optimizer.register_step_pre_hook(self._after_foreign_hooks))

    def _after_foreign_hooks(self, optimizer: Optimizer, *_: Any) -> None:
        """Says that step pre-hooks of the user's have changed what was compared before them."""
        before, after = self._squares.get(id(optimizer), math.nan), self._square(optimizer)
        if abs(after - before) > _OF_NORM * before and not self._hooked:
            self._hooked = True
            if self._world.is_main:
                _log.info("a step pre-hook of the optimizer changes the gradient; it was compared before the hook")

    def _square(self, optimizer: Optimizer) -> float:
        """The squared norm of what an optimizer holds on this rank."""
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        return sum(
            float(_wide(to_local(tensor.grad)).double().square().sum()) for tensor in tensors if tensor.grad is not None
        )

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook that runs before the optimizer moves a weight, with its gradients as they are then."""
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        divisor = getattr(optimizer, "grad_scale", None)
        skipped = getattr(optimizer, "found_inf", None)
        square = self._squares[id(optimizer)] = self._square(optimizer)
        square /= 1.0 if divisor is None else float(divisor) ** 2
        if skipped is not None and bool(skipped):
            self._spoiled = self._spoiled or not math.isfinite(square)
            square = 0.0
        self._called = True
        if self._names is None:
            self._of_copies(square, sum(tensor.numel() for tensor in tensors))
            return
        names = [self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names]
        self._agree_on(square, sum(self._expected.get(name, 0.0) for name in names))

    def _of_copies(self, square: float, elements: int) -> None:
        """Copies say nothing of their parameters: all of them are looked at together, over all ranks."""
        self._found += square
        self._seen += elements
        if self._seen < self._left:
            return
        found, seen = self._world.all_reduce_host([self._found, float(self._seen)])
        elements = sum(_numel(p) for p in trained(self._engine.unwrapped_model).values())
        copies = max(1, round(seen / elements))  # padding aside
        self._agree_on(found / copies, self._expected_whole)

    def _agree_on(self, found: float, expected: float) -> None:
        """Compares squared norms of what is stepped on and of what should be; a collective."""
        norms = math.sqrt(found), math.sqrt(expected) * self._coefficient
        allowed = self._tolerance * math.sqrt(expected) + self._coefficient * self._allowed
        wrong = not abs(norms[0] - norms[1]) <= allowed
        any_wrong, spoiled = self._world.all_reduce_host([wrong, self._spoiled])
        if spoiled:
            return
        if not any_wrong:
            self.conclusive = True
            return
        everyone = self._world.all_gather_object((*norms, wrong))
        if self._may_be_meant(self._world.all_gather_object((norms[0], math.sqrt(expected)))):
            self.conclusive = True
            return
        said = [
            (f"rank {rank}", norm / right if right else math.inf)
            for rank, (norm, right, bad) in enumerate(everyone)
            if bad
        ]
        raise VerificationError(self._told(said))

    # --- where the model is sharded

    def _is_whole(self, factor: float) -> bool:
        """Whether a factor, or one over it, is a number that the window is made of: no loss gives it by design."""
        if self._whole_factors is None or not factor > 0.0:
            return True
        larger = max(factor, 1.0 / factor)
        return any(abs(larger - whole) <= self._within_whole * whole for whole in self._whole_factors)

    def _may_be_meant(self, norms: list[tuple[float, float]]) -> bool:
        """Whether the gradient that the optimizers get may be right, and by design not the slope of the loss.

        Args:
            norms: every rank's, and that of the engine's gradient as far as the slope says, before clipping.
        """
        if self._whole_factors is None:
            return False
        largest = max((right for _, right in norms), default=0.0)
        factors = [norm / right for norm, right in norms if right > _OF_NORM * largest]
        if not factors or not all(map(math.isfinite, factors)):
            return False
        factor = max(factors)
        if factor - min(factors) > _ONE_FACTOR * factor and self._clip_value is None:
            return False
        total = factor * math.sqrt(self._whole)
        if self._clip_norm is not None and total > (1 - _ONE_FACTOR) * self._clip_norm:
            return total < (1 + _ONE_FACTOR) * self._clip_norm  # the norm that the step reports says by how much
        if self._is_whole(factor):
            return False
        self._off = factor
        return True

    def _prove_by_differences(self, held: Mapping[str, Tensor], divisor: float, *, finite: bool) -> None:
        """See ``directional.py``; a collective."""
        if self._loss is None:
            self._problem = self._problem or "this engine shards the model: call acc.verify(window, loss)"
        infinite, failed = self._world.all_reduce_host([not finite, bool(self._problem)])
        if infinite:
            return
        if failed:
            self._give_up()
            return
        if not any(self._world.all_gather_object(len(held))):
            return  # the engine says so
        assert self._loss is not None
        assert self._buffers is not None
        gradients = {name: _wide(to_local(gradient)) for name, gradient in held.items()}
        own = sum(
            float(to_local(p.detach()).double().square().sum()) for p in self._engine.unwrapped_model.parameters()
        )
        norm = math.sqrt(self._world.all_reduce_host([own])[0])
        road = DirectionalRoad(
            self._engine, self._world, self._window, self._loss, states=self._states, buffers=self._buffers
        )
        sixteen = max(self._engine.unit_roundoff(p) for p in self._engine.unwrapped_model.parameters()) > 2.0**-20
        self._tolerance = _OF_SLOPE_16 if sixteen else _OF_SLOPE
        counts = self._counts()
        losses = [
            float(part) / counts[name] for each in self._own_totals for name, part in each.items() if counts[name]
        ]
        scale, farthest, most = self._loss_scale * divisor, _FARTHEST * norm, _CHANGE_16 if sixteen else _CHANGE
        if sixteen:
            farthest *= 4
        (middle,) = self._world.all_reduce_host([sum(losses)])
        slope = again = road.slope(gradients, farthest=farthest, most=most, scale=scale, middle=middle)
        likely = [scale * factor for factor in (1.0, self._world.size, 1.0 / self._world.size)]
        if not any(abs(slope.factor - one) <= 0.5 * self._tolerance * one for one in likely):
            again = road.slope(gradients, farthest=farthest / 2, most=most, scale=scale / 2, middle=middle)
        doubt = abs(again.factor - slope.factor)
        if slope.predicted == 0.0:
            if slope.is_clear and again.is_clear:
                raise VerificationError(
                    "the gradient of every parameter is zero, and the window's loss changes with the weights: the loss "
                    f"does not reach them. {_CLOSING}"
                )
            self._problem = "its gradient is zero"
            self._give_up()
            return
        if not doubt <= 0.5 * self._tolerance * abs(slope.factor):
            self._problem = "the window's loss is too rough for differences, or not the same a second time"
            self._give_up()
            return
        self._held_scale = slope.factor
        self._parts = {}
        self._scale_of_true = 1.0
        self._road = "the slope of the window's loss along it"
        self._within_whole = _OF_WHOLE_16 if sixteen else _OF_WHOLE
        steps = self._world.all_gather_object(len(self._window.micro_batches))
        made_of = {self._world.size, *steps, *(self._world.size * own for own in steps), sum(steps)}
        made_of |= {round(self._engine.gradient_divide_factor), round(self._loss_scale)}
        self._whole_factors = {whole for whole in made_of if whole > 1}
        for name, gradient in gradients.items():
            self._note_expected(name, gradient / self._held_scale, (gradient / self._held_scale).flatten())
        self._whole, self._expected_whole = self._world.all_reduce_host([self._whole, self._expected_whole])
        self._watch_optimizers()

    def after_step(self, reported: Tensor) -> None:
        """See ``Verifier.stepping``; a collective where the gradient was compared.

        Args:
            reported: the norm of the gradient as the engine says it: clipping hides a wrong factor, this does not.
        """
        if not self._hooks or not math.isfinite(float(reported)):
            return  # the engine has found a fault of its own, and says so
        if not self._called:  # the other ranks may wait in an optimizer's step
            self._agree_on(0.0, max(self._whole, 1e-30))
        left = [
            name
            for name, p in self._engine.unwrapped_model.named_parameters()
            if p.grad is not None and bool((to_local(p.grad) != 0).any())
        ]
        norm, found = math.sqrt(self._whole), float(reported)
        off = not abs(found - norm) <= self._tolerance * norm + self._allowed
        if off and not self._is_whole(found / norm if norm else 0.0):
            off, self._off = False, found / norm
        any_left, any_off = self._world.all_reduce_host([bool(left), off])
        if any_off:
            raise VerificationError(
                f"the gradient norm that the step reports and clips by is {self._worded(found / norm)} that "
                f"of {self._road} ({found:.6g} and {norm:.6g}). {_CLOSING}"
            )
        if any_left:
            names = self._world.all_gather_names(left)
            raise VerificationError(
                f"gradients of {shorten(names, _NAMED)} are still there after the step, and would be added to those of "
                "the next window. Nothing but the engine may accumulate into a parameter's grad"
            )
        if self._off is not None or self._held_scale < 0.0:
            factor = math.copysign(1.0 if self._off is None else self._off, self._held_scale)
            self.doubtful = self.conclusive
            self.summary = f"the window's gradient is {factor:.2f}x the loss's slope along it: {_BY_DESIGN}"
            return
        self.summary = (
            f"the window's gradient, of norm {math.sqrt(self._whole):.4g}, agrees with {self._road}, and the optimizer "
            f"is given it ({len(self._expected)} parameters, {self._world.size} ranks)"
        )

    def close(self) -> None:
        """Leaves the optimizers alone, and frees what was computed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._local, self._states, self._loss = [], {}, [], None
        self._buffers = self._buffers_after = None

    # --- words

    def _remembers(self) -> bool:
        """Whether the forward has a memory in buffers that a second run does not give back; a collective."""
        assert self._buffers is not None
        differs = self._other_memory or bool(self._differing_losses())
        changed, differ = self._world.all_reduce_host([not self._buffers.hold(), differs])
        return bool(changed) and bool(differ)

    def _is_repeatable(self) -> bool:
        """Whether a third run gives the second's losses and gradients, on all ranks; a collective."""
        before, totals, sizes = dict(self._local), list(self._totals), dict(self._sizes)
        self._try(self._run_again)
        again, self._local = self._local, before
        noisy = bool(self._problem)
        for first, second in zip(totals, self._totals, strict=False):
            noisy |= not abs(first - second) <= 1e-6 * abs(first)
        for name, gradient in before.items():
            other = again.get(name)
            allowed = self._parts[name].allowed + 1e-12
            noisy |= other is None or not float(_norm(gradient - other)) <= allowed
        self._sizes = sizes
        (any_noisy,) = self._world.all_reduce_host([noisy])
        return not any_noisy

    def _mismatch(self, held: Mapping[str, Tensor], wrong: list[tuple[int, str, float]]) -> str:
        """What is wrong with the gradient that the engine holds; a collective."""
        ranks = sorted({rank for rank, _, _ in wrong})
        names = list(dict.fromkeys(name for _, name, _ in wrong))
        every = len(names) == len(self._parts)
        what = "every parameter" if every else shorten(names, _NAMED)
        everyone = "" if len(ranks) == self._world.size else f" on rank {shorten(ranks)}"
        shares = self._shares(held, names)
        off = max(
            (part.error(self._held_scale) / math.sqrt(part.expected) for part in self._parts.values() if part.expected),
            default=math.nan,
        )
        offs = max(self._world.all_gather_object(off))
        forward = self._forward_differs()
        factors = {round(factor, 3) for _, _, factor in wrong if math.isfinite(factor)}
        zero = not any(self._parts[name].found for name in names if name in self._parts)
        zero = all(self._world.all_gather_object(zero))
        if zero:
            how = "is zero"
        elif shares:
            how = shares
        elif len(factors) == 1:
            how = f"is {self._worded(factors.pop())}"
        else:
            how = f"is off by {offs:.0%}" if math.isfinite(offs) else "is not what the loss gives"
        return (
            f"the gradient of {what}{everyone} {how}: compared with {self._road}, before the step; no weight has "
            f"moved.{forward} {_CLOSING}"
        )

    def _forward_differs(self) -> str:
        """Whether the window's own losses were others than the bare model's; a collective."""
        differs = ""
        if differing := self._differing_losses():
            i, first, second = differing[0]
            differs = (
                f" On rank {self._world.rank} micro-batch {i} has the loss {first:.6g}, and the bare model "
                f"gives {second:.6g}: the engine's forward computes something else."
            )
        found = self._world.all_gather_names([differs] if differs else [])
        return found[0] if found else ""

    def _differing_losses(self) -> list[tuple[int, float, float]]:
        """The micro-batches whose loss was another in the window than in the bare model, and both."""
        if not self._totals or len(self._own_totals) != len(self._totals):
            return []
        own = [sum(float(part) for part in parts.values()) for parts in self._own_totals]
        pairs = enumerate(zip(own, self._totals, strict=True))
        return [(i, a, b) for i, (a, b) in pairs if abs(a - b) > 1e-4 * max(abs(a), abs(b))]

    def _shares(self, held: Mapping[str, Tensor], names: Iterable[str]) -> str:
        """In words, what each rank's part counts for in the gradient that the engine holds; a collective."""
        size = self._world.size
        if size > _MOST_RANKS_TOLD_APART or size == 1:
            return ""
        gram = torch.zeros(size, size, dtype=torch.float64)
        right = torch.zeros(size, dtype=torch.float64)
        found = 0.0
        parameters, starts = trained(self._engine.unwrapped_model), self._starts(held)
        for name in [name for name in parameters if name in set(names)]:
            own = self._local.get(name)
            if own is None:
                own = torch.zeros(parameters[name].shape, dtype=_widened(parameters[name].dtype))
            parts = [torch.zeros_like(own).to(self._engine.device) for _ in range(size)]
            torch.distributed.all_gather(parts, own.contiguous().to(self._engine.device))
            if name not in held:
                continue
            piece = _wide(to_local(held[name])).double().flatten()
            mine = torch.stack([_piece(part, held[name], starts[name]).double().flatten() for part in parts])
            piece = piece[: mine.shape[1]]
            gram += (mine @ mine.T).cpu()
            right += (mine @ piece).cpu()
            found += float(piece @ piece)
        shares = torch.linalg.lstsq(gram, right).solution if bool(gram.any()) else right
        left = found - 2 * float(shares @ right) + float(shares @ gram @ shares)
        explained = found > 0 and left < 1e-4 * found
        own_words = (shares / max(self._scale_of_true, 1e-30) * 1.0).tolist() if explained else None
        everyone = self._world.all_gather_object(own_words)
        if any(each is None for each in everyone):
            return ""
        nominal = 1.0 / max(self._scale_of_true, 1e-30)
        scale = max((abs(v) for each in everyone for v in each), default=1.0) or nominal
        sayings: list[str] = []
        for rank, each in enumerate(everyone):
            missing = [str(other) for other, share in enumerate(each) if abs(share) < 1e-3 * scale]
            part = [
                f"{share / scale:.2f}x rank {other}'s" for other, share in enumerate(each) if abs(share) >= 1e-3 * scale
            ]
            if missing:
                sayings.append(f"on rank {rank}: rank {', '.join(missing)} did not take part")
            elif max(each) - min(each) > 1e-3 * scale:
                sayings.append(f"on rank {rank}: {' + '.join(part)} part")
        if len({text.partition(": ")[2] for text in sayings}) == 1 and len(sayings) == size:
            return f"lacks a part: {sayings[0].partition(': ')[2]}"
        return f"is not the ranks' sum ({'; '.join(sayings)})" if sayings else ""

    def _worded(self, factor: float) -> str:
        return words(factor, self._measures(), max(5e-3, self._tolerance))

    def _measures(self) -> dict[str, float]:
        """Numbers that a wrong factor may be made of, with their names."""
        steps = len(self._window.micro_batches)
        counts = self._window.counts
        return {
            "ranks": self._world.size,
            "micro-batches": steps,
            "(loss scale)": self._loss_scale,
            "(count of the window)": next(iter(counts.values())) if len(counts) == 1 else 1.0,
            "(clip coefficient)": self._coefficient,
        }

    def _told(self, said: list[tuple[str, float]]) -> str:
        factors = {round(factor, 3) for _, factor in said}
        if len(factors) == 1:
            where = "" if len(said) == self._world.size else f" on {shorten([rank for rank, _ in said])}"
            how = f"{self._worded(said[0][1])}{where}"
        else:
            how = "; ".join(f"{self._worded(factor)} on {rank}" for rank, factor in said)
        return (
            f"the optimizer is given the window's gradient times {how}: compared with {self._road}, before it steps; "
            f"no weight has moved. {_CLOSING}"
        )


def words(factor: float, measures: Mapping[str, float], within: float = 5e-3) -> str:
    """A factor with what it is made of: ``8.00x = 2 ranks x 4 micro-batches``, to ``within``."""
    if factor == 0.0:
        return "zero"
    if not math.isfinite(factor):
        return "something, where there is no gradient"
    shown = f"{factor:.2f}x" if _SHORT[0] <= factor < _SHORT[1] else f"{factor:.3g}x"
    equals = "=" if within < _ABOUT else "~"
    kinds = [(name, value) for name, value in measures.items() if not math.isclose(value, 1.0, rel_tol=1e-3)]
    pairs = [(a, b) for i, a in enumerate(kinds) for b in kinds[i + 1 :]]
    for parts in [*((kind,) for kind in kinds), *pairs]:
        product = math.prod(value for _, value in parts)
        text = " x ".join(_measure(name, value) for name, value in parts)
        if math.isclose(factor, product, rel_tol=within):
            return f"{shown} {equals} {text}"
        if math.isclose(factor, 1 / product, rel_tol=within):
            return f"{shown} {equals} 1 / ({text})"
    return shown


def _measure(name: str, value: float) -> str:
    return f"{value:g} {name}"


def _median(pairs: list[tuple[float, float]]) -> float:
    """The weighted median of values and their weights; 0 where there are none."""
    ordered, total = sorted(pairs), sum(weight for _, weight in pairs)
    before = 0.0
    for value, weight in ordered:
        before += weight
        if 2 * before >= total:
            return value
    return 0.0


def _piece(whole: Tensor, held: Tensor, start: int) -> Tensor:
    """The elements of a whole gradient that a rank's piece covers; the piece may end in padding."""
    length = to_local(held).numel() * (2 if held.is_complex() else 1)
    return whole.flatten()[start : start + length]


def _wide(gradient: Tensor) -> Tensor:
    """Dense and real, in fp32 or fp64."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.to(_widened(dense.dtype))


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm


def _numel(parameter: Any) -> int:
    """Of the whole parameter, wherever its memory is."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:160]
