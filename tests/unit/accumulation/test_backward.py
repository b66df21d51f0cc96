"""``Accumulator.backward``: sums and means give the same gradient, that of the global batch."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, MisuseError

CLASSES, IGNORED = 5, -100
RATE = 1.0  # of plain SGD: what it takes from the weights is the gradient


def _data(*, last_counts: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Seven samples of four labels each, some ignored; all of the last micro-batch's unless ``last_counts``."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(7):
        labels = torch.randint(CLASSES, (4,), generator=generator)
        labels[: i % 4] = IGNORED
        if i == 6 and not last_counts:
            labels[:] = IGNORED
        samples.append((torch.randn(4, 3, generator=generator), labels))
    return samples


def _count(batch: Any) -> int:
    return int((batch[1] != IGNORED).sum())


def _loss(model: nn.Module, batch: Any, reduction: str) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def _accumulator(world: World, *, count: Any = _count) -> Accumulator:
    torch.manual_seed(0)
    model = nn.Linear(3, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return Accumulator(model, optimizer, global_batch_size=7, micro_batch_size=2, count=count, world=world)


def _truth(data: list[tuple[Tensor, Tensor]], model: nn.Module) -> list[Tensor]:
    """In fp64, from the whole batch in one forward."""
    exact = deepcopy(model).double()
    inputs, labels = (torch.stack(parts) for parts in zip(*data, strict=True))
    loss = _loss(exact, (inputs.double(), labels), "mean")
    return list(torch.autograd.grad(loss, list(exact.parameters())))


def _gradient(acc: Accumulator, data: Any, reduction: str, num_items: Any) -> list[Tensor]:
    before = [p.detach().clone() for p in acc.engine.unwrapped_model.parameters()]
    for batch in acc.batches(data):
        with acc.accumulate():
            acc.backward(_loss(acc.model, batch, reduction), num_items(batch), reduction=reduction)
    after = acc.engine.unwrapped_model.parameters()
    return [(old - new.detach()) / RATE for old, new in zip(before, after, strict=True)]


COUNTS = {  # by name: the accumulator's count, and what backward() is given
    "counted beforehand": (_count, lambda batch: None),
    "counted beforehand and given": (_count, _count),
    "given": (None, _count),
    "given as a tensor": (None, lambda batch: (batch[1] != IGNORED).sum()),
}


@pytest.mark.parametrize("last_counts", [True, False], ids=["", "with a mean over nothing"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_and_means_give_the_gradient_of_the_global_batch(
    gloo_world: World, reduction: str, counts: str, last_counts: bool
) -> None:
    data = _data(last_counts=last_counts)
    count, num_items = COUNTS[counts]
    acc = _accumulator(gloo_world, count=count)
    truth = _truth(data, acc.engine.unwrapped_model)
    if not last_counts:
        assert _loss(acc.engine.unwrapped_model, [part[None] for part in data[6]], "mean").isnan()
    found = _gradient(acc, torch.utils.data.DataLoader(data, batch_size=2), reduction, num_items)  # type: ignore[arg-type]
    for one, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-7)
    assert acc.progress.step == 1
    assert acc.progress.tokens == sum(int((labels != IGNORED).sum()) for _, labels in data)


def _backward(acc: Accumulator, loss: Any, num_items: Any = None, **options: Any) -> None:
    for batch in acc.batches(_data()):
        with acc.accumulate():
            acc.backward(loss(acc.model, batch), num_items, **options)


def _mean(model: nn.Module, batch: Any) -> Tensor:
    return _loss(model, batch, "mean")


def _two(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"a": _mean(model, batch), "b": _mean(model, batch)}


SEVERAL = "of several means at once: give their sums, by name"
REFUSED: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    (None, _mean, {}, MisuseError, "a mean without its count where none was counted beforehand: pass the count"),
    (_count, _mean, {"num_items": 17}, MisuseError, r"with the count 17 where count= gave"),
    (_count, _mean, {"num_items": torch.tensor(3)}, MisuseError, "with a tensor for a count where .*: leave it out"),
    (lambda batch: {"a": _count(batch), "b": len(batch[0])}, _two, {}, MisuseError, SEVERAL),
    (_count, _mean, {"num_items": {"loss": 3}}, MisuseError, SEVERAL),
    *(
        (_count, _mean, {"reduction": name}, ConfigError, f"reduction={name}: no such choice. Use one of sum, mean")
        for name in ("none", "Mean", "average")
    ),
]


@pytest.mark.parametrize(("count", "loss", "options", "kind", "message"), REFUSED)
def test_what_is_no_mean_over_its_count_is_refused(  # noqa: PLR0917
    gloo_world: World, count: Any, loss: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    acc = _accumulator(gloo_world, count=count)
    with pytest.raises(kind, match=message):
        _backward(acc, loss, **({"reduction": "mean"} | options))
    assert acc.progress.step == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0: must be at least 1"),
        ({"micro_batch_size": 9}, "micro_batch_size=9: larger than global_batch_size=7"),
    ],
)
def test_sizes_are_refused_at_once_by_their_python_names(
    gloo_world: World, sizes: dict[str, int], message: str
) -> None:
    model = nn.Linear(3, CLASSES)
    given: dict[str, Any] = {"global_batch_size": 7, "micro_batch_size": 2} | sizes
    with pytest.raises(ConfigError, match=f"^{message}"):
        Accumulator(model, torch.optim.SGD(model.parameters()), world=gloo_world, **given)
