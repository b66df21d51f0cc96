"""What is wrong with a gradient that an engine holds: whose part it lacks, or what it is multiplied by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.modules import to_local, trained
from distaccum.errors import shorten
from distaccum.verification.comparison import Comparison, layout, no_gradient
from distaccum.verification.expected import CLOSING, NAMED, piece_of, square, wide, words
from distaccum.verification.plain_autograd import PlainGradient

_MOST_RANKS_TOLD_APART = 8
_NO_SHARE = 1e-3  # of the largest


def what_is_wrong(
    engine: Engine, plain: PlainGradient, held: Mapping[str, Tensor], found: Comparison, measures: Mapping[str, float]
) -> str:
    """What a proof says of a gradient that is not the window's, before the step; a collective.

    Args:
        engine: holds it.
        plain: this rank's part of the true gradient.
        held: the engine's reduced gradients, or this rank's pieces of them.
        found: where they differ.
        measures: numbers that a wrong factor may be made of, with their names.
    """
    world = engine.world
    ranks = sorted({rank for rank, _, _ in found.wrong})
    names = list(dict.fromkeys(name for _, name, _ in found.wrong))
    what = "every parameter" if len(names) == len(found.parts) else shorten(names, NAMED)
    where = "" if len(ranks) == world.size else f" on rank {shorten(ranks)}"
    shares = _shares_of_ranks(engine, plain, held, names)
    off = max(world.all_gather_object(_largest_error(found)))
    forward = _forward_differs(plain, world)
    factors = {round(factor, 3) for _, _, factor in found.wrong if math.isfinite(factor)}
    if all(world.all_gather_object(_is_zero(found, names))):
        how = "is zero"
    elif shares:
        how = shares
    elif len(factors) == 1:
        how = f"is {words(factors.pop(), measures)}"
    else:
        how = f"is off by {off:.0%}" if math.isfinite(off) else "is not what the loss gives"
    return (
        f"the gradient of {what}{where} {how}: compared with {found.expected.road}, before the step; no weight has "
        f"moved.{forward} {CLOSING}"
    )


def _largest_error(found: Comparison) -> float:
    """On this rank, relative to the parameter's gradient; NaN where every gradient is zero."""
    return max(
        (part.error(found.scale) / math.sqrt(part.expected) for part in found.parts.values() if part.expected),
        default=math.nan,
    )


def _is_zero(found: Comparison, names: Iterable[str]) -> bool:
    """Whether the engine holds nothing but zeros for them on this rank."""
    return not any(found.parts[name].found for name in names if name in found.parts)


def _forward_differs(plain: PlainGradient, world: World) -> str:
    """Whether the window's own losses were others than the bare model's; a collective."""
    differs = ""
    if differing := plain.differing_losses():
        i, first, second = differing[0]
        differs = (
            f" On rank {world.rank} micro-batch {i} has the loss {first:.6g}, and the bare model "
            f"gives {second:.6g}: the engine's forward computes something else."
        )
    found = world.all_gather_names([differs] if differs else [])
    return found[0] if found else ""


def _shares_of_ranks(engine: Engine, plain: PlainGradient, held: Mapping[str, Tensor], names: Iterable[str]) -> str:
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
    starts, _ = layout(world, parameters, held)
    fits: dict[str, _Fit] = {}
    for name in [name for name in parameters if name in names]:
        own = plain.parts.get(name, no_gradient(parameters[name], engine.device))
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
