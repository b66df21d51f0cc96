"""Run by torchrun: plants NaN and infinity on one rank, and writes what became of it on each, by :data:`PARTS`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, AdamW, Optimizer

from distaccum import Accumulator, DataSpec, World
from distaccum import functional as da
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.errors import NonFiniteError
from distaccum.precision.scaler import LossScaler
from tests.support.accumulators import Of
from tests.support.answers import give

MICRO_SIZE, MICRO_STEPS = 2, 3
GOOD, BAD = "good", "bad"
HUGE = 1e5
SCALERS: dict[str, Any] = {"ours": LossScaler, "torch's": ShardedGradScaler}
Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Where in the second of three windows something is planted, and what trains."""

    level: int
    precision: str
    fused: tuple[bool, bool]  # of the optimizers of "a" and "b"
    branch: str  # whose gradients are spoiled
    micro_step: int
    rank: int
    value: float  # in an input; or HUGE, as a target, whose gradient fp32 can hold and fp16 at this scale cannot
    scheduler: str  # at level 2: "ours" or "torch's"


def cases(ranks: int) -> list[Case]:
    """Every level, precision, pair of optimizers, branch and micro-step; rank, value and scheduler take turns."""
    levels, precisions, fused = (1, 2), ("fp16", "fp32"), list(product((False, True), repeat=2))
    found = []
    for i, axes in enumerate(product(levels, precisions, fused, "ab", range(MICRO_STEPS))):
        turn = i + i // 6  # six cases in a row differ in branch and micro-step alone
        values = (float("nan"), float("inf"), -float("inf"), *([HUGE] if axes[1] == "fp16" else []))
        value = values[turn // 2 % len(values)]
        found.append(Case(*axes, rank=turn % ranks, value=value, scheduler=("ours", "torch's")[turn % 2]))
    return found


class Branches(nn.Module):
    """Two models side by side: what is in the one's input leaves the other's gradient alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2))

    def forward(self, batch: Sample) -> Tensor:
        return torch.cat([self.a(batch["a"]), self.b(batch["b"])], 1)


# A sum of squared errors over the samples.
SQUARES = Of(
    lambda model, batch: (model(batch).float() - batch["target"]).square().sum(),
    count=lambda batch: len(batch["target"]),
)


def samples_of(windows: Sequence[tuple[int, str]], world: World, case: Case) -> list[Sample]:
    """The samples of windows by number; in a bad one a single value of one rank's micro-batch is spoiled."""
    size = MICRO_SIZE * MICRO_STEPS
    found = []
    for number, kind in windows:
        generator = torch.Generator().manual_seed(number)
        for place in range(size * world.size):
            sample = {name: torch.randn(n, generator=generator) for name, n in (("a", 4), ("b", 4), ("target", 2))}
            if kind == BAD and place == case.rank * size + case.micro_step * MICRO_SIZE + 1:
                spoiled, place_in = ("target", "ab".index(case.branch)) if case.value == HUGE else (case.branch, 2)
                sample[spoiled][place_in] = case.value
            found.append(sample)
    return found


def source_of(windows: Sequence[tuple[int, str]], world: World, case: Case) -> DataSpec:
    """In this order, so that it is known which rank and micro-step gets what."""
    samples: Any = samples_of(windows, world, case)
    return DataSpec(train=samples, eval_dataset=None, description="planted", shuffle=False)


def make(fused: tuple[bool, bool]) -> tuple[Branches, list[Optimizer]]:
    """A model that is the same each time, and an optimizer for each branch."""
    torch.manual_seed(5)
    model = Branches()
    a = AdamW(model.a.parameters(), lr=0.05, weight_decay=0.1, fused=fused[0])
    b = SGD(model.b.parameters(), lr=0.1, momentum=0.9, dampening=0.3, fused=fused[1])
    return model, [a, b]


def precision_of(name: str, power: int = 10) -> PrecisionConfig:
    """At 2**10 no gradient of these models is too small or too large for fp16: powers of two change no digit."""
    return PrecisionConfig(name=name, scaler=ScalerConfig(initial_scale_power=power))


def snapshot(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    found = [p.detach().clone() for p in model.parameters()]
    for optimizer in optimizers:
        for state in optimizer.state_dict()["state"].values():
            found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
    return found


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Records:
    """What is seen after each window, on this rank."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self.seen: list[Any] = []  # micro-steps with a spoiled batch
        self.applied: list[bool] = []
        self.scales: list[float] = []
        self.rates: list[list[float]] = []
        self.progress: list[Any] = []
        self.states: list[list[Tensor]] = []

    def look_at(self, window: int, micro_step: int, batch: Sample) -> None:
        """Whether it is spoiled."""
        if not all((value.abs() < HUGE).all() for value in batch.values()):
            self.seen.append([window, micro_step])

    def after(self, result: Any) -> None:
        self.applied.append(result.applied)
        self.scales.append(result.loss_scale)
        self.rates.append([optimizer.param_groups[0]["lr"] for optimizer in self._optimizers])
        self.states.append(snapshot(self._model, self._optimizers))


def run(windows: Sequence[tuple[int, str]], case: Case, world: World) -> Records:
    model, optimizers = make(case.fused)
    records = Records(model, optimizers)
    source = source_of(windows, world, case)
    sizes: dict[str, Any] = {"global_batch_size": MICRO_SIZE * MICRO_STEPS * world.size, "micro_batch_size": MICRO_SIZE}
    sizes |= {"clip_norm": 1.0, "precision": precision_of(case.precision)}
    by = {1: by_hand, 2: by_accumulator}[case.level]
    by(model, optimizers, source, records, scheduler=case.scheduler, world=world, **sizes)
    return records


def by_hand(
    model: nn.Module,
    optimizers: list[Optimizer],
    source: DataSpec,
    records: Records,
    *,
    scheduler: str,
    world: World,
    global_batch_size: int,
    micro_batch_size: int,
    **options: Any,
) -> None:
    """Level 1, which leaves rates alone."""
    loss = SQUARES
    engine = da.create_engine(model, optimizers, world, **options)
    windows = da.plan_windows(
        source, world, count=loss.count, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size
    )
    for number, window in enumerate(windows(0)):
        for i, micro in enumerate(window.micro_batches):
            records.look_at(number, i, micro.batch)
            with engine.micro_step(sync=i == len(window.micro_batches) - 1):
                with engine.autocast():
                    total = loss(engine.model, micro.batch)
                engine.backward(
                    da.normalize_loss(total, window.counts, gradient_divide_factor=engine.gradient_divide_factor)
                )
        records.after(da.finish_step(engine, window))
    records.scales.append(engine.state().scaler.get("scale", 1.0))


def by_accumulator(
    model: nn.Module, optimizers: list[Optimizer], source: DataSpec, records: Records, *, scheduler: str, **options: Any
) -> None:
    """Level 2, with a schedule of ours, or one of torch's for each optimizer."""
    loss, gamma = SQUARES, 0.5
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, gamma) for one in optimizers]
    rates: Any = {"schedule": lambda step: gamma**step} if scheduler == "ours" else {"scheduler": schedulers}
    options |= {"nonfinite": "skip", "verify": "never"}
    acc = Accumulator(model, optimizers, count=loss.count, **rates, **options)
    for number, window in enumerate(acc.windows(source)):
        for i, micro in enumerate(window):
            records.look_at(number, i, micro.batch)
            with acc.accumulate():
                acc.backward(loss(acc.model, micro.batch))
        assert acc.last is not None
        records.progress.append(asdict(acc.progress))  # which asks, and steps schedulers
        records.after(acc.last)
    records.scales.append(acc.engine.state().scaler.get("scale", 1.0))


