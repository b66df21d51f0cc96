"""Random numbers inside a micro-step are keyed by its micro-batch, and leave those outside alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator
from distaccum import functional as da
from distaccum.distributed.random import KeyedRandom, keys_of
from distaccum.distributed.world import World
from distaccum.tools.diagnose import diagnose
from tests.support.accumulators import Loss

DATA: Any = list(torch.arange(20.0).reshape(10, 2).unbind())
SIZES: Any = {"global_batch_size": 4, "micro_batch_size": 2}


class Net(nn.Module):
    """Linear layers with dropout, in activation checkpoints if asked for."""

    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5))
        self.head, self.checkpoints = nn.Linear(16, 1), checkpoints
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints is None:
            hidden = self.body(x)
        else:
            x = x.clone().requires_grad_() if self.checkpoints else x
            hidden = checkpoint(self.body, x, use_reentrant=self.checkpoints, preserve_rng_state=True)
        self.drawn.append(hidden.detach().clone())
        total: Tensor = self.head(hidden)
        return total


def _make(world: World, model: Net, seed: int = 0) -> Accumulator:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Accumulator(model, optimizer, **SIZES, count=len, seed=seed, verify="never", world=world)


def _net(checkpoints: bool | None = None) -> Net:
    torch.manual_seed(0)
    return Net(checkpoints)


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_what_is_drawn_outside_does_not_change(gloo_world: World) -> None:
    acc = _make(gloo_world, _net())
    torch.manual_seed(5)
    expected = torch.rand(9)
    torch.manual_seed(5)
    drawn = []
    for window in acc.windows(DATA):
        drawn.append(torch.rand(1))
        for micro in window:
            drawn.append(torch.rand(1))
            with acc.accumulate():
                acc.backward(Loss()(acc.model, micro.batch))
            drawn.append(torch.rand(1))
    assert torch.equal(torch.cat(drawn)[:9], expected)


def test_micro_batches_epochs_and_seeds_draw_different_numbers(gloo_world: World) -> None:
    constant: Any = [torch.ones(2)] * 4  # so that outputs differ by what was dropped alone
    seen: list[Tensor] = []
    for seed in (0, 1):
        model = _net()
        acc = _make(gloo_world, model, seed)
        acc.engine.set_lr_factor(0.0)
        for _ in range(2):
            for window in acc.windows(constant):
                acc.step(window, Loss())
        seen += model.drawn
    assert len(seen) == 8
    assert not any(torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])


def test_the_levels_draw_the_same(gloo_world: World) -> None:
    found = []
    for level in ("run_window", "by hand", "accumulate", "step"):
        model = _net()
        torch.manual_seed(len(found))  # the outer numbers do not matter
        if level in ("run_window", "by hand"):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            engine = da.create_engine(model, optimizer, gloo_world)
            for window in da.plan_windows(DATA, gloo_world, **SIZES, count=len)(0):
                if level == "run_window":
                    da.run_window(engine, window, Loss())
                    continue
                for i, micro in enumerate(window.micro_batches):
                    sync = i == len(window.micro_batches) - 1
                    with da.keyed_random(engine, window, i), engine.micro_step(sync=sync):
                        total = Loss()(engine.model, micro.batch)
                        engine.backward(da.normalize_loss(total, window.counts, engine.gradient_divide_factor))
                da.finish_step(engine, window)
        else:
            acc = _make(gloo_world, model)
            for open_window in acc.windows(DATA):
                if level == "step":
                    acc.step(open_window, Loss())
                    continue
                for micro in open_window:
                    with acc.accumulate():
                        acc.backward(Loss()(acc.model, micro.batch))
        found.append(_weights(model))
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_draw_the_same_again(gloo_world: World, reentrant: bool) -> None:
    found = []
    for checkpoints in (None, reentrant):
        model = _net(checkpoints)
        acc = _make(gloo_world, model)
        for window in acc.windows(DATA):
            for micro in window:
                with acc.accumulate():
                    acc.backward(Loss()(acc.model, micro.batch))
        found.append(_weights(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


def test_a_window_that_is_run_again_draws_the_same(gloo_world: World) -> None:
    model = _net()
    engine = da.create_engine(model, torch.optim.SGD(model.parameters(), lr=0.0), gloo_world)
    for window in da.plan_windows(DATA, gloo_world, **SIZES, count=len)(0):
        model.drawn.clear()
        da.run_window(engine, window, Loss())
        first = list(model.drawn)
        model.drawn.clear()
        diagnose(engine, window, Loss(), gloo_world)
        assert all(map(torch.equal, first, model.drawn))


def _fails_after_drawing() -> None:
    torch.rand(3)
    raise ZeroDivisionError


def test_an_error_in_a_micro_step_gives_the_generators_back(gloo_world: World) -> None:
    acc, before = _make(gloo_world, _net()), torch.get_rng_state()
    for window in acc.windows(DATA):
        for _ in window:
            with pytest.raises(ZeroDivisionError), acc.accumulate():
                _fails_after_drawing()
            break
        break
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_are_their_own_function() -> None:
    keys = keys_of(range(1000), 7, 0)
    assert keys == [key for position in range(1000) for key in keys_of([position], 7, 0)]
    others = [*keys, *keys_of(range(1000), 7, 1), *keys_of(range(1000), 8, 0), *keys_of(range(1000), 7, 0, 0)]
    assert len(set(others)) == len({key % 2**32 for key in others}) == 4000  # the CPU's generator takes 32 bits
    assert all(0 <= key < 2**63 for key in others)


def test_without_keys_the_ranks_own_numbers_are_drawn() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with KeyedRandom(torch.device("cpu")).keyed((), 0):
        first = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_a_gpus_generator_is_keyed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the generator of the device is seeded as the host's is, and given back."""
    other, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    monkeypatch.setattr(torch.cuda, "default_generators", (other, own))
    before = [generator.get_state() for generator in (other, own)]
    with KeyedRandom(torch.device("cuda", 1)).keyed([5, 6], 1):
        assert own.initial_seed() == torch.default_generator.initial_seed() == 6
        assert other.initial_seed() == 1
        torch.rand(3, generator=own)
    assert [torch.equal(a, g.get_state()) for a, g in zip(before, (other, own), strict=True)] == [True, True]
