"""The loss in chunks beside whole logits in fp64, and beside what plain fp32 (or autocast) makes of the same batch."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distaccum import DataSpec, World
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config, Zero1Config
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.base import Loss
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.losses.linear_cross_entropy import linear_cross_entropy
from distaccum.models.cnn import CNN
from distaccum.models.gpt import GPT
from tests.support.accumulators import over_sgd
from tests.support.threads import run_ranks

TOKENS, WIDTH, ROWS, CLASSES, CHUNK = 300, 48, 520, 509, 64
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def _labels() -> Tensor:
    labels = torch.randint(CLASSES, (TOKENS,), generator=torch.Generator().manual_seed(1))
    labels[::5] = -100
    return labels


LABELS = _labels()
WEIGHTS = torch.rand(TOKENS, generator=torch.Generator().manual_seed(2))


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((TOKENS, WIDTH), 1.0), ((ROWS, WIDTH), 0.1), ((ROWS,), 0.1)
    return [torch.randn(size, generator=generator, dtype=torch.float64) * scale for size, scale in sizes]


def _whole(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)[:, :CLASSES]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    each = F.cross_entropy(logits, LABELS, ignore_index=-100, reduction="none")
    return (each * WEIGHTS).sum()


def _chunked(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, LABELS, bias, weights=WEIGHTS, chunk=CHUNK, classes=CLASSES)


def _run(head: Head, dtype: torch.dtype, cast: torch.dtype | None = None, factor: float = 1 / 240) -> list[Tensor]:
    """The sum, and its gradients times ``factor``."""
    leaves = [part.to(dtype, copy=True).requires_grad_() for part in _inputs()]
    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
        total = head(*leaves)
    (total * factor).backward()
    return [total.detach(), *(leaf.grad / factor for leaf in leaves)]  # type: ignore[operator]


def _errors(found: list[Tensor]) -> list[float]:
    truth = _run(_whole, torch.float64)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_its_gradient_is_as_near_to_the_true_one_as_that_of_whole_logits(cast: torch.dtype | None) -> None:
    loss, *gradients = _errors(_run(_chunked, torch.float32, cast))
    plain_loss, *plain = _errors(_run(_whole, torch.float32, cast))
    print(cast, "chunked", loss, gradients, "whole", plain_loss, plain)
    assert all(own <= 1.2 * other for own, other in zip(gradients, plain, strict=True))
    assert loss <= 2 * max(plain_loss, 2.0**-24)  # a single number may be right by luck


def test_fp64_is_exact_and_a_second_backward_gives_the_same() -> None:
    assert max(_errors(_run(_chunked, torch.float64))) < 1e-14
    leaves = [part.requires_grad_() for part in _inputs()]
    total = _chunked(*leaves)
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    second = torch.autograd.grad(3 * total, leaves)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(other, 3 * one, rtol=1e-9, atol=1e-15)


def test_fp16_keeps_what_only_the_loss_scale_makes_representable() -> None:
    """The gradient of a logit here is 2e-9 times the scale, and fp16 has nothing between 0 and 6e-8."""

    def flat(head: Head) -> Tensor:
        hidden = torch.ones(4, 8).requires_grad_()
        weight, bias = torch.zeros(ROWS, 8), torch.zeros(ROWS)
        weight[1:] = 1e-3
        bias[0] = 20.0  # of a probability of almost 1
        with torch.autocast("cpu", dtype=torch.float16):
            total = head(hidden, weight, bias)
        (total * 2.0**14).backward()
        assert hidden.grad is not None
        return hidden.grad

    labels = torch.zeros(4, dtype=torch.long)
    chunked = flat(lambda h, w, b: linear_cross_entropy(h, w, labels, b, chunk=3))
    whole = flat(lambda h, w, b: F.cross_entropy(F.linear(h, w, b).float(), labels, reduction="sum"))
    assert whole.abs().min() > 0
    torch.testing.assert_close(chunked, whole, rtol=1e-2, atol=0)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *found, 0)
        return result


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_no_tensor_of_tokens_times_vocabulary_is_made(cast: torch.dtype | None) -> None:
    sizes = []
    for head in (_whole, _chunked):
        with _Largest() as largest:
            _run(head, torch.float32, cast)
        sizes.append(largest.elements)
    assert sizes == [TOKENS * ROWS, CHUNK * ROWS]  # a chunk's logits


def test_scores_are_those_of_whole_logits_and_no_tensor_of_them_is_made() -> None:
    hidden, weight, bias = (part.float() for part in _inputs())
    logits = F.linear(hidden, weight, bias)[:, :CLASSES]
    labels = torch.where(torch.arange(TOKENS) % 3 == 0, logits.argmax(1), LABELS)
    labels[::5] = -100
    with _Largest() as largest:
        loss, right = linear_cross_entropy(
            hidden, weight, labels, bias, weights=WEIGHTS, chunk=CHUNK, classes=CLASSES, scores=True
        )
    assert largest.elements == CHUNK * ROWS
    each = F.cross_entropy(logits.double(), labels, reduction="none") * WEIGHTS
    assert loss.item() == pytest.approx(each.sum().item(), rel=1e-6)
    assert right.item() == pytest.approx((WEIGHTS * (logits.argmax(1) == labels)).sum().item(), rel=1e-6)


def test_a_frozen_weight_costs_no_gradient() -> None:
    hidden, weight, bias = (part.float() for part in _inputs())
    hidden.requires_grad_()
    with _Largest() as largest:
        _chunked(hidden, weight, bias).backward()
    assert weight.grad is None
    assert largest.elements == CHUNK * ROWS
    truth = _run(_whole, torch.float64)[1]
    torch.testing.assert_close(hidden.grad, truth.float(), rtol=1e-4, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(MisuseError, match=r"hidden states of shape \[2, 3, 4\] for labels of shape \[2, 4\]"):
        linear_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(9, 4), torch.zeros(2, 4).long())


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=37, seq_len=12, n_layer=2, n_head=2, n_embd=16)


def _samples(number: int) -> list[tuple[Tensor, Tensor]]:
    """Some labels are ignored, of some samples more than of others."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(37, (number, 13), generator=generator)
    ignored = torch.rand(number, 12, generator=generator) < torch.rand(number, 1, generator=generator)
    return list(zip(ids[:, :-1], ids[:, 1:].masked_fill(ignored, -100), strict=True))


