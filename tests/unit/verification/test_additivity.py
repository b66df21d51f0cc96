"""A loss that is no sum over what it counts is named before the first step; what is legitimate trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum import Accumulator, CrossEntropy, DataSpec, World
from distaccum.data.collate import PadCollator
from distaccum.errors import VerificationError
from distaccum.verification.additivity import suspicious_first_loss

CLASSES, PADDED = 5, -100
Batch = dict[str, Tensor]


class Tagger(nn.Module):
    """Logits ``(B, T, classes)``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(7, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.embed(tokens)))
        return logits


def samples() -> list[Batch]:
    """Of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 3, 6, 2, 5, 4, 6, 1)
    return [
        {
            "tokens": torch.randint(0, 7, (length,), generator=generator),
            "labels": torch.randint(0, CLASSES, (length,), generator=generator),
        }
        for length in lengths
    ]


def labelled(batch: Batch) -> float:
    return float((batch["labels"] != PADDED).sum())


def of_tokens(model: nn.Module, batch: Batch, reduction: str = "sum") -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    pooled = model(batch["tokens"]).mean(1)
    return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)), reduction="sum")


def noisy(model: nn.Module, batch: Batch) -> Tensor:
    return of_tokens(model, batch) * torch.rand(())


def per_sample(model: nn.Module, batch: Batch) -> Tensor:
    return of_tokens(model, batch) / len(batch["tokens"])


class Given:
    """A loss of two functions."""

    def __init__(self, total: Callable[..., Any], count: Callable[[Batch], Any]) -> None:
        self.total, self.count = total, count

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        return self.total(model, batch)


def first_window(world: World, loss: Any, **options: Any) -> Accumulator:
    torch.manual_seed(1)
    model = Tagger()
    nn.init.normal_(model.head.weight, std=0.02)  # an untrained classifier
    source = DataSpec(
        train=samples(), eval_dataset=None, description="tags", collate=PadCollator({"tokens": 0, "labels": PADDED})
    )
    acc = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=8,
        micro_batch_size=2,
        count=loss.count,
        world=world,
        **options,
    )
    before = [p.detach().clone() for p in model.parameters()]
    try:
        for window in acc.windows(source):
            acc.step(window, loss)
    except VerificationError:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "a weight has moved"
        raise
    return acc


@pytest.mark.parametrize(
    ("total", "count", "said"),
    [
        (lambda m, b: of_tokens(m, b, "mean"), labelled, "of their sum: it is a mean over its count .*da.from_mean"),
        (per_sample, labelled, "0.50 of their sum: it is a mean over the samples of a micro-batch"),
        (of_tokens, lambda b: b["labels"].numel(), "because they are padded to one length.*count_labels"),
        (
            lambda m, b: {"a": of_tokens(m, b), "b": of_tokens(m, b, "mean")},
            lambda b: {"a": labelled(b), "b": labelled(b)},
            "the loss 'b' .*it is a mean over its count",
        ),
    ],
)
def test_a_mean_and_a_count_of_padding_are_named_before_a_weight_moves(
    gloo_world: World, total: Any, count: Any, said: str
) -> None:
    with pytest.raises(VerificationError, match=said):
        first_window(gloo_world, Given(total, count))


@pytest.mark.parametrize(
    ("total", "count", "said"),
    [
        (of_tokens, labelled, ""),
        (noisy, labelled, ""),
        (contrastive, lambda b: float(len(b["tokens"])), "it compares the samples of a micro-batch"),
        (lambda m, b: of_tokens(m, b, "mean"), lambda _: 1.0, "it depends on the micro-batch size"),
        (lambda m, b: of_tokens(m, b) / 4, labelled, "is 4 times that, as many as there are micro-batches"),
    ],
)
def test_what_is_legitimate_trains_and_is_logged(
    gloo_world: World, caplog: pytest.LogCaptureFixture, total: Any, count: Any, said: str
) -> None:
    with caplog.at_level(logging.WARNING, "distaccum"):
        acc = first_window(gloo_world, Given(total, count))
    assert acc.progress.step == 1
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)
    assert acc.verified


def test_without_a_dataset_a_micro_batch_is_cut_in_two(gloo_world: World) -> None:
    model = nn.Linear(3, CLASSES)
    data = [(torch.randn(4, 3), torch.randint(0, CLASSES, (4,))) for _ in range(2)]  # a stream of micro-batches

    class Mean(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return super().__call__(model, batch) / len(batch[0])

    acc = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=8,
        micro_batch_size=4,
        count=Mean().count,
        world=gloo_world,
    )
    with pytest.raises(VerificationError, match="it is a mean over its count"):
        acc.step(next(iter(acc.windows(iter(data)))), Mean())


def test_the_check_of_the_loss_draws_no_random_numbers_of_the_run(gloo_world: World) -> None:
    weights = []
    for verify in ("first", "never"):
        acc = first_window(gloo_world, Given(of_tokens, labelled), verify=verify)
        weights.append(acc.engine.unwrapped_model.head.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_first_loss_that_is_ln_classes_over_the_steps_is_suspicious() -> None:
    assert "10) = 2.303 is 8 times that" in suspicious_first_loss(2.3 / 8, 10, {"micro-batches": 8})
    assert not suspicious_first_loss(2.3, 10, {"micro-batches": 8})
