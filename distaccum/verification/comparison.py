"""The gradient that an engine holds beside the true one: parameter by parameter, up to one factor and to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.modules import is_sharded, to_local, trained
from distaccum.verification.expected import Expected, piece_of, whole_numel, wide, widened
from distaccum.verification.plain_autograd import PlainGradient
from distaccum.verification.recorded import RecordedWindow

# Roundings of one term of a gradient: it is scaled, accumulated and reduced; kernels add up in an order of their own.
_ROUNDINGS = 64
_TOGETHER = 2**20  # numbers of an all-reduce, and the rest of the last gradient
_SQUARES = ("expected", "found", "product")  # of a part
_ROAD = "plain autograd over the bare model"


@dataclass(frozen=True, kw_only=True)
class Part:
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found.

    Args:
        parts: of every trained parameter.
        scale: the engine's gradient over the true one: the median over the parameters of all ranks.
        wrong: the rank, name and factor of what rounding does not explain; the same on every rank.
        expected: what the optimizers should be given, if nothing is wrong.
    """

    parts: Mapping[str, Part]
    scale: float
    wrong: list[tuple[int, str, float]]
    expected: Expected


def compare(
    engine: Engine,
    recorded: RecordedWindow,
    plain: PlainGradient,
    held: Mapping[str, Tensor],
    *,
    divisor: float,
    clip_value: float | None,
) -> Comparison:
    """Compares what the engine holds with the true gradient; a collective, and an all-reduce for some megabytes of it.

    Args:
        engine: whose step is looked at.
        recorded: the window.
        plain: this rank's part of the true gradient.
        held: the engine's reduced gradients, or this rank's pieces of them.
        divisor: that the step is still to divide by.
        clip_value: what the engine was told.
    """
    world, parameters = engine.world, trained(engine.unwrapped_model)
    starts, replicated = layout(world, parameters, held)
    sizes = _sizes(engine, plain)
    steps = max(world.all_gather_object(recorded.micro_batches))
    roundings = _ROUNDINGS * (steps + world.size)
    unit = recorded.loss_scale * engine.gradient_divide_factor * divisor
    expected = Expected(road=_ROAD, unit=unit, clip_value=clip_value)
    parts: dict[str, Part] = {}
    for name, true in _summed(world, parameters, plain, engine.device):
        if name in held:
            own = piece_of(true, held[name], starts[name])
            found = wide(to_local(held[name])).flatten()[: own.numel()]
        else:  # on no rank, or on another
            own = true if replicated else true.flatten()[:0]
            found = torch.zeros_like(own)
        precision = roundings * torch.finfo(true.dtype).eps / 2 + 8 * engine.probe.unit_roundoff(parameters[name])
        right, other = own.double().flatten(), found.double().flatten()
        squares = torch.stack((right @ right, other @ other, right @ other)).tolist()  # reads the device once
        parts[name] = Part(**dict(zip(_SQUARES, squares, strict=True)), allowed=precision * sizes[name])
        expected.add(name, true, own)
    ratios = [(part.product / part.expected, part.expected) for part in parts.values() if part.expected > 0]
    scale = _median([pair for pairs in world.all_gather_object(ratios) for pair in pairs])
    expected.allowed = math.sqrt(sum(part.allowed**2 for part in parts.values())) / abs(unit)
    expected.reversed = scale < 0.0
    own_wrong = [
        (world.rank, name, part.product / part.expected / scale if part.expected and scale else math.nan)
        for name, part in parts.items()
        if part.is_wrong(scale)
    ]
    wrong = [one for each in world.all_gather_object(own_wrong) for one in each]
    return Comparison(parts=parts, scale=scale, wrong=wrong, expected=expected)


def _summed(
    world: World, parameters: Mapping[str, nn.Parameter], plain: PlainGradient, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The true gradient of each parameter, summed over the ranks: small ones travel together."""
    waiting, size = dict[str, Tensor](), 0
    for i, (name, parameter) in enumerate(parameters.items(), start=1):
        part = plain.parts.get(name)
        waiting[name] = no_gradient(parameter, device) if part is None else part.detach()
        size += waiting[name].numel()
        if size < _TOGETHER and i < len(parameters):
            continue
        for dtype in {one.dtype: None for one in waiting.values()}:
            some = {key: one for key, one in waiting.items() if one.dtype == dtype}
            flat = world.all_reduce_(torch.cat([one.flatten() for one in some.values()]))
            pieces = torch.split(flat, [one.numel() for one in some.values()])
            waiting |= {key: piece.view(some[key].shape) for key, piece in zip(some, pieces, strict=True)}
        yield from waiting.items()
        waiting, size = {}, 0


def layout(
    world: World, parameters: Mapping[str, nn.Parameter], held: Mapping[str, Tensor]
) -> tuple[dict[str, int], bool]:
    """Where this rank's pieces begin in their parameters, and whether all ranks hold the same.

    Ranks hold consecutive pieces, or all the whole; replicas of shards begin anew, and these are never padded.
    """
    lengths = {name: to_local(piece).numel() * _reals(piece) for name, piece in held.items()}
    everyone = world.all_gather_object(lengths)
    whole = {name: whole_numel(p) * _reals(p) for name, p in parameters.items()}
    total = sum(length for each in everyone for length in each.values())
    # A parameter that one rank has and another has not is an error where ranks hold the same, and no shard.
    replicated = world.size == 1 or total > 1.5 * sum(whole.values()) or not total
    before = everyone[: world.rank]
    starts = {
        name: 0 if length >= whole.get(name, 0) else sum(each.get(name, 0) for each in before)
        for name, length in lengths.items()
    }
    starts |= {name: start % whole[name] for name, start in starts.items() if start and is_sharded(held[name])}
    return starts, replicated


def _reals(tensor: Tensor) -> int:
    """Real numbers of an element."""
    return 2 if tensor.is_complex() else 1


def _sizes(engine: Engine, plain: PlainGradient) -> dict[str, float]:
    """By parameter: the norms of all micro-batches' gradients, of all ranks, added up; a collective."""
    names = list(trained(engine.unwrapped_model))
    own = torch.tensor([plain.sizes.get(name, 0.0) for name in names], dtype=torch.float64)
    summed = engine.world.all_reduce_(own.to(engine.device).unsqueeze(1)).squeeze(1).tolist()
    return dict(zip(names, summed, strict=True))


def no_gradient(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """The gradient of a parameter that no loss reached: whole, also of one that is sharded."""
    shape = (*parameter.shape, 2) if parameter.is_complex() else parameter.shape
    return torch.zeros(shape, dtype=widened(parameter.dtype), device=device)


def _median(pairs: list[tuple[float, float]]) -> float:
    """The weighted median of values and their weights; 0 where there are none."""
    ordered, total = sorted(pairs), sum(weight for _, weight in pairs)
    before = 0.0
    for value, weight in ordered:
        before += weight
        if 2 * before >= total:
            return value
    return 0.0
