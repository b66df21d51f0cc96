"""The sums of an evaluation: the same bits whoever has which batches."""

import math
from typing import Any

import torch

from distaccum.data.counter import exact_sums, joined
from distaccum.train.evaluate import Sums


class Ranks:
    """Adds what several ranks give, one after the other."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.given.append(tensor)
        return tensor


def test_scores_are_added_in_the_order_of_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(31, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(31).remainder(7)
    found = set()
    for world in range(1, 7):
        ranks: Any = Ranks()
        for rank in range(world):
            own = range(rank, len(scores), world)
            sums = Sums(len(scores), own)
            for number in own:
                sums.add({"loss": scores[number]})
            sums.over_ranks(["loss"], torch.device("cpu"), ranks)
        found.add(torch.stack(ranks.given).sum(0).sum(1).item())
    assert len(found) == 1
    by_rank = {sum(scores[rank::world].sum().item() for rank in range(world)) for world in range(1, 7)}
    assert len(by_rank) > 1


def test_counts_of_batches_are_added_without_rounding() -> None:
    weights = (torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).tolist()
    found = set()
    for world in range(1, 7):
        of_ranks = [exact_sums([weights[rank::world]]) for rank in range(world)]
        (total,) = joined([sum(numbers) for numbers in zip(*of_ranks, strict=True)])
        found.add(total)
    assert len(found) == 1


def test_sums_are_exact_for_small_and_large_numbers() -> None:
    for numbers in ([3.0, 4.0], [1e-18, 3e-13, 1e-3], [1e14 + 0.5, 1e-9, 7.0], [0.1] * 1000, [0.0], []):
        (total,) = joined(exact_sums([numbers]))
        assert total == math.fsum(numbers)
    assert math.isnan(joined(exact_sums([[1.0, math.nan]]))[0])
    assert joined(exact_sums([[1.0], [math.inf]])) == [1.0, math.inf]
