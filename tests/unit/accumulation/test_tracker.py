"""What a NaN or infinite gradient leads to, and when the host asks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum.accumulation.accumulator import Accumulator
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.distributed.world import World
from distaccum.engines.modules import HostCopy
from distaccum.errors import MisuseError, NonFiniteError
from tests.support.accumulators import Of, over_sgd, weights

pytestmark = pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")  # fp16 is slow on a CPU
SIZE = 4
# Of two layers' output; sample 0 of a batch tells by what to multiply it.
SQUARES = Of(lambda model, batch: (model(batch[:, :3]) * batch[:, 3:]).square().sum())


def _data(bad: set[int], windows: int = 6) -> list[Tensor]:
    """Samples whose last number multiplies the loss; NaN in one of each window of ``bad``."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(windows * SIZE, 4, generator=generator)
    samples[:, 3] = 1.0
    for window in bad:
        samples[window * SIZE + 2, 3] = float("nan")
    return list(samples)


def _accumulator(world: World, *, fused: bool = True, **options: Any) -> Accumulator:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    first, second = model
    optimizers = [
        torch.optim.AdamW(first.parameters(), lr=0.01, fused=fused),
        torch.optim.SGD(second.parameters(), lr=0.01, momentum=0.9, fused=fused),
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5) for optimizer in optimizers]
    # A loader without shuffling keeps the order: window k is known by its samples.
    return Accumulator(
        model,
        optimizers,
        global_batch_size=SIZE,
        micro_batch_size=2,
        count=SQUARES.count,
        scheduler=schedulers,
        world=world,
        **options,
    )


def _loader(data: list[Tensor]) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def _rates(acc: Accumulator) -> list[float]:
    return [float(group["lr"]) for optimizer in acc.engine._optimizers for group in optimizer.param_groups]  # type: ignore[attr-defined]


def _run(acc: Accumulator, data: list[Tensor], epochs: int = 1) -> None:
    for _ in range(epochs):
        for window in acc.windows(_loader(data)):
            acc.step(window, SQUARES)


def _run_by_hand(acc: Accumulator, data: list[Tensor]) -> None:
    for window in acc.windows(_loader(data)):
        for micro in window:
            with acc.accumulate():
                acc.backward(SQUARES(acc.model, micro.batch))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_skipped_window_moves_the_data_on_and_nothing_else(gloo_world: World, precision: str, fused: bool) -> None:
    acc = _accumulator(gloo_world, fused=fused, precision=precision, nonfinite="skip")
    data, seen = _data({2}), []
    for k, window in enumerate(acc.windows(_loader(data))):
        before, rates = weights(acc), _rates(acc) if k != 3 else None
        acc.step(window, SQUARES)
        assert acc.last is not None
        seen.append(
            (acc.last.applied, acc.last.loss_scale, acc.progress.step, acc.progress.window, acc.progress.nonfinite)
        )
        same = all(torch.equal(a, b) for a, b in zip(before, weights(acc), strict=True))
        assert same is (k == 2)
        if k == 2:
            assert _rates(acc) == rates
            assert not acc.last.grad_norm.isfinite()
    high, low = (65536.0, 32768.0) if precision == "fp16" else (1.0, 1.0)
    assert seen == [
        (True, high, 1, 1, 0),
        (True, high, 2, 2, 0),
        (False, high, 2, 3, 1),
        (True, low, 3, 4, 1),
        (True, low, 4, 5, 1),
        (True, low, 5, 6, 1),
    ]
    assert (acc.progress.skipped, acc.progress.samples, acc.progress.epoch) == (1, 24, 1)
    assert _rates(acc) == [0.01 * 0.5**5] * 2
    assert all(weight.isfinite().all() for weight in weights(acc))


