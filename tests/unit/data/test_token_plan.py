"""Budgets of tokens: complete, within the budget, and the same for every world size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distaccum.data.plan.stream import StreamPlan
from distaccum.data.plan.tokens import TokenPlan
from distaccum.errors import ConfigError


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    tokens=st.integers(1, 60),
    micro=st.integers(1, 5),
    world=st.integers(1, 5),
    seed=st.none() | st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_windows_are_as_full_as_the_budget_allows(
    *, lengths: list[int], tokens: int, micro: int, world: int, seed: int | None, epoch: int
) -> None:
    def plan(world: int, micro: int) -> TokenPlan:
        return TokenPlan(lengths=np.array(lengths), tokens=tokens, micro_batch_size=micro, world_size=world, seed=seed)

    cut, alone = plan(world, micro).epoch(epoch), plan(1, 1).epoch(epoch)
    order = plan(world, micro).ids(epoch, np.arange(len(lengths)))
    assert sorted(order) == list(range(len(lengths)))
    position = 0
    for k in range(cut.windows_per_epoch):
        window = cut.window(k)
        assert window == alone.window(k)
        assert window.start == position
        held = [lengths[i] for i in order[window.start : window.stop]]
        assert sum(held) <= tokens or len(held) == 1
        if window.stop < len(lengths):  # one more would not have fitted
            assert sum(held) + lengths[order[window.stop]] > tokens
        shares = [cut.micro_batches(k, rank) for rank in range(world)]
        assert sorted(p for share in shares for batch in share for p in batch) == list(window)
        assert all(len(batch) <= micro for share in shares for batch in share)
        position = window.stop
    assert position == len(lengths)
    assert plan(world, micro).updates(epoch + 1) == sum(plan(1, 1).epoch(e).windows_per_epoch for e in range(epoch + 1))


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokens=0: must be at least 1"):
        TokenPlan(lengths=np.array([1]), tokens=0, micro_batch_size=1, world_size=1)
    with pytest.raises(ConfigError, match="micro_batch_size=0"):
        TokenPlan(lengths=np.array([1]), tokens=4, micro_batch_size=0, world_size=1)
    with pytest.raises(ConfigError, match="holds no samples"):
        TokenPlan(lengths=np.array([], dtype=np.int64), tokens=4, micro_batch_size=1, world_size=1)


@given(
    wanted=st.integers(0, 50), alive=st.lists(st.booleans(), min_size=1, max_size=8).filter(any), batched=st.booleans()
)
def test_what_a_stream_window_wants_is_asked_of_the_living_in_equal_parts(
    wanted: int, alive: list[bool], batched: bool
) -> None:
    plan = StreamPlan(global_batch_size=8, micro_batch_size=2, world_size=len(alive), batched=batched)
    quotas = [plan.quota(wanted, alive, rank) for rank in range(len(alive))]
    assert sum(quotas) == wanted
    asked = [quota for quota, lives in zip(quotas, alive, strict=True) if lives]
    assert max(asked) - min(asked) <= 1
    assert all(quota == 0 for quota, lives in zip(quotas, alive, strict=True) if not lives)
    assert [plan.wanted(samples) for samples in (0, 7, 8)] == ([4, 0, 0] if batched else [8, 1, 0])
