"""Balanced ranks: the rule beside the best deal, windows that hold what they held, and their gradient in fp64."""

import copy
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import distaccum
from distaccum import CrossEntropy, DataSpec, MisuseError, PadCollator, RunConfig, Trainer, World
from distaccum.data.factory import build_loader, make_plan
from distaccum.data.loader import MicroBatchIds
from distaccum.data.packing import packed
from distaccum.data.plan.shuffle import Shuffle
from distaccum.errors import ConfigError, DataError
from distaccum.models.gpt import GPT
from distaccum.tools.balance import BalancedPlan, balance, balanced, over_mean
from tests.support.accumulators import over_sgd
from tests.support.commands import metrics
from tests.support.runs import settings
from tests.support.threads import on_ranks, run_ranks

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 0.8, 120), 2, 120).astype(np.int64)
GLOBAL, MICRO = 48, 3


def _samples(vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [(row[:-1], row[1:]) for n in LENGTHS for row in [torch.randint(vocabulary, (int(n) + 1,), generator=drawn)]]


DATA = DataSpec(train=_samples(11), lengths=LENGTHS, collate=PadCollator((0, -100)))
KINDS: dict[str, dict[str, Any]] = {
    "samples": {},
    "tokens": {"global_batch_size": None, "tokens": 900},
    "grouped": {"group_by_length": True},
    "limited": {"micro_tokens": 200},
    "limited, grouped": {"micro_tokens": 200, "group_by_length": True},
}


class Bigrams(nn.Module):
    """Logits of the next token, by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.table(ids)
        return logits


def _plan(kind: str, world: int, by: str = "tokens", data: DataSpec = DATA) -> tuple[Any, BalancedPlan]:
    """The other plan, and the balanced one."""
    sizes = {"global_batch_size": GLOBAL, "tokens": None, "micro_batch_size": MICRO, "seed": 3, **KINDS[kind]}
    plan = make_plan(data, world_size=world, **sizes)
    config = RunConfig.from_dict({"batch": {"balance": by}})
    return plan, balanced(plan, data, Bigrams(), CrossEntropy(), config)


@given(costs=st.lists(st.integers(0, 50), max_size=7), parts=st.integers(1, 3), equal=st.booleans())
def test_no_part_has_much_more_than_in_the_best_deal(costs: list[int], parts: int, *, equal: bool) -> None:
    """Graham's bound where a part has any number; with equal numbers that of a loop which looks at every part."""
    found = balance(costs, parts, equal=equal)
    assert sorted(item for part in found for item in part) == list(range(len(costs)))
    assert all(costs[a] >= costs[b] for part in found for a, b in pairwise(part))
    most = -(-len(costs) // parts) if equal else len(costs)
    assert max(map(len, found)) <= most
    largest = max(sum(costs[i] for i in part) for part in found)
    if not equal:
        deals = (np.array(deal, dtype=int) for deal in product(range(parts), repeat=len(costs)))
        best = min(np.bincount(deal, weights=costs, minlength=parts).max() for deal in deals)
        assert largest <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9
        return
    sums = [[0.0, 0.0] for _ in range(parts)]
    for cost in sorted(costs, reverse=True):
        room = [one for one in sums if one[1] < most]
        least = min(room)
        least[0], least[1] = least[0] + cost, least[1] + 1
    assert largest == max(one[0] for one in sums)


def test_what_cannot_be_dealt_is_refused() -> None:
    assert distaccum.balance is balance
    for costs, parts in (([1.0], 0), ([-1.0], 2), ([float("nan")], 2), (np.ones((2, 2)), 2)):
        with pytest.raises(MisuseError, match=r"balance\(\)"):
            balance(costs, parts)


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_micro_batches_are_the_other_plans_once_each(kind: str, world: int) -> None:
    plan, dealt = _plan(kind, world)
    assert dealt.position == plan.position
    for epoch in (0, 1):
        cut, other = dealt.epoch(epoch), plan.epoch(epoch)
        assert cut.windows_per_epoch == other.windows_per_epoch
        own, others = ([MicroBatchIds(one, rank) for rank in range(world)] for one in (dealt, plan))
        for k in range(cut.windows_per_epoch):
            assert cut.window(k) == other.window(k)
            found = [[sorted(part) for part in ids.of_window(cut, epoch, k)] for ids in own]
            before = [[sorted(part) for part in ids.of_window(other, epoch, k)] for ids in others]
            assert sorted(chain(*found)) == sorted(chain(*before))
            assert max(map(len, found)) == -(-len(list(chain(*before))) // world)
    assert dealt.as_dict() == plan.as_dict() | {"balance": "tokens"}


@pytest.mark.parametrize(
    ("kind", "by", "before", "after"),
    [
        ("samples", "tokens", 1.4, 1.02),
        ("samples", "flops", 1.5, 1.03),
        ("grouped", "tokens", 1.35, 1.08),
        ("grouped", "flops", 1.5, 1.22),
    ],
)
def test_the_longest_rank_has_little_more_than_the_mean(kind: str, by: str, before: float, after: float) -> None:
    """Counted here, sample by sample: rows times the longest of them, of four ranks in the two windows of an epoch."""
    world = 4
    model, loss = GPT(vocab_size=11, n_embd=16, n_layer=1, n_head=2, seq_len=120), CrossEntropy()
    sizes = {"global_batch_size": GLOBAL, "tokens": None, "micro_batch_size": MICRO, "seed": 3, **KINDS[kind]}
    plan = make_plan(DATA, world_size=world, **sizes)
    dealt = balanced(plan, DATA, model, loss, RunConfig.from_dict({"batch": {"balance": by}}))
    square = 0.0 if by == "tokens" else 12 * 16 / (6 * sum(p.numel() for p in model.parameters() if p.ndim == 2))
    found = []
    for one in (plan, dealt):
        cut, ratios = one.epoch(0), []
        for k in range(2):
            ranks = [list(MicroBatchIds(one, rank).of_window(cut, 0, k)) for rank in range(world)]
            longest = [[(len(ids), max(LENGTHS[i] for i in ids)) for ids in rank] for rank in ranks]
            costs = [sum(rows * (n + square * n * n) for rows, n in rank) for rank in longest]
            ratios.append(max(costs) * world / sum(costs))
        found.append(ratios)
    told = [over_mean(dealt.epoch(0).costs(k)) for k in range(2)]
    assert told == pytest.approx(found[1], rel=0.02 if by == "flops" else 1e-12)
    assert np.mean(found[0]) > before
    assert np.mean(found[1]) < after


def _trained(world: World, *, resumes: bool) -> list[Tensor]:
    """The weights after each window of an epoch of three; another process may go on after the second one."""
    _, dealt = _plan("samples", world.size)
    found, count = list[Tensor](), CrossEntropy().count
    acc = over_sgd(copy.deepcopy(MODEL), 1.0, (GLOBAL, MICRO), count=count, world=world, verify="never")
    for last in (2, 3) if resumes else (3,):
        for window in acc.windows(build_loader(DATA, dealt, world)):
            acc.step(window, CrossEntropy())
            found.append(torch.cat([p.detach().clone() for p in acc.engine.unwrapped_model.parameters()]))
            if len(found) == last:
                break
        state = acc.state_dict()
        acc.close()
        acc = over_sgd(copy.deepcopy(MODEL), 1.0, (GLOBAL, MICRO), count=count, world=world, verify="never")
        acc.load_state_dict(state)
    acc.close()
    return found


MODEL = Bigrams().double()


def _reference() -> list[Tensor]:
    """The same by plain autograd over each window's samples."""
    model, found = copy.deepcopy(MODEL), list[Tensor]()
    for begin in (0, 48, 96):
        ids = Shuffle(120, seed=3, epoch=0)(np.arange(begin, min(begin + GLOBAL, 120)))
        pairs = [DATA.train[int(i)] for i in ids]  # type: ignore[index]
        losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in pairs]
        total = torch.stack(losses).sum() / sum(len(y) for _, y in pairs)
        (gradient,) = torch.autograd.grad(total, [model.table.weight])
        with torch.no_grad():
            model.table.weight -= gradient
        found.append(model.table.weight.detach().clone())
    return found


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.heavy)])
def test_the_gradient_is_the_whole_batchs_and_a_resume_is_bitwise(world: int) -> None:
    exact, whole = _reference(), on_ranks(world, partial(_trained, resumes=False))
    parted = on_ranks(world, partial(_trained, resumes=True))
    for one, other in zip(whole, parted, strict=True):
        assert all(map(torch.equal, one, other))
        assert all(torch.allclose(mine, true, rtol=0, atol=1e-14) for mine, true in zip(one, exact, strict=True))


