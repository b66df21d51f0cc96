"""ddp and zero1 on two uneven ranks: programs that trained wrongly in silence are exact, or refused by name.

The truth is a plain torch loop over the whole windows in fp64, on one process.
"""

import copy
import json
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator, DataSpec, Trainer
from distaccum.config.engine import DDPConfig, EngineConfig, Zero1Config
from distaccum.distributed.world import World
from distaccum.engines.ddp import reducer
from distaccum.engines.factory import create_engine
from distaccum.errors import BatchStatisticsWarning, ConfigError, MisuseError
from distaccum.functional import finish_step, plan_windows
from distaccum.losses.cross_entropy import CrossEntropy
from tests.support.runs import settings
from tests.support.threads import run_ranks

GLOBAL, MICRO = 5, 1  # three micro-batches on rank 0, two on rank 1; the last window has two and one
DATA = torch.randn(13, 4, generator=torch.Generator().manual_seed(3)).double()
Weights = list[Tensor]


class Branches(nn.Module):
    """``second`` is used where the sample's first feature is positive."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.double()

    def forward(self, x: Tensor) -> Any:
        y = self.first(x).tanh()
        y = self.second(y).tanh() if bool(x[0, 0] > 0) else y
        return self.head(y)


class Plain(Branches):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.second(self.first(x).tanh()).tanh())


class Hundreds(Plain):
    """More parameters than DDP names of those that a backward has left out."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ParameterList(nn.Parameter(torch.zeros(1).double()) for _ in range(250))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + (torch.stack([*self.more]).sum() if bool(x[0, 0] > 0) else 0.0)


def _data(positive: Callable[[int], bool]) -> list[Tensor]:
    """The samples, the first feature of each positive where the function of its number says so."""
    rows = DATA.clone()
    signs = torch.tensor([1.0 if positive(i) else -1.0 for i in range(len(rows))], dtype=torch.float64)
    rows[:, 0] = rows[:, 0].abs() * signs
    return list(rows)


def _weights(model: nn.Module) -> Weights:
    return [p.detach().clone() for p in model.parameters()]