@pytest.mark.parametrize("bad", [0, 2])  # the first one too, in which optimizers would make their state
def test_the_rest_equals_a_run_that_never_saw_the_window(gloo_world: World, bad: int) -> None:
    spoiled, clean = _data({bad}), _data(set())
    runs = []
    for data in (spoiled, clean[: bad * SIZE] + clean[(bad + 1) * SIZE :]):
        acc = _accumulator(gloo_world, nonfinite="skip")
        _run(acc, data)
        runs.append(weights(acc))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_by_default_it_stops_and_says_where(gloo_world: World, fused: bool) -> None:
    acc = _accumulator(gloo_world, fused=fused)
    good = _accumulator(gloo_world, fused=fused)
    data = _data({2})
    _run(good, _data(set(), windows=2))
    with pytest.raises(NonFiniteError) as caught:
        _run(acc, data)
    message = str(caught.value)
    for part in ("window 3 ", "0.weight", "rank 0 in micro-batch 1 (samples 10, 11)", "rank 0: 8, 9, 10, 11", "step 2"):
        assert part in message, message
    assert all(torch.equal(a, b) for a, b in zip(weights(acc), weights(good), strict=True))
    assert (acc.progress.step, acc.progress.nonfinite) == (
        2,
        1,
    )  # asking for them raises nothing: one rank may do it alone
    state = acc.state_dict()  # raised once, and the weights are good
    assert all(value.isfinite().all() for value in state["model"].values())
    _run(acc, data)  # goes on with the window that had begun
    assert (acc.progress.step, acc.progress.window, acc.progress.epoch) == (5, 6, 1)


def test_skips_in_a_row_have_an_end(gloo_world: World) -> None:
    acc = _accumulator(gloo_world, nonfinite="skip", max_skips=3)
    with pytest.raises(NonFiniteError, match="3 in a row"):
        _run(acc, _data({0, 1, 3, 4, 5}))  # two, and three
    assert (acc.progress.step, acc.progress.window, acc.progress.nonfinite) == (1, 6, 5)


def test_in_a_row_goes_on_from_epoch_to_epoch(gloo_world: World) -> None:
    acc = _accumulator(gloo_world, nonfinite="skip", max_skips=3)
    data = _data({0, 5})
    _run(acc, data, epochs=2)  # 5, 0
    acc = _accumulator(gloo_world, nonfinite="skip", max_skips=2)
    with pytest.raises(NonFiniteError, match="2 in a row"):
        _run(acc, data, epochs=2)


@pytest.mark.parametrize(("nonfinite", "stops"), [("stop", 1), ("skip", 4)])
def test_a_static_scale_cannot_fall_and_a_dynamic_one_falls_first(
    gloo_world: World, nonfinite: str, stops: int
) -> None:
    static = PrecisionConfig(name="fp16", scaler=ScalerConfig(static_scale=128.0))
    acc = _accumulator(gloo_world, precision=static, nonfinite=nonfinite, max_skips=4)
    with pytest.raises(NonFiniteError, match="loss scale 128"):
        _run(acc, _data(set(range(6))))
    assert acc.progress.nonfinite == stops
    dynamic = PrecisionConfig(name="fp16", scaler=ScalerConfig(initial_scale_power=3, min_scale=2.0))
    acc = _accumulator(gloo_world, precision=dynamic, nonfinite=nonfinite, max_skips=3)
    with pytest.raises(NonFiniteError, match="3 in a row, loss scale 2"):
        _run(acc, _data(set(range(6))))
    assert acc.progress.nonfinite == 5  # 8, 4, and 2 three times
    acc = _accumulator(gloo_world, precision=dynamic, nonfinite=nonfinite)
    _run(acc, _data({0}, windows=1))
    acc.tracker._forgive(["rank 1 gave it up"], here=False)  # at a scale that falls, where nothing is counted in a row
    assert (acc.progress.nonfinite, acc.tracker.skips_in_a_row) == (0, 0)


