"""Run by torchrun: FSDP2's own settings, uneven ranks, unusual models, beside one fp64 process, by :data:`PARTS`."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from distaccum import Accumulator, DataSpec, World
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config
from distaccum.config.precision import PrecisionConfig
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.engines.fsdp2.engine import FSDP2Engine
from distaccum.engines.modules import to_local
from distaccum.errors import ConfigError
from tests.distributed.workers.engine_matrix import weights_of
from tests.support.accumulators import SQUARED_ERRORS
from tests.support.answers import give
from tests.support.programs import Block, Net

FEATURES, WIDTH, BLOCKS = 5, 7, 3  # divided by nothing
EPSILON = 1e-2  # see tests.support.engine_matrix
Make = Callable[[], tuple[nn.Module, list[Optimizer]]]
Sample = tuple[Tensor, Tensor]
Errors = tuple[float, float]
BOUNDARY, EVERY = FSDP2Config(sync="boundary"), FSDP2Config(sync="every")
SYNCS = {"boundary": BOUNDARY, "every": EVERY}


def syncs(world: World) -> dict[str, FSDP2Config]:
    """With two ranks, as CI has, the default: other programs have the rest there."""
    return SYNCS if world.size > 2 else {"boundary": BOUNDARY}


class Model(Net):
    """Numbers in, one number a sample out: ``(B, FEATURES)`` to ``(B, 1)``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(BLOCKS, FEATURES, width)


class Tied(nn.Module):
    """The embedding is the output's weight too, and lies outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.abs().mul(4).long().clamp(max=10)).mean(1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)[:, :1].tanh()


def samples(size: int, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(FEATURES, generator=generator), torch.randn(1, generator=generator)) for _ in range(size)]


def plain(model: Callable[[], nn.Module] = Model) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(3)
    made = model()
    return made, [AdamW(made.parameters(), lr=0.05, eps=EPSILON, weight_decay=0.1)]


def windows_of(data: Sequence[Sample], size: int) -> list[Sequence[Sample]]:
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


def reference(
    make: Make,
    windows: Iterable[Sequence[Sample]],
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """The weights after whole windows: one process, fp64 by default, torch's own clipping."""
    model, optimizers = make()
    model.to(dtype)
    for window in windows:
        x, y = (torch.stack(tensors).to(dtype) for tensors in zip(*window, strict=True))
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        for optimizer in optimizers:
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def accumulator(make: Make, world: World, engine: EngineConfig, size: int, micro: int, **options: Any) -> Accumulator:
    model, optimizers = make()
    count = SQUARED_ERRORS.count
    return Accumulator(
        model,
        optimizers,
        global_batch_size=size,
        micro_batch_size=micro,
        count=count,
        world=world,
        engine=engine,
        **options,
    )


def source_of(data: Any) -> DataSpec:
    return DataSpec(train=data, eval_dataset=None, description="", shuffle=False)


def train(
    make: Make, data: Any, world: World, engine: EngineConfig, *, size: int, micro: int, **options: Any
) -> dict[str, Tensor]:
    """The weights after an epoch."""
    acc, loss = accumulator(make, world, engine, size, micro, **options), SQUARED_ERRORS
    for window in acc.windows(source_of(data)):
        for batch in window:
            with acc.accumulate():
                acc.backward(loss(acc.model, batch.batch))
    return weights_of(acc.engine, world)


