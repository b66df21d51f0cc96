"""What a micro-step that runs out of memory is refused for, before a weight moves; and when a mark falls by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import _get_current_dispatch_mode

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


def accumulator(world: World, model: Line, *, samples: int = 2 * WINDOW) -> tuple[Accumulator, DataSpec]:
    """With data of its own."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 3, generator=generator), torch.randn(samples, generator=generator)
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=0.1),
        global_batch_size=WINDOW,
        micro_batch_size=MICRO,
        count=lambda batch: len(batch[1]),
        verify="never",
        world=world,
    )
    return acc, DataSpec(train=list(zip(x, y, strict=True)), eval_dataset=None, description="", shuffle=False)


def two_windows(
    world: World, model: Line, loss: Any = squares, *, at: int = 1 + WINDOW // MICRO, errors: int = 1
) -> tuple[Accumulator, Any]:
    """The second of them, with errors in this backward, by default the first one of that window, and what follows."""
    acc, data = accumulator(world, model)
    seen, struck = 0, 0

    def strike(_: Tensor) -> None:  # the weight is still to come
        nonlocal seen
        seen += 1
        if seen == at and errors:
            over()

    def strike_again(_: Tensor) -> None:
        looked_at = _get_current_dispatch_mode() is not None
        if 0 < struck < errors and not looked_at:
            over()

    def over() -> None:
        nonlocal struck
        struck += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.layer.bias.register_post_accumulate_grad_hook(strike)
    model.layer.weight.register_hook(strike_again)
    windows = acc.windows(data)
    acc.step(next(windows), loss)
    return acc, next(windows)


