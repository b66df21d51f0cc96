from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum.errors import MisuseError
from distaccum.losses.base import scores
from distaccum.losses.cross_entropy import CrossEntropy, cross_entropy
from distaccum.testing.counters import OperationCounter


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
    torch.testing.assert_close(found["loss"], nn.functional.cross_entropy(logits, labels, reduction="sum"))


def test_a_loss_without_scores_reports_itself() -> None:
    class Plain:
        def count(self, batch: torch.Tensor) -> int:
            return len(batch)

        def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).sum()

    assert scores(Plain(), nn.Identity(), torch.ones(3)) == {"loss": torch.tensor(3.0)}


def test_cross_entropy_counts_where_the_labels_lie() -> None:
    logits, labels = torch.randn(3, 4, 5), torch.tensor([[0, 1, -100, 2]] * 3)
    with OperationCounter() as operations:
        total, count = cross_entropy(logits, labels)
    assert operations.counts["device reads"] == 0
    assert count.item() == 9
    expected = nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=-100)
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