def test_the_host_asks_at_the_next_boundary_or_when_somebody_wants_to_know(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    read = HostCopy.read
    monkeypatch.setattr(HostCopy, "read", lambda copy: (asked.append("read"), read(copy))[1])
    acc = _accumulator(gloo_world)
    for k, window in enumerate(acc.windows(_loader(_data(set())))):
        asked.clear()
        acc.step(window, SQUARES)
        assert acc.tracker.known_progress.step == k  # the last one is not asked for yet
        assert acc.tracker.if_applied.step == k + 1
        if k >= 2:  # the first step, which makes the state, is decided on the host
            assert set(asked) == {"read"}
            assert len(asked) <= 3  # of the attempt before: whether it was applied, finite, and its scale
        if k == 4:
            assert acc.progress.step == 5
            assert acc.tracker.known_progress.step == 5
            break
    assert _rates(acc) == [0.01 * 0.5**5] * 2


def test_a_loop_of_ones_own_is_told_what_is_known_there(gloo_world: World) -> None:
    """There is no loss to call again; parameters and samples are named all the same."""
    acc = _accumulator(gloo_world)
    with pytest.raises(NonFiniteError, match=r": of 0\.weight, .* Its samples are rank 0: 20, 21, 22, 23\."):
        _run_by_hand(acc, _data({5}))


def test_a_minimum_that_fp32_rounds_is_reached(gloo_world: World) -> None:
    tenth = PrecisionConfig(name="fp16", scaler=ScalerConfig(initial_scale_power=0, min_scale=0.1))
    acc = _accumulator(gloo_world, precision=tenth, max_skips=2)
    with pytest.raises(NonFiniteError, match=r"2 in a row, loss scale 0\.1"):
        _run(acc, _data(set(range(6))))


@pytest.mark.parametrize("per_sample", [1.0, 3.0, 1e5, 1e-3])
def test_a_count_that_is_known_late_does_not_strain_fp16(gloo_world: World, per_sample: float) -> None:
    """Long samples: a provisional count far from the true one would make what fp16 holds as far too large."""
    scales = []
    for late in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        count = None if late else lambda batch: per_sample * len(batch)
        acc = Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            global_batch_size=SIZE,
            micro_batch_size=2,
            count=count,
            precision=PrecisionConfig(name="fp16", scaler=ScalerConfig(initial_scale_power=12)),
            world=gloo_world,
        )
        loader = _loader(_data(set(), windows=12))
        for k, window in enumerate(acc.windows(loader)):
            for micro in window:
                with acc.accumulate():
                    total = per_sample * acc.model(micro.batch[:, :3]).float().abs().sum()
                    acc.backward(total, per_sample * len(micro.batch))
            if k == 5:
                acc.load_state_dict(acc.state_dict())
                break
        for window in acc.windows(loader):
            for micro in window:
                with acc.accumulate():
                    total = per_sample * acc.model(micro.batch[:, :3]).float().abs().sum()
                    acc.backward(total, per_sample * len(micro.batch))
        assert acc.last is not None
        scales.append((acc.last.loss_scale, acc.progress.nonfinite, acc.progress.window))
    (scale, skipped, windows), (late_scale, late_skipped, late_windows) = scales
    assert (scale, skipped, windows, late_windows) == (4096.0, 0, 12, 12)
    assert late_skipped <= 1  # the first window, before anything is known
    assert late_scale >= 2048.0


def test_a_total_of_16_bits_is_refused(gloo_world: World) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters())
    acc = Accumulator(model, optimizer, precision="bf16", global_batch_size=4, micro_batch_size=4, world=gloo_world)
    window = next(acc.windows(_data(set(), windows=1)))
    micro = next(iter(window))
    with pytest.raises(MisuseError, match=r"torch\.bfloat16, which rounds a sum"), acc.accumulate():
        acc.backward(acc.model(micro.batch[:, :3]).abs().sum(), 4)


def test_an_abandoned_window_of_a_stream_is_given_again(gloo_world: World) -> None:
    class Endless:
        def __iter__(self) -> Iterator[Tensor]:
            samples = _data({1}, windows=4)
            yield from (torch.stack(samples[i : i + 2]) for i in range(0, len(samples), 2))

    model = nn.Linear(3, 1)
    acc = over_sgd(model, 0.01, (SIZE, 2), count=SQUARES.count, world=gloo_world)
    stream, seen = Endless(), []

    def run() -> None:
        for window in acc.windows(stream):
            seen.append(next(iter(window.plain.ids()))[0])
            acc.step(window, SQUARES)

    with pytest.raises(NonFiniteError):
        run()
    run()
    assert seen == [0, 2, 4, 4, 6]  # the first of each window's micro-batches
    assert (acc.progress.step, acc.progress.window, acc.progress.samples, acc.progress.epoch) == (3, 4, 16, 1)


def test_a_state_asked_for_on_one_rank_raises_without_the_others(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for ranks that are elsewhere, and nobody would hear of the NaN."""
    acc = _accumulator(gloo_world)
    window = next(windows := acc.windows(_loader(_data({0}))))
    acc.step(window, SQUARES)
    monkeypatch.setattr(World, "all_gather_names", lambda *_: pytest.fail("a collective"))
    with pytest.raises(NonFiniteError, match=r"rank 0: 0, 1, 2, 3"):
        acc.state_dict()
    windows.close()
