"""What users' loops do to weights, optimizers and their groups between windows, beside one fp64 process.

``edits.py RESULT ENGINE[:PROGRAM]...`` (without a program: all): writes JSON, of each rank by ``"PROGRAM ENGINE"``: the
relative error of the weights' change after windows of uneven micro-batches, and that of plain torch in fp32 (two
numbers); or the message with which it was refused. ``ENGINE`` is a name, ``ds0`` to ``ds3``, or ``ds3x`` (stage 3 with
no parameter whole); ``/bf16`` after it is the precision.
"""

import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from distaccum import Accumulator, World
from distaccum.config.engine import DeepSpeedConfig
from distaccum.errors import ConfigError, MisuseError
from tests.support.answers import give
from tests.support.programs import error

WINDOWS, SAMPLES, GLOBAL, MICRO = 4, 20, 5, 2
Between = Callable[[Any, Any, int], object]


class Net(nn.Module):
    """With a buffer of a type, and a last layer in another format."""

    buffer: Tensor

    def __init__(self, buffer: torch.dtype = torch.int16, last: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3, dtype=last)
        self.register_buffer("buffer", torch.ones(3).to(buffer))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        out: Tensor = self.last((hidden + self.middle(hidden)).to(self.last.weight.dtype))
        return out * self.buffer.float().to(out.dtype)


class Clips(Optimizer):
    """Clips by the norm over all of its parameters, or scales each by its own (``alone``)."""

    def __init__(self, params: Any, lr: float = 0.02, *, alone: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.alone = alone

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = [p.grad.norm() for _, p in held]
        for (group, p), norm in zip(held, norms, strict=True):
            over = norm if self.alone else torch.stack(norms).norm().clamp(min=0.5)
            p.sub_(group["lr"] * p.grad / over)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.02, momentum=0.9)


def scheduled(model: nn.Module) -> Optimizer:
    """At a rate of 0 in the beginning."""
    optimizer = Clips(model.parameters())
    LambdaLR(optimizer, lambda step: step / 4)
    return optimizer


def square(model: Any, batch: list[Tensor]) -> Tensor:
    total: Tensor = (model(batch[1]) - batch[2]).square().sum()
    return total


@dataclass(frozen=True)
class Program:
    """What a user's file has of its own; ``made``, ``inside`` and ``between`` happen in the truth as well."""

    make: Callable[[], nn.Module] = Net
    optimizer: Callable[[Any], Optimizer] = sgd
    made: Callable[[Any, Any], object] = lambda _, __: None
    wrapped: Callable[[Any, Any], object] = lambda _, __: None
    between: Between = lambda _, __, ___: None
    options: Mapping[str, Any] = field(default_factory=dict)


def quiet(change: Between) -> Between:
    """Without gradients."""

    @torch.no_grad()
    def changed(model: Any, optimizer: Any, window: int) -> None:
        change(model, optimizer, window)

    return changed


@quiet
def clamp(model: Any, _: Any, __: int) -> None:
    for p in model.parameters():
        p.clamp_(-0.2, 0.2)


@quiet
def clamp_data(model: Any, _: Any, __: int) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


@quiet
def rebind(model: Any, _: Any, __: int) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.2, 0.2)


@quiet
def clamp_groups(_: Any, optimizer: Any, __: int) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.clamp_(-0.2, 0.2)


@quiet
def renormalise(model: Any, _: Any, __: int) -> None:
    model.first.weight.div_(model.first.weight.norm(dim=1, keepdim=True))


_kept: dict[int, Any] = {}


@quiet
def load(model: Any, _: Any, window: int) -> None:
    """The weights of after the first window."""
    if window == 0:
        _kept[id(model)] = deepcopy(model.state_dict())
    if window == 2:
        model.load_state_dict(_kept[id(model)])


@quiet
def gathered(model: Any, optimizer: Any, window: int) -> None:
    """As DeepSpeed has it at stage 3."""
    if not hasattr(model.first.weight, "ds_id"):
        return clamp_data(model, optimizer, window)
    import deepspeed  # noqa: PLC0415

    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            clamp(model, optimizer, window)
    return None


def settings(_: Any, optimizer: Any, __: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["momentum"] = 0.5
        group["weight_decay"] = 0.1


def rank_setting(key: str, at: int) -> Between:
    def set_it(_: Any, optimizer: Any, window: int) -> None:
        if window == at:
            for group in optimizer.param_groups:
                group[key] = 0.02 * (1 + dist.get_rank())

    return set_it


def more(_: Any, optimizer: Any, window: int) -> None:
    if window == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def hook(model: Any, optimizer: Any) -> None:
    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)


def hook_after(model: Any, optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: quiet(clamp_groups)(model, optimizer, 0))


def hook_later(model: Any, optimizer: Any, window: int) -> None:
    if window == 1:
        hook(model, optimizer)


def unfreeze(model: Any, _: Any, window: int) -> None:
    if window == 1:
        model.middle.requires_grad_(True)


def frozen() -> Net:
    net = Net()
    net.middle.requires_grad_(False)
    return net


