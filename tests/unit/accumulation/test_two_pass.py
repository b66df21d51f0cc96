"""Losses that compare the samples of a window: the gradient of one forward, or one message before weights move."""

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, World
from distaccum import functional as da
from distaccum.config.compile import CompileConfig
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.data.cutting import Shape, shape_of
from distaccum.distributed.random import KeyedRandom
from distaccum.errors import ConfigError, MisuseError, PeerError, ResourceError, VerificationError
from distaccum.testing.counters import OperationCounter
from distaccum.tools.diagnose import diagnose
from tests.support import compared, matrix
from tests.support.threads import on_ranks

GLOBAL = 12
SIZES = (29, 26)  # ragged windows of 5, and of 2 samples: ranks have none
EXACT = 1e-12
STATES = {name: compared.make_model(name).state_dict() for name in compared.LOSSES}


def make_model(name: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    """Of the truth's weights, though ranks that are threads draw from one generator."""
    model = compared.make_model(name, dtype, dropout)
    model.load_state_dict(STATES[name])
    return model


def accumulator(world: World, model: nn.Module, loss: Any, *, micro: int = 5, **options: Any) -> Accumulator:
    """Whose windows take the gradient itself from the weights."""
    return Accumulator(
        model,
        SGD(model.parameters(), lr=1.0),
        global_batch_size=options.pop("global_batch_size", GLOBAL),
        micro_batch_size=micro,
        count=loss.count,
        seed=compared.SEED,
        world=world,
        **options,
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def set_flat(model: nn.Module, weights: Tensor) -> None:
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, part in zip(parameters, weights.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(part.view_as(parameter))


def gradients(acc: Accumulator, model: nn.Module, loss: Any, data: Any) -> tuple[list[Tensor], list[float]]:
    """Of each window of an epoch, at the same weights; and the mean losses."""
    start, found, losses = flat(model).clone(), [], []
    for window in acc.windows(data):
        acc.step(window, loss)
        losses.append(acc.mean_loss())
        found.append(start - flat(model))
        set_flat(model, start)
    return found, losses


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("micro", [1, 5, GLOBAL])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", compared.LOSSES)
def test_the_gradient_is_that_of_the_whole_window(name: str, ranks: int, micro: int, size: int) -> None:
    loss = compared.LOSSES[name]()
    truth = compared.truth(name, size, GLOBAL)
    model = make_model(name)
    losses = [compared.mean(loss, model, batch).item() for batch in compared.windows(size, GLOBAL)]

    def rank(world: World) -> Any:
        own = make_model(name)
        acc = accumulator(world, own, loss, micro=micro)
        found = gradients(acc, own, loss, compared.samples(size))
        assert "agrees with plain autograd" in acc.verified
        acc.close()
        return found

    for found, own_losses in on_ranks(ranks, rank):
        assert matrix.error(found, truth) <= EXACT
        assert own_losses == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(("name", "least"), [("contrast", 0.5), ("balanced", 0.3)])
def test_plain_accumulation_is_wrong(gloo_world: World, name: str, least: float) -> None:
    loss, model = compared.LOSSES[name](), make_model(name)
    acc = accumulator(gloo_world, model, loss, verify="never")
    found, _ = gradients(acc, model, compared.ByMicroBatch(loss), compared.samples(29))
    assert matrix.error(found, compared.truth(name, 29, GLOBAL)) > least


@pytest.mark.parametrize("engine", ["zero1", "fsdp2"])
def test_engines_that_shard(engine: str) -> None:
    loss, truth = compared.Contrast(), compared.truth("contrast", 24, GLOBAL)

    def rank(world: World) -> list[float]:
        own = make_model("contrast")
        acc = accumulator(world, own, loss, engine=engine)
        norms = []
        for window in acc.windows(compared.samples(24)):
            norms.append(float(acc.step(window, loss).grad_norm))
            break
        acc.abandon()
        return norms

    for norms in on_ranks(2, rank):
        assert norms == pytest.approx([float(truth[0].norm())], rel=1e-12)


def test_levels_1_and_2_are_the_same(gloo_world: World) -> None:
    loss, found = compared.Contrast(), []
    for level in (1, 2):
        model = make_model("contrast")
        if level == 1:
            engine = da.create_engine(model, SGD(model.parameters(), lr=1.0), gloo_world)
            sizes: Any = {"global_batch_size": GLOBAL, "micro_batch_size": 5, "seed": compared.SEED}
            for window in da.plan_windows(compared.samples(29), gloo_world, **sizes, count=loss.count)(0):
                da.run_window(engine, window, loss)
            engine.close()
        else:
            acc = accumulator(gloo_world, model, loss)
            for open_window in acc.windows(compared.samples(29)):
                acc.step(open_window, loss)
        found.append(flat(model))
    assert torch.equal(*found)


def test_one_reduction_a_window_and_no_read_of_the_device(gloo_world: World) -> None:
    loss, model, found = compared.Contrast(), make_model("contrast"), []
    acc = accumulator(gloo_world, model, loss, micro=2, verify="never", global_batch_size=6)
    for number, window in enumerate(acc.windows(compared.samples(24))):
        with OperationCounter() as counter:
            acc.step(window, compared.ByMicroBatch(loss) if number < 2 else loss)
        found.append((counter.counts["gradient reductions"], counter.counts["device reads"]))
    assert found[0] == found[1] == (1, 0)
    assert found[2] == found[3] == (1, 2)  # on the host: sizes of what the ranks tell each other there


# ------------------------------------------------------------------------------------------ the second forward


class Noisy(nn.Module):
    """Towers with dropout, and noise from NumPy's and Python's generators; counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = make_model("contrast", dropout=0.5)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        self.forwards += 1
        first, second, scale = self.towers(image, text)
        noise = random.random() + float(np.random.rand()) + 0.01 * self.forwards  # noqa: NPY002, S311
        return first * (1 + noise), second + noise * torch.rand_like(second), scale


def _seed_others() -> None:
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002


@pytest.mark.parametrize("keyed", [True, False])
def test_both_passes_draw_the_same(gloo_world: World, keyed: bool) -> None:
    """Beside one graph over all micro-batches, each with its own random numbers and the buffers that come before."""
    loss, sizes = compared.Contrast(), {"global_batch_size": GLOBAL, "micro_batch_size": 5, "seed": compared.SEED}
    whole, model = Noisy(), Noisy()
    engine = da.create_engine(model, SGD(model.parameters(), lr=1.0), gloo_world)
    (window, _) = list(da.plan_windows(compared.samples(24), gloo_world, **sizes, count=loss.count)(0))[:2]
    if not keyed:
        object.__setattr__(window, "keys", ())
    _seed_others()
    torch.manual_seed(8)
    keys, parts = KeyedRandom(gloo_world.device), []
    for i, micro in enumerate(window.micro_batches):
        with keys.keyed(window.keys, i):
            parts.append(loss.represent(whole, micro.batch))
    total = loss({name: torch.cat([part[name] for part in parts]) for name in parts[0]}) / GLOBAL
    expected = torch.autograd.grad(total, list(whole.parameters()))
    drawn = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002, S311
    before = flat(model).clone()
    _seed_others()
    torch.manual_seed(8)
    da.run_window(engine, window, loss)
    found = before - flat(model)
    assert matrix.error([found], [torch.cat([part.flatten() for part in expected])]) <= EXACT
    assert float(model.forwards) == len(window.micro_batches)  # as if each had run once
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn  # noqa: NPY002, S311


class Remembers(nn.Module):
    """Says something else each time, of what no generator and no buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.towers, self.calls = make_model("contrast"), 0

    def forward(self, image: Tensor, text: Tensor) -> Any:
        self.calls += 1
        first, second, scale = self.towers(image, text)
        return first + 0.1 * self.calls, second, scale


def test_a_model_that_remembers_is_refused(gloo_world: World) -> None:
    loss, model = compared.Contrast(), Remembers()
    acc, before = accumulator(gloo_world, model, loss), flat(model).clone()
    words = r"micro-batch 0 of a rank is represented otherwise a second time \(off by .*%\)"
    for window in acc.windows(compared.samples(24)):
        with pytest.raises(MisuseError, match=words):
            acc.step(window, loss)
        break
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("name", [pytest.param("blocks", marks=pytest.mark.slow), "model"])
def test_a_compiled_model(gloo_world: World, name: str) -> None:
    loss, model = compared.Contrast(), make_model("contrast")
    config = CompileConfig(name=name, backend="eager", blocks=["image", "text"] if name == "blocks" else [])
    acc = accumulator(gloo_world, model, loss, compile=config)
    found, _ = gradients(acc, model, loss, compared.samples(29))
    assert matrix.error(found, compared.truth("contrast", 29, GLOBAL)) <= EXACT
    assert "agrees with plain autograd" in acc.verified
    acc.close()


@pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning")
def test_running_statistics_move_once(gloo_world: World) -> None:
    """As with a loss of each micro-batch: the first pass leaves no trace."""
    found = []
    for plain in (True, False):
        loss, model = compared.Contrast(), make_model("contrast")
        encoder: Any = model.image
        encoder.insert(0, nn.BatchNorm1d(compared.FEATURES, dtype=torch.float64))
        acc = accumulator(gloo_world, model, loss, verify="never", micro=4)
        for window in acc.windows(compared.samples(24)[:GLOBAL]):
            acc.step(window, compared.ByMicroBatch(loss) if plain else loss)
        found.append(torch.cat([buffer.double().flatten() for buffer in model.buffers()]))
    assert found[0][-1] == 3
    assert torch.equal(*found)


class Sizes(compared.Contrast):
    """Notes the samples of each batch that it represents."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def represent(self, model: nn.Module, batch: Any) -> Any:
        self.seen.append(len(batch["x"]))
        return super().represent(model, batch)


def test_windows_that_are_run_in_parts(gloo_world: World) -> None:
    """Since another loss has run out of memory with such micro-batches: parts are micro-batches like others."""
    loss, model = Sizes(), make_model("contrast")
    acc = accumulator(gloo_world, model, loss, verify="never")
    acc.engine.memory_marks.fail(Shape(*shape_of(compared.windows(5, 5)[0])))
    found, _ = gradients(acc, model, loss, compared.samples(12))
    assert loss.seen == [2, 3, 2, 3, 2] * 2
    assert matrix.error(found, compared.truth("contrast", 12, GLOBAL)) <= EXACT


# ------------------------------------------------------------------------------------------ number formats


class Seen(compared.Contrast):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def represent(self, model: nn.Module, batch: Any) -> Any:
        first, second, scale = model(batch["x"], batch["twin"])
        return [first * scale.reshape(()), (second, torch.arange(len(first)))]

    def __call__(self, representations: Any) -> Tensor:
        first, (second, numbers) = representations
        self.seen.append(
            (first.dtype, second.dtype, numbers.tolist(), type(representations), torch.is_autocast_enabled("cpu"))
        )
        return super().__call__({"first": first, "second": second})


@pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_representations_of_16_bits_are_compared_in_fp32(gloo_world: World, precision: str) -> None:
    loss, model = Seen(), make_model("contrast", torch.float32)
    policy = PrecisionConfig(name=precision, scaler=ScalerConfig(initial_scale_power=10))
    acc = accumulator(gloo_world, model, loss, precision=policy)
    found, _ = gradients(acc, model, loss, compared.samples(24, torch.float32))
    numbers = [*range(5), *range(5), *range(2)]
    first, twice, second = loss.seen  # the first window is looked at for being a sum
    assert first == second == (torch.float32, torch.float32, numbers, list, False)
    assert twice[2] == 2 * numbers
    assert "agrees with plain autograd" in acc.verified
    whole = make_model("contrast", torch.float64)
    wide = Seen()
    truth = []
    for batch in compared.windows(24, GLOBAL):
        every = torch.autograd.grad(wide(wide.represent(whole, batch)) / GLOBAL, list(whole.parameters()))
        truth.append(torch.cat([each.flatten() for each in every]))
    assert matrix.error(found, truth) <= 8 * 2.0 ** (-8 if precision == "bf16" else -11)


@pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")
def test_the_loss_scale_of_fp16_is_taken_off() -> None:
    loss, truth = compared.Contrast(), compared.truth("contrast", 24, GLOBAL)
    precision = PrecisionConfig(name="fp16", scaler=ScalerConfig(initial_scale_power=12))

    def rank(world: World) -> Any:
        own = make_model("contrast", torch.float32)
        acc = accumulator(world, own, loss, precision=precision)
        found, _ = gradients(acc, own, loss, compared.samples(24, torch.float32))
        assert acc.last is not None
        assert acc.last.loss_scale == 2.0**12
        return found

    for found in on_ranks(2, rank):
        assert matrix.error(found, truth) <= 8 * 2.0**-11


# ------------------------------------------------------------------------------------------ refused


class Learned(compared.Contrast):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))

    def __call__(self, representations: Any) -> Tensor:
        return super().__call__(representations) + self.bias.sum()


class Draws(compared.Contrast):
    def __call__(self, representations: Any) -> Tensor:
        return super().__call__(representations) * float(np.random.rand())  # noqa: NPY002


class Represents(compared.Contrast):
    """What ``make`` makes of a batch's embeddings."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._make = make

    def represent(self, model: nn.Module, batch: Any) -> Any:
        return self._make(super().represent(model, batch)["first"])

    def __call__(self, representations: Any) -> Tensor:
        return representations.sum()


class Gives(compared.Contrast):
    """What ``make`` makes of the loss."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._make = make

    def __call__(self, representations: Any) -> Any:
        return self._make(super().__call__(representations))


class Mean(compared.Contrast):
    """As torch's cross entropy is by default."""

    def __call__(self, representations: Any) -> Tensor:
        return super().__call__(representations) / len(representations["first"])


class OfMeans(compared.Balanced):
    """One of the two is a mean over the window."""

    def __call__(self, representations: Any) -> dict[str, Tensor]:
        sums = super().__call__(representations)
        return {**sums, "balance": sums["balance"] / representations["dealt"].sum()}


REFUSED = {
    "a learned number of the loss": (
        Learned(),
        r"a learned tensor of shape \[3\] past its representations.*temperature",
    ),
    "NumPy's numbers in the loss": (Draws(), "draws from NumPy's or Python's generators, which differ between ranks"),
    "no leading dimension": (Represents(torch.sum), "one has none: use tensor.reshape"),
    "complex numbers": (Represents(lambda t: torch.complex(t, t)), "one is complex"),
    "a number": (Represents(lambda t: {"a": t, "b": 1.0}), "it returns a float"),
    "nothing": (Represents(lambda _: []), "there is none in what it returns"),
    "another width": (Represents(lambda t: t[:, : 1 + len(t)]), r"may differ in the leading dimension alone"),
    "a loss for each sample": (Gives(lambda t: t.expand(3)), "has shape"),
    "a detached loss": (Gives(lambda t: t.detach()), "the loss has no gradient"),
    "a loss of another name": (Gives(lambda t: {"other": t}), "what was counted is"),
    "None": (Gives(lambda _: None), "the loss is None"),
    "a mean": (Mean(), r"the loss has the same .* a mean over the window, .* its count \(12\) a second"),
    "a mean of two": (OfMeans(), "the loss 'balance' has the same gradient for a window and for all of it twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_a_weight_moves(case: str) -> None:
    loss, words = REFUSED[case]
    kind = VerificationError if isinstance(loss, Mean | OfMeans) else MisuseError

    def rank(world: World) -> Any:
        model = make_model("balanced" if isinstance(loss, OfMeans) else "contrast")
        acc = accumulator(world, model, loss)
        before = flat(model).clone()
        for window in acc.windows(compared.samples(17)):
            with pytest.raises(kind, match=words):
                acc.step(window, loss)
            break
        return torch.equal(flat(model), before)

    assert on_ranks(2, rank) == [True, True]


class OfTwelve(compared.Contrast):
    """Takes a window of 12 samples, and no other."""

    def __call__(self, representations: Any) -> Tensor:
        assert len(representations["first"]) == GLOBAL
        return super().__call__(representations)


def test_what_cannot_be_called_with_all_of_it_twice_trains(gloo_world: World) -> None:
    loss, model = OfTwelve(), make_model("contrast")
    acc = accumulator(gloo_world, model, loss)
    found, _ = gradients(acc, model, loss, compared.samples(24))
    assert matrix.error(found, compared.truth("contrast", 24, GLOBAL)) <= EXACT


class FailsOn(compared.Contrast):
    """On rank 1, the n-th time that it represents; or in the loss."""

    def __init__(self, rank: int, call: int, error: Exception, *, in_loss: bool = False) -> None:
        super().__init__()
        self._left, self._error, self._fails_in_loss = call, error, in_loss and rank == 1
        self._fails = rank == 1 and not in_loss

    def represent(self, model: nn.Module, batch: Any) -> Any:
        self._left -= 1
        if self._fails and not self._left:
            raise self._error
        return super().represent(model, batch)

    def __call__(self, representations: Any) -> Tensor:
        if self._fails_in_loss:
            raise self._error
        return super().__call__(representations)


FAILURES: dict[str, tuple[Any, type[Exception], str]] = {
    "an error": ({"call": 2, "error": ZeroDivisionError("by zero")}, ZeroDivisionError, "by zero"),
    "memory": ({"call": 1, "error": torch.OutOfMemoryError("no memory")}, ResourceError, "Lower batch.micro_size"),
    "memory in the loss": (
        {"call": 2, "error": torch.OutOfMemoryError("no memory"), "in_loss": True},
        ResourceError,
        r"representations of shape \[12, 5\], \[12, 5\]: no memory. Lower batch.global_size",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_error_on_one_rank_is_told_to_the_others(case: str) -> None:
    how, kind, words = FAILURES[case]

    def rank(world: World) -> Any:
        model = make_model("contrast")
        loss = FailsOn(world.rank, **how)
        acc = accumulator(world, model, loss, micro=3)
        before = flat(model).clone()
        for window in acc.windows(compared.samples(24)):
            with pytest.raises(kind if world.rank == 1 else PeerError, match=words if world.rank == 1 else None):
                acc.step(window, loss)
            acc.abandon()
            break
        same = torch.equal(flat(model), before)
        for window in acc.windows(compared.samples(24)):  # and the run can go on
            acc.step(window, compared.Contrast())
        return same, float((flat(model) - before).norm())

    (first, moved), (second, also) = on_ranks(2, rank)
    assert first
    assert second
    assert moved == also > 0


def test_memory_that_is_over_in_the_second_pass_is_said(gloo_world: World) -> None:
    loss, model = FailsOn(1, 4, torch.OutOfMemoryError("no memory")), make_model("contrast")
    acc, before = accumulator(gloo_world, model, loss, micro=6), flat(model).clone()
    for window in acc.windows(compared.samples(24)):
        with pytest.raises(ResourceError, match=r"micro-batch 2 of this rank: no memory\. Lower batch\.micro_size"):
            acc.step(window, loss)
        break
    assert torch.equal(flat(model), before)
    assert not acc.engine.memory_marks.failed  # nothing is cut because of it


def test_a_loop_of_ones_own_is_told_to_step(gloo_world: World) -> None:
    loss, model = compared.Contrast(), make_model("contrast")
    acc = accumulator(gloo_world, model, loss)
    for window in acc.windows(compared.samples(24)):
        with pytest.raises(MisuseError, match=r"verify\(\) with a loss that compares.*call acc.step\(window, loss\)"):
            acc.verify(window, loss)
        wrong: Any = loss
        for _ in window:
            with (
                pytest.raises(MisuseError, match=r"Contrast compares the samples.*acc.step\(window, loss\)"),
                acc.accumulate(),
            ):
                acc.backward(wrong)
            break
        with pytest.raises(MisuseError, match=r"diagnose\(\) with a loss that compares"):
            diagnose(acc.engine, window.plain, loss, gloo_world)
        break


def test_nan_is_skipped_and_said(gloo_world: World) -> None:
    loss = Gives(lambda t: t * float("nan"))
    model = make_model("contrast")
    acc, before = accumulator(gloo_world, model, loss, nonfinite="skip"), flat(model).clone()
    outcomes = [acc.step(window, loss).applied for window in acc.windows(compared.samples(24))]
    assert outcomes == [False, False]
    assert torch.equal(flat(model), before)


# ------------------------------------------------------------------------------------------ the micro-batch


def test_the_micro_batch_is_rehearsed(gloo_world: World, caplog: pytest.LogCaptureFixture) -> None:
    loss, model = compared.Balanced(), make_model("balanced")
    optimizer = SGD(model.parameters(), lr=1.0)
    sizes: Any = {"global_batch_size": GLOBAL, "micro_batch_size": "auto", "seed": compared.SEED}
    acc = Accumulator(model, optimizer, **sizes, loss=loss, world=gloo_world)
    with caplog.at_level(logging.WARNING):
        found, _ = gradients(acc, model, loss, compared.samples(24))
    assert acc.rehearsal is not None
    assert acc.rehearsal.micro_size in (1, 2, 4, 8)
    assert matrix.error(found, compared.truth("balanced", 24, GLOBAL)) <= EXACT
    assert not caplog.records


def test_a_rehearsal_wants_a_count(gloo_world: World) -> None:
    model, nothing = make_model("contrast"), Any
    with pytest.raises(ConfigError, match="a rehearsal runs the loss"):
        Accumulator(
            model,
            SGD(model.parameters(), lr=1.0),
            global_batch_size=GLOBAL,
            micro_batch_size="auto",
            loss=nothing,
            world=gloo_world,
        )
