"""Level 2 in one process: what it gives, and that misuse has a name."""

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from pkgutil import resolve_name
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from distaccum import Accumulator, DataSpec
from distaccum.config.engine import DDPConfig, FSDP2Config
from distaccum.data.hooks import WindowHook
from distaccum.data.prefetch import on_device
from distaccum.data.window import Window
from distaccum.distributed.world import World
from distaccum.errors import BatchStatisticsWarning, ConfigError, DataError, MisuseError
from tests.support.accumulators import Loss, over_sgd, weights

DATA: Any = [torch.tensor([float(i), 1.0]) for i in range(10)]


_loss = Loss()


def _make(world: World, **options: Any) -> tuple[Accumulator, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sizes: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "count": len}
    return Accumulator(model, optimizer, world=world, **(sizes | options)), optimizer


def _epoch(acc: Accumulator, data: Any, *, windows: int = 100) -> None:
    for window in acc.windows(data):
        for micro in window:
            with acc.accumulate():
                acc.backward(_loss(acc.model, micro.batch))
        windows -= 1
        if not windows:
            return


def test_windows_and_outcomes(gloo_world: World) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    acc = Accumulator(
        model, optimizer, global_batch_size=4, micro_batch_size=2, count=len, scheduler=scheduler, world=gloo_world
    )
    sizes = []
    for window in acc.windows(DataLoader(DATA, batch_size=2, shuffle=True)):
        before = deepcopy(acc.engine.unwrapped_model)
        batches = []
        for micro in window:
            batches.append(micro.batch.clone())
            assert micro.count == len(micro.batch)
            with acc.accumulate():
                acc.backward(_loss(acc.model, micro.batch), len(micro.batch))
        whole = torch.cat(batches)
        sizes.append(len(whole))
        loss = _loss(before, whole) / len(whole)
        assert acc.mean_loss() == pytest.approx(loss.item(), rel=1e-6)
        assert acc.last is not None
        norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(before.parameters()))]).norm()
        assert acc.last.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert sizes == [4, 4, 2]
    assert (acc.progress.step, acc.progress.epoch, acc.progress.samples) == (3, 1, 10)
    assert scheduler.get_last_lr() == [0.01 * 0.5**3]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("on_the_device", [False, True])
def test_a_count_that_is_known_after_the_forward_gives_the_same(
    gloo_world: World, fused: bool, on_the_device: bool
) -> None:
    found = []
    for count in (len, None):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
        acc = Accumulator(
            model, optimizer, global_batch_size=4, micro_batch_size=2, count=count, clip_norm=0.5, world=gloo_world
        )
        for window in acc.windows(DATA):
            for micro in window:
                with acc.accumulate():
                    size: Any = torch.tensor(len(micro.batch)) if on_the_device and count is None else len(micro.batch)
                    acc.backward(_loss(acc.model, micro.batch), size)
        found.append(weights(acc))
        assert acc.progress.tokens == 10
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("counted_before", [True, False])
def test_windows_that_count_nothing_are_skipped(gloo_world: World, counted_before: bool) -> None:
    def count(batch: Tensor) -> int:
        return int((batch[:, 0] >= 4).sum())  # the first window's four samples count nothing

    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    acc = Accumulator(
        model,
        optimizer,
        global_batch_size=4,
        micro_batch_size=2,
        count=count if counted_before else None,
        scheduler=scheduler,
        world=gloo_world,
    )
    before, seen = weights(acc), 0
    for window in acc.windows(DataLoader(DATA, batch_size=2)):
        for micro in window:
            with acc.accumulate():
                weight = (micro.batch[:, :1] >= 4).float()
                acc.backward((weight * (acc.model(micro.batch) - 1).square()).sum(), count(micro.batch))
        seen += 1
        if seen == 1 and not counted_before:
            assert acc.last is not None
            assert not acc.last.applied
            assert all(map(torch.equal, weights(acc), before))
    assert (acc.progress.step, acc.progress.window, acc.progress.skipped) == (2, 3, 1)
    assert seen == (2 if counted_before else 3)
    assert scheduler.get_last_lr() == [0.01 * 0.5**2]
    with pytest.raises(DataError, match="none of its windows counts anything"):
        _epoch(_make(gloo_world, count=lambda batch: 0)[0], DATA)