def _expected(
    model: nn.Module,
    data: Sequence[Tensor],
    order: Sequence[Sequence[int]],
    optimizer: torch.optim.Optimizer | None = None,
    skipped: Collection[int] = (),
) -> Weights:
    """A plain loop: the mean over each window's samples, one by one, as a micro-batch has one; some add nothing."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for numbers in order:
        optimizer.zero_grad()
        losses = [model(data[i].unsqueeze(0)).square().sum() for i in numbers if i not in skipped]
        sum(losses).div(len(numbers)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def _accumulator(model: nn.Module, world: World, engine: EngineConfig | str = "ddp", **settings: Any) -> Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    sizes: dict[str, Any] = {"global_batch_size": GLOBAL, "micro_batch_size": MICRO, "count": len}
    return Accumulator(model, optimizer, world=world, engine=engine, **sizes | settings)


def _shares(data: Sequence[Tensor]) -> list[list[list[int]]]:
    """The samples of each window of the first epoch, by rank."""
    from distaccum.data.counter import GlobalCounter  # noqa: PLC0415
    from distaccum.data.factory import as_loader  # noqa: PLC0415

    def of(world: World) -> list[list[list[int]]]:
        loader = as_loader(list(data), world, global_batch_size=GLOBAL, tokens=None, micro_batch_size=MICRO, seed=0)
        return [
            [list(map(int, ids)) for ids in window.ids()] for window in loader.windows(0, 0, GlobalCounter(world, len))
        ]

    first, second = run_ranks(2, of)
    assert isinstance(first, list)
    assert isinstance(second, list)
    return [[list(chain(*ids)) for ids in shares] for shares in zip(first, second, strict=True)]


SHARES = _shares(list(DATA))
ORDER = [[i for share in shares for i in share] for shares in SHARES]
BOUNDARIES = [share[-1] for share in SHARES[0]]  # of the first window: the last sample of each rank


def _train(acc: Accumulator, data: Sequence[Tensor], between: Callable[[], object] | None = None) -> Weights:
    for window in acc.windows(list(data)):
        for micro in window:
            with acc.accumulate():
                acc.backward(acc.model(micro.batch).square().sum())
        if between is not None:
            between()
    return _weights(acc.engine.unwrapped_model)


def _agree(results: Sequence[object], expected: Weights, tolerance: float = 1e-12) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, list)
        for found, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def _refused(results: Sequence[object], message: str, kind: type[Exception] = MisuseError) -> None:
    for result in results:
        assert isinstance(result, kind), result
        assert re.search(message, str(result)), str(result)


ENGINES = [pytest.param(DDPConfig, id="ddp"), pytest.param(Zero1Config, id="zero1")]


@pytest.mark.parametrize("config", ENGINES)
@pytest.mark.parametrize("users", [(), (0,), (1,)], ids=["nobody", "rank 0", "rank 1"])
def test_a_parameter_that_the_boundary_leaves_unused_is_refused_on_all_ranks_alike(
    config: type[DDPConfig], users: tuple[int, ...]
) -> None:
    """It was used in the ranks' micro-batches before, or is used at other ranks' boundary: nobody waits or steps."""
    data = _data(lambda i: BOUNDARIES.index(i) in users if i in BOUNDARIES else True)

    def program(world: World) -> Weights:
        model = Branches()
        before = _weights(model)
        acc = _accumulator(model, world, config())
        try:
            _train(acc, data)
        finally:
            for now, was in zip(_weights(model), before, strict=True):
                torch.testing.assert_close(now, was, rtol=0, atol=0)
        return []

    named = "; ".join(
        rf"rank {rank}: the loss of a step's last micro-batch does not depend on second\.weight, second\.bias, .*"
        r"engine\.find_unused_parameters=true"
        for rank in (0, 1)
        if rank not in users
    )
    _refused(run_ranks(2, program), named)


def test_hundreds_that_the_boundary_leaves_unused_are_refused_on_all_ranks() -> None:
    """Torch names the first ones, and was taken for another release when it then named others."""
    data = _data(lambda i: i not in BOUNDARIES)
    models = [Hundreds() for _ in range(2)]
    _refused(run_ranks(2, lambda world: _train(_accumulator(models[world.rank], world), data)), r"depend on more\.0, ")


@pytest.mark.parametrize("config", ENGINES)
def test_unused_parameters_are_exact_with_the_setting(config: type[DDPConfig]) -> None:
    """Also where a whole window uses none of a branch, and a probe before it does: decay must not move it."""
    data = _data(lambda i: i % 3 == 0 and i not in ORDER[1])

    def program(world: World) -> Weights:
        model = Branches()
        acc = _accumulator(model, world, config(find_unused_parameters=True))
        return _train(acc, data, lambda: acc.model(DATA[:1].abs()).sum().backward())

    _agree(run_ranks(2, program), _expected(Branches(), data, ORDER))


def test_the_last_window_of_a_run_tells_of_its_fault() -> None:
    data = _data(lambda i: i not in ORDER[-1])
    results = run_ranks(2, lambda world: _train(_accumulator(Branches(), world, nonfinite="skip"), data))
    _refused(results, r"does not depend on second\.weight")


class Fades(nn.Module):
    """Leaves ``bonus`` out from its ninth forward on: the last micro-batch of the third window."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.bonus = nn.Linear(4, 3), nn.Linear(4, 3)
        self.forwards = 0

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        return self.head(x) + (self.bonus(x) if self.forwards < 9 else 0.0)


def test_a_trainer_whose_last_window_has_a_fault_fails_and_saves_nothing_of_it(
    gloo_world: World, tmp_path: Path
) -> None:
    config = settings((8, 3), {"max_steps": 3, "eval_every": 0, "verify": "never"}, save=1)  # a proof runs forwards
    data = DataSpec(train=[(row.float(), row[:3].argmax()) for row in torch.cat([DATA, DATA])[:24]], description="")
    with pytest.raises(MisuseError, match=r"does not depend on bonus\.weight, bonus\.bias"):
        Trainer(Fades(), CrossEntropy(), data, config=config, run_dir=tmp_path).fit()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-1", "step-2"]


def test_a_layer_frozen_after_wrapping_is_refused() -> None:
    def program(world: World) -> Weights:
        model = Plain()
        acc = _accumulator(model, world)
        model.second.requires_grad_(False)
        return _train(acc, list(DATA))

    _refused(run_ranks(2, program), r"freeze second\.weight, second\.bias before the model is wrapped")


