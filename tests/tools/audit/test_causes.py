"""Causes of made-up gradients: which weights and factors are told apart, and which are said to be alike."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distaccum.tools.audit.causes import Observed, Shape, find_causes
from distaccum.tools.audit.records import Clip

COUNTS = [[3.0, 5.0, 2.0], [7.0, 1.0, 9.0]]
SHAPE = Shape(counts=COUNTS, samples=[[2] * 3] * 2, positions=[[11] * 3] * 2, usual=3)
BASIS = torch.randn(6, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _observed(gradient: Tensor, **changed: object) -> Observed:
    made = Observed(rank=0, gradient=gradient, basis=BASIS, before=None, clips=[[], []], tolerance=1e-4)
    return replace(made, **changed)  # type: ignore[arg-type]


def _words(weights: list[float] | Tensor, shape: Shape = SHAPE, **changed: object) -> list[str]:
    gradient = torch.as_tensor(weights, dtype=torch.float64) @ BASIS
    return [f"{cause.name}: {cause.words}" for cause in find_causes(shape, _observed(gradient, **changed))]


TRUE = torch.full((6,), 1 / 27, dtype=torch.float64)


def test_the_right_weights_have_no_cause() -> None:
    assert _words(TRUE) == []


@pytest.mark.parametrize(
    ("factor", "name", "words"),
    [
        (3, "micro-batches summed", "3.00x = 3 micro-batches"),
        (2, "times the world size", "2.00x = 2 ranks"),
        (6, "world size x micro-batches", "6.00x = 2 ranks x 3 micro-batches"),
        (1 / 2, "averaged over the ranks twice", "1/2 = 1 / 2 ranks"),
        (1 / 6, "over world size x micro-batches", "1/6 = 1 / (2 ranks x 3 micro-batches)"),
        (27 / 66, "padding counted", "27 of 66 positions"),
        (27 / (27 + 12), "shifted-out labels counted", "27 / (27 + 12 rows)"),
        (27 / 12, "samples counted", "27 items / 12 samples"),
        (27 / 2, "sum not divided", "27 items / 2 ranks"),
        (1.37, "unexplained factor", "1.37x, which neither"),
    ],
)
def test_a_factor_is_explained_by_the_windows_numbers(factor: float, name: str, words: str) -> None:
    (found,) = _words(TRUE * factor)
    assert found.startswith(f"{name}: ")
    assert words in found


def test_numbers_that_are_alike_are_both_said() -> None:
    shape = Shape(counts=[[3.0, 5.0], [7.0, 1.0]], samples=[[2] * 2] * 2, positions=[[7] * 2] * 2, usual=2)
    gradient = torch.full((4,), 2 / 16, dtype=torch.float64) @ BASIS[:4]
    (cause,) = find_causes(shape, _observed(gradient, basis=BASIS[:4]))
    assert "2.00x = 2 micro-batches or 2 ranks" in cause.words
    assert set(cause.name.split(" or ")) == {"times the world size", "micro-batches summed"}


def test_a_loss_scale_is_known_by_its_value() -> None:
    (found,) = _words(TRUE * 1024, replace(SHAPE, loss_scale=1024.0))
    assert found.startswith("loss scale left in: 1024.00x = loss scale 1024")
    (found,) = _words(TRUE * 1024)
    assert found.startswith("unexplained factor")


def test_ranks_of_unequal_numbers_of_micro_batches() -> None:
    """The mean over a rank's micro-batches, then over the ranks: not the mean over all micro-batches."""
    counts = [[3.0, 5.0], [7.0, 1.0, 9.0, 2.0]]
    shape = Shape(counts=counts, samples=[[2] * 2, [2] * 4], positions=[[11] * 2, [11] * 4], usual=4)
    weights = [1 / (2 * len(rank) * n) for rank in counts for n in rank]
    (found,) = _words(weights, shape)
    assert "each rank by its own number of micro-batches (2 and 4)" in found
    assert _words([1 / 27] * 6, shape) == []


def test_a_rank_with_nothing_is_no_fault() -> None:
    shape = Shape(counts=[[3.0, 5.0, 2.0, 7.0, 1.0, 9.0], []], samples=[[2] * 6, []], positions=[[11] * 6, []], usual=6)
    assert _words(TRUE, shape) == []
    assert _words(TRUE / 2, shape)[0].startswith("averaged over the ranks twice")


def test_parts_that_are_missing() -> None:
    assert _words([0, 1, 1, 0, 1, 1])[0].startswith("zeroed inside the window: the first 1 of 3")
    assert _words([1, 1, 0, 1, 1, 0])[0].startswith("stepped too early: the last 1 of 3")
    assert _words([1, 1, 1, 0, 0, 0])[0].startswith("rank missing: rank 1's gradient is missing")
    assert _words([1, 1, 1, 0, 0, 0], agreed=False)[0].startswith("not reduced: rank 0 steps with its own")
    assert _words([1, 2, 2, 1, 0, 0], agreed=False)[0].startswith("rank missing at the boundary")
    assert _words([4, 2, 1, 4, 2, 1])[0].startswith("reduced in every micro-step")


def test_a_clip_in_the_middle_cuts_what_came_before() -> None:
    clips = [[Clip(1, 0.5, 1.0 - 1e-6)], [Clip(1, 0.5, 1.0 - 1e-6)]]
    assert _words(TRUE * torch.tensor([0.5, 1, 1, 0.5, 1, 1]), clips=clips)[0].startswith("clipped inside the window")
    harmless = [[Clip(1, 0.5, 0.1)], [Clip(1, 0.5, 0.1)]]
    assert _words(TRUE, clips=harmless) == []


def test_what_the_window_before_left_is_taken_off() -> None:
    before = torch.randn(50, dtype=torch.float64)
    found = find_causes(SHAPE, _observed(TRUE @ BASIS + before, before=before))
    assert [cause.name for cause in found] == ["left over"]
    assert find_causes(SHAPE, _observed(torch.randn(50, dtype=torch.float64), before=before)) == ()


def test_in_few_bits_the_nearest_is_taken() -> None:
    """Every way of averaging is within 5 % here; only one is within the rounding."""
    counts = [[100.0, 104.0, 98.0], [102.0, 101.0, 99.0]]
    shape = Shape(counts=counts, samples=[[2] * 3] * 2, positions=[[110] * 3] * 2, usual=3)
    weights = torch.tensor([1 / (6 * n) for rank in counts for n in rank], dtype=torch.float64)
    noise = torch.randn(50, dtype=torch.float64) * 1e-5
    (cause,) = find_causes(shape, _observed(weights @ BASIS + noise, tolerance=5e-2))
    assert cause.name == "mean of means over micro-batches"