def off_by(make: Make, found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Relative to how far the true weights have moved."""
    before = make()[0].state_dict()
    wrong = torch.cat([(found[name].double() - true[name]).flatten() for name in true])
    moved = torch.cat([(before[name].double() - true[name]).flatten() for name in true])
    return float(wrong.norm() / moved.norm())


def exact(
    make: Make,
    world: World,
    engine: EngineConfig,
    *,
    size: int = 12,
    micro: int = 2,
    number: int = 29,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    **options: Any,
) -> Errors:
    """How far off an epoch of ``number`` samples is."""
    data, clips = samples(number), {"clip_norm": clip_norm, "clip_value": clip_value}
    found = train(make, data, world, engine, size=size, micro=micro, **clips, **options)
    return errors(make, found, windows_of(data, size), **clips)


def errors(make: Make, found: dict[str, Tensor], windows: Sequence[Sequence[Sample]], **clips: Any) -> Errors:
    """Of ``found``, and of a plain loop over the same whole windows: what fp32 itself loses here, on this processor."""
    true = reference(make, windows, **clips)
    plain_loop = reference(make, windows, **clips, dtype=torch.float32)
    return off_by(make, found, true), off_by(make, plain_loop, true)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts reduce-scatters and all-gathers, and their bytes."""

    NAMES = ("_reduce_scatter_base_", "_allgather_base_")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = str(function).split(".")[1]
        self.calls[kind] += str(function).startswith("c10d.")
        if kind in self.NAMES:  # (output, input, ...): the larger one is the whole
            self.sent[kind] += max(args[0].nbytes, args[1].nbytes)
        return function(*args, **(kwargs or {}))


PARTS: dict[str, Callable[[World], Any]] = {}


def part(function: Callable[[World], Any]) -> Callable[[World], Any]:
    PARTS[function.__name__] = function
    return function


@part
def settings(world: World) -> dict[str, Errors]:
    """Every setting of the engine, both ways to sync."""
    found = {}
    for sync, config in SYNCS.items():
        for name, engine in {
            "defaults": config,
            "replicas": replace(config, replicas=2),
            "one replica a rank": replace(config, replicas=world.size),
            "offload": replace(config, offload=True),
            "held after the forward": replace(config, reshard_after_forward=False),
            "held, offload": replace(config, reshard_after_forward=False, offload=True),
            "checkpoint": replace(config, activation_checkpoint="blocks"),
            "selective": replace(config, activation_checkpoint="selective"),
            "named blocks": replace(config, blocks=["blocks.?.wide", "leave"]),
            "nested blocks": replace(config, blocks=["blocks.?", "blocks.?.wide"]),
        }.items():
            found[f"{name}, {sync}"] = exact(plain, world, engine)
    return found


def frozen() -> tuple[nn.Module, list[Optimizer]]:
    """One block as a whole, part of another, and what leads in."""
    model, _ = plain()
    for parameter in (*model.blocks[0].parameters(), model.blocks[1].wide.weight, *model.enter.parameters()):
        parameter.requires_grad_(False)
    return model, [AdamW(model.parameters(), lr=0.05, eps=EPSILON)]


def groups() -> tuple[nn.Module, list[Optimizer]]:
    """Two optimizers, one of two groups with settings of their own."""
    model, _ = plain()
    blocks = [{"params": model.blocks[0].parameters()}, {"params": model.blocks[1].parameters(), "lr": 0.01}]
    rest = [*model.blocks[2].parameters(), *model.enter.parameters(), *model.leave.parameters()]
    return model, [AdamW(blocks, lr=0.05, eps=EPSILON, fused=True), SGD(rest, lr=0.02, momentum=0.9, fused=True)]


MODELS: dict[str, Make] = {"tied": partial(plain, Tied), "frozen": frozen, "two optimizers": groups}


@part
def models(world: World) -> dict[str, Errors]:
    """Of every kind, with every clip."""
    found = {}
    for sync, engine in syncs(world).items():
        for name, make in MODELS.items():
            found[f"{name}, {sync}"] = exact(make, world, engine)
        found[f"replicas, {sync}"] = exact(plain, world, replace(engine, replicas=2), micro=1)
        found[f"clip_norm, {sync}"] = exact(groups, world, engine, clip_norm=0.3)
        found[f"clip_value, {sync}"] = exact(groups, world, engine, clip_value=0.02)
    return found


@part
def refusals(world: World) -> dict[str, str]:
    """What a model that cannot be meant is told."""
    found = {}
    optimized = Model()
    optimizer = SGD(optimized.parameters(), lr=0.1, momentum=0.5)
    optimized(torch.ones(1, FEATURES)).sum().backward()
    optimizer.step()
    for name, make in {
        "stepped": lambda: accumulator(lambda: (optimized, [optimizer]), world, BOUNDARY, 4, 1),
        "blocks": lambda: accumulator(plain, world, FSDP2Config(blocks=["block.*"]), 4, 1),
        "replicas": lambda: accumulator(plain, world, FSDP2Config(replicas=3), 4, 1),
        "no reset": lambda: accumulator(partial(on_meta, Unmade), world, BOUNDARY, 4, 1),
        "ddp": lambda: accumulator(partial(on_meta, Model), world, DDPConfig(), 4, 1),
    }.items():
        try:
            make()
        except ConfigError as error:
            found[name] = str(error)
    return found


@part
def uneven(world: World) -> dict[str, Errors]:
    """Ranks with fewer micro-batches than others, or none: from the first window on, in the last, for ever."""
    found = {}
    for sync, engine in syncs(world).items():
        for name, options in {
            "from the first on": {"size": 2 * world.size + 1, "micro": 1, "number": 5 * (2 * world.size + 1)},
            "one rank has all": {"size": 1, "micro": 1, "number": 3},
            "a last window of one": {"size": 2 * world.size, "micro": 1, "number": 4 * world.size + 1},
            "a last window of one, large micro-batches": {"size": 12, "micro": 4, "number": 25},
        }.items():
            found[f"{name}, {sync}"] = exact(plain, world, engine, **options)
        checkpointed = replace(engine, activation_checkpoint="blocks", reshard_after_forward=False)
        found[f"checkpoint, {sync}"] = exact(plain, world, checkpointed, size=5, micro=1, number=16)
        # By rank; and the windows' size: with several ranks in one only the whole is known.
        first = [11] + [0] * (world.size - 1)
        for name, sizes, size in (
            ("a rank has none", first, 4),
            ("the first rank has none", first[::-1], 4),
            ("each has less than the last", [6 - rank for rank in range(world.size)], 6 * world.size),
        ):
            data = samples(sum(sizes))
            begin = sum(sizes[: world.rank])
            make, own = partial(sgd, Model), data[begin : begin + sizes[world.rank]]
            after = train(make, iter(own), world, engine, size=size, micro=1)
            found[f"a stream: {name}, {sync}"] = errors(make, after, windows_of(data, size))
    return found


def sgd(model: Callable[[], nn.Module]) -> tuple[nn.Module, list[Optimizer]]:
    made, _ = plain(model)
    return made, [SGD(made.parameters(), lr=0.1)]


class NormedBlock(nn.Module):
    """Batch normalisation that can do with a sample: over three copies of it, of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).unsqueeze(-1) * torch.arange(1.0, 4.0)).mean(-1).tanh()


class Normed(Model):
    """With batch normalisation in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NormedBlock()])