def test_a_break_leaves_the_rest_of_the_epoch_for_the_next_loop(gloo_world: World) -> None:
    acc, _ = _make(gloo_world)
    _epoch(acc, DATA, windows=1)
    _epoch(acc, DATA)
    assert (acc.progress.step, acc.progress.epoch, acc.progress.samples) == (3, 1, 10)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_ends_before_the_next_window_and_a_stream_after_the_one_that_was_taken(
    gloo_world: World, stream: bool
) -> None:
    acc, _ = _make(gloo_world)
    for window in acc.windows(iter(torch.stack(DATA).split(2)) if stream else DATA):
        acc.step(window, _loss)
        acc.stop()
    assert acc.stopping
    assert acc.progress.step == 1 + stream


def _backward(acc: Accumulator, batch: Tensor) -> None:
    acc.backward(_loss(acc.model, batch))


def _twice(acc: Accumulator, batch: Tensor) -> None:
    _backward(acc, batch)
    _backward(acc, batch)


def _loop(
    acc: Accumulator,
    within: Callable[[Accumulator, Tensor], object] = _backward,
    after: Callable[[], object] = lambda: None,
    runs: tuple[int, int] = (1, 1),
) -> None:
    """Calls ``within`` in a micro-step and ``after`` behind it; how often each micro-batch of a window runs."""
    for window in acc.windows(DATA):
        for micro, times in zip(window, runs, strict=True):
            for _ in range(times):
                with acc.accumulate():
                    within(acc, micro.batch)
                after()


def _leaves_a_window(acc: Accumulator) -> None:
    for window in acc.windows(DATA):
        for micro in window:
            with acc.accumulate():
                _backward(acc, micro.batch)
            break


def _ignores_a_window(acc: Accumulator) -> None:
    for _ in acc.windows(DATA):
        pass


MISUSE: dict[str, tuple[Callable[[Accumulator, Any], object], str]] = {
    "steps by hand": (
        lambda acc, optimizer: _loop(acc, after=optimizer.step),
        r"optimizer\.step\(\) was called by hand: delete the line",
    ),
    "zeroes by hand": (
        lambda acc, optimizer: _loop(acc, after=lambda: optimizer.zero_grad(set_to_none=False)),
        r"optimizer\.zero_grad\(\) was called by hand: delete the line",
    ),
    "zeroes the model": (
        lambda acc, _: _loop(acc, after=acc.model.zero_grad),
        r"model\.zero_grad\(\) was called by hand: delete the line",
    ),
    "zeroes the bare model": (
        lambda acc, _: _loop(acc, after=lambda: acc.engine.unwrapped_model.zero_grad(set_to_none=False)),
        r"model\.zero_grad\(\) was called by hand: delete the line",
    ),
    "backward outside": (lambda acc, _: _backward(acc, DATA[0][None]), r"backward\(\) outside a window"),
    "backward twice": (lambda acc, _: _loop(acc, _twice), r"backward\(\) in accumulate\(\), after its backward\(\)"),
    "a micro-batch twice": (lambda acc, _: _loop(acc, runs=(2, 1)), r"accumulate\(\) between two micro-batches"),
    "torch's backward": (
        lambda acc, _: _loop(acc, lambda acc, batch: _loss(acc.model, batch).backward()),
        r"the end of accumulate\(\) in accumulate\(\), before its backward\(\): call acc\.backward\(loss\) in it and",
    ),
    "forgets a micro-batch": (
        lambda acc, _: _loop(acc, runs=(0, 1)),
        r"the next micro-batch before the micro-batch's accumulate\(\)",
    ),
    "forgets the last one": (
        lambda acc, _: _loop(acc, runs=(1, 0)),
        r"the end of the window before the micro-batch's accumulate\(\)",
    ),
    "leaves a window": (
        lambda acc, _: _leaves_a_window(acc),
        r"the next window between two micro-batches: run every micro-batch",
    ),
    "ignores a window": (
        lambda acc, _: _ignores_a_window(acc),
        r"the next window between two micro-batches: run every micro-batch",
    ),
    "goes past the engine": (
        lambda acc, _: _loop(acc, lambda acc, batch: acc.backward(_loss(acc.engine.unwrapped_model, batch))),
        r"the forward went past the engine, or there was none.*call acc\.model",
    ),
    "steps on no window": (lambda acc, _: acc.step(cast(Any, None), _loss), r"step\(\) with another window"),
    "counts differently": (
        lambda acc, _: _loop(acc, lambda acc, batch: acc.backward(_loss(acc.model, batch), 17)),
        r"with the count 17 where count= gave \{'loss': 2\}",
    ),
    "saves in a window": (lambda acc, _: _loop(acc, after=acc.state_dict), r"state_dict\(\) between two micro-batches"),
    "names differ": (
        lambda acc, _: _loop(acc, lambda acc, batch: acc.backward({"language": _loss(acc.model, batch)})),
        r"the losses are \['language'\], and what was counted is \['loss'\]",
    ),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_raises_by_name_and_steps_nothing(gloo_world: World, what: str) -> None:
    acc, optimizer = _make(gloo_world)
    misuse, message = MISUSE[what]
    with pytest.raises(MisuseError, match=message):
        misuse(acc, optimizer)
    assert acc.progress.step == 0
    acc.abandon()
    _epoch(acc, DATA, windows=1)
    with pytest.raises(MisuseError, match=r"backward\(\) outside a window"):
        _backward(acc, DATA[0][None])
    assert acc.progress.step == 1


def test_a_backward_without_a_count_needs_one(gloo_world: World) -> None:
    acc, _ = _make(gloo_world, count=None)
    with pytest.raises(MisuseError, match=r"with the count None where nothing was counted beforehand: pass a number"):
        _epoch(acc, DATA)


def test_what_cannot_work_is_refused(gloo_world: World) -> None:
    model, stranger = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *stranger.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="2 of its parameters are not the model's"):
        Accumulator(model, optimizer, global_batch_size=4, micro_batch_size=2, world=gloo_world)
    acc, _ = _make(gloo_world)
    with pytest.raises(ConfigError, match="micro_batch_size=2: the loader's batch_size is 3"):
        _epoch(acc, DataLoader(DATA, batch_size=3))
    with pytest.raises(ConfigError, match="prefetch=1: must be at least 2"):
        _make(gloo_world, prefetch=1)
    for wrong in ({"engine": "horovod"}, {"precision": "fp4"}, {"nonfinite": "ignore"}):
        with pytest.raises(ConfigError, match="no such choice"):
            _make(gloo_world, **wrong)
    with pytest.raises(ConfigError, match=r"clip_value=1\.0: and clip_norm=2\.0 too"):
        _make(gloo_world, clip_norm=2.0, clip_value=1.0)
    with pytest.raises(ConfigError, match="optimizer=LBFGS: its step alone raises TypeError"):
        Accumulator(
            model, torch.optim.LBFGS(model.parameters()), global_batch_size=4, micro_batch_size=2, world=gloo_world
        )
    twice = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ConfigError, match="2 of its parameters are not the model's, or another optimizer's too"):
        Accumulator(model, twice, global_batch_size=4, micro_batch_size=2, world=gloo_world)
    with pytest.raises(ConfigError, match="global_batch_size: is not given, and tokens neither"):
        _epoch(_make(gloo_world, global_batch_size=None)[0], DATA)


