"""A mean that is no sum, or is over another count, is refused in the first window of a loop; what is right trains."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum import Accumulator, World
from distaccum.errors import VerificationError
from distaccum.functional import create_engine, finish_step, from_mean, normalize_loss, plan_windows

SAMPLES, LENGTH, CLASSES, MICRO_BATCHES = 6, 5, 3, 4  # of a micro-batch; the second is the labels' of a sample
WEIGHT = torch.tensor([0.2, 1.0, 3.0])
SCALE = torch.tensor(65536.0)


@dataclass
class Forward:
    """A micro-batch: logits ``(B, T, C)`` and labels ``(B, T)``, of which the first are never ignored."""

    logits: Tensor
    labels: Tensor
    head: Tensor

    def __post_init__(self) -> None:
        self.tokens, self.of_tokens = int((self.labels != -100).sum()), self.labels.flatten()
        self.first, self.of_samples = self.logits[:, 0], self.labels[:, 0]
        self.samples = len(self.labels)
        self.soft = F.one_hot(self.of_samples, CLASSES).float() * 0.9 + 0.1 / 3
        self.mask = self.labels != -100

    def ce(self, **options: Any) -> Tensor:
        return F.cross_entropy(self.logits.flatten(0, 1), self.of_tokens, **options)

    def ce1(self, **options: Any) -> Tensor:
        return F.cross_entropy(self.first, self.of_samples, **options)

    def mse(self, **options: Any) -> Tensor:
        return F.mse_loss(self.first, self.soft, **options)

    def by_hand(self, weights: Tensor) -> Tensor:
        return ((self.first - self.soft).square() * weights).sum() / weights.sum().clamp(min=1)

    def loop(self) -> list[Tensor]:
        return [F.cross_entropy(one, label) for one, label in zip(self.logits, self.labels, strict=True)]

    def smooth(self) -> Tensor:
        return -0.3 * self.first.log_softmax(1).sum() / (self.samples * CLASSES)

    def again(self) -> Iterator[tuple[Tensor, Tensor]]:
        """A forward of each sample, of as many rows as there are samples."""
        return ((torch.ones(SAMPLES, 4) * i @ self.head.t(), self.soft) for i in range(SAMPLES))

    def kl(self) -> Tensor:
        return F.kl_div(self.first.log_softmax(1), self.soft, reduction="batchmean")

    def each(self) -> Tensor:
        """The loss of each token, ``(B, T)``."""
        return self.ce(reduction="none").view(self.labels.shape)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def square(f: Forward) -> Tensor:
    """As many features as samples."""
    return f.first @ torch.ones(CLASSES, SAMPLES)


Program = Callable[[Forward], tuple[Any, ...]]
RIGHT: dict[str, Program] = {
    "a sum": lambda f: (f.ce(reduction="sum"), f.tokens),
    "a mean": lambda f: (f.ce(), f.tokens, "mean"),
    "a mean, counted on the device": lambda f: (f.ce(), f.mask.sum(), "mean"),
    "from_mean": lambda f: (from_mean(f.ce(), f.tokens), f.tokens),
    "a mean times its count": lambda f: (f.ce1() * f.samples, f.samples),
    "a mean times its count, a tensor": lambda f: (f.ce() * f.mask.float().sum(), f.tokens),
    "a sum over and times its count": lambda f: (f.ce1(reduction="sum") / f.samples * f.samples, f.samples),
    "a weighed sum": lambda f: (0.5 * f.mse(reduction="sum"), f.samples),
    "a weighed mean": lambda f: (0.5 * f.mse(), f.samples, "mean"),
    "half of a square": lambda f: (f.mse() / 2, f.samples, "mean"),
    "a mean over as many features as samples": lambda f: (f.mse() / SAMPLES, f.samples, "mean"),
    "a mean of weights": lambda f: (f.ce1(reduction="sum") + 0.1 * f.head.repeat(2, 1).pow(2).mean(), f.samples),
    "a mean of a loop of samples": lambda f: (torch.stack(f.loop()).mean(), f.samples, "mean"),
    "bits": lambda f: (f.ce() / math.log(2), f.tokens, "mean"),
    "weights that are all 1": lambda f: (f.ce(weight=torch.ones(CLASSES)), f.tokens, "mean"),
    "weights, counted": lambda f: (f.ce1(weight=WEIGHT), float(WEIGHT[f.of_samples].sum()), "mean"),
    "weights, summed": lambda f: (f.ce1(weight=WEIGHT, reduction="sum"), f.samples),
    "smooth labels": lambda f: (f.ce(label_smoothing=0.1), f.tokens, "mean"),
    "smooth labels, summed": lambda f: (f.ce(label_smoothing=0.1, reduction="sum"), f.tokens),
    "soft labels": lambda f: (F.cross_entropy(f.first, f.soft), f.samples, "mean"),
    "all of a sample's values": lambda f: (f.mse(), f.samples, "mean"),
    "labels of samples": lambda f: (
        F.binary_cross_entropy_with_logits(f.first, f.soft, reduction="sum") / CLASSES,
        f.samples,
    ),
    "as many labels as samples": lambda f: (square(f).pow(2).sum() / SAMPLES, f.samples),
    "a mean of features": lambda f: (f.first.pow(2).sum(0).mean(), f.samples),
    "as many features as samples": lambda f: (square(f).pow(2).sum(0).mean(), f.samples),
    "a mean for each sample": lambda f: (sum(f.each().mean(1)), f.samples),  # type: ignore[arg-type]
    "a loop of samples": lambda f: (sum(f.loop()), f.samples),
    "means of sums": lambda f: (torch.stack([f.ce1(reduction="sum")] * SAMPLES).mean(), f.samples),
    "chunks": lambda f: (
        sum(
            F.cross_entropy(*part, reduction="sum")
            for part in zip(f.first.chunk(2), f.of_samples.chunk(2), strict=True)
        ),
        f.samples,
    ),
    "an auxiliary mean, times the count": lambda f: (
        f.ce(reduction="sum") + 0.1 * f.logits.mean() * f.tokens,
        f.tokens,
    ),
    "an auxiliary mean, times the count by hand": lambda f: (
        f.ce1(reduction="sum") + (0.05 * f.samples) * f.first.mean(),
        f.samples,
    ),
    "two means": lambda f: ((f.ce1() + f.mse()) / 2, f.samples, "mean"),
    "mixed labels": lambda f: ((0.3 * f.ce1() + 0.7 * f.ce1(label_smoothing=0.1)) * f.samples, f.samples),
    "a likelihood": lambda f: (-(f.soft * f.first.log_softmax(1)).sum(1).mean(), f.samples, "mean"),
    "two sums": lambda f: (f.ce1(reduction="sum") + 0.1 * f.head.pow(2).sum(), f.samples),
    "once a micro-batch": lambda f: (f.ce(), 1),
    "a mean of samples, as meant": lambda f: (f.each().mean(), f.samples, "mean"),
    "detection": lambda f: (f.ce() + f.mse(), f.samples, "mean"),
    "the same count everywhere": lambda f: (f.ce1(), f.samples * LENGTH, "mean"),
    "a function of one's own": lambda f: (Doubled.apply(f.ce()), f.tokens, "mean"),
    "an unknown whole": lambda f: (Doubled.apply(f.ce() * f.tokens), f.tokens),
    "weights by hand, counted": lambda f: ((f.each() * f.mask).sum() / f.mask.sum(), f.mask.sum(), "mean"),
    "one divisor everywhere": lambda f: (f.mse(reduction="sum") / 1.7, f.samples),
    "smooth labels of a mean": lambda f: (0.3 * f.ce1(label_smoothing=0.1) * f.samples, f.samples),
    "smooth labels beside another": lambda f: ((f.ce1(label_smoothing=0.1) + f.kl()) * f.samples, f.samples),
    "a loop of as many rows as samples": lambda f: (sum(row.outer(row).mean() for row in square(f)), f.samples),
    "a loop over the second dimension": lambda f: (sum(row.square().mean() for row in f.first.T.unbind(1)), f.samples),
    "a loop of forwards": lambda f: (sum(F.mse_loss(*one) for one in f.again()) + 0 * f.first.sum(), f.samples),
    "a learned factor": lambda f: (f.ce(reduction="sum") * f.head.sum().exp(), f.tokens),
}
_TWICE, _SCALED, _OTHER = (
    "is a mean .* divides it a second time",
    "multiplied by 65536",
    "is a mean over .* its count is",
)
_BY_HAND = "is divided by .*, others by other numbers, and its count is 6"
_DIVIDED = "is divided by 4, as many as there are micro-batches"
WRONG: dict[str, tuple[Program, str]] = {
    "forgotten": (lambda f: (f.ce(), f.tokens), _TWICE),
    "forgotten, of samples": (lambda f: (f.ce1(), f.samples), _TWICE),
    "forgotten, counted on the device": (lambda f: (f.ce(), f.mask.sum()), _TWICE),
    "forgotten, cast": (lambda f: (f.ce1().double().mean(), f.samples), _TWICE),
    "forgotten, squares": (lambda f: (f.mse(), f.samples), _TWICE),
    "forgotten, smooth labels": (lambda f: (f.ce1(label_smoothing=0.1), f.samples), _TWICE),
    "forgotten, soft labels": (lambda f: (F.cross_entropy(f.first, f.soft), f.samples), _TWICE),
    "forgotten, a mean by hand": (lambda f: (f.ce1(reduction="none").mean(), f.samples), _TWICE),
    "forgotten, of a dimension": (lambda f: (f.each().mean(1).mean(0), f.samples), _TWICE),
    "forgotten, of an error": (lambda f: ((f.first - f.soft).pow(2).mean(), f.samples), _TWICE),
    "forgotten, of a mask": (lambda f: ((f.each() * f.mask).sum() / f.mask.sum(), f.tokens), _TWICE),
    "forgotten, of what is left": (lambda f: (f.each()[f.mask].mean(), f.tokens), _TWICE),
    "forgotten, of a batch": (
        lambda f: (F.kl_div(f.first.log_softmax(1), f.soft, reduction="batchmean"), f.samples),
        _TWICE,
    ),
    "forgotten, two": (lambda f: (f.ce1() + 0.1 * f.mse(), f.samples), _TWICE),
    "forgotten, a likelihood": (lambda f: (-(f.soft * f.first.log_softmax(1)).sum(1).mean(), f.samples), _TWICE),
    "forgotten, mixed labels": (
        lambda f: (0.3 * f.ce1() + 0.7 * F.cross_entropy(f.first, f.of_samples.flip(0)), f.samples),
        _TWICE,
    ),
    "forgotten, beside a mean by hand": (lambda f: (f.ce1() + f.kl(), f.samples), _TWICE),
    "forgotten, beside an entropy": (
        lambda f: (f.ce1() + 0.01 * f.first.square().sum() / f.samples, f.samples),
        _TWICE,
    ),
    "forgotten, as many as samples": (
        lambda f: (f.ce1() + 0.5 * f.mse() + sum(f.first[:, i].square().mean() for i in (0, 1, 2, 0)), f.samples),
        _TWICE,
    ),
    "forgotten, rows": (lambda f: (f.ce(), f.samples), _TWICE),
    "forgotten, half of a square": (lambda f: (0.5 * f.mse(), f.samples), _TWICE),
    "forgotten, weighed": (lambda f: (0.25 * f.ce(), f.tokens), _TWICE),
    "forgotten, a loop of samples": (lambda f: (torch.stack(f.loop()).mean(), f.samples), _TWICE),
    "forgotten, a sum of a loop": (lambda f: (sum(f.loop()) / SAMPLES, f.samples), _TWICE),
    "forgotten, two stacked": (lambda f: (torch.stack([f.ce1(), f.mse()]).mean(), f.samples), _TWICE),
    "forgotten, smoothed by hand": (
        lambda f: (0.7 * f.ce1(reduction="sum") / f.samples + f.smooth(), f.samples),
        _TWICE,
    ),
    "divided, by the window's": (lambda f: (f.ce1(reduction="sum") / 24, f.samples), "is divided by 24, as many as"),
    "forgotten, beside a sum": (lambda f: (f.ce1(reduction="sum") + f.mse(), f.samples), _TWICE),
    "forgotten, an auxiliary": (lambda f: (f.ce1(reduction="sum") + 0.1 * f.first.pow(2).mean(), f.samples), _TWICE),
    "forgotten, a long auxiliary": (lambda f: (f.ce1(reduction="sum") + 2 * f.first.pow(2).mean(), f.samples), _TWICE),
    "divided": (lambda f: (f.ce() / 4, f.tokens, "mean"), _DIVIDED),
    "divided, a sum": (lambda f: (f.ce(reduction="sum") / 4.0, f.tokens), _DIVIDED),
    "divided, two": (lambda f: ((f.ce1() + 0.1 * f.mse()) / 4, f.samples, "mean"), _DIVIDED),
    "scaled": (lambda f: (SCALE * f.ce(), f.tokens, "mean"), _SCALED),
    "scaled, a sum": (lambda f: (f.ce(reduction="sum") * SCALE, f.tokens), _SCALED),
    "scaled, unknown": (lambda f: (Doubled.apply(f.ce()) * SCALE, f.tokens, "mean"), _SCALED),
    "class weights": (lambda f: (f.ce1(weight=WEIGHT), f.samples, "mean"), _OTHER),
    "class weights, times": (lambda f: (f.ce1(weight=WEIGHT) * f.samples, f.samples), _OTHER),
    "class weights, beside another": (lambda f: (f.ce1(weight=WEIGHT) + f.mse(), f.samples, "mean"), _OTHER),
    "rows for tokens": (lambda f: (f.ce(), f.samples, "mean"), _OTHER),
    "padding, too": (lambda f: (f.ce(), f.labels.numel(), "mean"), _OTHER),
    "weights by hand": (lambda f: (f.by_hand(f.first.detach()[:, :1].exp()), f.samples, "mean"), _BY_HAND),
    "a mask by hand": (lambda f: (f.by_hand((f.first[:, :1] > 0).float()), f.samples, "mean"), _BY_HAND),
    "a running scale": (lambda f: (f.mse(reduction="sum") / float(f.first.detach().norm()), f.samples), _BY_HAND),
    "before the shift": (
        lambda f: (F.cross_entropy(f.logits[:, :-1].flatten(0, 1), f.labels[:, 1:].flatten()), f.tokens, "mean"),
        _OTHER,
    ),
}


def loader(size: int = SAMPLES) -> Any:
    """One window, of four micro-batches on one rank."""
    generator, data = torch.Generator().manual_seed(0), []
    for i in range(size * MICRO_BATCHES):
        labels = torch.randint(CLASSES, (LENGTH,), generator=generator)
        labels[LENGTH - i * i % LENGTH % 4 :] = -100
        data.append((torch.randn(LENGTH, 4, generator=generator), labels))
    return torch.utils.data.DataLoader(data, batch_size=size)  # type: ignore[arg-type]


def accumulator(world: World, size: int = SAMPLES, **options: Any) -> tuple[nn.Linear, Accumulator]:
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES)
    sizes = {"global_batch_size": size * MICRO_BATCHES, "micro_batch_size": size}
    return model, Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world, **sizes, **options)


def train(world: World, program: Program, size: int = SAMPLES, *, verify: str = "first") -> bool:
    """Runs the window of a loop; whether a weight has moved."""
    model, acc = accumulator(world, size, verify=verify)
    before = model.weight.detach().clone()
    try:
        for inputs, labels in acc.batches(loader(size)):
            with acc.accumulate():
                loss, count, *reduction = program(Forward(acc.model(inputs), labels, model.weight))
                acc.backward(loss, count, reduction=reduction[0] if reduction else "sum")
    except VerificationError:
        assert torch.equal(before, model.weight), "a weight has moved"
        raise
    finally:
        acc.close(alone=True)
    return not torch.equal(before, model.weight)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_trains(gloo_world: World, name: str) -> None:
    assert train(gloo_world, RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_before_a_weight_moves(gloo_world: World, name: str) -> None:
    program, said = WRONG[name]
    with pytest.raises(VerificationError, match=said):
        train(gloo_world, program)
    assert train(gloo_world, program, verify="never")


LENGTHS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {  # of losses and mask, and whether it is right
    "each by its own": (lambda each, mask: (each.sum(1) / mask.sum(1)).sum(), True),
    "a mean, times its share": (lambda each, mask: (each.mean(1) / mask.float().mean(1)).sum(), True),
    "the longest, undone": (lambda each, mask: each.mean(1).sum() * mask.shape[1], True),
    "a number, undone": (lambda each, mask: (0.5 * each.sum(1) / mask.sum()).sum() * mask.sum(), True),
    "the longest": (lambda each, mask: each.mean(1).sum(), False),
    "the longest, a number": (lambda each, mask: -2 * (-each.sum(1) / mask.shape[1]).sum(), False),
    "the longest, a mask": (lambda each, mask: ((each + 1) * mask).mean(1).sum(), False),
    "the longest, filled": (lambda each, mask: (each + 1).masked_fill(~mask, 0).mean(1).sum(), False),
}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", LENGTHS)
def test_rows_that_are_divided_by_what_a_micro_batch_is_padded_to_are_refused(
    gloo_world: World, name: str, padded: bool
) -> None:
    program, right = LENGTHS[name]
    lengths, taken = [[5, 2, 3, 4, 1, 5], [4, 4, 1, 2, 3, 3], [5, 5, 5, 5, 5, 5], [2, 1, 1, 2, 2, 1]], iter(range(4))

    def cut(f: Forward) -> tuple[Any, ...]:
        ends = torch.tensor(lengths[next(taken)])
        mask = torch.arange(int(ends.max()) if padded else LENGTH) < ends[:, None]
        labels = f.labels[:, :1].expand(mask.shape).masked_fill(~mask, -100)
        each = F.cross_entropy(f.logits[:, : mask.shape[1]].flatten(0, 1), labels.flatten(), reduction="none")
        return program(each.view(mask.shape), mask), f.samples

    with pytest.raises(VerificationError, match="is padded, and") if padded and not right else nullcontext():
        train(gloo_world, cut)


@pytest.mark.parametrize("told", [True, False])
def test_a_mean_of_samples_beside_one_of_labels_is_told(
    gloo_world: World, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    train(gloo_world, lambda f: (f.ce() + (f.mse() if told else f.each()[f.mask].square().mean()), f.tokens, "mean"))
    assert ("adds a mean over 6 (MseLoss) to one over its count" in caplog.text) == told


EYE = torch.eye(CLASSES)
PENALTIES: dict[str, tuple[Program, bool]] = {  # and whether it is told
    "once": (lambda f: (f.ce1(reduction="sum") + 0.1 * f.head.pow(2).sum(), f.samples), True),
    "once, for other counts": (lambda f: (f.ce(reduction="sum") + 0.2 * f.head.pow(2).sum(), f.tokens), True),
    "once, a learned weight": (
        lambda f: (f.ce1(reduction="sum") * (-f.head.sum()).exp() + f.head.sum(), f.samples),
        True,
    ),
    "once, from constants": (lambda f: (f.mse(reduction="sum") + (f.head - EYE[:, :1]).norm() / 2, f.samples), True),
    "once, of products": (
        lambda f: (f.ce1(reduction="sum") + 0.5 * (f.head @ f.head.t() - EYE).square().sum(), f.samples),
        True,
    ),
    "once, of each row": (lambda f: (f.ce(reduction="sum") + sum(row.norm() for row in f.head), f.tokens), True),
    "of a mean": (lambda f: (f.ce() + 0.1 * f.head.pow(2).sum(), f.tokens, "mean"), False),
    "times samples": (lambda f: (f.ce1(reduction="sum") + 0.1 * f.samples * f.head.pow(2).sum(), f.samples), False),
    "times tokens": (lambda f: (f.ce(reduction="sum") + 0.3 * (f.tokens * f.head.abs().sum()), f.tokens), False),
    "times a tensor": (lambda f: (f.ce(reduction="sum") + f.mask.sum() * f.head.abs().mean(), f.mask.sum()), False),
    "times other labels": (lambda f: (f.ce(reduction="sum") + f.tokens * f.head.abs().mean(), f.samples), False),
    "shared out": (lambda f: (f.ce1(reduction="sum") + 0.1 * 24 / 4 * f.head.pow(2).sum(), f.samples), False),
    "of each sample": (lambda f: (f.ce1(reduction="sum") + f.head.sum().expand(f.samples).sum(), f.samples), False),
    "of samples' rows": (lambda f: (f.ce1(reduction="sum") + f.head[f.of_samples].pow(2).sum(), f.samples), False),
    "of samples": (lambda f: (f.ce1(reduction="sum") + (f.soft * f.head.sum()).sum(), f.samples), False),
    "of inputs": (lambda f: (f.ce1(reduction="sum") + (f.soft.sum(0) @ f.head).square().sum(), f.samples), False),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_term_of_the_weights_alone_that_each_micro_batch_adds_once_is_told(
    gloo_world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    program, told = PENALTIES[name]
    train(gloo_world, program)
    assert ("a term of the weights alone is added to the loss once for each micro-batch" in caplog.text) == told


@pytest.mark.parametrize(("size", "weight"), [(5, 0.1), (4, 0.1), (4, 0.5)])  # 0.02 and 0.025 may be written, too
def test_a_short_factor_of_a_mean_beside_a_sum_is_refused(gloo_world: World, size: int, weight: float) -> None:
    with pytest.raises(VerificationError, match=_TWICE):
        train(gloo_world, lambda f: (f.ce1(reduction="sum") + weight * f.first.pow(2).mean(), f.samples), size)
    assert train(gloo_world, lambda f: (f.ce1(reduction="sum") + weight * f.first.pow(2).sum(), f.samples), size)


@pytest.mark.parametrize("size", [MICRO_BATCHES, MICRO_BATCHES + 1])
def test_a_mean_over_as_many_samples_as_there_are_micro_batches_is_not_divided_by_these(
    gloo_world: World, size: int
) -> None:
    with pytest.raises(VerificationError, match=_DIVIDED):
        train(gloo_world, lambda f: (f.ce1() / 4, f.samples, "mean"), size)
    programs: list[Program] = [
        lambda f: (f.ce1() / f.samples * f.samples, f.samples, "mean"),
        lambda f: (f.ce1(reduction="sum") / f.samples * f.samples, f.samples),
        lambda f: (f.ce1(reduction="sum") / f.samples, f.samples, "mean"),
        lambda f: (0.25 * f.ce1(), f.samples, "mean"),
        lambda f: ((f.ce1() + f.mse() + f.mse() + f.ce1()) / 4, f.samples, "mean"),
        lambda f: (f.first.abs().sum(1).mean() / 2, f.samples, "mean"),
    ]
    for right in programs:
        assert train(gloo_world, right, size)


def test_losses_over_themselves_are_refused_beside_a_micro_batch_of_one_number(gloo_world: World) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = Accumulator(model, optimizer, global_batch_size=7, micro_batch_size=2, world=gloo_world)

    def run() -> None:
        for inputs in acc.batches(list(torch.randn(7, 4))):
            with acc.accumulate():
                output = acc.model(inputs)
                first, second = (output[:, i].square().sum() for i in range(2))
                acc.backward(first / first.detach() + second / second.detach(), len(inputs))

    with pytest.raises(VerificationError, match=_BY_HAND.replace("6", "2")):
        run()


class OfFunction:
    def __init__(self, program: Program) -> None:
        self._program = program

    def count(self, batch: Any) -> float:
        return float(self._program(Forward(torch.zeros(*batch[1].shape, CLASSES), batch[1], WEIGHT))[1])

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss, count, *mean = self._program(Forward(model(batch[0]), batch[1], WEIGHT))
        return from_mean(loss, count) if mean else loss


@pytest.mark.parametrize("name", ["divided", "scaled, a sum", "class weights", "before the shift"])
def test_a_loss_function_is_refused_alike(gloo_world: World, name: str) -> None:
    loss = OfFunction(WRONG[name][0])
    model, acc = accumulator(gloo_world, count=loss.count)
    before, windows = model.weight.detach().clone(), acc.windows(loader())
    window = next(windows)
    with pytest.raises(VerificationError, match=WRONG[name][1]):
        acc.step(window, loss)
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize(("name", "verify"), [("forgotten, of samples", "first"), ("forgotten, of samples", "never")])
def test_a_loop_by_hand_is_refused_alike(gloo_world: World, name: str, verify: str) -> None:
    program, said = WRONG[name]
    torch.manual_seed(0)
    model, sizes = nn.Linear(4, CLASSES), {"global_batch_size": SAMPLES * MICRO_BATCHES, "micro_batch_size": SAMPLES}
    engine = create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), gloo_world)
    windows = plan_windows(loader(), gloo_world, count=OfFunction(program).count, verify=verify, **sizes)
    before, window = model.weight.detach().clone(), next(windows(0))
    for i, (inputs, labels) in enumerate(micro.batch for micro in window.micro_batches):
        with engine.micro_step(sync=i == MICRO_BATCHES - 1):
            loss = program(Forward(engine.model(inputs), labels, model.weight))[0]
            engine.backward(normalize_loss(loss, window.counts, engine.gradient_divide_factor))
    with pytest.raises(VerificationError, match=said) if verify == "first" else nullcontext():
        finish_step(engine, window)
    assert torch.equal(before, model.weight) == (verify == "first")
