"""Right loops over models of every kind are called right, in one process; what the audit changes is restored."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from distaccum import Accumulator, InfoNCE, audit
from distaccum.errors import ConfigError, DataError, MisuseError
from distaccum.testing import single_process_world
from distaccum.tools.audit import command
from distaccum.tools.audit.report import Report

WIDTH, STEPS, WINDOWS = 6, 3, 2


def _silent(report: Report) -> None:
    """In place of printing."""


def _batches() -> list[tuple[Tensor, Tensor]]:
    """Of 1, 2 ... samples, so that a mean of means is wrong."""
    generator = torch.Generator().manual_seed(0)
    sizes = range(2, 2 + STEPS * WINDOWS)
    return [(torch.randn(n, WIDTH, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def count(batch: tuple[Tensor, Tensor]) -> int:
    return len(batch[1])


def _windows() -> Iterator[list[tuple[Tensor, Tensor]]]:
    batches = _batches()
    for at in range(0, len(batches), STEPS):
        yield batches[at : at + STEPS]


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer, scaler: Any = None, **autocast: Any) -> None:
    for window in _windows():
        items = sum(map(count, window))
        for batch in window:
            with torch.autocast("cpu", enabled=bool(autocast), **autocast):
                loss = loss_sum(model, batch) / items
            (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        model.zero_grad()


def _audited(model: nn.Module, *optimizers: torch.optim.Optimizer, **autocast: Any) -> Report:
    """Of a right loop, by SGD over all of the model unless told otherwise."""
    optimizers = optimizers or (torch.optim.SGD(model.parameters(), lr=0.01),)
    with audit(loss_sum=loss_sum, count=count, batches=_batches(), show=_silent) as report:
        _train(model, *optimizers, **autocast)
    return report


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(self.first(x).tanh()))
        return found


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(2, 5, 2, batch_first=True, dropout=0.3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x.unflatten(1, (3, 2)))[0][:, -1])
        return found


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))
        return found


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


class _Fixed(nn.Module):
    """Makes a tensor in fp32 by itself, so that it cannot run in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x.float() @ torch.eye(WIDTH, dtype=torch.float32))
        return found


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    "tied": _Tied,
    "recurrent": _Recurrent,
    "checkpointed": lambda: _Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: _Checkpointed(reentrant=True),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 1)),
    "complex": _Complex,
    "fp32 inside": _Fixed,
    "frozen": _frozen,
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 4, dropout=0.2, batch_first=True),
        nn.Flatten(1),
        nn.Linear(6, 1),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_right_loop_is_right(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probabilities = [
        value for module in model.modules() for key, value in vars(module).items() if key in ("p", "dropout")
    ]
    with audit(model, optimizer, loss_sum=loss_sum, count=count, batches=_batches(), show=_silent) as report:
        _train(model, optimizer)
    assert report.right, str(report)
    assert len(report.findings) == WINDOWS
    assert max(finding.error for finding in report.findings) <= 2e-6
    assert probabilities == [
        value for module in model.modules() for key, value in vars(module).items() if key in ("p", "dropout")
    ]
    assert ("computed in fp32" in str(report)) == (name == "fp32 inside")


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_loss_is_unscaled(fused: bool) -> None:
    """A fused optimizer divides by the scale itself, so that its gradients still hold it."""
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with audit(model, loss_sum=loss_sum, count=count, batches=_batches(), show=_silent) as report:
        _train(model, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    assert report.right, str(report)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_computes_the_gradient_within_the_step(kind: type[torch.optim.Optimizer]) -> None:
    """As in Lightning's loop; and LBFGS, whose first evaluation is that of the weights before the step."""
    model = nn.Linear(WIDTH, 1)
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]

    def closure_on(batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_sum(model, batch) / len(batch[0])
            loss.backward()
            return loss

        return closure

    with audit(loss_sum=loss_sum, count=count, batches=_batches(), show=_silent) as report:
        for batch in _batches():
            optimizer.step(closure_on(batch))  # type: ignore[arg-type]
    assert report.right, str(report)
    assert [finding.micro_batches for finding in report.findings] == [(1,), (1,), (1,)]


def test_two_optimizers_step_together() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1))
    report = _audited(model, *(torch.optim.SGD(part.parameters(), lr=0.01) for part in model))
    assert report.right, str(report)
    assert len(report.findings) == WINDOWS


def test_parameters_that_no_optimizer_steps_on_are_noted() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1))
    report = _audited(model, torch.optim.SGD(model[0].parameters(), lr=0.01))
    assert report.right, str(report)
    assert "no optimizer steps on 1.weight, 1.bias" in str(report)


def test_sixteen_bits_have_their_own_tolerance() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))
    report = _audited(model, dtype=torch.bfloat16)
    assert report.right, str(report)
    assert report.findings[0].error > 1e-4
    assert "audit in fp32" in str(report)


