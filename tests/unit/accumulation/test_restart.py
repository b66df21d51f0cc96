"""What a window that runs out of memory is refused for, before a weight moves; and when a mark falls by itself.

And what surrounds a window that begins again: the step, in which it cannot; copies to the device; users' hooks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, DataSpec, World
from distaccum.accumulation import restart
from distaccum.accumulation import step as accumulation_step
from distaccum.errors import ResourceError

MICRO, WINDOW = 4, 8
pytestmark = pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning")


class Line(nn.Module):
    """A layer, and a buffer that ``change`` may change in a forward."""

    def __init__(self, change: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(3, 1)
        self.register_buffer("always", torch.zeros(()))
        self.forwards, self._change = 0, change

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self._change(self)
        found: Tensor = self.layer(x)[:, 0]
        return found


def squares(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


class Full(SGD):
    """Has moved the weights when memory runs out."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def accumulator(
    world: World, model: Line, *, samples: int = 2 * WINDOW, optimizer: type[SGD] = SGD, **options: Any
) -> tuple[Accumulator, DataSpec]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 3, generator=generator), torch.randn(samples, generator=generator)
    acc = Accumulator(
        model,
        optimizer(model.parameters(), lr=0.1),
        global_batch_size=WINDOW,
        micro_batch_size=MICRO,
        count=lambda batch: len(batch[1]),
        world=world,
        **{"verify": "never", **options},
    )
    return acc, DataSpec(train=list(zip(x, y, strict=True)), eval_dataset=None, description="", shuffle=False)


def second_window(world: World, model: Line, loss: Any = squares) -> tuple[Accumulator, Any]:
    """With an error in its first backward; the weight's gradient is still to come."""
    acc, data = accumulator(world, model)
    seen = 0

    def strike(_: Tensor) -> None:
        nonlocal seen
        seen += 1
        if seen == 1 + WINDOW // MICRO:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.layer.bias.register_post_accumulate_grad_hook(strike)
    windows = acc.windows(data)
    acc.step(next(windows), loss)
    return acc, next(windows)


def _counts(model: Any) -> None:
    model.always.add_(1)


def _contrastive(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0])
    return (found[:, None] * found[None, :]).sum()


def nothing(_: Any) -> None:
    """Changes nothing."""


TEMPERATURE = torch.ones((), requires_grad=True)


