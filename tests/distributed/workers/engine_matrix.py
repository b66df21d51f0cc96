"""Run by torchrun: trains in the asked cells of the engine matrix, and writes each one's relative error."""

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from distaccum import Accumulator, DataSpec, World
from distaccum.accumulation.progress import Progress
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.engines.base import Engine
from distaccum.train.ema import EMA
from tests.support import engine_matrix, matrix
from tests.support.answers import asked, give
from tests.support.engine_matrix import BETAS, DECAY, EMA_DECAY, EPSILON, MICRO_SIZES, RATE, UPDATES, Cell
from tests.support.matrix import GLOBAL_SIZE, SEED


def weights_of(engine: Engine, world: World) -> dict[str, Tensor]:
    """The whole model in fp32, on every rank; what several ranks hold must be the same, bit by bit."""
    gather = getattr(engine, "whole_model", None)  # DeepSpeed's files are its own
    parts: list[dict[str, Tensor]] = [{} for _ in range(world.size)]
    own = gather() if gather else {name: tensor.detach().clone() for name, tensor in engine.state().model.items()}
    dist.all_gather_object(parts, own)
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"ranks differ in {name}"
    return found


@dataclass(frozen=True)
class ARun:
    """What a callback is shown."""

    progress: Progress

    def stop(self, reason: str) -> None:
        raise AssertionError(reason)


def average_of(acc: Accumulator) -> EMA:
    """The callback of a run, over the accumulator's engine."""
    average = EMA(decay=EMA_DECAY)
    average.begin(acc.engine)
    return average


def averages(average: EMA, world: World) -> dict[str, Tensor]:
    """Whole, as they are saved: each rank owns some."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(world.size)]
    dist.all_gather_object(parts, average.whole(lambda number: number % world.size == world.rank))
    return {name: tensor for part in parts for name, tensor in part.items()}


def precision_of(name: str) -> PrecisionConfig:
    """At 2**10 no gradient of this model is too large for fp16."""
    return PrecisionConfig(name=name, scaler=ScalerConfig(initial_scale_power=10))


def accumulator(cell: Cell, model: nn.Module, optimizer: Optimizer, world: World) -> Accumulator:
    return Accumulator(
        model,
        optimizer,
        global_batch_size=GLOBAL_SIZE,
        micro_batch_size=MICRO_SIZES[cell.world],
        count=matrix.Two().count,
        seed=SEED,
        world=world,
        engine=cell.config,
        precision=precision_of(cell.precision),
    )


def source_of(samples: Any) -> DataSpec:
    return DataSpec(train=samples, eval_dataset=None, description="matrix", collate=matrix.collate)


def sgd(cell: Cell, world: World) -> float:
    """The weights lose the gradient: the largest error of the two windows of an epoch, each from where it began."""
    model, loss, errors = engine_matrix.make_model(), matrix.Two(), []
    acc = accumulator(cell, model, SGD(model.parameters(), lr=1.0), world)
    samples = engine_matrix.make_data(cell)
    whole = engine_matrix.windows(samples, epoch=0)
    before = weights_of(acc.engine, world)
    average = average_of(acc) if cell.mode == "ema" else None
    for number, window in enumerate(acc.windows(source_of(samples))):
        for micro in window:
            with acc.accumulate():
                acc.backward(loss(acc.model, micro.batch))
        assert acc.last is not None
        assert acc.last.applied
        gradient = engine_matrix.gradient(before, whole[number], rounds=cell.precision == "bf16-weights")
        truth = {name: before[name].double() - g for name, g in gradient.items()}
        after = weights_of(acc.engine, world)
        if average is None:
            errors.append(engine_matrix.error(before, after, truth))
        else:
            was = averages(average, world)
            average.on_update(ARun(acc.progress), acc.last)
            errors.append(engine_matrix.error(was, averages(average, world), engine_matrix.moved(was, truth)))
        before = after
    assert len(errors) == len(whole)
    return max(errors)


def adamw(cell: Cell, world: World) -> float:
    """The change of the weights over 20 updates."""
    model, loss = engine_matrix.make_model(), matrix.Two()
    optimizer = AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)
    acc = accumulator(cell, model, optimizer, world)
    samples = engine_matrix.make_data(cell)
    before = weights_of(acc.engine, world)
    average = average_of(acc) if cell.mode == "ema" else None
    rounds = cell.precision == "bf16-weights"
    for _ in count():
        for window in acc.windows(source_of(samples)):
            outcome = acc.step(window, loss)
            assert outcome.applied
            if average is not None:
                average.on_update(ARun(acc.progress), outcome)
            if acc.progress.step == UPDATES:
                truth = engine_matrix.adamw(before, samples, rounds=rounds, averages=average is not None)
                found = weights_of(acc.engine, world) if average is None else averages(average, world)
                return engine_matrix.error(before, found, truth)
    raise AssertionError


def allow_fp16() -> None:
    """Has DeepSpeed believe that the CPU can: which the product never does."""
    import deepspeed  # noqa: PLC0415  an optional extra

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def run(cells: list[Cell], world: World) -> list[float]:
    """Each one's error, the largest of all ranks'."""
    if any(cell.engine.startswith("deepspeed") for cell in cells):
        allow_fp16()
    errors = []
    for cell in cells:
        assert cell.world == world.size
        errors.append({"sgd": sgd, "adamw": adamw}[cell.update](cell, world))
    everyone = torch.tensor(errors, dtype=torch.float64)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return everyone.tolist()


if __name__ == "__main__":
    give(lambda world: run([Cell(**values) for values in asked()], world), timeout_s=30)