def test_batch_normalisation_is_warned_of_once_and_a_frozen_one_is_not(gloo_world: World) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    with pytest.warns(BatchStatisticsWarning, match=r"1 and 1 more: batch normalisation .*SyncBatchNorm") as caught:
        over_sgd(model, 0.1, (4, 2), world=gloo_world)
    assert len(caught) == 1
    over_sgd(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval()), 0.1, (4, 2), world=gloo_world)  # or it raises


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_at_most_so_many_batches_are_on_the_device(limit: int) -> None:
    class Batch:
        """Not a tensor, so that moving it gives itself; alive as long as somebody holds it."""

    alive: weakref.WeakSet[Batch] = weakref.WeakSet()

    most = 0

    def load() -> Any:
        nonlocal most
        for _ in range(10):
            batch = Batch()
            alive.add(batch)
            most = max(most, len(alive))
            yield batch

    for _ in on_device(load(), torch.device("cpu"), limit):
        pass
    assert most == limit


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_loader_with_a_plain_batch_sampler_keeps_its_order(gloo_world: World, shuffled: bool) -> None:
    sampler: Any = RandomSampler(DATA) if shuffled else SequentialSampler(DATA)
    acc, seen = _make(gloo_world)[0], []
    for batch in acc.batches(DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False))):
        seen += batch[:, 0].tolist()
        with acc.accumulate():
            acc.backward(_loss(acc.model, batch))
    assert sorted(seen) == list(range(10))
    assert (seen == list(range(10))) is not shuffled


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(DATA)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("windows", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("home", ["torch.utils.data:DataLoader", "torchdata.stateful_dataloader:StatefulDataLoader"])
def test_a_streams_state_goes_on_from_anywhere(gloo_world: World, home: str, windows: int) -> None:
    loader = resolve_name(home)

    def batches(acc: Accumulator, data: Any, number: int) -> list[list[float]]:
        """The next windows' samples, over the ends of epochs."""
        found: list[list[float]] = []
        while len(found) < number:
            for window in acc.windows(data):
                found.append([])
                for micro in window:
                    found[-1] += micro.batch[:, 0].tolist()
                    with acc.accumulate():
                        acc.backward(_loss(acc.model, micro.batch))
                if len(found) == number and acc.progress.step % 3:  # else on to the end of the epoch
                    break
        return found

    whole = batches(_make(gloo_world)[0], loader(Numbers(), batch_size=2), 7)
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2 + [[0, 1, 2, 3]]
    first = _make(gloo_world)[0]
    assert batches(first, loader(Numbers(), batch_size=2), windows) == whole[:windows]
    second, third = _make(gloo_world)[0], _make(gloo_world)[0]
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())  # taken up, and not gone on from
    assert batches(third, loader(Numbers(), batch_size=2), 7 - windows) == whole[windows:]


