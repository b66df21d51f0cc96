"""Run by torchrun: DeepSpeed's engine beside one fp64 process on whole batches, by :data:`PARTS`."""

import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from distaccum import World
from distaccum.config.engine import DeepSpeedConfig
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.engines.context import EngineContext
from distaccum.engines.deepspeed.compat import load_deepspeed
from distaccum.engines.deepspeed.engine import DeepSpeedEngine
from distaccum.engines.deepspeed.internals import Partitions
from distaccum.engines.factory import create_engine
from distaccum.engines.state import whole_state
from distaccum.errors import CheckpointError, ConfigError, MisuseError
from distaccum.losses.normalize import normalize_loss
from tests.support.answers import give

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
LR = 2.0  # of SGD, so that what a weight loses has more digits
CLIP = 0.05
VOCABULARY, WIDTH, LENGTH, IGNORED = 13, 6, 7, -100
Sample = tuple[Tensor, Tensor]
MicroBatches = Sequence[Sequence[Sample]]


class Model(nn.Module):
    """Ids and floats go in; a parameter is used in some windows only; sizes divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH + 1, 11), nn.Tanh(), nn.LayerNorm(11))
        self.rare = nn.Linear(11, 11, bias=False)
        self.head = nn.Linear(11, VOCABULARY)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, extra: Tensor, rarely: bool) -> dict[str, Tensor]:
        hidden = self.body(torch.cat([self.embedding(ids), extra], -1))
        if rarely:
            hidden = hidden + self.rare(hidden)
        return {"logits": self.head(hidden)}


def make_window(shape: str, number: int, ranks: int, *, alike: bool = False) -> list[MicroBatches]:
    """By rank its micro-batches. ``ragged``: their number differs, down to none.

    Which of them use the rare layer is left to chance, but for one that does: DeepSpeed decays what none uses. Or it is
    ``alike`` on all ranks, as ZeRO-3 wants it.
    """
    generator = torch.Generator().manual_seed(number)
    steps = [3] * ranks if shape == "full" else [(3, 0, 1, 2)[(rank + number) % 4] for rank in range(ranks)]
    if not sum(steps):
        steps[0] = 1

    def sample(step: int) -> Sample:
        length = LENGTH if shape == "full" else int(torch.randint(1, LENGTH + 1, (), generator=generator))
        labels = torch.randint(VOCABULARY, (length,), generator=generator)
        if shape == "unequal" and length > 1:
            labels[0] = IGNORED
        if alike:
            labels[-1] = (step + number) % 2 if shape == "full" else 0
        return torch.randint(VOCABULARY, (length,), generator=generator), labels

    sizes = [[2 if shape == "full" else 1 + (step + rank) % 3 for step in range(n)] for rank, n in enumerate(steps)]
    window: list[MicroBatches] = [
        [[sample(step) for _ in range(size)] for step, size in enumerate(own)] for own in sizes
    ]
    if not any(uses_rare(samples) for own in window for samples in own):
        (_, labels), *_ = next(own for own in window if own)[0]
        labels[-1] = 0
    return window


def uses_rare(samples: Sequence[Sample]) -> bool:
    return bool(samples[0][1][-1] % 2 == 0)


def collate(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Padded; the floats are the ids' own; the rare layer is used where the first label is even."""
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in samples], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([labels for _, labels in samples], batch_first=True, padding_value=IGNORED)
    return ids, torch.sin(ids.float()).unsqueeze(-1), labels, uses_rare(samples)


