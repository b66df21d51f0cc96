"""The gradient that an engine holds beside the true one: parameter by parameter, up to one factor and to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.dtensor import to_local
from distaccum.engines.modules import trained
from distaccum.verification.expected import Expected
from distaccum.verification.plain_autograd import PlainGradient
from distaccum.verification.recorded import RecordedWindow
from distaccum.verification.tensors import piece_of, square, whole_numel, wide, widened

# Roundings of one term of a gradient: it is scaled, accumulated and reduced; kernels add up in an order of their own.
_ROUNDINGS = 64
_ROAD = "plain autograd over the bare model"
_MOST_RANKS_TOLD_APART = 8


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

    @property
    def largest_error(self) -> float:
        """On this rank, relative to the parameter's gradient; NaN where every gradient is zero."""
        return max(
            (part.error(self.scale) / math.sqrt(part.expected) for part in self.parts.values() if part.expected),
            default=math.nan,
        )

    def is_zero(self, names: Iterable[str]) -> bool:
        """Whether the engine holds nothing but zeros for them on this rank."""
        return not any(self.parts[name].found for name in names if name in self.parts)


def compare(
    engine: Engine,
    world: World,
    recorded: RecordedWindow,
    plain: PlainGradient,
    held: Mapping[str, Tensor],
    *,
    divisor: float,
    clip_value: float | None,
) -> Comparison:
    """Compares what the engine holds with the true gradient; a collective, and one all-reduce a parameter.

    Args:
        engine: whose step is looked at.
        world: this rank.
        recorded: the window.
        plain: this rank's part of the true gradient.
        held: the engine's reduced gradients, or this rank's pieces of them.
        divisor: that the step is still to divide by.
        clip_value: what the engine was told.
    """
    parameters = trained(engine.unwrapped_model)
    starts, replicated = _layout(world, parameters, held)
    sizes = _sizes(engine, world, plain)
    steps = max(world.all_gather_object(recorded.micro_batches))
    roundings = _ROUNDINGS * (steps + world.size)
    unit = recorded.loss_scale * engine.gradient_divide_factor * divisor
    expected = Expected(road=_ROAD, unit=unit, clip_value=clip_value)
    parts: dict[str, Part] = {}
    for name, parameter in parameters.items():
        true = _summed(world, plain.parts.get(name), parameter)
        if name in held:
            own = piece_of(true, held[name], starts[name])
            found = wide(to_local(held[name])).flatten()[: own.numel()]
        else:  # on no rank, or on another
            own = true if replicated else true.flatten()[:0]
            found = torch.zeros_like(own)
        precision = roundings * torch.finfo(true.dtype).eps / 2 + 8 * engine.unit_roundoff(parameter)
        right, other = own.double().flatten(), found.double().flatten()
        parts[name] = Part(
            expected=float(right @ right),
            found=float(other @ other),
            product=float(right @ other),
            allowed=precision * sizes[name],
        )
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


def _layout(
    world: World, parameters: Mapping[str, nn.Parameter], held: Mapping[str, Tensor]
) -> tuple[dict[str, int], bool]:
    """Where this rank's pieces begin in their parameters, and whether all ranks hold the same.

    Ranks hold consecutive pieces, or all the whole.
    """
    lengths = {name: to_local(piece).numel() for name, piece in held.items()}
    everyone = world.all_gather_object(lengths)
    whole = {name: whole_numel(p) for name, p in parameters.items()}
    total = sum(length for each in everyone for length in each.values())
    # A parameter that one rank has and another has not is an error where ranks hold the same, and no shard.
    replicated = world.size == 1 or total > 1.5 * sum(whole.values()) or not total
    before = everyone[: world.rank]
    starts = {
        name: 0 if length >= whole.get(name, 0) else sum(each.get(name, 0) for each in before)
        for name, length in lengths.items()
    }
    return starts, replicated


def _sizes(engine: Engine, world: World, plain: PlainGradient) -> dict[str, float]:
    """By parameter: the norms of all micro-batches' gradients, of all ranks, added up; a collective."""
    names = list(trained(engine.unwrapped_model))
    own = torch.tensor([plain.sizes.get(name, 0.0) for name in names], dtype=torch.float64)
    summed = world.all_reduce_(own.to(engine.device).unsqueeze(1)).squeeze(1).tolist()
    return dict(zip(names, summed, strict=True))


def _summed(world: World, own: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """A parameter's true gradient, over all ranks; a collective."""
    if own is None:
        like = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        own = torch.zeros_like(like, dtype=widened(like.dtype))
    return world.all_reduce_(own.detach().clone().contiguous())


def _median(pairs: list[tuple[float, float]]) -> float:
    """The weighted median of values and their weights; 0 where there are none."""
    ordered, total = sorted(pairs), sum(weight for _, weight in pairs)
    before = 0.0
    for value, weight in ordered:
        before += weight
        if 2 * before >= total:
            return value
    return 0.0


def shares_of_ranks(
    engine: Engine,
    world: World,
    plain: PlainGradient,
    held: Mapping[str, Tensor],
    names: Iterable[str],
    *,
    unit: float,
) -> str:
    """In words, what each rank's part counts for in the gradient that the engine holds; a collective.

    By least squares over the parameters ``names``. Empty where it is the ranks' sum, or nothing that they give.
    """
    size = world.size
    if size > _MOST_RANKS_TOLD_APART or size == 1:
        return ""
    gram = torch.zeros(size, size, dtype=torch.float64)
    right = torch.zeros(size, dtype=torch.float64)
    found = 0.0
    parameters = trained(engine.unwrapped_model)
    starts, _ = _layout(world, parameters, held)
    for name in [name for name in parameters if name in set(names)]:
        own = plain.parts.get(name)
        if own is None:
            own = torch.zeros(parameters[name].shape, dtype=widened(parameters[name].dtype))
        parts = [torch.zeros_like(own).to(engine.device) for _ in range(size)]
        torch.distributed.all_gather(parts, own.contiguous().to(engine.device))
        if name not in held:
            continue
        piece = wide(to_local(held[name])).double().flatten()
        mine = torch.stack([piece_of(part, held[name], starts[name]).double().flatten() for part in parts])
        piece = piece[: mine.shape[1]]
        gram += (mine @ mine.T).cpu()
        right += (mine @ piece).cpu()
        found += square(piece)
    shares = torch.linalg.lstsq(gram, right).solution if bool(gram.any()) else right
    left = found - 2 * float(shares @ right) + float(shares @ gram @ shares)
    explained = found > 0 and left < 1e-4 * found
    everyone = world.all_gather_object((shares / max(unit, 1e-30)).tolist() if explained else None)
    if any(each is None for each in everyone):
        return ""
    return _in_words(everyone, nominal=1.0 / max(unit, 1e-30))


def _in_words(everyone: list[list[float]], *, nominal: float) -> str:
    """Of each rank, the shares that the ranks have in what it holds."""
    scale = max((abs(share) for each in everyone for share in each), default=1.0) or nominal
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
    if len({text.partition(": ")[2] for text in sayings}) == 1 and len(sayings) == len(everyone):
        return f"lacks a part: {sayings[0].partition(': ')[2]}"
    return f"is not the ranks' sum ({'; '.join(sayings)})" if sayings else ""