def test_late_counts_are_added_in_full_precision(gloo_world: World) -> None:
    acc, _ = _make(gloo_world, count=None, global_batch_size=2, micro_batch_size=1)
    for window in acc.windows(DATA[:2]):
        for micro, count in zip(window, (2**24, 1), strict=True):
            with acc.accumulate():
                acc.backward(_loss(acc.model, micro.batch), torch.tensor(count))
    assert acc.progress.tokens == 2**24 + 1


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(x) if bool(x[0, 0] < 4) else self.first(x)
        return found


def test_what_only_a_skipped_window_used_is_left_alone(gloo_world: World) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    engine = DDPConfig(find_unused_parameters=True)
    acc = Accumulator(model, optimizer, global_batch_size=4, micro_batch_size=2, engine=engine, world=gloo_world)
    before = model.second.weight.detach().clone()
    for batch in acc.batches(DataLoader(DATA, batch_size=2)):
        with acc.accumulate():
            acc.backward(_loss(acc.model, batch), int((batch[:, 0] >= 4).sum()))
    assert (acc.progress.step, acc.progress.skipped) == (2, 1)
    assert torch.equal(model.second.weight, before)


def test_an_abandoned_window_leaves_no_gradient(gloo_world: World) -> None:
    acc, _ = _make(gloo_world)
    for batch in acc.batches(DATA):
        with acc.accumulate():
            acc.backward(_loss(acc.model, batch))
        break  # in the middle of the window, as an error would leave it
    with pytest.raises(MisuseError, match="windows\\(\\) between two micro-batches"):
        _epoch(acc, DATA)
    acc.abandon()
    fresh, _ = _make(gloo_world)
    for one in (acc, fresh):
        _epoch(one, DATA, windows=1)
    assert all(map(torch.equal, weights(acc), weights(fresh)))


def test_a_stop_ends_with_the_state_that_is_taken_up(gloo_world: World) -> None:
    acc, _ = _make(gloo_world)
    state = acc.state_dict()
    acc.stop()
    _epoch(acc, DATA)
    assert acc.progress.step == 0
    _epoch(acc, DATA)
    assert acc.progress.step == 0
    acc.load_state_dict(state)
    _epoch(acc, DATA)
    assert acc.progress.step == 3


class _Raises(WindowHook):
    """Raises KeyError at an event, the second time."""

    def __init__(self, event: str) -> None:
        self._event, self._times, self.closed = event, 0, False

    def _at(self, event: str) -> None:
        self._times += event == self._event
        if event == self._event and self._times > 1:
            raise KeyError(event)

    def before_step(self, divisor: float) -> None:
        self._at("before_step")

    def after_step(self, window: Window) -> None:
        self._at("after_step")

    def close(self) -> None:
        self.closed = True
        self._at("close")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("runs", [True, False], ids=["step", "accumulate"])
@pytest.mark.parametrize("event", ["before_step", "after_step"])
def test_a_window_that_a_hook_ends_is_left_once_and_trained_on_once(gloo_world: World, event: str, runs: bool) -> None:
    def train(acc: Accumulator) -> None:
        for window in acc.windows(DATA):
            if runs:
                acc.step(window, _loss)
                continue
            for micro in window:
                with acc.accumulate():
                    acc.backward(_loss(acc.model, micro.batch))

    # Reproducible: its windows are given up as several ranks' are.
    acc, plain = (_make(gloo_world, numerics="reproducible", virtual_ranks=2)[0] for _ in range(2))
    hook = _Raises(event)
    acc.add_hook(hook)
    with pytest.raises(KeyError, match=event):
        train(acc)
    assert acc.progress.step == (1 if event == "before_step" else 2)
    acc.abandon()  # the hook raises no more: the ranks have had that
    acc.engine.hooks.remove(hook)
    train(acc)
    train(plain)
    assert acc.progress == plain.progress
    assert all(map(torch.equal, weights(acc), weights(plain)))