def planted(case: Case, world: World) -> dict[str, Any]:
    """A good, a bad and a good window, beside a run that never sees the bad one."""
    records = run([(1, GOOD), (2, BAD), (3, GOOD)], case, world)
    reference = run([(1, GOOD), (3, GOOD)], case, world)
    first, bad, last = records.states
    return {
        "seen": records.seen,
        "applied": records.applied,
        "scales": records.scales,
        "rates": records.rates,
        "reference rates": reference.rates,
        "clocks": records.progress,
        "unchanged": same(first, bad),
        "moved": not any(map(torch.equal, bad[:8], last[:8])),  # every one of the weights
        "as without it": same(last, reference.states[-1]),
        "weights": [value.tolist() for value in last],
    }


def sharded(world: World, scaler: Any, spoiled: Sequence[int], unscales: bool, fused: bool) -> dict[str, Any]:
    """Every rank has a parameter of its own, and nobody reduces gradients; those of ``spoiled`` ranks are infinite."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter], lr=0.1, fused=fused)
    scaler = scaler("cpu", init_scale=16.0)
    found = []
    for window in range(3):
        bad = window == 1 and world.rank in spoiled
        parameter.grad = torch.full_like(parameter, float("inf") if bad else 1.0) * scaler.scale(torch.ones(()))
        before = parameter.detach().clone()
        if unscales:
            scaler.unscale_(optimizer)
            (decision,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            found.append([decision.item(), decision.ndim])
            # As where torch has mended the shape: what the kernel makes of a sum is another matter.
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {decision.device: decision.squeeze()}
        scaler.step(optimizer)
        scaler.update()
        if window == 1:
            stepped = not torch.equal(parameter, before)
    return {
        "found": found,
        "stepped": stepped,
        "scale": scaler.get_scale(),
        "finite": bool(parameter.isfinite().all()),
        "moved": not torch.equal(parameter, before),
    }


def overflow_for_ever(world: World, *, by: str, **options: Any) -> dict[str, Any]:
    """200 windows whose gradients are infinite because of rank 1, then two good ones; or to the end that it takes."""
    case = Case(2, "fp16", (True, True), "b", 1, world.size - 1, float("inf"), "ours")
    windows = [(0, GOOD)] + [(i, BAD) for i in range(1, 201)] + [(201, GOOD), (202, GOOD)]
    model, optimizers = make(case.fused)
    source, loss = source_of(windows, world, case), SQUARES
    acc = Accumulator(
        model,
        optimizers,
        count=loss.count,
        precision=precision_of("fp16", 16),
        world=world,
        micro_batch_size=MICRO_SIZE,
        global_batch_size=MICRO_SIZE * MICRO_STEPS * world.size,
        clip_norm=1.0,
        **options,
    )
    states, scales, applied, message = [snapshot(model, optimizers)], [], [], ""
    try:
        for window in acc.windows(source):
            if by == "step":
                acc.step(window, loss)
            else:
                for batch in window:
                    with acc.accumulate():
                        acc.backward(loss(acc.model, batch.batch))
            assert acc.last is not None
            scales.append(acc.last.loss_scale)
            applied.append(acc.last.applied)
            states.append(snapshot(model, optimizers))
    except NonFiniteError as error:
        message = str(error)
    last_good = max((i for i, done in enumerate(applied) if done), default=-1) + 1
    return {
        "message": message,
        "attempts": len(applied),
        "applied": [i for i, done in enumerate(applied) if done],
        "scales": [*scales, acc.engine.state().scaler.get("scale", 1.0)],
        "untouched": all(same(states[last_good], state) for state in states[last_good:]),
        "untouched at the end": same(states[last_good], snapshot(model, optimizers)),
        "finite": all(bool(value.isfinite().all()) for value in states[-1]),
        "clocks": asdict(acc.tracker.known_progress),
        "weights": [value.tolist() for value in states[-1]],
    }


def attempt(todo: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What torch's class may raise, as a result."""
    try:
        return todo()
    except RuntimeError as error:
        return {"error": str(error)}