@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["random", "numpy"])
def test_what_python_or_numpy_draws_is_drawn_again_alike(gloo_world: World, draw: Callable[[], float]) -> None:
    """A factor of each forward: a rest from another forward would have another one."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(model, batch) * (draw() if model.training else 1.0)

    weights = []
    for errors in (1, 0):
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002  what users' code draws from
        acc, window = two_windows(gloo_world, model := Line(), loss, at=2 * WINDOW // MICRO, errors=errors)
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


def test_forwards_that_count_are_run_again_whole(gloo_world: World) -> None:
    """What the failed forward has changed is put back, and two parts would count once each."""
    acc, window = two_windows(gloo_world, model := Line(_counts))
    acc.step(window, squares)
    assert int(model.always) == 2 * WINDOW // MICRO
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


def _normalized(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = squares(model, batch)
    return found / found.detach() * len(batch[1])


def _one_by_one(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    if len(batch[1]) == 1:
        raise KeyError("loss")
    return squares(model, batch)


def _annealed(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return squares(model, batch) / model.forwards


NOISE = torch.Generator().manual_seed(1)


def _noisy(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0] + torch.rand(batch[0].shape, generator=NOISE)) - batch[1]).square().sum()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (_contrastive, "its loss is no sum over samples: .* together and .* apart"),
        (_normalized, "the gradient of layer.* is no sum over samples: off by .* of it"),
        (
            _one_by_one,
            "nobody can tell whether its gradient is a sum over samples, some of which end in KeyError: 'loss'",
        ),
        (_annealed, "the loss of the same samples is .*, and .* once more"),
        (_noisy, "its forward draws from a generator of its own"),
    ],
)
def test_a_loss_that_is_no_sum_is_not_cut(gloo_world: World, loss: Any, why: str) -> None:
    acc, window = two_windows(gloo_world, model := Line(), loss, errors=2)
    before = model.layer.weight.detach().clone()
    with pytest.raises(ResourceError, match=why):
        acc.step(window, loss)
    assert torch.equal(model.layer.weight, before)
    assert not acc.engine.memory_marks.any_failed  # so that nobody cuts it later, or begins again with less
    acc.abandon()
    acc.close()


@pytest.mark.parametrize("loss", [_contrastive, _normalized])
def test_a_loss_that_is_no_sum_is_run_again_whole(gloo_world: World, loss: Any) -> None:
    weights = []
    for errors in (1, 0):
        acc, window = two_windows(gloo_world, model := Line(), loss, errors=errors)
        acc.step(window, loss)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        acc.close()
    assert torch.allclose(*weights, rtol=1e-6, atol=0)


def test_a_checkpoints_marks_cut_nothing_that_may_not_be_cut(gloo_world: World) -> None:
    acc, data = accumulator(gloo_world, Line(), samples=4 * WINDOW)
    acc.step(next(acc.windows(data)), _contrastive)
    state = acc.state_dict()
    state["memory"]["marks"] = {"proven": [], "failed": [[MICRO, 3]]}
    acc.close()
    acc, data = accumulator(gloo_world, model := Line(), samples=4 * WINDOW)
    acc.load_state_dict(state)
    before = model.layer.weight.detach().clone()
    with pytest.raises(ResourceError, match="have run out of memory before, and parts of them would give another grad"):
        acc.step(next(acc.windows(data)), _contrastive)
    assert torch.equal(model.layer.weight, before)
    acc.abandon()
    acc.close()


@pytest.mark.parametrize(
    ("loss", "change", "falls"),
    [(squares, lambda _: None, True), (_contrastive, lambda _: None, False), (squares, _counts, False)],
    ids=["sum", "no sum", "counts"],
)
def test_two_windows_of_rising_retries_lower_the_mark(
    gloo_world: World, loss: Any, change: Callable[[Any], None], falls: bool
) -> None:
    acc, data = accumulator(gloo_world, Line(change), samples=6 * WINDOW)
    retries = iter((0, 3, 3, 4, 5, 5))
    vars(Recovery.of(acc.engine))["_retries"] = lambda: next(retries)
    found = []
    for window in acc.windows(data):
        acc.step(window, loss)
        found.append(acc.engine.memory_marks.is_too_large(Shape(MICRO, 3)))
    assert found == [False, False, False, False, falls, falls]
    acc.close()


def _dropped(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """With dropout, and noise of another operator behind it where the model says so."""
    x = torch.nn.functional.dropout(batch[0], 0.4)
    if model.later:
        x = x + torch.rand_like(x)
    return (model(x) - batch[1]).square().sum()


class _Drops(Line):
    later = False


def _four_windows(
    world: World, *, errors: Sequence[int], later: int = 4, looks: int = 8, marks: bool = True, resumed: bool = False
) -> tuple[Tensor, list[int]]:
    """The weights after windows with dropout, and how many micro-batches each of them has.

    Memory runs out in the second micro-batch of some ``errors``; from a window on the forward draws more.
    """
    acc, data = accumulator(world, model := _Drops(), samples=4 * WINDOW)
    left, sizes = 0, []

    def strike(_: Tensor) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def begin(acc: Accumulator, model: _Drops, n: int) -> None:
        nonlocal left
        left, model.later = 2 if n in errors else 0, n >= later
        if n > 1 and Recovery.of(acc.engine).looks:
            Recovery.of(acc.engine).looks = looks

    model.layer.bias.register_post_accumulate_grad_hook(strike)
    n = 0
    while n < 4:
        for window in acc.windows(data):
            begin(acc, model, n)
            sizes.append(len(window.plain.micro_batches))
            acc.step(window, _dropped)
            n += 1
            if not marks:
                acc.engine.memory_marks.keep_whole()
            if n == 2 and resumed:
                break
        if n < 4:
            state, weights = acc.state_dict(), model.state_dict()
            acc.close()
            acc, data = accumulator(world, model := _Drops(), samples=4 * WINDOW)
            model.load_state_dict(weights)
            acc.load_state_dict(state)
    acc.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), sizes


@pytest.mark.parametrize("resumed", [False, True])
def test_windows_that_are_cut_later_have_the_numbers_of_whole_micro_batches(gloo_world: World, resumed: bool) -> None:
    truth, whole = _four_windows(gloo_world, errors=())
    found, sizes = _four_windows(gloo_world, errors=(1,), resumed=resumed)
    assert (whole, sizes) == ([2, 2, 2, 2], [2, 2, 4, 4])
    assert torch.allclose(found, truth, rtol=1e-6, atol=0)


def test_a_part_that_draws_something_else_than_was_looked_at_is_run_again_whole(
    gloo_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    truth, _ = _four_windows(gloo_world, errors=(), later=2)
    found, _ = _four_windows(gloo_world, errors=(1, 2), later=2, looks=0, marks=False)
    assert torch.allclose(found, truth, rtol=1e-6, atol=0)
    assert "the random numbers of smaller micro-batches from here on: aten::rand_like draws here" in caplog.text


def test_a_window_that_is_cut_and_draws_something_else_says_so(
    gloo_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    truth, _ = _four_windows(gloo_world, errors=(), later=3)
    found, _ = _four_windows(gloo_world, errors=(1,), later=3, looks=0)
    assert not torch.allclose(found, truth, rtol=1e-6, atol=0)
    assert caplog.text.count("the random numbers of smaller micro-batches from here on") == 1
