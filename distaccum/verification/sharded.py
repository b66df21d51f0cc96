"""A gradient that no rank holds whole beside the slope of the window's loss: one factor, and what it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.modules import to_local
from distaccum.errors import VerificationError
from distaccum.verification.directional import DirectionalRoad, Slope
from distaccum.verification.expected import CLOSING, Expected, WholeFactors, square, wide
from distaccum.verification.recorded import RecordedWindow

_ROAD = "the slope of the window's loss along it"
_OF_SLOPE, _OF_SLOPE_16 = 0.03, 0.15  # of a difference of losses, in fp32 and in 16 bits
_OF_WHOLE, _OF_WHOLE_16 = 0.03, 0.06  # of a factor that is a whole number, by such a difference
_CHANGE, _CHANGE_16 = 0.04, 0.2  # of the loss, between the points of a difference: rounding drowns in it
_FARTHEST, _FARTHEST_16 = 0.01, 0.04  # of the norm of the weights, for the points of a difference
_ROUNDOFF_16 = 2.0**-20  # coarser ones are of 16 bits


def compare_with_slope(
    engine: Engine,
    world: World,
    recorded: RecordedWindow,
    held: Mapping[str, Tensor],
    *,
    divisor: float,
    clip_value: float | None,
) -> Expected | str:
    """What the optimizers should be given, by differences of the window's loss; a collective.

    Returns:
        In words, why it cannot be told, where it cannot; the same on every rank.

    Raises:
        VerificationError: the gradient is zero, and the loss changes with the weights; on all ranks.
    """
    gradients = {name: wide(to_local(gradient)) for name, gradient in held.items()}
    sixteen = max(engine.unit_roundoff(p) for p in engine.unwrapped_model.parameters()) > _ROUNDOFF_16
    tolerance = _OF_SLOPE_16 if sixteen else _OF_SLOPE
    slope, again = _slopes(engine, world, recorded, gradients, divisor=divisor, sixteen=sixteen)
    if slope.predicted == 0.0:
        if slope.is_clear and again.is_clear:
            raise VerificationError(
                "the gradient of every parameter is zero, and the window's loss changes with the weights: the loss "
                f"does not reach them. {CLOSING}"
            )
        return "its gradient is zero"
    if not abs(again.factor - slope.factor) <= 0.5 * tolerance * abs(slope.factor):
        return "the window's loss is too rough for differences, or not the same a second time"
    faults = WholeFactors(_numbers(engine, world, recorded), _OF_WHOLE_16 if sixteen else _OF_WHOLE)
    expected = Expected(road=_ROAD, clip_value=clip_value, tolerance=tolerance, faults=faults)
    for name, gradient in gradients.items():
        true = gradient / slope.factor
        expected.add(name, true, true)
    expected.whole, expected.clipped = world.all_reduce_host([expected.whole, expected.clipped])
    expected.reversed = slope.factor < 0.0
    return expected


def _slopes(
    engine: Engine,
    world: World,
    recorded: RecordedWindow,
    gradients: Mapping[str, Tensor],
    *,
    divisor: float,
    sixteen: bool,
) -> tuple[Slope, Slope]:
    """The slope, and once more at another distance where the factor is not what it should be."""
    own = sum(square(to_local(p.detach())) for p in engine.unwrapped_model.parameters())
    weights = math.sqrt(world.all_reduce_host([own])[0])
    farthest, most = (_FARTHEST_16, _CHANGE_16) if sixteen else (_FARTHEST, _CHANGE)
    farthest *= weights
    counts = recorded.counts
    losses = [float(part) / counts[name] for each in recorded.totals for name, part in each.items() if counts[name]]
    (middle,) = world.all_reduce_host([sum(losses)])
    scale = recorded.loss_scale * divisor
    road = DirectionalRoad(engine, world, recorded)
    slope = road.slope(gradients, farthest=farthest, most=most, scale=scale, middle=middle)
    likely = [scale * factor for factor in (1.0, world.size, 1.0 / world.size)]
    tolerance = _OF_SLOPE_16 if sixteen else _OF_SLOPE
    if any(abs(slope.factor - one) <= 0.5 * tolerance * one for one in likely):
        return slope, slope
    return slope, road.slope(gradients, farthest=farthest / 2, most=most, scale=scale / 2, middle=middle)


def _numbers(engine: Engine, world: World, recorded: RecordedWindow) -> frozenset[int]:
    """That the window is made of: no loss is likely to give a factor of one of them by design; a collective."""
    steps = world.all_gather_object(recorded.micro_batches)
    numbers = {world.size, *steps, *(world.size * own for own in steps), sum(steps)}
    numbers |= {round(engine.gradient_divide_factor), round(recorded.loss_scale)}
    return frozenset(number for number in numbers if number > 1)