def _batch(number: int) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*_samples(number), strict=True)
    return torch.stack(inputs), torch.stack(labels)


def test_the_models_own_loss_and_scores_are_those_of_its_logits() -> None:
    model, batch = _gpt().double(), _batch(7)
    own, other = CrossEntropy(chunk=20), CrossEntropy()
    found, wanted = own.scores(model, batch), other.scores(model, batch)
    assert {name: part.item() for name, part in found.items()} == pytest.approx(
        {name: part.item() for name, part in wanted.items()}
    )
    assert own.count(batch) == other.count(batch)
    gradients = [torch.autograd.grad(loss(model, batch), list(model.parameters())) for loss in (own, other)]
    for one, another in zip(*gradients, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
# Of torch's own tracer, about every autograd.Function that it meets.
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_a_compiled_model_makes_the_same_loss() -> None:
    batch, losses = _batch(7), []
    for compiled in (False, True):
        model: Any = _gpt()
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        loss = CrossEntropy(chunk=20)(model, batch)
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, traced in zip(*losses, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-6)


ENGINES: dict[str, EngineConfig] = {
    "ddp": DDPConfig(),
    "zero1": Zero1Config(),
    "fsdp2": FSDP2Config(sync="every"),
    "fsdp2, checkpointed": FSDP2Config(activation_checkpoint="blocks"),
}


def _step(world: World, engine: EngineConfig, model: nn.Module, loss: Loss, data: Any) -> dict[str, Tensor]:
    """What the weights lose in one window, in which rank 0 has a micro-batch more than rank 1."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    acc = over_sgd(model, 1.0, (5, 2), count=loss.count, engine=engine, world=world, verify="first")
    for window in acc.windows(data):
        for micro in window:
            with acc.accumulate():
                acc.backward(loss(acc.model, micro.batch))
    after = dict(acc.engine.unwrapped_model.named_parameters())
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in after.items()}
    return {name: before[name] - whole[name].detach() for name in before}


def _error(steps: dict[str, Tensor] | BaseException, truth: nn.Module) -> float:
    """Of a step by the gradient, relative to the 2-norm over all parameters of that of ``truth``."""
    assert isinstance(steps, dict), steps
    gradients = {name: p.grad for name, p in truth.named_parameters() if p.grad is not None}
    wrong = sum(float((steps[name] - gradient).square().sum()) for name, gradient in gradients.items())
    return float((wrong / sum(float(gradient.square().sum()) for gradient in gradients.values())) ** 0.5)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(one, id=name, marks=[] if name in ("ddp", "fsdp2") else pytest.mark.slow)
        for name, one in ENGINES.items()
    ],
)
def test_every_engine_steps_by_the_true_gradient(engine: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    model, (inputs, labels) = _gpt(), _batch(5)
    copies = deepcopy(model), deepcopy(model)
    F.cross_entropy(model.double()(inputs).flatten(0, 1), labels.flatten()).backward()
    data = DataSpec(train=_samples(5), eval_dataset=None, description="tokens")
    loss = CrossEntropy(chunk=7)
    for steps in run_ranks(2, lambda world: _step(world, engine, copies[world.rank], loss, data)):
        assert _error(steps, model) < 5e-7
    if engine.name != "fsdp2":  # whose graphs nobody walks twice
        assert "not verified" not in caplog.text


def test_a_model_that_cannot_make_the_loss_is_refused_before_it_is_trained() -> None:
    model = CNN(channels=2, classes=3)
    with pytest.raises(ConfigError, match=r"loss.chunk=9: CNN.forward has no argument output"):
        CrossEntropy(chunk=9).check_model(model)
    with pytest.raises(ConfigError, match=r"loss.chunk=0: no positive whole number"):
        CrossEntropy(chunk=0)

    class Scaled(nn.Module):
        def forward(self, x: Tensor, output: Head = F.linear) -> Tensor:
            return output(x, torch.zeros(3, 2), torch.zeros(3)).expand(2)

    with pytest.raises(MisuseError, match=r"its result has shape \[2\]: return what output\(.*\) gives, as it is"):
        CrossEntropy(chunk=9)(Scaled(), (torch.zeros(4, 2), torch.zeros(4).long()))


@pytest.mark.parametrize("label", [CLASSES, ROWS - 1])
def test_a_label_in_the_padding_of_the_vocabulary_is_as_far_out_of_bounds_as_with_whole_logits(label: int) -> None:
    hidden, weight, _ = (part.requires_grad_() for part in _inputs())
    labels = LABELS.clone()
    labels[7] = label
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(F.linear(hidden, weight)[:, :CLASSES], labels)
    for scores in (False, True):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            linear_cross_entropy(hidden, weight, labels, chunk=CHUNK, classes=CLASSES, scores=scores)
