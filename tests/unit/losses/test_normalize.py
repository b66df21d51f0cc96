"""What a loss and its count may be: each other thing is refused by one message, before a weight moves."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.distributed.world import World
from distaccum.errors import MisuseError
from distaccum.losses.base import from_mean
from distaccum.losses.normalize import as_counts, normalize_loss
from distaccum.testing import single_process_world

DATA = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), torch.tensor(float(i))) for i in range(8)]


class Output(OrderedDict[str, Tensor]):
    """A model's output as transformers has it: a mapping with attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def _total(model: nn.Module, batch: Any) -> Tensor:
    errors: Tensor = (model(batch[0]).squeeze(-1) - batch[1]).square()
    return errors


BAD_LOSSES: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "nothing": (lambda _, __: None, "the loss is None: return its sum"),
    "a float": (lambda m, b: _total(m, b).sum().item(), r"a float, which has no gradient: return the sum"),
    "an int": (lambda _, __: 0, "the loss is 0, a int, which has no gradient"),
    "a NumPy number": (lambda m, b: _total(m, b).sum().detach().numpy(), "has no gradient: return the sum as a 0-dim"),
    "a tuple": (lambda m, b: (_total(m, b).sum(), 2), "the loss is a tuple of 2: return the sum alone"),
    "a list": (lambda m, b: [_total(m, b).sum()], "the loss is a list of 1: return the sum alone"),
    "floats by name": (lambda m, b: {"loss": _total(m, b).sum().item()}, r"by name are \{'loss': float\}: return a 0"),
    "nothing by name": (lambda _, __: {}, r"by name are \{\}: return a 0-dim"),
    "other names": (lambda m, b: {"mse": _total(m, b).sum()}, r"the losses are \['mse'\], and what was counted is"),
    "an output": (
        lambda m, b: Output(loss=_total(m, b).mean(), logits=m(b[0])),
        "the loss is a Output, the model's whole output: return",
    ),
    "an output without a loss": (lambda m, b: Output(logits=m(b[0])), r"the losses are \['logits'\]"),
    "unreduced": (_total, r"the loss 'loss' has shape \[2\], one number for each item: .* loss.sum\(\)"),
    "of one element": (lambda m, b: _total(m, b).sum().reshape(1), r"has shape \[1\]"),
    "detached": (lambda m, b: _total(m, b).sum().detach(), "the loss has no gradient"),
    "a tensor made anew": (lambda m, b: torch.tensor(_total(m, b).sum().item()), "the loss has no gradient"),
    "an integer tensor": (lambda m, b: _total(m, b).sum().long(), "is torch.int64, which has no gradient"),
    "in 16 bits": (lambda m, b: _total(m, b).sum().bfloat16(), "is torch.bfloat16, which rounds a sum"),
    "a complex one": (lambda m, b: _total(m, b).sum() * 1j, "is torch.complex64, which has no gradient"),
}


@pytest.fixture(scope="module")
def world() -> Any:
    """A group of one for all of them."""
    with single_process_world() as opened:
        yield opened


