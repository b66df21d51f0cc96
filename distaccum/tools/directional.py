"""The slope of a window's loss along a line through the weights, by central differences: forwards only.

Where a model is sharded no rank can run plain autograd over all of it. But the loss at two points, at the same distance
before and behind the weights, says how steep it is there; the engine's gradient says so too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distaccum.data.batches import map_tensors, to_device
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.buffers import buffers_restored
from distaccum.engines.modules import to_local
from distaccum.errors import VerificationError
from distaccum.losses.normalize import as_loss_sums
from distaccum.verification.additivity import in_16_bits
from distaccum.verification.expected import CLOSING, Expected, WholeFactors, square, wide
from distaccum.verification.recorded import RecordedWindow

# A gradient that no rank holds whole beside the slope of the window's loss: one factor, and what it may be.

_ROAD = "the slope of the window's loss along it"
_OF_SLOPE, _OF_SLOPE_16 = 0.03, 0.15  # of a difference of losses, in fp32 and in 16 bits
_OF_WHOLE, _OF_WHOLE_16 = 0.03, 0.06  # of a factor that is a whole number, by such a difference
_CHANGE, _CHANGE_16 = 0.04, 0.2  # of the loss, between the points of a difference: rounding drowns in it
_FARTHEST, _FARTHEST_16 = 0.01, 0.04  # of the norm of the weights, for the points of a difference


def compare_with_slope(
    engine: Engine, recorded: RecordedWindow, held: Mapping[str, Tensor], *, divisor: float, clip_value: float | None
) -> Expected | str:
    """What the optimizers should be given, by differences of the window's loss; a collective.

    Returns:
        In words, why it cannot be told, where it cannot; the same on every rank.

    Raises:
        VerificationError: the gradient is zero, and the loss changes with the weights; on all ranks.
    """
    gradients = {name: wide(to_local(gradient)) for name, gradient in held.items()}
    sixteen = in_16_bits(engine)
    tolerance = _OF_SLOPE_16 if sixteen else _OF_SLOPE
    slope, again = _slopes(engine, recorded, gradients, divisor=divisor, sixteen=sixteen)
    if slope.predicted == 0.0:
        if slope.is_clear and again.is_clear:
            raise VerificationError(
                "the gradient of every parameter is zero, and the window's loss changes with the weights: the loss "
                f"does not reach them. {CLOSING}"
            )
        return "its gradient is zero"
    if not abs(again.factor - slope.factor) <= 0.5 * tolerance * abs(slope.factor):
        return "the window's loss is too rough for differences, or not the same a second time"
    faults = WholeFactors(_numbers(engine, recorded), _OF_WHOLE_16 if sixteen else _OF_WHOLE)
    expected = Expected(road=_ROAD, clip_value=clip_value, tolerance=tolerance, faults=faults)
    for name, gradient in gradients.items():
        true = gradient / slope.factor
        expected.add(name, true, true)
    expected.whole, expected.clipped = engine.world.all_reduce_host([expected.whole, expected.clipped])
    expected.reversed = slope.factor < 0.0
    return expected


def _slopes(
    engine: Engine, recorded: RecordedWindow, gradients: Mapping[str, Tensor], *, divisor: float, sixteen: bool
) -> tuple[Slope, Slope]:
    """The slope, and once more at another distance where the factor is not what it should be."""
    world = engine.world
    own = sum(square(to_local(p.detach())) for p in engine.unwrapped_model.parameters())
    weights = math.sqrt(world.all_reduce_host([own])[0])
    farthest, most = (_FARTHEST_16, _CHANGE_16) if sixteen else (_FARTHEST, _CHANGE)
    farthest *= weights
    counts = recorded.counts
    losses = [float(part) / counts[name] for each in recorded.totals for name, part in each.items() if counts[name]]
    (middle,) = world.all_reduce_host([sum(losses)])
    scale = recorded.loss_scale * divisor
    road = DirectionalRoad(engine, recorded)
    slope = road.slope(gradients, farthest=farthest, most=most, scale=scale, middle=middle)
    likely = [scale * factor for factor in (1.0, world.size, 1.0 / world.size)]
    tolerance = _OF_SLOPE_16 if sixteen else _OF_SLOPE
    if any(abs(slope.factor - one) <= 0.5 * tolerance * one for one in likely):
        return slope, slope
    return slope, road.slope(gradients, farthest=farthest / 2, most=most, scale=scale / 2, middle=middle)


def _numbers(engine: Engine, recorded: RecordedWindow) -> frozenset[int]:
    """That the window is made of: no loss is likely to give a factor of one of them by design; a collective."""
    world = engine.world
    steps = world.all_gather_object(recorded.micro_batches)
    numbers = {world.size, *steps, *(world.size * own for own in steps), sum(steps)}
    numbers |= {round(engine.gradient_divide_factor), round(recorded.loss_scale)}
    return frozenset(number for number in numbers if number > 1)


_STRAIGHT = 0.5  # the loss's bend beside its change, at most
_SEED = 20_261_122
_SMALLEST_BLOCK = 1e-6  # the norm of a parameter's gradient beside the largest one: below there is only rounding
_SHRINK, _TRIES = 4.0, 5


@dataclass(frozen=True, kw_only=True)
class Slope:
    """How the window's mean loss changes from one point to the other.

    ``predicted`` by the engine's gradient (in its own scale), and ``measured``; ``bend``: how far the loss between the
    points is from their mean, twice.
    """

    predicted: float
    measured: float
    bend: float

    @property
    def factor(self) -> float:
        """The engine's gradient over the true one."""
        return self.predicted / self.measured if self.measured else math.inf

    @property
    def is_clear(self) -> bool:
        """Whether the loss changes by more than it bends."""
        return abs(self.measured) > 2 * self.bend


