"""Run by torchrun, ``few`` or ``all``: loops as people write them on FSDP2, on uneven ranks, beside plain fp64."""

import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from distaccum import World
from distaccum.config.engine import FSDP2Config
from distaccum.engines.base import Engine
from distaccum.engines.factory import create_engine
from distaccum.engines.modules import full_tensor, to_local
from distaccum.errors import DistaccumError, MisuseError
from tests.support.answers import give
from tests.support.programs import error, gan_loop, gan_truth

WIDTH, RATE = 5, 0.05
SETTINGS = {
    "boundary": FSDP2Config(),
    "every": FSDP2Config(sync="every"),
    "held": FSDP2Config(reshard_after_forward=False),
}
# The micro-batches of each rank, window by window. Rank 1 has none in the first window of the second table.
UNEVEN, EMPTY, EVEN = [(3, 1), (1, 2), (2, 2)], [(2, 0), (0, 1), (1, 3)], [(2, 2), (1, 1), (2, 2)]
Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Act = Callable[[nn.Module, Batch], object]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Model(nn.Module):
    """``(B, WIDTH)`` to two outputs of that shape; the second has a layer of its own."""

    layers = 2

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(Block() for _ in range(self.layers))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.through(self.enter(x))
        return self.leave(x), torch.tanh(self.second(x))


class Checkpointed(Model):
    """Under both kinds of activation checkpoint."""

    def through(self, x: Tensor) -> Tensor:
        for block, reentrant in zip(self.blocks, (True, False), strict=True):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x


class Chosen(Model):
    """Each sample chooses its blocks, and the second layer; what no sample of a micro-batch chooses is not run."""

    layers = 3

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.enter(x)
        for i, block in enumerate(self.blocks):
            rows = (x[:, i] > 0).unsqueeze(1)
            if rows.any():
                hidden = torch.where(rows, block(hidden), hidden)
        rows = (x[:, -1] > 0).unsqueeze(1)
        second = torch.zeros_like(hidden)
        return self.leave(hidden), torch.where(rows, self.second(hidden), second) if rows.any() else second


class Apart(Chosen):
    """Blocks in parallel, on inputs that need no gradient; each sample chooses one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, found = x[:, :3].argmax(1), torch.zeros_like(x)
        for i, block in enumerate(self.blocks):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                found = found.index_add(0, rows, block(x[rows]))
        return self.leave(self.enter(found)), torch.tanh(self.second(found))


class Outer(nn.Module):
    """Holds blocks of its own; the second is run for what chooses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first, self.second = nn.Linear(WIDTH, WIDTH), Block(), Block()

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = self.first(self.layer(x))
        return torch.where(rows, self.second(x), x) if rows.any() else x


class Nested(Model):
    """Blocks within blocks, the outer and the inner ones chosen by each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outer() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, rows = self.enter(x), (x[:, :1] > 0)
        for i, block in enumerate(self.blocks):
            if i or rows.any():
                hidden = torch.where(rows | (i > 0), block(hidden, x[:, i + 1 : i + 2] > 0), hidden)
        return self.leave(hidden), torch.tanh(self.second(hidden))


class Backwards(Model):
    """Runs its blocks in another order than it lists them."""

    def through(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def squares(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum()


def plain(model: nn.Module, batch: Batch) -> Tensor:
    """One forward, whose second output is not used."""
    return squares(model(batch[0])[0], batch[1])


def both(model: nn.Module, batch: Batch) -> Tensor:
    first, second = model(batch[0])
    return squares(first, batch[1]) + squares(second, batch[1])


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """Two forwards, each with gradients, of one output each."""
    return squares(model(batch[0])[0], model(-batch[0])[1]) + plain(model, batch)


def chained(model: nn.Module, batch: Batch) -> Tensor:
    """The second forward's input is the first one's output."""
    return squares(model(model(batch[0])[0])[0], batch[1])


def teacher(model: nn.Module, batch: Batch) -> Tensor:
    """The model teaches itself, before, with a layer frozen as PEFT has adapters, and after the student's forward."""
    model.second.requires_grad_(False)
    with torch.no_grad():
        before = model(-batch[0])[0]
    model.second.requires_grad_(True)
    student = model(batch[0])
    with torch.no_grad():
        after = model(2 * batch[0])[1]
    return squares(student[0], before) + squares(student[1], after)