class Checkpointed(Plain):
    reentrant = True

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        for _ in range(2):
            y = checkpoint(self.second, y.tanh(), use_reentrant=self.reentrant)
        return self.head(y)


class NotReentrant(Checkpointed):
    reentrant = False


def test_a_block_in_two_reentrant_checkpoints_is_refused_and_exact_without() -> None:
    program = partial(_trained, Checkpointed)
    _refused(run_ranks(2, program), r"reached a parameter twice, .*: give torch\.utils\.checkpoint use_reentrant=False")
    _agree(run_ranks(2, partial(_trained, NotReentrant)), _expected(NotReentrant(), list(DATA), ORDER))


def _trained(kind: type[Plain], world: World) -> Weights:
    return _train(_accumulator(kind(), world), list(DATA))


def test_a_loss_without_a_gradient_adds_nothing_or_is_refused() -> None:
    """A micro-batch may give a constant, except at the boundary: there nobody knows what was used."""

    def program(world: World, skipped: set[int], **config: Any) -> Weights:
        model = Plain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        engine = create_engine(model, optimizer, world, engine=DDPConfig(**config))
        for shares in SHARES:
            own, size = shares[world.rank], sum(map(len, shares))
            for i in own:
                with engine.micro_step(sync=i == own[-1]):
                    loss = engine.model(DATA[i : i + 1]).square().sum() / size * engine.gradient_divide_factor
                    engine.backward(loss.detach() if i in skipped else loss)
            output = engine.step()
            faults = world.all_gather_names([output.fault] if output.fault else [])
            if faults:
                raise MisuseError("; ".join(faults))
        return _weights(model)

    skipped = {SHARES[0][0][0], SHARES[1][0][0]}
    expected = _expected(Plain(), list(DATA), ORDER, skipped=skipped)
    _agree(run_ranks(2, partial(program, skipped=skipped)), expected)
    _agree(run_ranks(2, partial(program, skipped=skipped, find_unused_parameters=True)), expected)
    _refused(run_ranks(2, partial(program, skipped={BOUNDARIES[0]})), "rank 0: .* depends on no trained parameter")
    everything = set(range(len(DATA)))
    _refused(run_ranks(2, partial(program, skipped=everything)), "rank 0: .* depends on no .*rank 1: .* depends on no")
    results = run_ranks(2, partial(program, skipped=everything, find_unused_parameters=True))
    _refused(results, "no loss of this step depends on a trained parameter")


@pytest.mark.parametrize("config", ENGINES)
@pytest.mark.parametrize("zeroes", [False, True])
def test_gradients_of_probes_between_windows_are_none_of_the_next_windows(
    config: type[DDPConfig], zeroes: bool
) -> None:
    """Saliency maps, validation gradients; on one rank alone too, since nothing is communicated."""

    def program(world: World) -> Weights:
        model = Plain()
        acc = _accumulator(model, world, config())

        def probe() -> None:
            for forward in (acc.model, model)[: world.rank + 1]:
                forward(DATA[:2].clone().requires_grad_(True)).sum().backward()
            if zeroes:
                acc.model.zero_grad()
                model.zero_grad()

        probe()
        return _train(acc, list(DATA), probe)

    _agree(run_ranks(2, program), _expected(Plain(), list(DATA), ORDER))


def _train_after(acc: Accumulator, boundary: Callable[[Tensor], object]) -> Weights:
    """Trains after a first window that is abandoned: its last micro-step is ``boundary``, which raises KeyError."""
    window = next(iter(acc.windows(list(DATA))))
    for i, micro in enumerate(window):
        if i == len(window) - 1:
            with suppress(KeyError), acc.accumulate():
                boundary(micro.batch)
            break
        with acc.accumulate():
            acc.backward(acc.model(micro.batch).square().sum())
    acc.abandon()
    return _train(acc, list(DATA))


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: list[bool]) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks[0]:
            raise KeyError
        return gradient, None


