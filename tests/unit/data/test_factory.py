"""Plans and window loaders of given data: grouped, by tokens, counted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distaccum.data.counter import GlobalCounter
from distaccum.data.datasets.lines import lines
from distaccum.data.factory import build_loader, make_plan
from distaccum.data.loader import MicroBatchIds, padding_share
from distaccum.data.plan.batch import CONFIG_KEYS, KEYWORDS, SizeNames
from distaccum.data.spec import DataSpec
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.normalize import normalize_loss

LENGTHS = np.random.default_rng(0).integers(1, 40, 50)
DATA: Any = [torch.full((int(length),), i) for i, length in enumerate(LENGTHS)]
SOURCE = DataSpec(
    train=DATA,
    eval_dataset=None,
    description="",
    lengths=LENGTHS,
    collate=lambda samples: torch.nn.utils.rnn.pad_sequence(samples, True, -1),
)


def _plan(world: int, **sizes: Any) -> Any:
    given: dict[str, Any] = {"global_batch_size": 16, "tokens": None, "micro_batch_size": 4, "seed": 0}
    return make_plan(SOURCE, world_size=world, **(given | sizes))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sizes", [{}, {"global_batch_size": None, "tokens": 300}])
def test_grouping_moves_samples_within_their_window_only(world: int, sizes: dict[str, Any]) -> None:
    plan = _plan(world, **sizes)

    def windows(plan: Any) -> list[list[int]]:
        streams = [iter(MicroBatchIds(plan, rank)) for rank in range(world)]
        cut = plan.epoch(0)
        return [
            sorted(i for r in range(world) for part in cut.micro_batches(k, r) if len(part) for i in next(streams[r]))
            for k in range(cut.windows_per_epoch)
        ]

    by_length = _plan(world, group_by_length=True, **sizes)
    assert windows(by_length) == windows(plan)
    assert by_length.position == plan.position
    assert sorted(i for window in windows(by_length) for i in window) == list(range(50))
    plain, grouped = (padding_share(LENGTHS, plan, grouped=grouped) for grouped in (False, True))
    assert 0 < grouped < 0.6 * plain


def test_batches_are_padded_to_the_longest_of_the_micro_batch(gloo_world: World) -> None:
    loader = build_loader(SOURCE, _plan(1, group_by_length=True), gloo_world)
    for window in loader.windows(0, 0, GlobalCounter(gloo_world, lambda batch: int((batch >= 0).sum()))):
        assert window.counts["loss"] == sum(LENGTHS[i] for m in window.micro_batches for i in m.batch[:, 0].tolist())
        assert all(int((m.batch >= 0).sum(1).max()) == m.batch.shape[1] for m in window.micro_batches)


def test_one_small_all_reduce_a_window(gloo_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    all_reduce_host = World.all_reduce_host
    monkeypatch.setattr(
        World, "all_reduce_host", lambda self, xs: (calls.append(len(xs)), all_reduce_host(self, xs))[1]
    )
    windows = list(build_loader(SOURCE, _plan(1), gloo_world).windows(0, 0, GlobalCounter(gloo_world, len)))
    assert calls == [2] * len(windows)


UNWORKABLE: list[tuple[DataSpec, dict[str, Any], str]] = [
    (SOURCE, {"global_batch_size": None}, "{G}: is not given, and {T} neither"),
    (SOURCE, {"tokens": 7}, "{T}=7: and {G}=16 is given too"),
    (
        DataSpec(train=DATA, eval_dataset=None, description=""),
        {"global_batch_size": None, "tokens": 7},
        "{T}=7: the data does not say how long",
    ),
    (
        DataSpec(train=iter(DATA), eval_dataset=None, description=""),
        {"global_batch_size": None, "tokens": 7},
        "{T}=7: the data is a stream",
    ),
    (
        DataSpec(train=iter(DATA), eval_dataset=None, description="", lengths=[1] * len(DATA)),
        {"group_by_length": True},
        "batch.group_by_length=True: the data is a stream",
    ),
    (SOURCE, {"micro_batch_size": 17}, "{M}=17: larger than {G}=16"),
    (SOURCE, {"global_batch_size": None, "tokens": 0}, "{T}=0: must be at least 1"),
    (
        DataSpec(train=iter(DATA), eval_dataset=None, description=""),
        {"micro_batch_size": 3, "batched": True},
        "{G}=16: no multiple of {M}=3",
    ),
]


@pytest.mark.parametrize("names", [KEYWORDS, CONFIG_KEYS], ids=["Python", "command line"])
@pytest.mark.parametrize(("source", "sizes", "message"), UNWORKABLE)
def test_what_cannot_work_is_refused_by_the_name_that_was_typed(
    source: DataSpec, sizes: dict[str, Any], message: str, names: SizeNames
) -> None:
    given: dict[str, Any] = {"global_batch_size": 16, "tokens": None, "micro_batch_size": 4, "seed": 0, "world_size": 1}
    expected = message.format(G=names.global_batch_size, M=names.micro_batch_size, T=names.tokens)
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        make_plan(source, names=names, **(given | sizes))


def test_counts(gloo_world: World) -> None:
    counter = GlobalCounter(gloo_world, lambda batch: batch)
    first = [counter.micro_batch({"a": 1.5, "b": 0}), counter.micro_batch({"a": 2})]
    assert counter.all_reduce(first) == ({"a": 3.5, "b": 0.0}, [])
    with pytest.raises(MisuseError, match="a batch counts 'c', and the first window only"):
        counter.all_reduce([counter.micro_batch({"c": 1})])
    with pytest.raises(MisuseError, match="the count of 'loss' is -1"):
        counter.micro_batch(-1)
    with pytest.raises(MisuseError, match="give a finite number that is at least 0, read on the host"):
        counter.micro_batch(torch.tensor(3))


def test_a_loss_that_counts_nothing_in_a_window_weighs_nothing() -> None:
    totals: dict[str, Tensor] = {"a": torch.tensor(6.0, requires_grad=True), "b": torch.tensor(5.0)}
    assert normalize_loss(totals, {"a": 3.0, "b": 0.0}, gradient_divide_factor=2).item() == 4.0


def test_lines_are_samples_of_their_own_length() -> None:
    source = lines(seq_len=20)
    assert source.eval_dataset is not None
    assert source.lengths is not None
    inputs, labels = source.train[3]  # type: ignore[index]
    assert torch.equal(inputs[1:], labels[:-1])
    assert len(inputs) == source.lengths[3]
    assert source.lengths.max() == 20
    assert source.collate is not None
    padded, ignored = source.collate([source.train[i] for i in range(8)])  # type: ignore[index]
    assert padded.shape == ignored.shape == (8, source.lengths[:8].max())
    assert int((ignored != -100).sum()) == source.lengths[:8].sum()
    with pytest.raises(ConfigError, match=r"data\.path=/nowhere: no such file"):
        lines(path="/nowhere")


def test_a_request_to_stop_is_seen_after_the_next_all_reduce_and_can_be_forgotten(gloo_world: World) -> None:
    counter = GlobalCounter(gloo_world, len)
    counter.request_stop()
    assert not counter.stopping  # the other ranks do not know yet
    counter.all_reduce([])
    assert counter.stopping
    counter.clear_stop()
    counter.all_reduce([])
    assert not counter.stopping
