"""A look at samples apart and together: what adds up, what does not, and what legitimate losses train."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, CrossEntropy, DataSpec, World
from distaccum.data.collate import PadCollator
from distaccum.errors import VerificationError
from distaccum.tools.first_loss import suspicious_first_loss
from distaccum.verification.parts import why_not_cut
from tests.support.accumulators import over_sgd

Batch = dict[str, Tensor]


class Net(nn.Module):
    """Two layers, with ``between`` what a case is of."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor] = lambda _, x: x) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.enter, self.leave, self.more = nn.Linear(5, 8), nn.Linear(8, 1), nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.4, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.generator, self.forwards = torch.Generator().manual_seed(1), 0
        self.register_buffer("seen", torch.zeros(()))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        found: Tensor = self.leave(self.between(self, torch.tanh(self.enter(x))))[:, 0]
        return found


def squares(model: Any, batch: Batch) -> Tensor:
    found: Tensor = (model(batch["x"]) - batch["y"]).square().sum()
    return found


def look(world: World, model: Net, loss: Any = squares, rows: int = 2) -> str:
    """At a batch of random numbers, which are given back."""
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), global_batch_size=8, micro_batch_size=8, world=world)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(rows, 5, generator=generator), torch.randn(rows, generator=generator)
    state, numbers = torch.get_rng_state(), np.random.get_state()[2]  # noqa: NPY002  what users' code draws from
    found = why_not_cut(acc.engine, loss, lambda start, stop: {"x": x[start:stop], "y": y[start:stop]})
    assert torch.equal(state, torch.get_rng_state())
    assert np.random.get_state()[2] == numbers  # noqa: NPY002
    assert int(model.seen) == 0  # type: ignore[operator]
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())  # nothing accumulates
    acc.close()
    return found


def _rows_of(net: Net, x: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(-1, 3, -1)


SUMS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "plain": lambda _, x: x,
    "dropout": lambda net, x: F.dropout(x, 0.5, training=net.training),
    "noise": lambda _, x: x + torch.randn_like(x),
    "numbers of numpy": lambda _, x: x * float(np.random.random()),  # noqa: NPY002
    "random depth": lambda net, x: x if torch.rand(()) < 0.3 else net.more(x),
    "order": lambda _, x: x[torch.randperm(len(x))],
    "lstm with dropout": lambda net, x: net.lstm(_rows_of(net, x))[0][:, -1],
    "attention with dropout": lambda net, x: net.attention(*[_rows_of(net, x)] * 3, need_weights=False)[0][:, -1],
    "layer norm": lambda _, x: F.layer_norm(x, (8,)),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_treats_each_sample_by_itself_adds_up(name: str, gloo_world: World) -> None:
    assert look(gloo_world, Net(SUMS[name])) == ""


class _Clipped(torch.autograd.Function):
    """As it is, and its gradient normalized over all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / gradient.norm()


def _counts(net: Any, x: Tensor) -> Tensor:
    net.seen += 1
    return x


def _mean(model: Any, batch: Batch) -> Tensor:
    return squares(model, batch) / len(batch["y"])


def _small_term(model: Any, batch: Batch) -> Tensor:
    found = model(batch["x"])
    return (found - batch["y"]).square().sum() + 0.1 * len(found) * torch.sigmoid(found).mean() ** 2


def _only_gradient(model: Any, batch: Batch) -> Tensor:
    found = squares(model, batch)
    return found / found.detach() * len(batch["y"])


def _one_by_one(model: Any, batch: Batch) -> Tensor:
    if len(batch["y"]) == 1:
        raise KeyError("loss")
    return squares(model, batch)


class _Carries:
    last: Any = 0.0

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        found: Tensor = model(batch["x"])
        before, self.last = self.last, found.detach().mean()
        return (found - batch["y"] - before).square().sum()


TEACHER = nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2)).requires_grad_(requires_grad=False)
TEMPERATURE = torch.ones((), requires_grad=True)


def _taught(model: Any, batch: Batch) -> Tensor:
    found: Tensor = (model(batch["x"]) - TEACHER(batch["x"].unsqueeze(1)).sum((1, 2))).square().sum()
    return found


def _tempered(model: Any, batch: Batch) -> Tensor:
    return squares(model, batch) * TEMPERATURE


LOSS = r"its loss is no sum over samples: \S* together and \S* apart"
GRADIENT = r"the gradient of \S* is no sum over samples: off by \S* of it"
AGAIN = r"the loss of the same samples is \S*, and \S* once more"
ENDS = "nobody can tell whether its gradient is a sum over samples, some of which end in "
OWN = "its forward draws from a generator of its own"
BUFFERS = "its forward changes buffers, and parts of it would change them once each"
OUTSIDE = "its loss reaches learned tensors outside of the model, and nobody knows which have their gradient"
REFUSED: dict[str, tuple[Callable[[Net, Tensor], Tensor], Any, str]] = {
    "batch norm by function": (
        lambda net, x: F.batch_norm(x, None, None, training=net.training),
        squares,
        f"{ENDS}ValueError: Expected more than 1 value.*",  # which says so itself of a single sample
    ),
    "batch norm by hand": (lambda _, x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1).sqrt(), squares, LOSS),
    "softmax over samples": (lambda _, x: x.softmax(0), squares, LOSS),
    "gradient clipped together": (lambda _, x: _Clipped.apply(x), squares, GRADIENT),
    "a mean": (SUMS["plain"], _mean, LOSS),
    "a small term of all samples": (SUMS["plain"], _small_term, LOSS),
    "a gradient of all samples": (SUMS["plain"], _only_gradient, GRADIENT),
    "a loss that takes no single sample": (SUMS["plain"], _one_by_one, f"{ENDS}KeyError: 'loss'"),
    "a buffer that a forward changes": (_counts, squares, BUFFERS),
    "carried over": (SUMS["plain"], _Carries(), AGAIN),
    "another model's statistics": (SUMS["plain"], _taught, LOSS),
    "a learned tensor outside of the model": (SUMS["plain"], _tempered, OUTSIDE),
    "a counter": (lambda net, x: x / net.forwards, squares, AGAIN),
    "its own generator": (lambda net, x: x * (torch.rand(x.shape, generator=net.generator) > 0.5), squares, OWN),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_be_cut_is_told(name: str, gloo_world: World) -> None:
    between, loss, words = REFUSED[name]
    found = look(gloo_world, Net(between), loss)
    assert re.fullmatch(words, found), found
    assert torch.is_grad_enabled()


CLASSES, PADDED = 5, -100


class Tagger(nn.Module):
    """Logits ``(B, T, classes)``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(7, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.embed(tokens)))
        return logits


def samples() -> list[Batch]:
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
    acc = over_sgd(model, 0.1, (8, 2), count=loss.count, world=world, **options)
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
        (lambda m, b: of_tokens(m, b, "mean"), lambda _: 1.0, "count 2 alone and 1 together.*verify_allow=.counts"),
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
        (lambda m, b: 0.25 * of_tokens(m, b), labelled, "is 4 times that, as many as there are micro-batches"),
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

    acc = over_sgd(model, 0.1, (8, 4), count=Mean().count, world=gloo_world)
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