def total_of(model: Any, batch: Any) -> Tensor:
    ids, extra, labels, rarely = batch
    dtype = next(model.parameters()).dtype
    extra = extra.to(dtype) if dtype is torch.float64 else extra
    logits = model(ids, extra, rarely=rarely)["logits"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def count_of(window: Sequence[MicroBatches]) -> int:
    return sum(int((labels != IGNORED).sum()) for own in window for samples in own for _, labels in samples)


def settings_of(stage: int, precision: str, *, clip: float = 0.0, **zero: Any) -> dict[str, Any]:
    """The JSON. Its accumulation steps are wrong on purpose: nothing may divide by them."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 7,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage} | zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if precision == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "hysteresis": 1}
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if stage and precision != "fp32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision != "fp32":
        settings["communication_data_type"] = "fp32"
    if stage == 3:  # or parameters as small as these stay whole
        settings["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
    return settings


def wrap(
    world: World,
    stage: int,
    precision: str,
    optimizer: Callable[[Any], Optimizer],
    *,
    clip: float = 0.0,
    scaler: ScalerConfig | None = None,
    **zero: Any,
) -> DeepSpeedEngine:
    torch.manual_seed(world.rank + 1)  # rank 0's weights are everyone's
    model = Model()
    context = EngineContext(
        engine=DeepSpeedConfig(stage=stage),
        precision=PrecisionConfig(name=precision, scaler=scaler or ScalerConfig(initial_scale_power=10)),
        world_size=world.size,
        device=world.device,
        generated=settings_of(stage, precision, clip=clip, **zero),
    )
    return DeepSpeedEngine(model, [optimizer(model.parameters())], world, context)


def train_on(engine: DeepSpeedEngine, window: Sequence[MicroBatches], world: World, *, late: bool = False) -> Any:
    """One window; ``late``: the count comes with the step."""
    own, count = window[world.rank], float(count_of(window))
    engine.begin_window(len(own))
    for i, samples in enumerate(own):
        with engine.micro_step(sync=i == len(own) - 1):
            with engine.autocast():
                total = total_of(engine.model, collate(samples))
            counts = {"loss": 1.0 if late else count}
            engine.backward(normalize_loss(total, counts, gradient_divide_factor=engine.gradient_divide_factor))
    if not own:
        engine.shadow_micro_step()
    return engine.step(divisor=count if late else 1.0)


def truth(weights: dict[str, Tensor], window: Sequence[MicroBatches]) -> tuple[nn.Module, float]:
    """An fp64 model with the gradient of the window's whole batch, and its norm."""
    model = Model().double()
    model.load_state_dict(weights)
    whole = [samples for own in window for samples in own]
    loss = sum((total_of(model, collate(samples)) for samples in whole), torch.zeros(())) / count_of(window)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())  # type: ignore[union-attr]
    return model, norm


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def weights_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.whole_model().items()}


def off(model: nn.Module, before: dict[str, Tensor], after: dict[str, Tensor], rate: float, gradient: Any) -> float:
    """How far what the weights have lost is from a gradient at this rate, relative."""
    taken = flat([(before[name].double() - after[name].double()) / rate for name, _ in model.named_parameters()])
    return float((taken - flat(gradient)).norm() / flat(gradient).norm())


def one_window(
    world: World, stage: int, precision: str, shape: str, *, alike: bool = False, **zero: Any
) -> dict[str, float]:
    """What SGD takes from the weights in each of three windows, beside the fp64 gradient; also the norm told."""
    engine = wrap(world, stage, precision, lambda p: SGD(p, lr=LR, foreach=False), **zero)
    worst = worst_norm = worst_named = 0.0
    before = weights_of(engine)
    for number in range(3):
        engine.set_lr_factor(1.0 if number < 2 else 0.5)
        window = make_window(shape, number, world.size, alike=alike or stage == 3)
        result = train_on(engine, window, world, late=number == 1)
        after = weights_of(engine)
        assert result.applied, (stage, precision, shape, number, result.grad_norm, result.nonfinite())
        if world.is_main:
            model, norm = truth(before, window)
            expected = [p.grad for p in model.parameters()]
            worst = max(worst, off(model, before, after, LR if number < 2 else LR / 2, expected))
            worst_norm = max(worst_norm, abs(float(result.grad_norm) / norm - 1))
            told = dict(zip(result.names, (result.norms / result.norms_scale).tolist(), strict=True))
            named = {name: float(p.grad.norm()) for name, p in model.named_parameters()}  # type: ignore[union-attr]
            worst_named = max(worst_named, *(abs(told.get(name, 0.0) - one) / norm for name, one in named.items()))
            before = after
    return {"gradient": worst, "norm": worst_norm, "norms": worst_named}


PARTS: dict[str, Callable[[World], Any]] = {}


def part(function: Callable[[World], Any]) -> Callable[[World], Any]:
    PARTS[function.__name__] = function
    return function


@part
def offload(world: World) -> Any:
    """The optimizer's state on the CPU at stages 2 and 3, and parameters at stage 3."""
    cpu = {"device": "cpu"}
    cells: list[tuple[int, str, dict[str, Any]]] = [
        (2, "fp32", {"offload_optimizer": cpu}),
        (2, "bf16", {"offload_optimizer": cpu}),
        (3, "fp32", {"offload_optimizer": cpu}),
        (3, "bf16", {"offload_optimizer": cpu, "offload_param": cpu}),
    ]
    return {
        f"{stage} {precision}": one_window(world, stage, precision, "ragged", **zero)
        for stage, precision, zero in cells
    }