def _refusal(world: World, run: Callable[[Accumulator, nn.Module], None], **settings: Any) -> str:
    """The message, of a model whose weights have not moved."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    before = copy.deepcopy(model.state_dict())
    accumulator = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        global_batch_size=4,
        micro_batch_size=2,
        world=world,
        **settings,
    )
    with pytest.raises(MisuseError) as caught:
        run(accumulator, model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    return str(caught.value)


def _backward(
    loss: Callable[..., Any], count: Any = None, reduction: str = "sum"
) -> Callable[[Accumulator, Any], None]:
    def run(accumulator: Accumulator, _: nn.Module) -> None:
        for window in accumulator.windows(DATA):
            for micro in window:
                with accumulator.accumulate():
                    value = loss(accumulator.model, micro.batch)
                    accumulator.backward(value, count, reduction=reduction)

    return run


@pytest.mark.parametrize("case", BAD_LOSSES)
@pytest.mark.parametrize("level", ["backward", "step"])
def test_what_is_no_sum_is_refused_before_a_weight_moves(case: str, level: str, world: World) -> None:
    loss, expected = BAD_LOSSES[case]

    def step(accumulator: Accumulator, _: nn.Module) -> None:
        for window in accumulator.windows(DATA):
            accumulator.step(window, loss)  # type: ignore[arg-type]

    run = step if level == "step" else _backward(loss)
    message = _refusal(world, run, count=lambda batch: len(batch[1]))
    with pytest.raises(MisuseError, match=expected):
        raise MisuseError(message)
    assert "\n" not in message


@pytest.mark.parametrize("case", BAD_LOSSES)
def test_level_1_refuses_it_too(case: str) -> None:
    loss, expected = BAD_LOSSES[case]
    model, batch = nn.Linear(3, 1), (torch.stack([x for x, _ in DATA[:2]]), torch.stack([y for _, y in DATA[:2]]))
    with pytest.raises(MisuseError, match=expected):
        normalize_loss(loss(model, batch), {"loss": 4.0}, 1)


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (lambda m, b: _total(m, b).mean().item(), "a float, which has no gradient"),
        (lambda m, b: (_total(m, b).mean(), 2), "a tuple of 2"),
        (lambda m, b: {"loss": _total(m, b).mean()}, "several means"),
        (lambda _, __: None, "the loss is None"),
        (_total, r"has shape \[2\]"),
        (lambda m, b: _total(m, b).mean().detach(), "has no gradient"),
    ],
)
def test_a_mean_is_held_to_the_same(mean: Any, expected: str, world: World) -> None:
    message = _refusal(world, _backward(mean, reduction="mean"), count=lambda batch: len(batch[1]))
    with pytest.raises(MisuseError, match=expected):
        raise MisuseError(message)


BAD_COUNTS: dict[str, Any] = {
    "None": None,
    "NaN": math.nan,
    "infinite": math.inf,
    "negative": -1,
    "negative infinity": -math.inf,
    "a tensor": torch.ones(2),
    "a truth value": True,
    "NumPy's truth value": np.True_,
    "NumPy's NaN": np.float32("nan"),
    "NumPy's half that overflowed": np.float16("inf"),
    "an array": np.ones(2),
    "an array's NaN": np.array(math.nan),
    "an array's truth value": np.array(True),
    "text": "3",
    "complex": 3j,
    "a list": [1, 2],
    "none by name": {},
    "NaN by name": {"loss": math.nan},
}


@pytest.mark.parametrize("case", BAD_COUNTS)
def test_what_is_no_count_is_refused_before_a_weight_moves(case: str, world: World) -> None:
    run = _backward(lambda m, b: _total(m, b).sum())
    message = _refusal(world, run, count=lambda _: BAD_COUNTS[case])
    assert "give a finite number" in message or "give one number" in message
    with pytest.raises(MisuseError):
        as_counts(BAD_COUNTS[case])


@pytest.mark.parametrize(
    "count",
    [math.nan, math.inf, -2, True, np.float32("nan"), "3", torch.tensor(-2.0), torch.tensor(math.nan), torch.ones(2)],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_so_is_one_that_is_given_with_the_loss(count: Any, reduction: str, world: World) -> None:
    """A negative one made the step ascend, and NaN made every weight NaN."""
    run = _backward(lambda m, b: getattr(_total(m, b), reduction)(), count, reduction)
    message = _refusal(world, run)
    assert "count" in message or "shape [2]" in message


@pytest.mark.parametrize(
    "count",
    [np.int64(2), np.float32(2.0), np.uint8(2), np.array(2.0), torch.tensor(2), torch.tensor(2.0), 2, 2.0],
    ids=lambda c: type(c).__name__,
)
def test_numpys_and_torchs_numbers_count_as_pythons(count: Any, world: World) -> None:
    assert as_counts(count) == {"loss": 2}
    assert type(as_counts(count)["loss"]) in (int, float)
    trained = []
    for settings, given in (({"count": lambda _: count}, None), ({}, count)):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        sizes: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "world": world, "verify": "never"}
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), **sizes, **settings)
        _backward(lambda m, b: _total(m, b).sum(), given)(accumulator, model)
        trained.append(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(trained[0], trained[1])


def test_a_count_of_one_element_weighs_a_mean() -> None:
    mean = torch.tensor(2.0, requires_grad=True)
    assert from_mean(mean, torch.tensor([3])).shape == ()
    assert from_mean(mean, np.int64(3)).item() == 6.0  # type: ignore[arg-type]


def test_only_a_micro_batch_that_counts_nothing_may_have_a_constant_loss() -> None:
    """Of one that counts, a loss without a gradient would be left out, and counted all the same."""
    constant = torch.zeros(())
    assert normalize_loss(constant, {"loss": 4}, 1, own_counts={"loss": 0}).item() == 0
    for own_counts in (None, {"loss": 2}):
        with pytest.raises(MisuseError, match="the loss has no gradient"):
            normalize_loss(constant, {"loss": 4}, 1, own_counts=own_counts)