class BreaksLate(torch.autograd.Function):
    """Raises once the backward, and DDP's reduction in it, are through: as a signal's handler does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        later = torch.autograd.Variable._execution_engine.queue_callback

        def breaks() -> None:
            raise KeyError

        later(lambda: later(breaks))  # after DDP's own
        return gradient


BREAKING: Any = Breaks
BREAKING_LATE: Any = BreaksLate


def _hook(model: Plain, breaks: list[bool], how: str, rank: int) -> None:
    """Lets the model break in a backward: in one of its layers, or in a hook of a parameter."""
    if how == "in a backward":  # on one rank before it reached a parameter, on the other one half-way
        where = model.first if rank else model.head
        where.register_forward_hook(lambda _, __, y: BREAKING.apply(y, breaks))
    elif how == "in a parameter's hook":  # which is called when a gradient is written, and DDP has not been told

        def hook(_: Tensor) -> None:
            if breaks[0]:
                raise KeyError

        bias: Any = model.head.bias
        bias.register_post_accumulate_grad_hook(hook)


FINDS = partial(DDPConfig, find_unused_parameters=True)


@pytest.mark.parametrize(
    ("how", "config"),
    [
        ("before a forward", DDPConfig),
        ("after a backward", DDPConfig),
        ("in a backward", DDPConfig),
        ("in a parameter's hook", DDPConfig),
        ("in a parameter's hook", FINDS),
        *(
            ("after the reduction", config)
            for config in (DDPConfig, FINDS, Zero1Config, partial(Zero1Config, find_unused_parameters=True))
        ),
    ],
)
def test_a_window_that_breaks_at_its_boundary_and_is_abandoned_leaves_the_next_one_exact(
    how: str, config: Callable[[], EngineConfig]
) -> None:
    """One rank may be further than the other, and go on with its gradient: no reduction is another one's collective."""

    def program(world: World) -> Weights:
        model, breaks = Plain(), [False]
        _hook(model, breaks, how, world.rank)
        acc = _accumulator(model, world, config())

        def boundary(batch: Tensor) -> None:
            if how in ("before a forward", "in a parameter's hook") and world.rank == 0:
                raise KeyError
            loss = acc.model(batch).square().sum()
            if how == "after the reduction" and world.rank == 0:
                loss = BREAKING_LATE.apply(loss)
            breaks[0] = True
            try:
                if how != "before a forward":
                    acc.backward(loss)
            finally:
                breaks[0] = False
            raise KeyError

        return _train_after(acc, boundary)

    _agree(run_ranks(2, program), _expected(Plain(), list(DATA), ORDER))


def _clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _backward_past(model: nn.Module) -> None:
    model(DATA[:1]).sum().backward()


def _drop(model: nn.Module) -> None:
    next(model.parameters()).grad = None


@pytest.mark.parametrize("config", ENGINES)
@pytest.mark.parametrize("tamper", [_clip, _backward_past, _drop])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_changed_by_hand_inside_a_window_are_refused(
    config: type[DDPConfig], tamper: Callable[[nn.Module], None], last: bool
) -> None:
    def program(world: World) -> Weights:
        model = Plain()
        before = _weights(model)
        acc = _accumulator(model, world, config())
        try:
            for window in acc.windows(list(DATA)):
                for i, micro in enumerate(window):
                    with acc.accumulate():
                        acc.backward(acc.model(micro.batch).square().sum())
                        if i == (len(window) - 1 if last else 0):
                            tamper(model)
        finally:
            for now, was in zip(_weights(model), before, strict=True):
                torch.testing.assert_close(now, was, rtol=0, atol=0)
        return []

    _refused(run_ranks(2, program), "gradients were changed by hand inside a window")


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    return fully_shard(model)  # type: ignore[return-value]


def _named(name: str, place: str) -> Callable[[nn.Module], nn.Module]:
    """A wrapper of that name, from a module that need not be installed."""
    kind: Callable[[nn.Module], nn.Module] = type(name, (Wrapped,), {"__module__": place})
    return kind


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (DistributedDataParallel, "DistributedDataParallel"),
        (DataParallel, "DataParallel"),
        (_sharded, "FSDPModule"),
        (_named("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded"), "FullyShardedDataParallel"),
        (_named("DeepSpeedEngine", "deepspeed.runtime.engine"), "DeepSpeedEngine"),
    ],
)
def test_a_model_that_is_wrapped_already_is_refused(
    gloo_world: World, wrap: Callable[[nn.Module], nn.Module], name: str, inside: bool
) -> None:
    model = wrap(nn.Linear(2, 2))
    model = Wrapped(model) if inside else model
    part = "its inner" if inside else "it"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for engine in ("ddp", "zero1", "fsdp2", "deepspeed"):
        with pytest.raises(ConfigError, match=rf"{part} is in {name} already, and gradients would be reduced twice"):
            create_engine(model, optimizer, gloo_world, engine=engine)