VARIANTS: list[tuple[int, str, dict[str, Any]]] = [
    (0, "fp16", {}),
    (1, "fp32", {"contiguous_gradients": False}),
    (2, "fp32", {"contiguous_gradients": False}),
    (2, "bf16", {"contiguous_gradients": False}),
    (1, "fp32", {"reduce_scatter": False}),
    (2, "fp32", {"reduce_scatter": False}),
    (2, "bf16", {"reduce_scatter": False}),
    (3, "fp32", {"reduce_scatter": False}),
    (3, "fp32", {"contiguous_gradients": False}),
    (3, "fp32", {"stage3_param_persistence_threshold": 10**5}),
    (1, "fp32", {"overlap_comm": True}),
    (2, "fp32", {"overlap_comm": True}),
    (2, "fp32", {"reduce_bucket_size": 60}),
    (3, "fp32", {"reduce_bucket_size": 60}),
    (2, "fp32", {"use_multi_rank_bucket_allreduce": False}),
]


@part
def variants(world: World) -> Any:
    """What users set in their own JSON."""
    return {
        f"{stage} {precision} {zero}": one_window(world, stage, precision, "ragged", **zero)
        for stage, precision, zero in VARIANTS
    }


@part
def older(world: World) -> Any:
    """A DeepSpeed without its coalesced reduction, and one whose wrapper keeps its gradients elsewhere."""
    engine_type = load_deepspeed(world.device).DeepSpeedEngine
    coalesced = engine_type.coalesce_grad_reduction
    del engine_type.coalesce_grad_reduction
    try:
        found = {"no coalesced": refusal(lambda: wrap(world, 2, "fp32", lambda p: SGD(p, lr=1.0)))}
    finally:
        engine_type.coalesce_grad_reduction = coalesced
    names = Partitions.names
    Partitions.names = (*names, "gradients_elsewhere")
    try:
        found["elsewhere"] = refusal(lambda: wrap(world, 1, "fp32", lambda p: SGD(p, lr=1.0)))
    finally:
        Partitions.names = names
    return found


@part
def accumulation(world: World) -> Any:
    """48 micro-steps in bf16, beside the fp64 sum of the same micro-steps' gradients: what adding up loses."""
    found = {}
    window = [
        [make_window("full", 100 * rank + step, 1, alike=True)[0][0] for step in range(48)]
        for rank in range(world.size)
    ]
    for stage in STAGES:
        engine = wrap(world, stage, "bf16", lambda p: SGD(p, lr=LR))
        before = weights_of(engine)
        train_on(engine, window, world)
        after = weights_of(engine)
        if world.is_main:
            model, count = Model(), count_of(window)
            model.load_state_dict(before)
            model.bfloat16()
            sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
            for samples in (samples for own in window for samples in own):
                ids, extra, labels, rarely = collate(samples)
                logits = model(ids, extra.bfloat16(), rarely=rarely)["logits"].float()
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * world.size / count
                grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
                for total, grad in zip(sums, grads, strict=True):
                    total.add_(0 if grad is None else grad.double() / world.size)
            found[str(stage)] = off(model, before, after, LR, sums)
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def state_of(engine: DeepSpeedEngine) -> list[Tensor]:
    """This rank's part of the optimizer's state."""
    states = engine._optimizers[0].state.values()
    return [value.clone() for state in states for value in state.values() if isinstance(value, Tensor)]


@part
def given_up(world: World) -> Any:
    """A window that is given up half-way, or after its reduction, leaves nothing behind."""
    found = {}
    for stage, precision, reduced in product(STAGES, ("fp32", "bf16"), (False, True)):
        runs = []
        for gives_up in (True, False):
            engine = wrap(world, stage, precision, lambda p: SGD(p, lr=LR))
            for number in range(2):
                window = make_window("full", number, world.size, alike=stage == 3)
                if gives_up and number == 1:
                    engine.begin_window(3)
                    for i, samples in enumerate(make_window("full", 9, world.size, alike=stage == 3)[world.rank]):
                        with engine.micro_step(sync=i == 2 and reduced):
                            engine.backward(total_of(engine.model, collate(samples)))
                    engine.zero_gradients()
                train_on(engine, window, world)
            runs.append(weights_of(engine))
        found[f"{stage} {precision} {'reduced' if reduced else 'half'}"] = same(*runs)
    return found


class Reductions(TorchDispatchMode):
    """Counts those of more than a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d.") and "reduce" in name:
            tensors, _ = tree_flatten(args[:2])
            gradients = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.shape[1:] != (1,)]
            self.count += any(t.numel() > 1 for t in gradients)  # a column of numbers is none of gradients
        return function(*args, **(kwargs or {}))


@part
def norms(world: World) -> Any:
    """How far off the norm of any parameter's gradient is that rank 0 is told, by stage."""
    return {stage: one_window(world, stage, "fp32", "full", alike=True)["norms"] for stage in STAGES}