@part
def buffers(world: World) -> dict[str, Any]:
    """Running statistics: this rank's own micro-batches and no others, as on DDP; rank 0's after ``sync_buffers``."""
    found: dict[str, Any] = {}
    for name, engine in {"ddp": DDPConfig(), **SYNCS}.items():
        acc, loss = accumulator(partial(sgd, Normed), world, engine, 5, 1), SQUARED_ERRORS
        for window in acc.windows(source_of(samples(22))):
            acc.step(window, loss)
        norm: Any = acc.engine.unwrapped_model.blocks[0].norm  # type: ignore[index,union-attr]
        steps = int(norm.num_batches_tracked)
        own = norm.running_mean.tolist()
        acc.engine.sync_buffers()
        found[name] = {"steps": steps, "own": own, "synced": norm.running_mean.tolist()}
    return found


@part
def activations(world: World) -> dict[str, Any]:
    """What each way to checkpoint keeps for the backward, and whether the gradient is the same bit by bit."""
    found: dict[str, Any] = {}
    first: list[Tensor] | None = None
    for name in ("none", "selective", "blocks"):
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.nbytes if tensor.shape[:1] == (64,) else 0  # activations, not weights
            return tensor

        torch.manual_seed(3)
        model = Model(width=16)
        engine = accumulator(
            lambda model=model: (model, [SGD(model.parameters(), lr=0.0)]),
            world,
            FSDP2Config(activation_checkpoint=name),
            64,
            64,
        ).engine
        engine.begin_window(1)
        with engine.micro_step(sync=True), Computed() as computed:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                total = engine.model(torch.stack([x for x, _ in samples(64, seed=world.rank)])).square().sum()
            engine.backward(total)
        gradients = [to_local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        first = first or gradients
        found[name] = {
            "kept": kept,
            "same": all(map(torch.equal, gradients, first)),
            "gradients": len(gradients),
            "products": computed.calls["addmm"] + computed.calls["mm"],
            "tanh": computed.calls["tanh"],
        }
        engine.zero_gradients()
    return found


class Computed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function).split(".")[1]] += 1
        return function(*args, **(kwargs or {}))


