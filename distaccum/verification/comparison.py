"""The gradient that an engine holds beside the true one: parameter by parameter, up to one factor and to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.modules import to_local, trained
from distaccum.verification.expected import Expected, piece_of, square, whole_numel, wide, widened
from distaccum.verification.plain_autograd import PlainGradient
from distaccum.verification.recorded import RecordedWindow

# Roundings of one term of a gradient: it is scaled, accumulated and reduced; kernels add up in an order of their own.
_ROUNDINGS = 64
_ROAD = "plain autograd over the bare model"
_MOST_RANKS_TOLD_APART = 8
_NO_SHARE = 1e-3  # of the largest


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
        recorded: the window.
        plain: this rank's part of the true gradient.
        held: the engine's reduced gradients, or this rank's pieces of them.
        divisor: that the step is still to divide by.
        clip_value: what the engine was told.
    """
    world, parameters = engine.world, trained(engine.unwrapped_model)
    starts, replicated = _layout(world, parameters, held)
    sizes = _sizes(engine, plain)
    steps = max(world.all_gather_object(recorded.micro_batches))
    roundings = _ROUNDINGS * (steps + world.size)
    unit = recorded.loss_scale * engine.gradient_divide_factor * divisor
    expected = Expected(road=_ROAD, unit=unit, clip_value=clip_value)
    parts: dict[str, Part] = {}
    for name, parameter in parameters.items():
        part = plain.parts.get(name)
        true = world.all_reduce_(
            _none(parameter, engine.device) if part is None else part.detach().clone().contiguous()
        )
        if name in held:
            own = piece_of(true, held[name], starts[name])
            found = wide(to_local(held[name])).flatten()[: own.numel()]
        else:  # on no rank, or on another
            own = true if replicated else true.flatten()[:0]
            found = torch.zeros_like(own)
        precision = roundings * torch.finfo(true.dtype).eps / 2 + 8 * engine.probe.unit_roundoff(parameter)
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


def _none(parameter: nn.Parameter, device: torch.device) -> Tensor:
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


def shares_of_ranks(engine: Engine, plain: PlainGradient, held: Mapping[str, Tensor], names: Iterable[str]) -> str:
    """In words, what each rank's part counts for in the gradient that the engine holds; a collective.

    By least squares over the parameters ``names``, together or else one by one: of a reduction that was not ended each
    may have another factor. Empty where it is the ranks' sum, or nothing that they give.
    """
    world = engine.world
    if world.size > _MOST_RANKS_TOLD_APART or world.size == 1:
        return ""
    fits = _fits(engine, plain, held, set(names))
    total = sum(fits.values(), _Fit.none(world.size))
    together = [shares for shares in world.all_gather_object(total.shares()) if shares is not None]
    if len(together) == world.size:
        return _in_words(together)
    alone = world.all_gather_object([_missing(fit.shares()) for fit in fits.values() if fit.found])
    if any(len(set(each)) != 1 or not each[0] for each in alone):
        return ""
    return _in_words([[float(rank not in each[0]) for rank in range(world.size)] for each in alone])


@dataclass(frozen=True)
class _Fit:
    """Of what this rank holds, as a sum of the ranks' parts with a share each: the normal equations, in fp64.

    ``gram``: the parts' products, ``(ranks, ranks)``; ``right``: those with what is held, ``(ranks,)``; ``found``: its
    squared norm.
    """

    gram: Tensor
    right: Tensor
    found: float

    @classmethod
    def none(cls, ranks: int) -> _Fit:
        """Of a rank that holds nothing."""
        return cls(torch.zeros(ranks, ranks, dtype=torch.float64), torch.zeros(ranks, dtype=torch.float64), 0.0)

    def __add__(self, other: _Fit) -> _Fit:
        """With one share a rank for both."""
        return _Fit(self.gram + other.gram, self.right + other.right, self.found + other.found)

    def shares(self) -> list[float] | None:
        """One for each rank; None where no shares explain what is held."""
        if not self.found or not bool(self.gram.any()):
            return None
        shares = torch.linalg.lstsq(self.gram, self.right).solution
        left = self.found - 2 * float(shares @ self.right) + float(shares @ self.gram @ shares)
        return shares.tolist() if left < 1e-4 * self.found else None


def _fits(engine: Engine, plain: PlainGradient, held: Mapping[str, Tensor], names: set[str]) -> dict[str, _Fit]:
    """Of each parameter; a collective."""
    world, parameters = engine.world, trained(engine.unwrapped_model)
    starts, _ = _layout(world, parameters, held)
    fits: dict[str, _Fit] = {}
    for name in [name for name in parameters if name in names]:
        own = plain.parts.get(name, _none(parameters[name], engine.device))
        parts = [torch.zeros_like(own) for _ in range(world.size)]
        torch.distributed.all_gather(parts, own.contiguous())
        if name not in held:
            fits[name] = _Fit.none(world.size)
            continue
        mine = torch.stack([piece_of(part, held[name], starts[name]).double().flatten() for part in parts])
        piece = wide(to_local(held[name])).double().flatten()[: mine.shape[1]]
        fits[name] = _Fit((mine @ mine.T).cpu(), (mine @ piece).cpu(), square(piece))
    return fits


def _missing(shares: list[float] | None) -> tuple[int, ...]:
    """The ranks that have none."""
    if shares is None:
        return ()
    largest = max(map(abs, shares))
    return tuple(rank for rank, share in enumerate(shares) if abs(share) < _NO_SHARE * largest)


def _in_words(everyone: list[list[float]]) -> str:
    """Of each rank, the shares that the ranks have in what it holds."""
    largest = max((abs(share) for shares in everyone for share in shares), default=0.0) or 1.0
    sayings: list[str] = []
    for rank, shares in enumerate(everyone):
        if missing := [str(other) for other, share in enumerate(shares) if abs(share) < _NO_SHARE * largest]:
            sayings.append(f"on rank {rank}: rank {', '.join(missing)} did not take part")
        elif max(shares) - min(shares) > _NO_SHARE * largest:
            parts = [f"{share / largest:.2f}x rank {other}'s" for other, share in enumerate(shares)]
            sayings.append(f"on rank {rank}: {' + '.join(parts)} part")
    if len({text.partition(": ")[2] for text in sayings}) == 1 and len(sayings) == len(everyone):
        return f"lacks a part: {sayings[0].partition(': ')[2]}"
    return f"is not the ranks' sum ({'; '.join(sayings)})" if sayings else ""
