"""Programs as users write them, on DeepSpeed, beside one fp64 process on whole batches.

``deepspeed_programs.py RESULT STAGE...`` (``3few``: some of the programs): writes JSON, of each rank by
``"PROGRAM STAGE"``: the relative error of the weights' change after three windows of uneven micro-batches, and that of
plain torch in fp32 (two numbers); or the message with which it was refused.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.utils.data import DataLoader

from distaccum import Accumulator, World
from distaccum.config.engine import DeepSpeedConfig
from distaccum.errors import ConfigError, MisuseError
from distaccum.functional import create_engine
from tests.distributed.workers.edits import samples
from tests.support.answers import give
from tests.support.programs import error

Batch = tuple[Tensor, Tensor, Tensor]  # numbers of samples, inputs, targets
WINDOWS = 3


class Net(nn.Module):
    """Two layers, and one that a caller may leave out or replace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.rare, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, rare: bool = True, other: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = hidden + (self.rare(hidden) if rare else 0) + (self.other(hidden) if other else 0)
        result: Tensor = self.last(hidden)
        return result


@dataclass
class Output:
    """What DeepSpeed's hooks on outputs overlook."""

    logits: Tensor


class InDataclass(Net):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return Output(super().forward(*args, **kwargs))


class Keeps(Net):
    """What a loss takes beside the output."""

    def forward(self, x: Tensor, rare: bool = True, other: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.beside = hidden.square().sum()
        result: Tensor = self.last(hidden + self.rare(hidden) + self.other(hidden))
        return result


class Reads(Net):
    """Another module's weight."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        moved: Tensor = nn.functional.linear(x, next(iter(self.first.parameters())))
        return super().forward(x) + moved.mean(1, keepdim=True)


class PastAutograd(Net):
    """Its loss has a gradient, of the input alone."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x.requires_grad_() @ self.first.weight.detach().T[:, :3]


class Odd(Net):
    """With a parameter that DeepSpeed cannot take."""

    def __init__(self, odd: Tensor) -> None:
        super().__init__()
        self.odd = nn.Parameter(odd, requires_grad=odd.is_floating_point() or odd.is_complex())


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)


class ByNorm(Optimizer):
    """Its step depends on a whole parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.3)


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.02)


def square(model: Any, batch: Batch, **options: Any) -> Tensor:
    _, x, y = batch
    total: Tensor = (model(x, **options) - y).square().sum()
    return total


def contrastive(model: Any, batch: Batch) -> Tensor:
    total: Tensor = (model(batch[1]) - model(batch[1] * 0.5 + 1)).square().sum()
    return total + square(model, batch)


def distilled(model: Any, batch: Batch) -> Tensor:
    output = model(batch[1])
    with torch.no_grad():
        teacher = model(batch[1] * 2)
    total: Tensor = (output - teacher).square().sum()
    return total


def penalty(model: Any, batch: Batch) -> Tensor:
    x = batch[1].detach().clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    total: Tensor = (output - batch[2]).square().sum() + slope.square().sum()
    return total


def by_sample(model: Any, batch: Batch) -> Tensor:
    """One module or another by the sample: ranks differ."""
    parts = zip(*(part.split(1) for part in batch), strict=True)  # type: ignore[no-untyped-call]
    return sum(  # type: ignore[return-value]
        square(model, one, rare=bool(one[0] % 2), other=not bool(one[0] % 2)) for one in parts
    )


def with_hooks(model: Net) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    mask = torch.arange(18).reshape(3, 6) % 2

    def masked(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(mask)

    model.last.weight.register_post_accumulate_grad_hook(masked)  # type: ignore[no-untyped-call]


@dataclass
class Program:
    """What a user's file has of its own; the rest is the same."""

    make: Callable[[], nn.Module] = Net
    optimizer: Callable[[Any], Optimizer] = adamw
    loss: Callable[..., Tensor] = square
    size: int = 5  # the global batch: one rank has two micro-batches, the other one
    micro: int = 2
    before: Callable[[Any], None] = lambda _: None  # both models are wrapped
    wrapped: Callable[[Any], None] = lambda _: None
    between: Callable[[Any, Any], Any] = lambda _, __: None
    inside: Callable[[Any, int, Batch], Any] = lambda _, __, ___: None
    after: Callable[[Any, Batch], Any] = lambda _, __: None
    leaves: str = ""  # the second window is abandoned in this phase


