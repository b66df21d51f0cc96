"""Rules of a user's own on shards: what would read a rank's share as the whole is given the whole, or refused."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.engine import engine_config
from distaccum.distributed.world import World
from distaccum.engines.factory import create_engine
from distaccum.engines.state import whole_state
from distaccum.errors import ConfigError
from tests.support.threads import run_ranks


class Rule(Optimizer):
    """Plain descent, times a factor of each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.factor(p) * p.grad)

    def factor(self, p: Any) -> Any:
        return 1.0


class Lars(Rule):
    """By norms that stay tensors, which know of the other ranks' shares."""

    def factor(self, p: Any) -> Any:
        return p.norm() / (p.grad.norm() + 1e-3)


class LarsByItem(Rule):
    """By this rank's share of the norms."""

    def factor(self, p: Any) -> Any:
        return p.norm().item() / (p.grad.norm().item() + 1e-3)


class OwnNorm(Rule):
    """By the norm over all, of this rank's share."""

    def factor(self, p: Any) -> Any:
        every = (q for group in self.param_groups for q in group["params"] if q.grad is not None)
        return 1.0 / (1.0 + math.sqrt(sum(float(q.grad.square().sum()) for q in every)))


class Largest(Rule):
    """Raises where a shard is empty."""

    def factor(self, p: Any) -> Any:
        return p.grad.to_local().abs().max().item()


class KeepsRows(Rule):
    """Keeps shards of one number a row."""

    def factor(self, p: Any) -> Any:
        self.state[p]["rows"] = p.grad.abs().mean(dim=-1) if p.ndim > 1 else p.grad.abs()
        return 1.0


class KeepsShares(Rule):
    """Keeps this rank's share as if it were the whole."""

    def factor(self, p: Any) -> Any:
        self.state[p]["average"] = p.grad.to_local().clone()
        return 1.0


class KeepsWhole(Rule):
    """Keeps the same on every rank, of another shape."""

    def factor(self, p: Any) -> Any:
        self.state[p]["step"] = self.state[p].get("step", torch.zeros(1)) + 1
        return 1.0


class CountsBesideItsState(Rule):
    """Keeps a clock and a list of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.clock, self.seen = torch.zeros(()), list[int]()

    def factor(self, p: Any) -> Any:
        self.clock += 1
        self.seen.append(p.ndim)
        return 1.0


def _wrapped(kind: Any) -> list[Any]:
    def run(world: World) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
        optimizer = kind(model.parameters())
        create_engine(model, optimizer, world, engine=engine_config("fsdp2"))
        if isinstance(optimizer, CountsBesideItsState):
            assert (optimizer.clock, optimizer.seen) == (0, [])  # as before it was tried
        return "accepted"

    return run_ranks(2, run)


TORCHS = torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax, torch.optim.Adagrad


@pytest.mark.parametrize("kind", [Rule, Lars, KeepsWhole, CountsBesideItsState, *TORCHS])
def test_what_works_on_shards_is_accepted(kind: Any) -> None:
    assert _wrapped(kind) == ["accepted"] * 2


@pytest.mark.parametrize("kind", [LarsByItem, KeepsRows])
def test_what_needs_a_whole_tensor_is_given_it(kind: Any) -> None:
    assert _wrapped(kind) == ["accepted"] * 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnNorm, "its step of one parameter depends on the others"),
        (Largest, r"its rule does not work on shards \(.*numel"),
        (KeepsShares, r"its rule does not work on shards \(it keeps average of"),
    ],
)
def test_what_reads_a_share_is_refused_on_every_rank(kind: Any, words: str) -> None:
    for raised in _wrapped(kind):
        assert isinstance(raised, ConfigError)
        assert re.search(words, str(raised))


def test_what_is_whole_on_every_rank_is_saved_and_loaded_whole() -> None:
    def run(world: World) -> list[float]:
        torch.manual_seed(0)
        found = []
        saved = None
        for _ in range(2):
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
            optimizer = KeepsWhole(model.parameters())
            engine = create_engine(model, optimizer, world, engine=engine_config("fsdp2"))
            if saved is not None:
                engine.load_state(saved)
            engine.begin_window(1)
            with engine.micro_step(sync=True):
                engine.backward(engine.model(torch.ones(2, 4)).square().sum())
            engine.step()
            saved = whole_state(engine, world)
            found.append(float(optimizer.state[next(iter(optimizer.state))]["step"]))
        return found

    assert run_ranks(2, run) == [[1.0, 2.0]] * 2