def detached(model: nn.Module, batch: Batch) -> Tensor:
    """The teacher's forward has gradients enabled, and its output is detached."""
    return squares(model(batch[0])[0], model(-batch[0])[0].detach())


def masked(model: nn.Module, batch: Batch) -> Tensor:
    """Of some samples; without any of these in a micro-batch the loss does not depend on the model."""
    kept = batch[0][:, 2] > 0
    first, second = model(batch[0])
    if not kept.any():
        return torch.zeros((), requires_grad=True)
    return squares(first[kept], batch[1][kept]) + squares(second[kept], batch[1][kept])


def adversarial(model: nn.Module, batch: Batch) -> Tensor:
    """Trained on the inputs that a gradient step makes worse."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(both(model, (x, batch[1])), x)
    return both(model, (batch[0] + 0.1 * slope, batch[1]))


def metric(model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        model(batch[0])


def evaluated(model: nn.Module, batch: Batch) -> None:
    """The same in eval mode, as ``@torch.inference_mode`` functions do it after the first training forward."""
    model.eval()
    with torch.inference_mode():
        model(batch[0])
    model.train()


def probed(model: nn.Module, batch: Batch) -> None:
    """A saliency map by a plain backward."""
    both(model, batch).backward()


def nothing(_: nn.Module, __: Batch) -> None:
    """The default."""


PROGRAMS: dict[str, tuple[Loss, Act, Act]] = {  # loss, after each backward, between windows
    "one forward, an unused output": (plain, nothing, nothing),
    "contrastive": (contrastive, nothing, nothing),
    "chained": (chained, nothing, nothing),
    "teacher": (teacher, nothing, nothing),
    "detached teacher": (detached, nothing, nothing),
    "adversarial": (adversarial, nothing, nothing),
    "masked": (masked, nothing, nothing),
    "metric": (both, metric, nothing),
    "metric and teacher": (teacher, evaluated, nothing),
    "evaluation between windows": (both, nothing, evaluated),
    "a backward between windows": (both, nothing, probed),
}


def samples(window: int, rank: int, micro: int) -> Batch:
    """A micro-batch, of one to three samples."""
    generator = torch.Generator().manual_seed(100 * window + 10 * rank + micro)
    rows = 1 + (window + rank + micro) % 3
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def count_of(window: int, table: list[tuple[int, int]]) -> int:
    """The samples of a window on all ranks."""
    return sum(len(samples(window, r, m)[0]) for r, n in enumerate(table[window]) for m in range(n))


def oracle(
    model: nn.Module, table: list[tuple[int, int]], loss: Loss, dtype: torch.dtype, left_out: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """The weights after plain SGD on whole windows."""
    model = deepcopy(model).to(dtype)
    for window in range(len(table)):
        if window in left_out:
            continue
        parts = [samples(window, r, m) for r, n in enumerate(table[window]) for m in range(n)]
        whole = tuple(torch.cat(column).to(dtype) for column in zip(*parts, strict=True))
        model.zero_grad()
        (loss(model, (whole[0], whole[1])) / len(whole[0])).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad)
    return {name: value.detach().double() for name, value in model.named_parameters()}


def made(config: FSDP2Config, make: Callable[[], nn.Module] = Model, **options: Any) -> tuple[nn.Module, Engine]:
    """A model as it was, and an engine around its copy."""
    torch.manual_seed(3)
    model = make()
    before = deepcopy(model)
    return before, create_engine(model, torch.optim.SGD(model.parameters(), lr=RATE), WORLD, engine=config, **options)


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: full_tensor(p).detach().double() for name, p in engine.unwrapped_model.named_parameters()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], before: nn.Module) -> float:
    """Of the weights' changes, relative."""
    start = {name: value.detach().double() for name, value in before.named_parameters()}
    off = sum((found[name] - expected[name]).square().sum() for name in expected)
    moved = sum((expected[name] - start[name]).square().sum() for name in expected)
    return float((off / moved) ** 0.5)