def test_ranks_that_would_deal_otherwise_are_refused() -> None:
    def windows(world: World) -> None:
        _, dealt = _plan("samples", world.size, by=("tokens", "flops")[world.rank])
        acc = over_sgd(copy.deepcopy(MODEL), 1.0, (GLOBAL, MICRO), count=len, world=world)
        next(acc.windows(build_loader(DATA, dealt, world)))

    for error in run_ranks(2, windows):
        assert isinstance(error, ConfigError | DataError)
        assert "batch.balance" in str(error)


def test_documents_in_rows_cost_their_rows_and_their_own_squares() -> None:
    data = packed(DATA, row_tokens=None, shifted=False)
    plan = make_plan(data, global_batch_size=GLOBAL, tokens=None, micro_batch_size=8, world_size=2, seed=3)
    model = GPT(vocab_size=11, n_embd=16, n_layer=1, n_head=2, seq_len=120)
    costs = [
        balanced(plan, data, model, CrossEntropy(), RunConfig.from_dict({"batch": {"balance": by}})).cost
        for by in ("tokens", "flops")
    ]
    one, two = np.array([60]), np.array([30, 30])
    assert costs[0](one) == costs[0](two) == 60
    assert costs[1](one) - 60 == pytest.approx(2 * (costs[1](two) - 60))
    assert costs[1](two) > 60