def test_a_hook_is_added_between_two_windows(gloo_world: World) -> None:
    acc, _ = _make(gloo_world)
    wrong: Any = _Raises
    with pytest.raises(MisuseError, match=r"add_hook\(_Raises\) of no WindowHook: inherit from WindowHook, and give"):
        acc.add_hook(wrong)
    for window in acc.windows(DATA):
        with pytest.raises(MisuseError, match=r"add_hook\(\) between two micro-batches"):
            acc.add_hook(_Raises("before_step"))
        acc.step(window, _loss)
        acc.add_hook(_Raises("close"))
        break
    acc.close()
    with pytest.raises(MisuseError, match=r"add_hook\(\) after close\(\)"):
        acc.add_hook(_Raises("close"))


def test_everything_is_given_back_where_a_hook_raises_in_close(gloo_world: World) -> None:
    acc, optimizer = _make(gloo_world)
    hooks = [_Raises("close"), _Raises("close")]
    hooks[0]._times = 1
    for hook in hooks:
        acc.add_hook(hook)
    _epoch(acc, DATA)
    with pytest.raises(KeyError, match="close"):
        acc.close()
    assert hooks[1].closed
    optimizer.step()
    acc.close()


def test_a_loop_goes_on_after_a_window_that_it_has_had_verified_alone(gloo_world: World) -> None:
    acc, _ = _make(gloo_world, verify="never")
    for number, window in enumerate(acc.windows(DATA)):
        if number == 0:
            acc.verify(window, _loss)
        for micro in window:
            with acc.accumulate():
                acc.backward(_loss(acc.model, micro.batch))
    assert acc.progress.step == 3
    assert acc.verified


class Remembers(dict[int, int]):
    def __call__(self, batch: Tensor) -> int:
        return 0 if batch[0, 0] >= 8 else len(batch)


def test_a_count_may_be_an_empty_container(gloo_world: World) -> None:
    acc, _ = _make(gloo_world, count=Remembers())
    for window in acc.windows(DATA):
        acc.step(window, _loss)
    assert (acc.progress.step, acc.progress.skipped) == (2, 1)


def test_on_one_rank_a_learned_tensor_beside_the_model_is_exact_whatever_counts(gloo_world: World) -> None:
    temperature = torch.ones((), requires_grad=True)
    beside = torch.optim.SGD([temperature], lr=0.1)
    acc, _ = _make(gloo_world, count=Remembers())
    for window in acc.windows(DATA):
        for micro in window:
            with acc.accumulate():
                acc.backward(_loss(acc.model, micro.batch) * temperature)
        beside.step()
        beside.zero_grad()
    assert acc.progress.step == 2
    assert temperature.item() != 1.0


class Shares(nn.Module):
    """Blocks with a layer in common, and a part of a function's outputs that the loss does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.blocks[1][0] = self.blocks[0][0]  # type: ignore[index]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, y = torch.var_mean(self.enter(x).unflatten(-1, (2, 4)), 1)
        for block in self.blocks:
            y = torch.sin(y) + block(y)
        return y, left


@pytest.mark.parametrize("engine", [DDPConfig(), FSDP2Config(blocks=["blocks.?", "blocks.0.0"])], ids=["ddp", "fsdp2"])
def test_blocks_share_a_layer_and_a_loss_leaves_outputs_out(engine: Any, gloo_world: World) -> None:
    model = Shares()
    oracle = deepcopy(model).double()
    acc = over_sgd(model, 0.1, (4, 2), count=len, engine=engine, world=gloo_world)
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for batch in acc.batches(DataSpec(train=DATA[:8], shuffle=False)):
        with acc.accumulate():
            acc.backward((acc.model(batch)[0] - 1).square().sum())
    for window in (DATA[:4], DATA[4:8]):
        optimizer.zero_grad()
        ((oracle(torch.stack(window).double())[0] - 1).square().sum() / 4).backward()
        optimizer.step()
    for name, weight in acc.state_dict()["model"].items():
        torch.testing.assert_close(weight.double(), oracle.state_dict()[name], rtol=1e-5, atol=1e-6)