def errors(engine: Engine, before: nn.Module, table: Any, loss: Loss, left_out: tuple[int, ...] = ()) -> list[float]:
    """This engine's error, and that of a plain fp32 loop."""
    expected = oracle(before, table, loss, torch.float64, left_out)
    loop = oracle(before, table, loss, torch.float32, left_out)
    return [distance(weights(engine), expected, before), distance(loop, expected, before)]


def run_micro(engine: Engine, loss: Loss, batch: Batch, count: int, *, sync: bool, after: Act = nothing) -> None:
    with engine.micro_step(sync=sync):
        engine.backward(loss(engine.model, batch) / count)
        after(engine.model, batch)


def train(engine: Engine, table: list[tuple[int, int]], loss: Loss, after: Act, between: Act) -> None:
    for window in range(len(table)):
        train_on(engine, table, window, loss, after)
        between(engine.model, samples(window, 0, 0))


def train_on(engine: Engine, table: list[tuple[int, int]], window: int, loss: Loss, after: Act = nothing) -> None:
    own, count = table[window][WORLD.rank], count_of(window, table)
    engine.begin_window(own)
    for micro in range(own):
        batch = samples(window, WORLD.rank, micro)
        run_micro(engine, loss, batch, count, sync=micro == own - 1, after=after)
    if not own:
        engine.shadow_micro_step()
    engine.step()


def chosen(cells: Iterable[tuple[Any, ...]], few: bool) -> list[tuple[Any, ...]]:
    """All of them, or every seventh: each program and phase occurs, and each pair of a table and a setting."""
    return list(cells)[::7] if few else list(cells)


def programs(few: bool) -> Iterator[tuple[str, Any]]:
    """Errors of each program on each table and setting."""
    tables = {"uneven": UNEVEN, "empty": EMPTY, "even": EVEN}
    for name, table, setting in chosen(product(PROGRAMS, tables, SETTINGS), few):
        loss, after, between = PROGRAMS[name]
        if loss is adversarial and table != "even":
            continue  # refused
        before, engine = made(SETTINGS[setting])
        train(engine, tables[table], loss, after, between)
        yield f"{name}, {table}, {setting}", errors(engine, before, tables[table], loss)

    for make, table, setting in chosen(product((Checkpointed, Chosen, Apart), tables, SETTINGS), few):
        before, engine = made(SETTINGS[setting], make)
        train(engine, tables[table], both, nothing, nothing)
        yield f"{make.__name__}, {table}, {setting}", errors(engine, before, tables[table], both)

    nested = FSDP2Config(blocks=["blocks.?", "blocks.?.first", "blocks.?.second"])
    for make, config in ((Nested, nested), (Backwards, SETTINGS["boundary"])):
        before, engine = made(config, make)
        train(engine, UNEVEN, both, nothing, nothing)
        yield make.__name__, errors(engine, before, UNEVEN, both)


def copies() -> Iterator[tuple[str, Any]]:
    """Errors of an average of the weights, which is evaluated in between."""
    for setting, config in SETTINGS.items():
        before, engine = made(config)
        average = AveragedModel(engine.model)

        def update(model: nn.Module, batch: Batch, average: AveragedModel = average) -> None:
            average.update_parameters(model)
            metric(average, batch)

        train(engine, UNEVEN, both, nothing, update)
        exact, loop = (
            {name: sum(after[name] for after in weights) / len(weights) for name in weights[0]}
            for weights in (
                [oracle(before, UNEVEN[: i + 1], both, dtype) for i in range(len(UNEVEN))]
                for dtype in (torch.float64, torch.float32)
            )
        )
        found = {name: full_tensor(p).detach().double() for name, p in average.module.named_parameters()}
        yield setting, [distance(found, exact, before), distance(loop, exact, before)]


PHASES = ("begun", "forward", "backward", "one micro-step", "last backward")