def scalers(world: World) -> dict[str, Any]:
    """Both classes on gradients that nobody reduces; by class, ranks that are spoiled, and calls."""
    found = {}
    for (name, scaler), spoiled, unscales, fused in product(
        SCALERS.items(), ([world.size - 1], [*range(world.size)]), (False, True), (False, True)
    ):
        key = f"{name}, {len(spoiled)} spoiled, {'unscale_, ' if unscales else ''}{'fused' if fused else 'plain'}"
        found[key] = attempt(partial(sharded, world, scaler, spoiled, unscales, fused))
        world.barrier()
    return found


def chosen_cases(ranks: int) -> list[Case]:
    """Some of them, by a step that no axis shares: nearly every two values of two axes meet."""
    return cases(ranks)[:: 5 if ranks == 2 else 7]


def endings(world: World) -> dict[str, Any]:
    """Runs that are spoiled for good, or nearly."""
    found = {f"by default, {by}": overflow_for_ever(world, by=by) for by in ("step", "backward")}
    return found | {"200 overflows": overflow_for_ever(world, by="step", max_skips=300)}


PARTS: dict[str, Callable[[World], Any]] = {
    "scalers": scalers,
    "matrix": lambda world: [planted(case, world) for case in chosen_cases(world.size)],
    "endings": endings,
    "whole matrix": lambda world: [planted(case, world) for case in cases(world.size)],
}

if __name__ == "__main__":
    give(lambda world: {name: PARTS[name](world) for name in sys.argv[2:]}, of_all=True)