@pytest.mark.parametrize(
    ("changes", "data", "problem"),
    [
        ({}, DataSpec(train=[1, 2, 3]), "tokens: the data does not say how long its samples are"),
        ({}, DataSpec(train=iter([1, 2])), "tokens: the data is a stream"),
        ({"numerics": "reproducible"}, DATA, "tokens: and numerics=reproducible deals units"),
        ({"batch": {"balance": "flops"}}, DATA, r"flops: the model's operations cannot be counted \(RuntimeError"),
        ({"batch": {"balance": "time"}}, DATA, "time: no such choice"),
    ],
)
def test_what_cannot_be_balanced_is_refused_before_there_are_ranks(
    changes: dict[str, Any], data: DataSpec, problem: str
) -> None:
    class Reads(Bigrams):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * float(self.table.weight.sum())

    def planned() -> BalancedPlan:
        config = RunConfig.from_dict({"batch": {"balance": "tokens"}} | changes)
        sizes: dict[str, Any] = {"global_batch_size": 2, "tokens": None, "micro_batch_size": 1}
        plan = make_plan(data, **sizes, world_size=2, seed=0)
        return balanced(plan, data, Reads(), CrossEntropy(), config)

    with pytest.raises(ConfigError, match=rf"batch\.balance={problem}"):
        planned()


def test_a_run_records_how_much_more_its_longest_rank_has(tmp_path: Path, gloo_world: World) -> None:
    batch = {"global_size": 24, "micro_size": 3, "balance": "tokens"}
    config = settings(None, {"max_steps": 3, "log_every": 1}, batch=batch)
    Trainer(Bigrams(), CrossEntropy(), DATA, config=config, run_dir=tmp_path / "run").fit()
    assert [record["longest_over_mean"] for record in metrics(tmp_path / "run")] == [1.0, 1.0, 1.0]
    assert '"balance": "tokens"' in (tmp_path / "run" / "plan.json").read_text()