def halve_momentum(_: Any, optimizer: Any, window: int) -> None:
    for group in optimizer.param_groups:
        for p in group["params"] if window == 1 else ():
            momentum = optimizer.state[p].get("momentum_buffer")
            if momentum is not None:
                momentum.mul_(0.5)


PROGRAMS: dict[str, Program] = {
    "plain": Program(),
    "clamp": Program(between=clamp),
    "clamp .data": Program(between=clamp_data),
    "rebind .data": Program(between=rebind),
    "clamp by groups": Program(between=clamp_groups),
    "renormalise": Program(between=renormalise),
    "load_state_dict": Program(between=load),
    "gathered": Program(between=gathered),
    "settings": Program(between=settings),
    "global norm": Program(optimizer=lambda model: Clips(model.parameters())),
    "global norm, a warm-up": Program(optimizer=scheduled),
    "norm over groups": Program(optimizer=lambda model: Clips([{"params": [p]} for p in model.parameters()])),
    "own norms": Program(optimizer=lambda model: Clips(model.parameters(), alone=True)),
    "hook": Program(made=hook),
    "hook after": Program(made=hook_after),
    "hook later": Program(between=hook_later),
    "hook, fused and clipped": Program(
        made=hook,
        optimizer=lambda model: AdamW(model.parameters(), lr=0.02, eps=1e-3, fused=True),
        options={"clip_norm": 0.2},
    ),
    "a rate of the rank's": Program(between=rank_setting("lr", 1)),
    "a decay of the rank's": Program(between=rank_setting("weight_decay", 1)),
    "a schedule of the rank's": Program(options={"schedule": lambda step: 1 / (1 + step) ** (1 + dist.get_rank())}),
    "add_param_group": Program(between=more),
    "momentum by parameter": Program(between=halve_momentum),
    "state_dict": Program(between=lambda _, optimizer, __: optimizer.load_state_dict(optimizer.state_dict())),
    "unfrozen": Program(make=frozen, between=unfreeze),
    "float8 buffer": Program(make=partial(Net, torch.float8_e4m3fn)),
    "float64 too": Program(make=partial(Net, torch.int16, torch.float64)),
}


def samples(size: int = SAMPLES) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Their numbers, inputs and targets."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.tensor(i), torch.randn(4, generator=generator), torch.randn(3, generator=generator)) for i in range(size)
    ]


def engine_of(name: str) -> str | DeepSpeedConfig:
    if not name.startswith("ds"):
        return name
    zero = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return DeepSpeedConfig(stage=int(name[2]), json=zero if name.endswith("x") else None)


def run(program: Program, engine: str, world: World) -> tuple[float, float]:
    """The relative errors of the weights' change: the engine's, and that of plain torch in fp32 on whole batches."""
    torch.manual_seed(0)
    model = program.make()
    truth, plain = deepcopy(model).double(), deepcopy(model)
    start = {name: p.detach().double() for name, p in deepcopy(model).named_parameters()}
    optimizer = program.optimizer(model)
    program.made(model, optimizer)
    name, _, precision = engine.partition("/")
    acc = Accumulator(
        model,
        optimizer,
        global_batch_size=GLOBAL,
        micro_batch_size=MICRO,
        count=lambda batch: len(batch[0]),
        engine=engine_of(name),
        precision=precision or "fp32",
        world=world,
        **program.options,
    )
    try:
        data: Any = samples()
        taken: list[list[int]] = []
        for k, window in enumerate(acc.windows(DataLoader(data, batch_size=MICRO))):
            own: list[int] = []
            for micro in window:
                with acc.accumulate():
                    own += micro.batch[0].tolist()
                    acc.backward(square(acc.model, micro.batch))
            taken.append(own)
            program.between(model, optimizer, k)
        found = acc.state_dict()["model"]
    finally:
        acc.close()
    every = world.all_gather_object(taken)
    for one in (truth, plain):
        follow(program, one, [sorted(i for rank in every for i in rank[k]) for k in range(WINDOWS)])
    exact = dict(truth.named_parameters())
    return error(found, exact, start), error(dict(plain.named_parameters()), exact, start)


def follow(program: Program, model: nn.Module, windows: list[list[int]]) -> None:
    """Trains on the same windows, each as a whole."""
    optimizer, known = program.optimizer(model), samples()
    program.made(model, optimizer)
    for k, chosen in enumerate(windows):
        batch = [torch.stack(parts) for parts in zip(*[known[i] for i in chosen], strict=True)]
        dtype = next(model.parameters()).dtype
        optimizer.zero_grad()
        (square(model, [batch[0], batch[1].to(dtype), batch[2].to(dtype)]) / len(chosen)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        program.between(model, optimizer, k)


def main(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cell in sys.argv[2:]:
        engine, _, only = cell.partition(":")
        for name in [only] if only else PROGRAMS:
            try:
                found[f"{name} {engine}"] = run(PROGRAMS[name], engine, world)
            except (ConfigError, MisuseError) as error:
                found[f"{name} {engine}"] = str(error)
    return found


if __name__ == "__main__":
    give(main, of_all=True)