def test_a_model_with_sharded_parameters_is_refused(gloo_world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import Replicate, distribute_tensor  # noqa: PLC0415

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,)), [Replicate()]))
    for engine in ("ddp", "zero1", "fsdp2"):
        with pytest.raises(ConfigError, match=r"its parameters weight are sharded over ranks already \(DTensor\)"):
            create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), gloo_world, engine=engine)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("_NAMES", ("prepare_for_lunch",), "has no prepare_for_lunch"),
        ("_UNREACHED", re.compile("nothing like it"), "does not say which parameters its reduction waits for"),
    ],
)
def test_another_torch_is_refused_when_the_engine_is_made(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch, name: str, value: object, problem: str
) -> None:
    monkeypatch.setattr(reducer, name, value)
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=rf"torch={re.escape(torch.__version__)}: .*{problem}\. Use a torch from"):
        create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), gloo_world)


def test_what_cannot_be_trained_is_refused(gloo_world: World) -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match=r"its parameter scale is float8_e4m3fn, which cannot be trained"):
        create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), gloo_world)
    table = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ConfigError, match="SparseAdam: it takes sparse gradients only"):
        create_engine(table, torch.optim.SparseAdam(table.parameters()), gloo_world)
    del model.scale
    model.weight._in_backward_optimizers = [torch.optim.SGD([model.weight])]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"_apply_optimizer_in_backward steps weight in the backward, where"):
        create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), gloo_world)


class Odd(nn.Module):
    """A sparse embedding, complex and 0-dim parameters, and tensors that no collective sends as they are."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(2)
        self.table = nn.Embedding(13, 4, sparse=True).double()
        self.table.weight.data = torch.randn(13, 4, generator=values).double()
        self.phase = nn.Parameter(torch.randn(4, generator=values).to(torch.complex128))
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.steps: Tensor
        self.short: Tensor
        self.register_buffer("steps", torch.arange(4).to(torch.int16))
        self.register_buffer("short", torch.tensor(3, dtype=torch.int16))
        self.frozen = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, number: Tensor) -> Any:
        return self.table(number) * (self.phase * self.phase.conj() + self.phase).real * self.scale


@pytest.mark.parametrize("config", ENGINES)
def test_sparse_embeddings_complex_and_small_integers_are_exact(config: type[DDPConfig]) -> None:
    numbers = list(torch.arange(13))

    def program(world: World) -> Weights:
        model = Odd()
        if world.rank:
            model.steps += 5
            model.short += 1
            model.frozen.data = torch.zeros(2).to(torch.float8_e4m3fn)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        acc = Accumulator(
            model, optimizer, global_batch_size=5, micro_batch_size=1, count=len, world=world, engine=config()
        )
        assert model.table.sparse
        _train(acc, numbers)
        assert model.steps.tolist() == [0, 1, 2, 3]
        assert model.short.item() == 3
        assert model.frozen.float().tolist() == [1, 1]
        return [p.detach() for p in model.parameters() if p.requires_grad]

    model = Odd()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    _agree(run_ranks(2, program), _expected(model, numbers, ORDER, optimizer))


def test_copies_of_an_owned_model_and_optimizer_are_the_users_own(gloo_world: World) -> None:
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = create_engine(model, optimizer, gloo_world)
    engine.begin_window(1)
    assert engine.window_open
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        copied(DATA[:1]).sum().backward()
        copied.zero_grad()
        assert all(p.grad is None for p in copied.parameters())
    other = copy.deepcopy(optimizer)
    other.zero_grad()
    other.step()
    for method in (model.zero_grad, engine.model.zero_grad, optimizer.zero_grad):
        with pytest.raises(MisuseError, match=r"zero_grad\(\) was called by hand"):
            method()
    engine.zero_gradients()
    assert not engine.window_open
    for allowed in (model.zero_grad, engine.model.zero_grad, optimizer.zero_grad):
        allowed()
    with pytest.raises(MisuseError, match=r"optimizer\.step\(\) was called by hand"):
        optimizer.step()


def _looks(_: Tensor) -> None:
    """As some log the gradients."""


@pytest.mark.parametrize("config", [*ENGINES, pytest.param(partial(DDPConfig, find_unused_parameters=True), id="find")])
def test_a_closed_engine_gives_everything_back(config: Callable[[], EngineConfig]) -> None:
    """A plain loop then goes on exactly, optimizer state included, and another accumulator can take over."""

    def program(world: World) -> Weights:
        model = Plain()
        model.head.weight.register_post_accumulate_grad_hook(_looks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        sizes: dict[str, Any] = {"global_batch_size": GLOBAL, "micro_batch_size": MICRO, "count": len}
        names = set(vars(model)), set(vars(optimizer))
        acc = Accumulator(model, optimizer, world=world, engine=config(), **sizes)
        _train(acc, list(DATA))
        acc.engine.close()
        assert (set(vars(model)), set(vars(optimizer))) == names
        assert all(p.grad is None for p in model.parameters())
        assert [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or {}).values()] == [_looks]
        with pytest.raises(MisuseError, match="a window after close"):
            acc.engine.begin_window(1)
        _expected(model, list(DATA), ORDER, optimizer)
        return _train(Accumulator(model, optimizer, world=world, engine=config(), **sizes), list(DATA))

    _agree(run_ranks(2, program), _expected(Plain(), list(DATA), [*ORDER, *ORDER, *ORDER]))


def test_a_second_zero1_accumulator_over_a_model_is_refused() -> None:
    def program(world: World) -> Weights:
        model = Plain()
        _accumulator(model, world, "zero1")
        return _train(_accumulator(model, world), list(DATA))

    _refused(run_ranks(2, program), "is in another Accumulator")


class SyncBatchNorm(nn.BatchNorm1d):
    """By the name of torch's, which DDP takes on GPUs alone."""


