"""The rule of spikes on made-up norms, and level 2's loop with it."""

import copy
import json
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.accumulation.spikes import Spikes
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, SpikeError

NORMS = st.lists(st.floats(0.0, 2.0**20, width=32), min_size=1, max_size=60)


@given(NORMS, st.integers(2, 12), st.floats(0.5, 10.0))
@settings(max_examples=60)
def test_the_rule(norms: list[float], window: int, zscore: float) -> None:
    spikes, kept = Spikes(zscore=zscore, window=window, skips=True), list[float]()
    for norm in norms:
        last, bound = kept[-window:], math.inf
        if len(last) >= window / 2:
            mean = statistics.fmean(last)
            bound = mean + zscore * max(statistics.pstdev(last), mean / 100)
            bound = torch.tensor(bound, dtype=torch.float32).item() or math.inf
        assert spikes.bound == pytest.approx(bound, rel=1e-6)
        bound = spikes.bound
        assert spikes.note(norm) == (norm >= bound)
        kept.append(min(norm, bound))
        copied = Spikes(zscore=zscore, window=window, skips=True)
        copied.load_state_dict(json.loads(json.dumps(spikes.state_dict())))
        assert (copied.bound, copied.metrics["spikes"]) == (spikes.bound, spikes.total)
        spikes = copied


def test_what_is_not_finite_is_no_spike_and_is_not_remembered() -> None:
    spikes = Spikes(zscore=3, window=4, skips=True)
    for norm in (1.0, 1.1, 0.9, 1.0):
        spikes.note(norm)
    before = spikes.state_dict()
    assert not spikes.note(math.nan)
    assert not spikes.note(math.inf)
    assert spikes.state_dict() == before


def test_a_lasting_rise_is_followed() -> None:
    spikes = Spikes(zscore=6, window=20, skips=False)
    for i in range(20):
        spikes.note(1.0 + 0.1 * (i % 2))
    found = [spikes.note(3.0) for _ in range(40)]
    assert found[0]
    assert not any(found[10:])


@pytest.mark.parametrize(
    ("name", "value"), [("on_spike", "rollback"), ("spike_zscore", 0.0), ("spike_window", 1), ("spike_window", 2.5)]
)
def test_settings_that_cannot_work(gloo_world: World, name: str, value: Any) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=f"^{name}={value}"):
        Accumulator(
            model,
            torch.optim.SGD(model.parameters()),
            global_batch_size=2,
            micro_batch_size=1,
            world=gloo_world,
            **{"on_spike": "skip", name: value},
        )


def make(world: World, *, on_spike: str = "skip", **options: Any) -> Accumulator:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return Accumulator(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        global_batch_size=2,
        micro_batch_size=1,
        count=len,
        world=world,
        on_spike=on_spike,
        spike_zscore=8.0,
        spike_window=8,
        **options,
    )


def samples(poisoned: tuple[int, ...]) -> list[Tensor]:
    """Two a window, which are counted from 1."""
    found = list(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) + 1.0)
    for window in poisoned:
        found[2 * window - 1] = found[2 * window - 1] * 1e4
    return found


def train(acc: Accumulator, data: Any, windows: int = 99) -> list[bool]:
    """A loop of a user's own; whether each window was applied."""
    applied = []
    for window in acc.windows(data):
        for micro in window:
            with acc.accumulate():
                acc.backward((acc.model(micro.batch) - 1.0).square().sum())
        assert acc.last is not None
        applied.append(acc.last.applied)
        if len(applied) == windows:
            break
    return applied


def test_a_loop_of_ones_own_skips_them(gloo_world: World) -> None:
    data = torch.utils.data.DataLoader(samples((9, 15)), batch_size=1)  # type: ignore[arg-type]
    acc = make(gloo_world)
    applied = train(acc, data)
    assert [number for number, one in enumerate(applied, 1) if not one] == [9, 15]
    assert (acc.progress.step, acc.progress.window, acc.progress.skipped, acc.progress.nonfinite) == (18, 20, 2, 0)
    assert acc.spikes is not None
    assert acc.spikes.metrics["spikes"] == 2
    # as a loop that never met them
    good = [sample for i, sample in enumerate(samples(())) if i // 2 + 1 not in (9, 15)]
    other = make(gloo_world, on_spike="off")
    assert other.spikes is None
    train(other, torch.utils.data.DataLoader(good, batch_size=1))  # type: ignore[arg-type]
    ours, theirs = acc.engine.unwrapped_model.state_dict(), other.engine.unwrapped_model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_state_dict_goes_on_with_the_same_bound(gloo_world: World) -> None:
    data = torch.utils.data.DataLoader(samples((9, 12)), batch_size=1)  # type: ignore[arg-type]
    whole, first, second = (make(gloo_world) for _ in range(3))
    train(whole, data)
    train(first, data, windows=9)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, data)
    assert second.spikes is not None
    assert whole.spikes is not None
    assert second.spikes.state_dict() == whole.spikes.state_dict()
    ours, theirs = second.engine.unwrapped_model.state_dict(), whole.engine.unwrapped_model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_too_many_in_a_row_end_the_loop(gloo_world: World) -> None:
    data = torch.utils.data.DataLoader(samples((9, 10, 11)), batch_size=1)  # type: ignore[arg-type]
    acc = make(gloo_world, max_skips=2)
    with pytest.raises(SpikeError, match="It is the last of 2 in a row that were skipped"):
        train(acc, data)
    assert acc.progress.step == 8