def _tempered(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return squares(model, batch) * TEMPERATURE


@pytest.mark.parametrize(
    ("loss", "why", "change"),
    [
        (_contrastive, "its loss is no sum over samples: .* together and .* apart", nothing),
        (_tempered, "its loss reaches learned tensors outside of the model", nothing),
        (squares, "its forward changes buffers, and parts of it would change them once each", _counts),
    ],
)
def test_a_loss_that_is_no_sum_is_not_cut(
    gloo_world: World, loss: Any, why: str, change: Callable[[Any], None]
) -> None:
    acc, window = second_window(gloo_world, model := Line(change), loss)
    before = model.layer.weight.detach().clone()
    with pytest.raises(ResourceError, match=why):
        acc.step(window, loss)
    assert torch.equal(model.layer.weight, before)
    assert not acc.engine.memory_marks.failed  # so that nobody cuts it later, or begins again with less
    acc.abandon()
    acc.close()


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


def _moved(model: Line, data: DataSpec) -> Tensor:
    """The bias after the first window of ``data``, by plain autograd."""
    x, y = (torch.stack([sample[n] for sample in data.train[:WINDOW]]) for n in (0, 1))
    loss = ((x @ model.layer.weight.T + model.layer.bias)[:, 0] - y).square().sum() / WINDOW
    return model.layer.bias.detach() - 0.1 * torch.autograd.grad(loss, model.layer.bias)[0]


def test_memory_that_is_over_in_the_optimizers_step_is_an_error(gloo_world: World) -> None:
    """Some weights may have moved: another step would be one too many, here or where the other ranks have made it."""
    acc, data = accumulator(gloo_world, model := Line(), optimizer=Full)
    expected = _moved(model, data)
    with pytest.raises(ResourceError):
        acc.step(next(acc.windows(data)), squares)
    assert model.forwards == WINDOW // MICRO
    assert not acc.engine.memory_marks.failed
    torch.testing.assert_close(model.layer.bias.detach(), expected)
    acc.abandon()
    acc.close()


def test_memory_that_is_over_without_a_micro_batch_is_an_error(gloo_world: World) -> None:
    """Of a rank that only joins the others' reduction: it has nothing to cut."""
    acc, data = accumulator(gloo_world, Line())
    window = replace(next(acc.windows(data)).plain, micro_batches=())

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(ResourceError):
        restart.Restarting(acc.engine, full).run(window, squares)
    acc.abandon()
    acc.close()


def test_a_first_copy_that_does_not_fit_is_of_the_first_micro_batch(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    acc, data = accumulator(gloo_world, model := Line())
    copy, failed = accumulation_step.on_device, False

    def strike(*given: Any) -> Iterator[Any]:
        nonlocal failed
        if not failed:
            failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        yield from copy(*given)

    monkeypatch.setattr(accumulation_step, "on_device", strike)
    gloo_world.activity.done = 40  # of an evaluation before
    expected = _moved(model, data)
    acc.step(next(acc.windows(data)), squares)
    assert [shape.rows for shape in acc.engine.memory_marks.failed] == [MICRO]
    torch.testing.assert_close(model.layer.bias.detach(), expected)
    acc.close()


_NCCL = "NCCL error in: x.cpp:9, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"


@pytest.mark.parametrize("last", ["Failed to CUDA calloc async 608 bytes", "Cuda failure 2 'out of memory'", ""])
def test_memory_that_is_over_is_told_as_such_and_begins_nothing_again(gloo_world: World, last: str) -> None:
    """In NCCL, whose communicator has failed; and in the first step's check, where forwards communicate."""
    given: dict[str, Any] = {} if last else {"engine": "fsdp2", "verify": "first"}
    acc, data = accumulator(gloo_world, model := Line(), **given)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        del model, batch
        if not last:
            raise torch.OutOfMemoryError("CUDA out of memory")
        raise dist.DistBackendError(f"{_NCCL}ncclUnhandledCudaError: CUDA function failed.\nLast error:\n{last}")

    said = r"out of memory in .*NCCL error.*" if last else r"CUDA out of memory\. "
    with pytest.raises(ResourceError, match=f"{said}Lower batch.micro_size"):
        acc.step(next(acc.windows(data)), loss)
    assert model.forwards == 0
    assert not acc.engine.memory_marks.failed
    acc.abandon()
    acc.close()


def test_hooks_on_parameters_do_not_see_a_reduction_that_follows_the_backward(gloo_world: World) -> None:
    """They may make something of the zeros that it adds."""
    acc, data = accumulator(gloo_world, model := Line())
    expected, calls = _moved(model, data), []
    model.layer.bias.register_hook(lambda gradient: gradient + 1.0)
    model.layer.bias.register_post_accumulate_grad_hook(calls.append)
    acc.step(next(acc.windows(data)), squares)
    assert len(calls) == WINDOW // MICRO
    torch.testing.assert_close(model.layer.bias.detach(), expected - 0.1 * len(calls))
    acc.close()


def test_a_window_that_reached_a_learned_tensor_outside_of_the_model_before_is_refused(gloo_world: World) -> None:
    """In an earlier micro-batch than the one that fails: begun again, its gradient would be added twice."""
    acc, data = accumulator(gloo_world, Line())
    outside = torch.ones((), requires_grad=True)
    calls = 0

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        total = squares(model, batch)
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        first = torch.equal(batch[1], torch.stack([sample[1] for sample in data.train[:MICRO]]))
        return total * outside if first else total

    with pytest.raises(ResourceError, match="its loss reaches learned tensors outside of the model"):
        acc.step(next(acc.windows(data)), loss)
    acc.abandon()
    acc.close()
