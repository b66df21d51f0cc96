"""A look at samples apart and together: what adds up, what does not, and what is not the same once more."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.distributed.world import World
from distaccum.verification.parts import why_not_cut

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
    """The sum of squared errors."""
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
    "random depth": lambda net, x: x if torch.rand(()) < 0.3 else net.more(x),
    "order": lambda _, x: x[torch.randperm(len(x))],
    "lstm with dropout": lambda net, x: net.lstm(_rows_of(net, x))[0][:, -1],
    "attention with dropout": lambda net, x: net.attention(*[_rows_of(net, x)] * 3, need_weights=False)[0][:, -1],
    "layer norm": lambda _, x: F.layer_norm(x, (8,)),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_treats_each_sample_by_itself_adds_up(name: str, gloo_world: World) -> None:
    assert look(gloo_world, Net(SUMS[name])) == ""


def test_numbers_of_numpy_are_drawn_alike(gloo_world: World) -> None:
    assert look(gloo_world, Net(lambda _, x: x * float(np.random.random()))) == ""  # noqa: NPY002


COMPANY: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "batch norm by function": lambda net, x: F.batch_norm(x, None, None, training=net.training),
    "batch norm by hand": lambda _, x: (x - x.mean(0)) / (x.var(0, unbiased=False) + 1).sqrt(),
    "softmax over samples": lambda _, x: x.softmax(0),
    "gradient clipped together": lambda _, x: _Clipped.apply(x),
}


class _Clipped(torch.autograd.Function):
    """As it is, and its gradient normalized over all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / gradient.norm()


@pytest.mark.parametrize("name", COMPANY)
def test_what_a_sample_owes_to_its_company_is_noticed(name: str, gloo_world: World) -> None:
    said = look(gloo_world, Net(COMPANY[name]))
    refused = name == "batch norm by function"  # which says so itself of a single sample
    assert ("nobody can tell" if refused else "is no sum over samples") in said


def _mean(model: Any, batch: Batch) -> Tensor:
    return squares(model, batch) / len(batch["y"])


def _small_term(model: Any, batch: Batch) -> Tensor:
    found = model(batch["x"])
    return (found - batch["y"]).square().sum() + 0.1 * len(found) * torch.sigmoid(found).mean() ** 2


def _only_gradient(model: Any, batch: Batch) -> Tensor:
    found = squares(model, batch)
    return found / found.detach() * len(batch["y"])


@pytest.mark.parametrize("loss", [_mean, _small_term, _only_gradient])
def test_a_loss_that_is_no_sum_is_noticed(loss: Any, gloo_world: World) -> None:
    assert "is no sum over samples" in look(gloo_world, Net(), loss)


def test_a_gradient_that_a_hook_clips_is_noticed(gloo_world: World) -> None:
    model = Net()
    model.enter.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    assert look(gloo_world, model).startswith("the gradient of enter.weight is no sum over samples: off by 0.")


def _counts(net: Any, x: Tensor) -> Tensor:
    net.seen += 1
    return x


def test_a_buffer_that_a_forward_changes_is_noticed(gloo_world: World) -> None:
    assert look(gloo_world, Net(_counts)).startswith("its forward changes buffers")


class _Carries:
    """A loss that what came before goes into."""

    last: Any = 0.0

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        found: Tensor = model(batch["x"])
        before, self.last = self.last, found.detach().mean()
        return (found - batch["y"] - before).square().sum()


TEACHER = nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2)).requires_grad_(requires_grad=False)


def _taught(model: Any, batch: Batch) -> Tensor:
    found: Tensor = (model(batch["x"]) - TEACHER(batch["x"].unsqueeze(1)).sum((1, 2))).square().sum()
    return found


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (_Carries(), "the loss of the same samples is .*, and .* once more"),
        (_taught, "its loss is no sum over samples"),
    ],
    ids=["carried over", "another model's statistics"],
)
def test_what_is_kept_outside_of_the_model_is_noticed(loss: Any, words: str, gloo_world: World) -> None:
    assert re.match(words, look(gloo_world, Net(), loss))


AGAIN: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "a counter": (lambda net, x: x / net.forwards, "the loss of the same samples is .*, and .* once more"),
    "its own generator": (
        lambda net, x: x * (torch.rand(x.shape, generator=net.generator) > 0.5),
        "its forward draws from a generator of its own",
    ),
}


@pytest.mark.parametrize("name", AGAIN)
def test_what_is_another_once_more_is_noticed(name: str, gloo_world: World) -> None:
    between, words = AGAIN[name]
    found = look(gloo_world, Net(between))
    assert torch.is_grad_enabled()
    assert re.fullmatch(words, found)
