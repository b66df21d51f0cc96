"""Losses as people write them, cross-entropy and InfoNCE, each beside plain torch or its formula, in fp64."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.base import scores
from distaccum.losses.contrastive import InfoNCE
from distaccum.losses.cross_entropy import CrossEntropy, cross_entropy
from distaccum.testing.counters import OperationCounter
from tests.support.accumulators import Loss

WEIGHT = torch.tensor([1.0, 2.0, 0.5])
Give = Callable[[Accumulator, Tensor, Tensor], None]
Mean = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return [(row, row[:3].argmax()) for row in x]


def _focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - (-losses).exp()) ** 2 * losses


def _norm(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _kept(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A constant where nothing is left, as people write it."""
    logits, keep = model(x), y != 0
    return F.cross_entropy(logits[keep], y[keep], reduction="sum") if keep.any() else torch.zeros(())


def _by_name(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits = model(x)
    return {"a": F.cross_entropy(logits, y, reduction="sum"), "b": logits[y == 0].square().sum()}


def _with_norm(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"a": F.cross_entropy(model(x), y, reduction="sum"), "p": _norm(model)}


def _plain(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(x), y, **options)


def _unignored(batch: Any) -> int:
    return int((batch[1] != 0).sum())


PROGRAMS: dict[str, tuple[Callable[[Any], Any] | None, Give, Mean]] = {
    "a sum": (lambda b: len(b[1]), lambda a, x, y: a.backward(_plain(a.model, x, y, reduction="sum")), _plain),
    "a mean, NumPy's count": (
        None,
        lambda a, x, y: a.backward(_plain(a.model, x, y), np.int32(len(y)), reduction="mean"),  # type: ignore[arg-type]
        _plain,
    ),
    "a mean, a count of one element": (
        None,
        lambda a, x, y: a.backward(_plain(a.model, x, y), torch.tensor([len(y)]), reduction="mean"),
        _plain,
    ),
    "weights of classes": (
        lambda b: WEIGHT[b[1]].sum().numpy(),
        lambda a, x, y: a.backward(_plain(a.model, x, y, weight=WEIGHT), reduction="mean"),
        lambda m, x, y: _plain(m, x, y, weight=WEIGHT.double()),
    ),
    "two counts": (
        lambda b: {"a": len(b[1]), "b": int((b[1] == 0).sum())},
        lambda a, x, y: a.backward(_by_name(a.model, x, y)),
        lambda m, x, y: _plain(m, x, y) + m(x)[y == 0].square().sum() / (y == 0).sum(),
    ),
    "a penalty of the weights": (
        lambda b: {"a": len(b[1]), "p": 1},
        lambda a, x, y: a.backward(_with_norm(a.model, x, y)),
        lambda m, x, y: _plain(m, x, y) + _norm(m),
    ),
    "label smoothing": (
        lambda b: len(b[1]),
        lambda a, x, y: a.backward(_plain(a.model, x, y, label_smoothing=0.1, reduction="sum")),
        lambda m, x, y: _plain(m, x, y, label_smoothing=0.1),
    ),
    "focal": (
        lambda b: len(b[1]),
        lambda a, x, y: a.backward(_focal(a.model(x), y).sum()),
        lambda m, x, y: _focal(m(x), y).mean(),
    ),
    "a mean over nothing": (
        _unignored,
        lambda a, x, y: a.backward(_plain(a.model, x, y, ignore_index=0), reduction="mean"),
        lambda m, x, y: _plain(m, x, y, ignore_index=0),
    ),
    "a constant for nothing": (
        _unignored,
        lambda a, x, y: a.backward(_kept(a.model, x, y)),
        lambda m, x, y: _plain(m, x, y, ignore_index=0),
    ),
    "several labels": (
        lambda b: 3 * len(b[1]),
        lambda a, x, y: a.backward(
            F.binary_cross_entropy_with_logits(a.model(x), F.one_hot(y, 3).float()), reduction="mean"
        ),
        lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), F.one_hot(y, 3).double()),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loss_trains_as_that_of_the_whole_batch(name: str, gloo_world: World) -> None:
    count, give, mean = PROGRAMS[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reference = copy.deepcopy(model).double()
    step = SGD(reference.parameters(), lr=0.05)
    accumulator = Accumulator(
        model, SGD(model.parameters(), lr=0.05), global_batch_size=8, micro_batch_size=3, count=count, world=gloo_world
    )
    for window in accumulator.windows(_data()):
        seen = []
        for micro in window:
            with accumulator.accumulate():
                give(accumulator, *micro.batch)
            seen.append(micro.batch)
        step.zero_grad()
        mean(reference, torch.cat([x for x, _ in seen]).double(), torch.cat([y for _, y in seen])).backward()
        step.step()
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.double(), expected, rtol=1e-6, atol=1e-6)


def test_it_sums_in_fp32_over_what_it_counts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 5, 7)
    labels = torch.randint(7, (4, 5))
    labels[0, :3] = -100
    loss = CrossEntropy()
    total = loss(nn.Identity(), (logits, labels))

    log_probabilities = logits.double().log_softmax(-1)
    expected = -sum(
        log_probabilities[b, t, labels[b, t]].item() for b in range(4) for t in range(5) if labels[b, t] != -100
    )
    assert loss.count((logits, labels)) == 17
    assert total.dtype is torch.float32
    torch.testing.assert_close(total.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    assert loss(nn.Identity(), (logits.bfloat16(), labels)).dtype is torch.float32


def test_images_and_labels_work_as_tokens_do() -> None:
    logits, labels = torch.eye(3), torch.tensor([0, 1, 0])
    found = scores(CrossEntropy(), nn.Identity(), (logits, labels))
    assert found["accuracy"].item() == 2
    torch.testing.assert_close(found["loss"], F.cross_entropy(logits, labels, reduction="sum"))


def test_a_loss_without_scores_reports_itself() -> None:
    assert scores(Loss(), nn.Identity(), torch.zeros(3)) == {"loss": torch.tensor(3.0)}


def test_cross_entropy_counts_where_the_labels_lie() -> None:
    logits, labels = torch.randn(3, 4, 5), torch.tensor([[0, 1, -100, 2]] * 3)
    with OperationCounter() as operations:
        total, count = cross_entropy(logits, labels)
    assert operations.counts["device reads"] == 0
    assert count.item() == 9
    expected = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert total.item() == pytest.approx(9 * expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        (torch.zeros(2, 5, 4, 5), torch.zeros(2, 4, 5).long(), r"\[2, 5, 4, 5\] for labels of shape \[2, 4, 5\]"),
        (torch.zeros(3, 4), torch.zeros(3, 4), "labels are the numbers of classes"),
        ((torch.zeros(3, 4), None), torch.zeros(3).long(), "the model returns a tuple, and cross entropy takes logits"),
    ],
    ids=["classes in dimension 1", "one-hot", "a tuple"],
)
def test_logits_that_do_not_fit_their_labels_are_refused(logits: Any, labels: Tensor, expected: str) -> None:
    """The first, with as many classes as columns, was the loss of other pixels."""
    with pytest.raises(MisuseError, match=expected):
        CrossEntropy()(lambda _: logits, (torch.zeros(1), labels))  # type: ignore[arg-type]


def test_labels_in_a_column_are_those_in_a_row() -> None:
    logits, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, -100])
    found = [CrossEntropy().scores(lambda _: logits, (logits, y)) for y in (labels, labels[:, None])]  # type: ignore[arg-type]
    assert found[0] == found[1]
    assert found[0]["accuracy"].item() == (logits.argmax(-1) == labels).sum().item()


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


def test_pairs_that_are_alike_are_found_and_16_bits_are_normalised_in_32() -> None:
    both = torch.eye(5)
    loss = InfoNCE(temperature=0.05)
    assert float(loss.scores(loss.represent(Given(), (both, both)))["accuracy"]) == 5
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