@part
def wire(world: World) -> dict[str, Any]:
    """Reduce-scatters and gathers of a full window, and their bytes, by sync and number formats."""
    found: dict[str, Any] = {}
    micro_steps = 2
    fp32, bf16 = PrecisionConfig(), PrecisionConfig(name="bf16")
    cases = {
        "fp32": (fp32, "compute"),
        "reduced in bf16": (replace(fp32, reduce_dtype="bf16"), "compute"),
        "bf16": (bf16, "compute"),
        "bf16, gathered in fp32": (bf16, "fp32"),
        "bf16, keep_fp32": (replace(bf16, keep_fp32=["blocks.0"]), "compute"),
        "bf16, only": (replace(bf16, only=["blocks.0"]), "compute"),
        "replicas": (fp32, "compute"),
    }
    for sync, config in SYNCS.items():
        for name, (precision, gather) in cases.items():
            make, size = partial(sgd, Model), world.size * micro_steps
            engine = replace(config, gather_dtype=gather, replicas=world.size if name == "replicas" else 1)
            acc = accumulator(make, world, engine, size, 1, precision=precision, verify="never")
            loss = SQUARED_ERRORS
            windows = acc.windows(source_of(samples(2 * size)))
            acc.step(next(windows), loss)
            with Collectives() as collectives:
                acc.step(next(windows), loss)
            assert isinstance(acc.engine, FSDP2Engine)
            padded = sum(-(-len(p) // world.size) * world.size * p[0].numel() for p in acc.model.parameters())
            found[f"{name}, {sync}"] = {
                "reductions": collectives.calls["_reduce_scatter_base_"],
                "reduced bytes": collectives.sent["_reduce_scatter_base_"],
                "gathered bytes": collectives.sent["_allgather_base_"],
                "all-reduces": collectives.calls["allreduce_"],
                "fp32 bytes": 4 * padded,
            }
    return found | {"units": BLOCKS + 1, "micro-steps": micro_steps}


class Unmade(nn.Module):
    """Has a weight of its own, and no way to make it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()
        self.inner.blocks[1].scale = nn.Parameter(torch.ones(3))


def on_meta(model: Callable[[], nn.Module]) -> tuple[nn.Module, list[Optimizer]]:
    """Without memory; an AdamW over it."""
    torch.manual_seed(LaunchEnvironment.from_environment().rank)  # which must not matter
    with torch.device("meta"):
        made = model()
    return made, [AdamW(made.parameters(), lr=0.05, eps=EPSILON)]


def made_from_nothing(world: World) -> dict[str, dict[str, Tensor]]:
    """The weights of models that were on the meta device."""
    found = {}
    for name, model in {"plain": Model, "tied": Tied}.items():
        for offload in (False, True):
            acc = accumulator(partial(on_meta, model), world, FSDP2Config(offload=offload), 4, 1)
            if model is Tied:
                assert acc.model.head.weight is acc.model.embed.weight
            found[f"{name}{', offload' if offload else ''}"] = weights_of(acc.engine, world)
    return found


@part
def meta(world: World) -> dict[str, Any]:
    weights = made_from_nothing(world)
    if world.is_main:
        torch.save(weights, f"{sys.argv[1]}.pt")
    found: dict[str, Any] = {}
    for name, model in {"plain": Model, "tied": Tied}.items():

        def make(name: str = name, model: Callable[[], nn.Module] = model) -> tuple[nn.Module, list[Optimizer]]:
            made = model()
            made.load_state_dict(weights[name])
            return made, [AdamW(made.parameters(), lr=0.05, eps=EPSILON)]

        data = samples(30)
        trained = train(partial(on_meta, model), data, world, BOUNDARY, size=8, micro=1)
        found[name] = errors(make, trained, windows_of(data, 8))
    return found


@part
def held(world: World) -> dict[str, Any]:
    """Bytes of parameters, gradients and optimizer state on this rank after a window, and in the middle of one."""
    acc = accumulator(partial(plain, partial(Model, 64)), world, BOUNDARY, 8, 1)
    for window in islice(acc.windows(source_of(samples(16))), 1):
        acc.step(window, SQUARED_ERRORS)
    parameters = list(acc.model.parameters())
    (optimizer,) = acc.engine._optimizers  # type: ignore[attr-defined]
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "total": sum(p.numel() * p.element_size() for p in parameters),
        "parameters": sum(to_local(p).untyped_storage().nbytes() for p in parameters),
        "gradients": sum(to_local(p.grad).nbytes for p in parameters if p.grad is not None),
        "state": sum(to_local(value).nbytes for value in states),
    }


if __name__ == "__main__":
    give(lambda world: {name: PARTS[name](world) for name in sys.argv[2:]}, timeout_s=100, of_all=True)
