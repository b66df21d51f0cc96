"""What a micro-step that runs out of memory is refused for, before a weight moves; and when a mark falls by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, DataSpec, World
from distaccum.accumulation.recovery import Recovery
from distaccum.engines.memory_marks import Shape
from distaccum.errors import ResourceError

MICRO, WINDOW = 4, 8
pytestmark = pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning")


class Line(nn.Module):
    """A layer, and two buffers that ``change`` may change in a forward."""

    def __init__(self, change: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(3, 1)
        self.register_buffer("always", torch.zeros(()))
        self.register_buffer("late", torch.zeros(()))
        self.forwards, self._change = 0, change

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self._change(self)
        found: Tensor = self.layer(x)[:, 0]
        return found


def squares(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The sum of squared errors."""
    return (model(batch[0]) - batch[1]).square().sum()


def two_windows(
    world: World, model: Line, loss: Any = squares, *, at: int = 1 + WINDOW // MICRO
) -> tuple[Accumulator, Any]:
    """With an error in this backward, by default the first one of the second window."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2 * WINDOW, 3, generator=generator), torch.randn(2 * WINDOW, generator=generator)
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=0.1),
        global_batch_size=WINDOW,
        micro_batch_size=MICRO,
        count=lambda batch: len(batch[1]),
        verify="never",
        world=world,
    )
    seen = 0

    def strike(_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.layer.bias.register_post_accumulate_grad_hook(strike)  # the weight is still to come
    windows = acc.windows(
        DataSpec(train=list(zip(x, y, strict=True)), eval_dataset=None, description="", shuffle=False)
    )
    acc.step(next(windows), loss)
    return acc, next(windows)


@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["random", "numpy"])
def test_what_python_or_numpy_draws_is_drawn_again_alike(gloo_world: World, draw: Callable[[], float]) -> None:
    """A factor of each forward: a rest from another forward would have another one."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(model, batch) * (draw() if model.training else 1.0)

    weights = []
    for at in (2 * WINDOW // MICRO, 0):  # the last one, or none
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002  what users' code draws from
        acc, window = two_windows(gloo_world, model := Line(), loss, at=at)
        acc.step(window, loss)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        acc.close()
    assert torch.allclose(*weights, rtol=1e-6, atol=0)


def _counts(model: Any) -> None:
    model.always.add_(1)


def _counts_late(model: Any) -> None:
    model.always.add_(1)
    if model.forwards > WINDOW // MICRO:
        model.late.add_(1)


def test_a_buffer_counts_forwards_that_went_well(gloo_world: World) -> None:
    """Two whole ones and four parts: what the failed forward has changed is put back."""
    acc, window = two_windows(gloo_world, model := Line(_counts))
    acc.step(window, squares)
    assert int(model.always) == 2 + 2 * 2
    acc.close()


def test_a_buffer_that_only_a_later_forward_changes_is_not_changed_twice(gloo_world: World) -> None:
    acc, window = two_windows(gloo_world, model := Line(_counts_late))
    before = model.layer.weight.detach().clone()
    with pytest.raises(ResourceError, match="has changed the buffer late of Line, and not in the first one: it is not"):
        acc.step(window, squares)
    assert torch.equal(model.layer.weight, before)
    acc.close()


def _contrastive(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0])
    return (found[:, None] * found[None, :]).sum()


def _only_in_training(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    if not model.training:
        raise KeyError("loss")
    return squares(model, batch)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (_contrastive, "it is no sum over samples, but .* as a whole and .* in parts"),
        (_only_in_training, "KeyError of the loss in evaluation mode.* nobody can tell whether its loss is a sum"),
    ],
)
def test_a_loss_that_may_be_no_sum_is_not_cut(gloo_world: World, loss: Any, why: str) -> None:
    acc, window = two_windows(gloo_world, model := Line(), loss)
    before = model.layer.weight.detach().clone()
    with pytest.raises(ResourceError, match=why):
        acc.step(window, loss)
    assert torch.equal(model.layer.weight, before)
    assert model.training
    acc.close()


@pytest.mark.parametrize(("normal", "falls"), [(False, True), (True, False)], ids=["", "batch norm"])
def test_two_windows_of_rising_retries_lower_the_mark(gloo_world: World, normal: bool, falls: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3) if normal else nn.Identity())
    acc = Accumulator(model, SGD(model.parameters(), lr=0.1), global_batch_size=8, micro_batch_size=4, world=gloo_world)
    retries = iter((0, 3, 3, 4, 5, 5))
    recovery, shape = Recovery(acc.engine, retries=lambda: next(retries)), Shape(4, 3)
    acc.engine.memory_marks.prove(shape)
    found = []
    for _ in range(5):
        recovery.end(shape)
        found.append(acc.engine.memory_marks.is_too_large(shape))
    assert found == [False, False, False, False, falls]
    acc.close()