def abandoned(phase: str, config: FSDP2Config, table: list[tuple[int, int]], at: int) -> list[float]:
    """Window ``at`` is given up in ``phase``, the others are trained."""
    before, engine = made(config)
    for window in range(len(table)):
        if window != at:
            train_on(engine, table, window, teacher)
            continue
        own, count = table[window][WORLD.rank], count_of(window, table)
        engine.begin_window(own)
        batch = samples(window, WORLD.rank, 0)
        if phase == "one micro-step":
            run_micro(engine, teacher, batch, count, sync=own == 1)
        elif phase != "begun":
            step = engine.micro_step(sync=own == 1)
            step.__enter__()
            total = teacher(engine.model, batch)
            if phase == "backward":
                engine.backward(total / count)
            if phase == "last backward":
                engine.backward(total / count)
                step.__exit__(None, None, None)
                for micro in range(1, own):
                    run_micro(engine, teacher, batch, count, sync=micro == own - 1)
        engine.zero_gradients()
    return errors(engine, before, table, teacher, left_out=(at,))


def abandonments(few: bool) -> Iterator[tuple[str, Any]]:
    """In each phase, in the first window and a later one."""
    tables = {"uneven": UNEVEN, "even": EVEN}
    for setting, phase, table, at in chosen(product(SETTINGS, PHASES, tables, (0, 1)), few):
        yield f"{phase}, {table}, {setting}, {at}", abandoned(phase, SETTINGS[setting], tables[table], at)


def after_an_error(config: FSDP2Config) -> list[float]:
    """A forward that raises on all ranks, caught."""
    before, engine = made(config)
    train(engine, EVEN[:1], both, nothing, nothing)
    engine.begin_window(2)
    broken = engine.unwrapped_model.blocks[1].register_forward_pre_hook(_raise)  # type: ignore[union-attr,index,operator]
    try:
        with engine.micro_step(sync=False):
            both(engine.model, samples(1, WORLD.rank, 0))
    except ArithmeticError:
        engine.zero_gradients()
    broken.remove()
    for window in (1, 2):
        train_on(engine, EVEN, window, both)
    return errors(engine, before, EVEN, both)


def _raise(*_: Any) -> None:
    raise ArithmeticError