@part
def padding(world: World) -> Any:
    """Whether sums over slices are numbers, where memory as it was found holds NaN."""
    found = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    for precision in ("fp32", "bf16"):
        engine = wrap(world, 3, precision, lambda p: SGD(p, lr=LR))
        named: Any = engine.unwrapped_model.named_parameters()
        nothing = {name: torch.zeros(int(p.ds_tensor.ds_numel)) for name, p in named}
        with engine.probe.shifted(nothing, 1.0) as moved:
            found += [float(by.abs().sum()) for by in moved.values()]
    torch.use_deterministic_algorithms(False)
    return any(world.all_reduce_host([float(sum(found) != 0.0)]))


@part
def reductions(world: World) -> Any:
    """By micro-step of a window of three, the replays before it, and the step."""
    found = {}
    for stage, precision in product(STAGES, PRECISIONS):
        engine = wrap(world, stage, precision, lambda p: AdamW(p, lr=1e-2), clip=CLIP)
        for number in range(2):
            window, seen = make_window("full", number, world.size, alike=True)[world.rank], []
            with Reductions() as counter:
                engine.begin_window(3)
                seen.append(counter.count)
                for i, samples in enumerate(window):
                    with engine.micro_step(sync=i == 2):
                        engine.backward(total_of(engine.model, collate(samples)))
                    seen.append(counter.count)
                engine.step()
                seen.append(counter.count)
            found[f"{stage} {precision} {number}"] = seen
    return found


@part
def resume(world: World) -> Any:
    """Four windows, beside two, the state, and two more: bit by bit."""
    found: dict[str, Any] = {}
    for stage, precision in product(STAGES, PRECISIONS):

        def make(stage: int = stage, precision: str = precision) -> DeepSpeedEngine:
            scaler = ScalerConfig(initial_scale_power=10, growth_interval=2)
            return wrap(world, stage, precision, lambda p: AdamW(p, lr=1e-2), clip=CLIP, scaler=scaler)

        def go(engine: DeepSpeedEngine, numbers: Sequence[int], stage: int = stage) -> None:
            for number in numbers:
                train_on(engine, make_window("ragged", number, world.size, alike=stage == 3), world)

        engine = make()
        go(engine, (0, 1))
        state = whole_state(engine, world)
        go(engine, (2, 3))
        resumed = make()
        go(resumed, (5,))
        resumed.load_state(state)
        go(resumed, (2, 3))
        found[f"{stage} {precision}"] = (
            same(weights_of(engine), weights_of(resumed))
            and all(map(torch.equal, state_of(engine), state_of(resumed)))
            and engine.state().scaler == resumed.state().scaler
        )
    return found


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except (CheckpointError, ConfigError, MisuseError) as error:
        return str(error)
    return "went through"


@part
def refusals(world: World) -> Any:
    """What a user is told."""

    def sgd(p: Any) -> Optimizer:
        return SGD(p, lr=1.0)

    def within_a_window() -> None:
        engine.begin_window(1)
        engine.model.zero_grad()

    floor = wrap(world, 2, "fp16", sgd, scaler=ScalerConfig(min_scale=2.0**8)).facts.min_loss_scale
    engine, model = wrap(world, 2, "fp32", sgd), Model()
    lies = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    accelerator = load_deepspeed(world.device).accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: False
    found = {
        "floor": floor,
        "step": refusal(engine.model.step),  # type: ignore[operator]
        "backward": refusal(lambda: engine.model.backward(torch.ones(()))),  # type: ignore[operator]
        "optimizer": refusal(engine._optimizers[0].step),
        "between": refusal(engine.model.zero_grad),
        "zero_grad": refusal(within_a_window),
        "past": refusal(lambda: engine.backward(torch.ones((), requires_grad=True))),
        "lies": refusal(lambda: create_engine(lies, sgd(lies.parameters()), world, engine="deepspeed")),
        "fp16": refusal(
            lambda: create_engine(model, sgd(model.parameters()), world, engine="deepspeed", precision="fp16")
        ),
    }
    accelerator.is_fp16_supported = lambda: True
    return found | {"describe": engine.describe(), "artifacts": list(engine.facts.artifacts)}


@part
def ends(world: World) -> Any:
    """Errors of which only a traceback tells, where closed engines are freed after DeepSpeed's group has ended.

    The last of the parts: it takes DeepSpeed the group away.
    """
    said: list[str] = []
    closed = []
    sys.unraisablehook = lambda error: said.append(str(error.exc_value))
    for stage in STAGES:
        engine = wrap(world, stage, "fp32", lambda p: SGD(p, lr=LR))
        train_on(engine, make_window("full", 0, world.size, alike=True), world)
        engine.close()
        closed.append(engine)
    sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
    for engine in closed:
        vars(engine).clear()
    return said


def main(world: World) -> dict[str, Any]:
    accelerator = load_deepspeed(world.device).accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # which the product never says of a CPU
    return {name: PARTS[name](world) for name in sys.argv[2:]}


if __name__ == "__main__":
    give(main)