class LeftWindowError(Exception):
    """The second window is left."""


def abandon(acc: Accumulator, phase: str, window: int, now: str) -> None:
    if window == 1 and phase == now:
        raise LeftWindowError


def run(program: Program, stage: int, world: World) -> tuple[float, float]:
    """The relative errors of the weights' change: DeepSpeed's, and that of plain torch in fp32 on whole batches."""
    torch.manual_seed(0)
    model = program.make()
    truth, plain = deepcopy(model).double(), deepcopy(model)
    for one in (model, truth, plain):
        program.before(one)
    start = {name: value.clone() for name, value in truth.state_dict().items()}
    acc = accumulator(model, program, stage, world)
    program.wrapped(model)
    data: Any = samples(40)
    taken: list[list[int]] = []
    while len(taken) < WINDOWS:
        own: list[int] = []
        try:
            for window in acc.windows(DataLoader(data, batch_size=program.micro)):
                program.between(acc, model)
                own = []
                for i, micro in enumerate(window):
                    with acc.accumulate():
                        own += micro.batch[0].tolist()
                        program.inside(acc, i, micro.batch)
                        total = program.loss(acc.model, micro.batch)
                        abandon(acc, program.leaves, len(taken), "forward")
                        acc.backward(total)
                        program.after(acc, micro.batch)
                        abandon(acc, program.leaves, len(taken), "backward")
                taken.append(own)
                if len(taken) == WINDOWS:
                    break
        except LeftWindowError:
            acc.abandon()
            taken.append([])
    every = world.all_gather_object(taken)
    follow(program, truth, every)
    follow(program, plain, every)
    exact = truth.state_dict()
    return error(acc.state_dict()["model"], exact, start), error(plain.state_dict(), exact, start)


def accumulator(model: nn.Module, program: Program, stage: int, world: World) -> Accumulator:
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}  # or parameters as small stay whole
    return Accumulator(
        model,
        program.optimizer(model.parameters()),
        global_batch_size=program.size,
        micro_batch_size=program.micro,
        count=lambda batch: len(batch[0]),
        engine=DeepSpeedConfig(stage=stage, json={"zero_optimization": zero} if zero else None),
        world=world,
    )