def half(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Hooked(Model):
    """With a hook on a block's weight, and one on the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].layer.weight.register_hook(half)  # type: ignore[union-attr]
        self.leave.weight.register_hook(half)

    def __deepcopy__(self, _: Any) -> nn.Module:
        """With hooks, which copies of parameters lose."""
        twin = type(self)()
        twin.load_state_dict(self.state_dict())
        return twin


class HookedAfter(Hooked):
    def __init__(self) -> None:
        Model.__init__(self)
        self.blocks[0].layer.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[union-attr]


def hooks() -> Iterator[tuple[str, Any]]:
    for setting, config in SETTINGS.items():
        for make in (Hooked, HookedAfter):
            try:
                before, engine = made(config, make)
            except DistaccumError as error:
                yield f"{make.__name__}, {setting}", str(error)
                continue
            train(engine, UNEVEN, both, nothing, nothing)
            yield f"{make.__name__}, {setting}", errors(engine, before, UNEVEN, both)


class Routed(Model):
    """Each rank uses a block of its own once more; they are alike in size."""

    layers = 3

    def through(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[WORLD.rank]):
            x = block(x)
        return x


class Reentrant(Model):
    """A shared block."""

    def through(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[0], self.blocks[1]):
            x = checkpoint(block, x, use_reentrant=True)
        return x


def gan(config: FSDP2Config) -> list[float]:
    """Two models in turns, each with an accumulator, until ranks have different numbers of micro-batches."""
    made_of: list[Any] = []
    said = caught(lambda: gan_loop(config, WORLD, lambda acc: made_of.append(acc) or acc))
    assert "in another one's micro-step, and ranks have different numbers" in said or "PeerError" in said, said
    found = {
        f"{part}.{name}": p for part, acc in zip("gd", made_of, strict=True) for name, p in weights(acc.engine).items()
    }
    before, exact, loop = (
        gan_truth(dtype, steps) for dtype, steps in ((torch.float64, 0), (torch.float64, 2), (torch.float32, 2))
    )
    return [error(found, exact, before), error(loop, exact, before)]


class WithoutHooks(Model):
    """As Keras 3 calls its layers."""

    def __call__(self, x: Tensor) -> Any:
        return self.forward(x)


def whole_window(engine: Engine, loss: Loss, after: Act = nothing) -> None:
    """An even one of two micro-batches, and its step."""
    engine.begin_window(2)
    for micro in range(2):
        run_micro(engine, loss, samples(0, WORLD.rank, micro), 1, sync=micro == 1, after=after)
    complaint = engine.step().complaint
    if complaint:
        raise MisuseError(complaint)


def clip(model: nn.Module, _: Batch) -> None:
    """The line that people carry over; of the gradients that there are, gathered or reduced."""
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clear(model: nn.Module, _: Batch) -> None:
    """``zero_grad(set_to_none=True)`` by hand."""
    for parameter in model.parameters():
        parameter.grad = None


def penalty(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0].clone().requires_grad_()
    first, _ = model(x)
    (slope,) = torch.autograd.grad(squares(first, batch[1]), x, create_graph=True)
    return squares(first, batch[1]) + slope.square().sum()


def constant(model: nn.Module, batch: Batch) -> Tensor:
    """It has a gradient, and none of the model's."""
    return model(batch[0])[0].detach().sum() * torch.ones((), requires_grad=True)


def adversarial_then_uneven(engine: Engine) -> None:
    """The first window is even, the second is not."""
    engine.begin_window(1)
    with engine.micro_step(sync=True):
        engine.backward(adversarial(engine.model, samples(0, WORLD.rank, 0)))
    engine.zero_gradients()
    engine.begin_window(2 - WORLD.rank)


def between_micro_batches(engine: Engine) -> None:
    """Raised on the rank with two; the window goes on."""
    said = None
    engine.begin_window(2 - WORLD.rank)
    for micro in range(2 - WORLD.rank):
        last = micro == 1 - WORLD.rank
        run_micro(engine, both, samples(0, WORLD.rank, micro), 1, sync=last)
        if not last:
            said = caught(lambda: metric(engine.model, samples(0, 0, 0)))
    engine.zero_gradients()
    raise MisuseError(said or "")


def beside_an_empty_rank(engine: Engine) -> None:
    """Rank 1 has nothing to do in the window."""
    engine.begin_window(1 - WORLD.rank)
    said = None
    if WORLD.rank:
        engine.shadow_micro_step()
    else:
        said = caught(engine.zero_gradients)
        run_micro(engine, both, samples(0, 0, 0), 1, sync=True)
    engine.zero_gradients()
    raise MisuseError(said or "")


def penalized(read: Callable[[Tensor], Tensor]) -> Callable[[Engine], None]:
    """With a penalty on what ``read`` makes of the parameters."""
    loss = lambda model, batch: both(model, batch) + sum(read(p).square().sum() for p in model.parameters())  # noqa: E731
    return lambda engine: whole_window(engine, loss)


def adapted(model: nn.Module, batch: Batch) -> Tensor:
    """An inner step, as meta-learning makes it."""
    slopes = torch.autograd.grad(both(model, batch), list(model.parameters()))
    return sum(slope.square().sum() for slope in slopes)  # type: ignore[return-value]


def mapped(model: nn.Module, batch: Batch) -> Tensor:
    return torch.func.vmap(lambda x, y: both(model, (x.unsqueeze(0), y.unsqueeze(0))))(*batch).sum()


def freeze(model: Any, _: Batch) -> None:
    model.leave.requires_grad_(False)


def tied(engine: Any) -> None:
    """Between wrapping and the first window."""
    own = engine.model.leave.weight
    engine.model.leave.weight = engine.model.enter.weight
    try:
        whole_window(engine, both)
    finally:
        engine.model.leave.weight = own


def penalty_before_the_forward(_: Engine) -> None:
    """On weights that are gathered already."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        metric(model, batch)
        return sum(p.square().sum() for p in model.parameters()) + both(model, batch)

    whole_window(made(SETTINGS["held"])[1], loss)


def told_of_an_error(engine: Engine) -> None:
    """In the first window, in which rank 0 has two micro-batches."""
    train(engine, UNEVEN, adversarial, nothing, nothing)


def synced_early(engine: Engine) -> None:
    """By rank 1, which has two micro-batches, and which rank 0 waits for from the beginning."""
    engine.begin_window(1 + WORLD.rank)
    with engine.micro_step(sync=True):
        pass


def left_out(engine: Engine) -> None:
    engine.begin_window(2)
    with engine.micro_step(sync=False):
        engine.backward(both(engine.model, samples(0, 0, 0)))
    engine.step()


def wrapped_again(_: Engine) -> None:
    _, engine = made(FSDP2Config())
    engine.close()
    model = engine.unwrapped_model
    create_engine(model, torch.optim.SGD(model.parameters(), lr=RATE), WORLD, engine=FSDP2Config())


def caught(call: Callable[[], object]) -> str:
    try:
        call()
    except DistaccumError as error:
        return str(error)
    return ""


def refusals() -> Iterator[tuple[str, Any]]:
    """What was raised, and at last whether no weight has moved."""
    kept: list[nn.Parameter] = []

    def keep() -> Model:
        model = Model()
        kept.append(model.leave.weight)
        return model

    def inner(model: Any, batch: Batch) -> Tensor:
        return squares(model.blocks[0](batch[0]), batch[1])

    def hooked(engine: Any) -> None:
        engine.unwrapped_model.enter.weight.register_hook(half)
        whole_window(engine, both)

    cases: dict[str, tuple[Callable[[Engine], object], Callable[[], nn.Module]]] = {
        "clipped by hand": (lambda engine: whole_window(engine, both, clip), Model),
        "cleared by hand": (lambda engine: whole_window(engine, both, clear), Model),
        "a backward of one's own": (lambda engine: whole_window(engine, both, probed), Model),
        "model.forward": (lambda engine: whole_window(engine, lambda m, b: squares(m.forward(b[0])[0], b[1])), Model),
        "a module inside": (lambda engine: whole_window(engine, inner), Model),
        "a __call__ without hooks": (lambda engine: whole_window(engine, plain), WithoutHooks),
        "a kept parameter": (lambda e: whole_window(e, lambda m, b: both(m, b) + kept[0].square().sum()), keep),
        "a hook on a shard": (hooked, Model),
        "a constant forward": (lambda engine: whole_window(engine, constant), Model),
        "another block twice on each rank": (lambda engine: whole_window(engine, both), Routed),
        "a block twice, reentrant": (lambda engine: whole_window(engine, both), Reentrant),
        "two forwards, reentrant": (lambda engine: whole_window(engine, contrastive), Checkpointed),
        "a gradient penalty": (lambda engine: whole_window(engine, penalty), Model),
        "an attack, uneven": (adversarial_then_uneven, Model),
        "between micro-batches": (between_micro_batches, Model),
        "abandoned beside an empty rank": (beside_an_empty_rank, Model),
        "whole weights in the loss": (penalized(full_tensor), Model),
        "local weights in the loss": (penalized(to_local), Model),
        "a plain penalty": (penalized(Tensor.clone), Model),
        "a penalty before the forward": (penalty_before_the_forward, Model),
        "an inner step": (lambda engine: whole_window(engine, adapted), Model),
        "vmap": (lambda engine: whole_window(engine, mapped), Model),
        "frozen in a window": (lambda engine: whole_window(engine, both, freeze), Model),
        "tied after wrapping": (tied, Model),
        "another type": (lambda engine: engine.model.double(), Model),
        "a copy of a block": (lambda engine: deepcopy(engine.model.blocks[0]), Model),
        "an error that another rank waits for": (told_of_an_error, Model),
        "left out": (left_out, Model),
        "synced early": (synced_early, Model),
        "wrapped again": (wrapped_again, Model),
    }
    unmoved = True
    for name, (run, make) in cases.items():
        _, engine = made(FSDP2Config(), make)
        before = weights(engine)
        yield name, caught(partial(run, engine))
        engine.zero_gradients()
        now = weights(engine)
        unmoved &= all(torch.equal(now[key], before[key]) for key in before)
    yield "unmoved", unmoved


def main(_: World) -> dict[str, Any]:
    few = sys.argv[2] == "few"
    refused = dict(refusals())
    return {
        "programs": dict(programs(few)),
        "copies": dict(copies()),
        "abandoned": dict(abandonments(few)),
        "after an error": {setting: after_an_error(config) for setting, config in SETTINGS.items()},
        "hooks": dict(hooks()),
        "gan": {name: gan(config) for name, config in SETTINGS.items()},
        "unmoved": refused.pop("unmoved"),
        "refused": refused,
    }


WORLD = World.join()

if __name__ == "__main__":
    give(main, of_all=True)
