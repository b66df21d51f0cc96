"""Two ranks of which one changes its weights past the engine: both are told, by what is compared beside the counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import World
from distaccum.errors import DistaccumError
from tests.support.accumulators import Loss, over_sgd
from tests.support.threads import run_ranks

SIZES = 32, 1  # sixteen micro-batches on each rank: compared every second window
DATA: list[Tensor] = list(torch.randn(4 * SIZES[0], 4, generator=torch.Generator().manual_seed(0)))


def _model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(4, 2))
    nn.init.zeros_(model[2].bias)  # type: ignore[arg-type]
    return model


def _flip_a_bit(model: Any) -> None:
    model[4].weight.data.view(torch.int32)[0, 0] ^= 1


def _fill_a_bias(model: Any) -> None:
    nn.init.ones_(model[2].bias)


def _trained(spoil: Callable[[Any], None] | None = None, **options: Any) -> list[Any]:
    """What each rank is told, after how many windows, of how many one is compared; rank 1 spoils after two."""
    models = [_model() for _ in range(2)]  # before there are threads, which draw from one generator

    def rank(world: World) -> tuple[str, int, int]:
        loss, number, said = Loss(), 0, ""
        acc = over_sgd(models[world.rank], 0.01, SIZES, count=loss.count, world=world, **options)
        try:
            for _ in range(2):
                for window in acc.windows(DATA):
                    acc.step(window, loss)
                    number += 1
                    if number == 2 and spoil is not None and world.rank == 1:
                        spoil(acc.engine.unwrapped_model)
        except DistaccumError as error:
            said = str(error)
        return said, number, acc.replicas.every

    return run_ranks(2, rank)


def test_ranks_that_agree_train_to_the_end() -> None:
    assert _trained() == [("", 8, 2)] * 2


@pytest.mark.parametrize(("spoil", "name"), [(_flip_a_bit, "4.weight"), (_fill_a_bias, "2.bias")])
def test_a_change_on_one_rank_ends_the_run_on_all(spoil: Callable[[Any], None], name: str) -> None:
    first, second = _trained(spoil)
    assert first == second
    said, windows, every = first
    assert "ranks differ: 0 against 1" in said
    assert name in said
    assert windows <= 2 + every


def test_a_run_may_be_told_to_go_on() -> None:
    assert _trained(_flip_a_bit, on_divergence="warn") == [("", 8, 2)] * 2