def test_what_rounding_hides_is_told_by_its_direction() -> None:
    """In bf16 a mean of means over nearly equal micro-batches is within the tolerance, and still named."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(torch.randn(n, WIDTH), torch.randn(n, 1) + n) for n in (30, 34, 38)]
    with audit(model, loss_sum=loss_sum, count=count, batches=batches, show=_silent) as report:
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_sum(model, batch) / len(batch[0]) / len(batches)
            loss.backward()
        optimizer.step()
    assert report.findings[0].error < report.findings[0].tolerance
    assert [cause.name for cause in report.causes] == ["mean of means over micro-batches"]


def test_a_forward_that_draws_random_numbers_is_named() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    report = _audited(Noisy(WIDTH, 1))
    assert [cause.name for cause in report.causes] == ["random forward"]


def test_two_forwards_on_one_batch_are_one_micro_batch() -> None:
    model = nn.Linear(WIDTH, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - model(batch[0].flip(1))).square().sum()

    def batch_of(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.flip(1)

    batches = [batch_of(x) for x, _ in _batches()]
    with audit(model, loss_sum=contrast, count=lambda b: len(b[0]), batches=batches, show=_silent) as report:
        for at in range(0, len(batches), STEPS):
            window = batches[at : at + STEPS]
            for x, y in window:
                ((model(x) - model(y)).square().sum() / sum(len(x) for x, _ in window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert report.right, str(report)
    assert report.findings[0].micro_batches == (STEPS,)


def test_batches_come_from_the_loader_and_others_are_left_alone() -> None:
    """Validation with and without gradients, a step of another model, and a loader whose batches are shuffled."""
    torch.manual_seed(0)
    model, other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
    optimizer, others = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, other))
    data = list(zip(torch.randn(18, WIDTH), torch.randn(18, 1), strict=True))
    with audit(model, optimizer, loss_sum=loss_sum, count=count, show=_silent) as report:
        for i, batch in enumerate(DataLoader(data, batch_size=3, shuffle=True)):
            (loss_sum(model, batch) / 9).backward()
            model(torch.randn(2, WIDTH))
            with torch.no_grad():
                model(torch.randn(2, WIDTH))
            loss_sum(other, batch).backward()
            others.step()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert report.right, str(report)
    assert "the batches are the DataLoader's" in str(report)
    assert [finding.micro_batches for finding in report.findings] == [(3,), (3,)]


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_distaccum_is_right(clip_norm: float | None) -> None:
    """Its clip is part of the step; the report says that it hides the factor."""
    torch.manual_seed(0)
    data = list(zip(torch.randn(24, WIDTH), torch.randn(24, 1), strict=True))
    with single_process_world() as world:
        model = nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        acc = Accumulator(
            model, optimizer, global_batch_size=12, micro_batch_size=5, world=world, count=count, clip_norm=clip_norm
        )
        with audit(loss_sum=loss_sum, count=count, show=_silent) as report:
            for batch in acc.batches(DataLoader(data, batch_size=5)):
                with acc.accumulate():
                    acc.backward(loss_sum(acc.model, batch))
        assert report.right, str(report)
        assert ("as the right gradient would be" in str(report)) == (clip_norm is not None)


@pytest.mark.filterwarnings("ignore")  # torch's own, about FSDP on a CPU
def test_flat_shards_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415  a second of imports

    destroy = torch.distributed.destroy_process_group
    with single_process_world():
        model = FullyShardedDataParallel(nn.Linear(WIDTH, 1), device_id=torch.device("cpu"))
        with pytest.raises(MisuseError, match="shard with fully_shard"), audit(model, loss_sum=loss_sum, count=count):
            pass
        with pytest.raises(MisuseError, match="audit at least 1"):
            audit(model, windows=0)
        assert torch.distributed.destroy_process_group is destroy


def test_a_clean_up_after_an_error_asks_nobody() -> None:
    """The error comes out, not what the audit would say of a loop that has not stepped."""

    def failing() -> None:
        with single_process_world():  # which closes the process group on its way out
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), audit(loss_sum=loss_sum, count=count):
        failing()


def test_misuse_is_said_and_everything_restored() -> None:
    call, clip = nn.Module.__call__, torch.nn.utils.clip_grad_norm_
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(MisuseError, match="give both"):
        audit(model, optimizer, loss_sum=loss_sum)
    with pytest.raises(MisuseError, match="no training forward"), audit(loss_sum=loss_sum, count=count):
        pass
    with pytest.raises(MisuseError, match="windows seen by rank are"), audit(model, loss_sum=loss_sum, count=count):
        loss_sum(model, _batches()[0]).backward()
    with (
        pytest.raises(DataError, match="window 1 counts nothing"),
        audit(model, optimizer, loss_sum=loss_sum, count=lambda _: 0, batches=_batches(), show=_silent),
    ):
        _train(model, optimizer)
    with (
        pytest.raises(MisuseError, match="loss_sum failed on a recorded batch, float32"),
        audit(model, optimizer, loss_sum=lambda m, b: m(b["x"]), count=len, show=_silent),
    ):
        _train(model, optimizer)
    with pytest.raises(ZeroDivisionError), audit(model, loss_sum=loss_sum, count=count):
        raise ZeroDivisionError
    assert nn.Module.__call__ is call
    assert torch.nn.utils.clip_grad_norm_ is clip


def test_a_script_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command._main(["absent.py"]) == 2
    assert "script=absent.py: no such file" in capsys.readouterr().err


def test_a_loss_that_compares_samples_is_not_audited() -> None:
    loss: Any = InfoNCE()
    with pytest.raises(MisuseError, match="InfoNCE compares the samples of a whole window"):
        audit(loss_sum=loss, count=loss.count)
    with pytest.raises(ConfigError, match="--loss=distaccum:InfoNCE: compares the samples of a whole window"):
        command._loss("distaccum:InfoNCE")