def test_synchronized_batch_norm_is_refused_by_name_where_ranks_are_uneven() -> None:
    def program(world: World) -> Weights:
        model = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4), nn.Linear(4, 1)).double()
        return _train(_accumulator(model, world), list(DATA))

    with pytest.warns(BatchStatisticsWarning):
        results = run_ranks(2, program)
    _refused(results, r"^1 \(SyncBatchNorm\) communicates in every micro-step")


def test_level_one_tells_of_a_fault_and_of_calls_out_of_order() -> None:
    data = _data(lambda i: i != BOUNDARIES[0])

    def program(world: World) -> Iterator[Tensor]:
        model = Branches()
        engine = create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
        windows = plan_windows(data, world, global_batch_size=GLOBAL, micro_batch_size=MICRO, count=len)
        window = next(windows(0))
        with engine.micro_step(sync=False):
            engine.backward(engine.model(window.micro_batches[0].batch).sum())
        with pytest.raises(MisuseError, match=r"step\(\) before the gradients are reduced"):
            engine.step()
        engine.zero_gradients()
        for i, micro in enumerate(window.micro_batches):
            with engine.micro_step(sync=i == len(window.micro_batches) - 1):
                engine.backward(engine.model(micro.batch).square().sum() / window.counts["loss"] * world.size)
        with pytest.raises(MisuseError, match="after the window's reduction"):
            engine.backward(engine.model(window.micro_batches[0].batch).sum())
        with pytest.raises(MisuseError, match="a micro-step after the window's last"):
            engine.micro_step(sync=False)
        if world.rank == 0:
            with pytest.raises(MisuseError, match=r"rank 0: .* does not depend on second\.weight"):
                finish_step(engine, window)
        else:
            assert not finish_step(engine, window).applied
        engine.begin_window(1)
        with engine.micro_step(sync=world.rank == 1):
            engine.backward(engine.model(window.micro_batches[0].batch).sum())
        if world.rank == 0:  # the other rank has reduced, and does not step alone
            with pytest.raises(MisuseError, match=r"step\(\) before the gradients are reduced"):
                finish_step(engine, window)
        else:
            assert not finish_step(engine, window).applied
        engine.zero_gradients()
        engine.begin_window(2)
        with pytest.raises(MisuseError, match="with 1 micro-steps of the window left"):
            engine.micro_step(sync=True)
        raise KeyError("done")

    _refused(run_ranks(2, program), "done", KeyError)
