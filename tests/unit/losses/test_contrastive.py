"""InfoNCE beside the formula, written out pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.contrastive import InfoNCE


def _by_hand(first: Tensor, second: Tensor, scale: float) -> float:
    """The cross entropy of each pair among all others, both ways, halved."""
    rows = list(zip(first.tolist(), second.tolist(), strict=True))

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    total = 0.0
    for a, b in rows:
        there = math.log(sum(math.exp(scale * cosine(a, other)) for _, other in rows))
        back = math.log(sum(math.exp(scale * cosine(other, b)) for other, _ in rows))
        total += (there + back) / 2 - scale * cosine(a, b)
    return total


class Given(nn.Module):
    """Returns what it is called with."""

    def __init__(self, *more: Any) -> None:
        super().__init__()
        self.more = more

    def forward(self, first: Any, second: Any) -> Any:
        return first, second, *self.more


@pytest.mark.parametrize("scale", [None, 5.0])
@pytest.mark.parametrize("named", [False, True])
def test_it_is_the_formula(scale: float | None, named: bool) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    loss, model = InfoNCE(temperature=0.5), Given() if scale is None else Given(torch.tensor([scale]))
    batch: Any = {"first": first, "second": second} if named else (first, second)
    assert loss.count(batch) == 6
    found = loss.represent(model, batch)
    expected = _by_hand(first, second, 2.0 if scale is None else scale)
    assert loss(found).item() == pytest.approx(expected, rel=1e-6)  # the scale is in fp32
    scores = loss.scores(found)
    assert tuple(scores) == loss.score_names
    assert scores["loss"] == loss(found)
    assert 0 <= float(scores["accuracy"]) <= 6


def test_pairs_that_are_alike_are_found() -> None:
    both = torch.eye(5)
    loss = InfoNCE(temperature=0.05)
    assert float(loss.scores(loss.represent(Given(), (both, both)))["accuracy"]) == 5


def test_embeddings_of_16_bits_are_normalised_in_32() -> None:
    found = InfoNCE().represent(Given(), (torch.ones(2, 3).bfloat16(), torch.ones(2, 3).half()))
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


REFUSED: dict[str, tuple[Any, str]] = {
    "four outputs": (Given(torch.ones(2), torch.ones(2)), r"returns \[\[2, 3\], \[2, 3\], \[2\], \[2\]\]"),
    "a text": (Given("scale"), r"returns \[\[2, 3\], \[2, 3\], 'str'\]: return two tensors"),
    "one output": (
        nn.Bilinear(3, 3, 4),
        r"wants a model that returns two embeddings, and this one returns \[\[2, 4\]\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused(case: str) -> None:
    model, words = REFUSED[case]
    with pytest.raises(MisuseError, match=words):
        InfoNCE().represent(model, (torch.ones(2, 3), torch.ones(2, 3)))


def test_embeddings_of_two_widths_are_refused() -> None:
    with pytest.raises(MisuseError, match=r"one shape, and these have \[2, 3\] and \[2, 4\]"):
        InfoNCE().represent(Given(), (torch.ones(2, 3), torch.ones(2, 4)))


@pytest.mark.parametrize("temperature", [0.0, -1, math.inf, True, "0.07"])
def test_a_temperature_is_a_positive_number(temperature: Any) -> None:
    with pytest.raises(ConfigError, match=r"loss.temperature=.*no positive number"):
        InfoNCE(temperature=temperature)


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(MisuseError, match="the batch has none"):
        InfoNCE().count(["text"])