def follow(program: Program, truth: nn.Module, taken: list[list[list[int]]]) -> None:
    """Trains ``truth`` on the same windows, each as a whole."""
    optimizer, known, dtype = program.optimizer(truth.parameters()), samples(40), next(truth.parameters()).dtype
    for k in range(WINDOWS):
        chosen = [known[i] for i in sorted(i for own in taken for i in own[k])]
        if not chosen:
            continue
        numbers, x, y = (torch.stack(parts) for parts in zip(*chosen, strict=True))
        optimizer.zero_grad()
        (program.loss(truth, (numbers, x.to(dtype), y.to(dtype))) / len(chosen)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def probe(acc: Any, _: object) -> None:
    acc.model(torch.ones(2, 4)).square().sum().backward()
    (slope,) = torch.autograd.grad(acc.model(x := torch.ones(2, 4, requires_grad=True)).sum(), x)
    with torch.no_grad():
        plain = acc.model(x + 1e-3).sum() - acc.model(x - 1e-3).sum()
    assert abs(float(slope.sum() * 2e-3 - plain)) < 1e-4, "a probe's gradient is its own"


def zero(acc: Any, model: Any) -> None:
    probe(acc, model)
    acc.model.zero_grad()
    model.zero_grad()


def metric(acc: Any, batch: Batch) -> None:
    with torch.no_grad():
        acc.model(batch[1])


def clip(acc: Any, i: int, _: Batch) -> None:
    if i:
        nn.utils.clip_grad_norm_(acc.model.parameters(), 1e-3)


def backward_past(acc: Any, i: int, batch: Batch) -> None:
    if i:
        square(acc.model, batch).backward()  # type: ignore[no-untyped-call]


def frozen(model: Any) -> None:
    model.rare.requires_grad_(False)


def unfrozen(model: Any) -> None:
    model.rare.requires_grad_(True)


PROGRAMS: dict[str, Program] = {
    "plain": Program(),
    "an empty rank first": Program(size=1, micro=1),
    "two forwards": Program(loss=contrastive),
    "two forwards, an empty rank first": Program(loss=contrastive, size=1, micro=1),
    "a teacher without gradient": Program(loss=distilled),
    "a metric after the backward": Program(after=metric),
    "probes between windows": Program(between=probe),
    "zero_grad between windows": Program(between=zero),
    "hooks on parameters": Program(before=with_hooks, optimizer=sgd),
    "a gradient penalty": Program(loss=penalty, size=4),
    "an output in a dataclass": Program(make=InDataclass, loss=lambda m, b: square(lambda x: m(x).logits, b)),
    "a term beside the output": Program(make=Keeps, loss=lambda m, b: square(m, b) + 0.1 * m.beside),
    "abandoned in a forward": Program(leaves="forward"),
    "abandoned after a backward": Program(leaves="backward"),
    "Nesterov": Program(optimizer=lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True)),
    "unused, plain SGD": Program(optimizer=sgd, loss=lambda m, b: square(m, b, rare=False)),
    "unused": Program(loss=lambda m, b: square(m, b, rare=False)),
    "used by some samples": Program(loss=by_sample, micro=1, size=2),
    "a weight out of its module": Program(make=Reads),
    "past autograd": Program(make=PastAutograd),
    "clipped by hand": Program(inside=clip),
    "a backward past the accumulator": Program(inside=backward_past),
    "frozen later": Program(wrapped=frozen),
    "unfrozen later": Program(before=frozen, wrapped=unfrozen),
    "Adafactor": Program(optimizer=lambda p: Adafactor(p, lr=0.02)),
    "a rule by the norm": Program(optimizer=lambda p: ByNorm(p, lr=0.02)),
    "an optimizer over a part": Program(optimizer=lambda p: adamw(list(p)[:2])),
    "complex": Program(make=lambda: Odd(torch.ones(2, dtype=torch.complex64))),
    "without elements": Program(make=lambda: Odd(torch.ones(0))),
    "int16": Program(make=lambda: Odd(torch.ones(2, dtype=torch.int16))),
    "sparse": Program(make=Sparse),
}


FEW = (
    "two forwards, an empty rank first",
    "a metric after the backward",
    "probes between windows",
    "abandoned in a forward",
    "used by some samples",
    "unused",
    "clipped by hand",
    "a term beside the output",
    "a weight out of its module",
)


def said(action: Callable[[], Any]) -> Any:
    """What it returns, or the message of an error; torch's own with its type."""
    try:
        return action()
    except (ConfigError, MisuseError) as error:
        return str(error)
    except RuntimeError as error:
        return repr(error)


def one_micro_step(of: int, sync: bool, stage: int, world: World) -> None:
    """And a step, at level 1."""
    model = Net()
    engine = create_engine(model, sgd(model.parameters()), world, engine=DeepSpeedConfig(stage=stage))
    engine.begin_window(of)
    with engine.micro_step(sync=sync):
        engine.backward(engine.model(torch.ones(2, 4)).sum())
    engine.step()


def main(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for argument in sys.argv[2:]:
        stage, few = int(argument[0]), argument.endswith("few")
        for name, program in PROGRAMS.items():
            if few and name not in FEW:
                continue
            if stage == 3 and program.inside is backward_past:
                continue  # the other rank waits until this one, which raises, has ended
            found[f"{name} {stage}"] = said(partial(run, program, stage, world))
        for name, (of, sync) in {"no sync": (1, False), "a micro-step left out": (2, True)}.items():
            found[f"{name} {stage}"] = said(partial(one_micro_step, of, sync, stage, world))
    return found


if __name__ == "__main__":
    give(main, of_all=True)