def make_direction(gradients: Mapping[str, Tensor], world: World, *, seed: int) -> tuple[dict[str, Tensor], float]:
    """A direction along the gradient, each parameter's part of length 0.5 to 1.5, and the slope that it predicts.

    So a parameter counts by the norm of its gradient, not its square, and no two errors cancel by design. Where the
    gradient is zero everywhere the direction is a random one.
    """
    squares = {name: square(gradient) for name, gradient in gradients.items()}
    names = sorted({name for each in world.all_gather_object(list(squares)) for name in each})
    summed = world.all_reduce_host([squares.get(name, 0.0) for name in names])
    norms = dict(zip(names, map(math.sqrt, summed), strict=True))
    largest = max(norms.values(), default=0.0)
    if largest == 0.0:
        generator = torch.Generator().manual_seed(seed + world.rank)
        return {
            name: torch.randn(gradient.shape, generator=generator).to(gradient.device, gradient.dtype)
            for name, gradient in gradients.items()
        }, 0.0
    generator = torch.Generator().manual_seed(seed)
    factors = dict(zip(names, (0.5 + torch.rand(len(names), generator=generator)).tolist(), strict=True))
    large = {name for name, norm in norms.items() if norm > _SMALLEST_BLOCK * largest}
    direction = {
        name: gradient * (factors[name] / norms[name] if name in large else 0.0) for name, gradient in gradients.items()
    }
    return direction, sum(factors[name] * norms[name] for name in large)


class DirectionalRoad:
    """Runs a window's forwards at shifted weights; every call is a collective.

    Args:
        engine: shifts its weights (``GradientProbe.shifted``).
        recorded: the window, with what its forwards are run again with.
    """

    def __init__(self, engine: Engine, recorded: RecordedWindow) -> None:
        assert recorded.loss is not None
        assert recorded.buffers is not None
        self._engine, self._loss = engine, recorded.loss
        self._world = world = engine.world
        self._recorded, self._buffers, self._counts = recorded, recorded.buffers, recorded.counts
        batches = recorded.batches
        everyone = world.all_gather_object(len(batches))
        self._own, self._most = len(batches), max(everyone)
        if not min(everyone):  # a forward is a collective: who has no batch runs another rank's, for nothing
            first = next(rank for rank, number in enumerate(everyone) if number)
            given = world.all_gather_object(map_tensors(batches[0], Tensor.cpu) if world.rank == first else None)
            batches = batches or [given[first]]
        self._batches = batches

    def loss_at(
        self, direction: Mapping[str, Tensor], distance: float, gradients: Mapping[str, Tensor]
    ) -> tuple[float, float]:
        """The window's mean loss over all ranks, each part over its own count, and what the gradient predicts.

        The prediction is for the weights as they have moved: in 16 bits they move by whole steps only.
        """
        counts, total, predicted = self._counts, 0.0, 0.0
        outer = RNGState.capture(self._engine.device)
        try:
            shifted = self._engine.probe.shifted(direction, distance)
            with torch.no_grad(), buffers_restored(self._engine), shifted as moved:
                self._buffers.restore()
                predicted = sum(float(gradients[name].double().flatten() @ by.double()) for name, by in moved.items())
                for i in range(self._most):
                    batch = to_device(self._batches[i if i < self._own else 0], self._engine.device)
                    outer.restore()
                    if i < self._own:
                        self._recorded.draw_again(i)
                    with self._engine.autocast():
                        sums = as_loss_sums(self._loss(self._engine.unwrapped_model, batch))
                    if i < self._own:
                        total += sum(float(part) / counts[name] for name, part in sums.items() if counts[name])
        finally:
            outer.restore()
        total, predicted = self._world.all_reduce_host([total, predicted])
        return total, predicted

    def slope(
        self, gradients: Mapping[str, Tensor], *, farthest: float, most: float, scale: float, middle: float
    ) -> Slope:
        """Along the gradient: two forwards of the window, and two more each time the loss is not straight there.

        Args:
            gradients: this rank's parts of the engine's.
            farthest: the distance to either point, at most.
            most: the change of the loss between the points, over the loss, at most.
            scale: of the engine's gradients, as far as is known: the distance to begin with depends on it.
            middle: the window's mean loss at the weights themselves.
        """
        direction, predicted = make_direction(gradients, self._world, seed=_SEED)
        length = math.sqrt(self._world.all_reduce_host([sum(map(square, direction.values()))])[0])
        distance = farthest / max(length, 1e-30)
        if predicted:
            distance = min(distance, 0.25 * most * abs(middle) * scale / predicted)
        for _ in range(_TRIES):
            (ahead, rises), (behind, falls) = (
                self.loss_at(direction, sign * distance, gradients) for sign in (1.0, -1.0)
            )
            change, bend = ahead - behind, abs(ahead + behind - 2 * middle)
            found = Slope(predicted=rises - falls if predicted else 0.0, measured=change, bend=bend)
            if bend <= _STRAIGHT * abs(change) and abs(change) <= most * abs(middle):
                break
            distance /= _SHRINK
        return found
