"""Evaluation: sums and counts over the held-out samples, exact on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from distaccum.data.batches import to_device
from distaccum.data.loader import MicroBatchIds
from distaccum.data.plan.batch import BatchPlan
from distaccum.data.spec import DataSpec
from distaccum.distributed.activity import Phase
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import MisuseError, shorten
from distaccum.losses.base import Loss, Predictor, Scorer, scores
from distaccum.losses.normalize import SINGLE, as_counts

_MEAN_TOLERANCE = 0.01  # of the halves' sum: far below the half by which a mean misses it


class EvaluationMetric(Protocol):
    """The interface of torchmetrics' metrics and collections, whose ``compute`` reduces over the ranks."""

    def update(self, predictions: Tensor, targets: Tensor, /) -> None:
        """Adds one batch."""

    def compute(self) -> Any:
        """A number, or numbers by name; a collective."""

    def reset(self) -> None:
        """Clears all batches."""


@torch.no_grad()
def evaluate(
    engine: Engine,
    data: DataSpec,
    loss: Loss,
    world: World,
    *,
    micro_batch_size: int,
    metrics: Mapping[str, EvaluationMetric] | None = None,
    check_sums: bool = False,
) -> dict[str, float]:
    """``eval_loss``, the loss's other scores, and ``eval_bits_per_byte`` for text: sums over all ranks, divided once.

    A collective. The model's training mode is restored. Samples are taken in the dataset's own order, each once.

    Args:
        engine: has the model.
        data: has an ``eval_dataset``.
        loss: gives sums, and ``scores`` if there are any.
        world: this rank.
        micro_batch_size: the most samples of one forward on one rank.
        metrics: further results, by name.
        check_sums: whether scores that a user has written are tried on two halves of a batch first.

    Raises:
        MisuseError: there are ``metrics``, and the loss gives no ``predictions``; or a score is a mean.
    """
    assert data.eval_dataset is not None
    metrics, activity = metrics or {}, world.activity
    activity.phase, activity.done = Phase.EVALUATION, 0
    _reset(metrics, loss, engine.device)
    engine.sync_buffers()
    model = engine.unwrapped_model
    modes = [(module, module.training) for module in model.modules()]  # some may be frozen
    model.eval()
    if check_sums and isinstance(loss, Scorer) and not type(loss).__module__.startswith("distaccum.losses."):
        _check_sums(engine, data, loss, world, micro_batch_size)
    sums: dict[str, Tensor] = {}
    counted: dict[str, float] = {}
    for batch, is_own in _batches(engine, data, world, micro_batch_size):
        activity.done += 1
        moved = to_device(batch, engine.device)
        with engine.autocast():
            found = scores(loss, model, moved)
            if metrics:
                predictions = cast(Predictor, loss).predictions(model, moved)
            for metric in metrics.values() if is_own else ():
                metric.update(*predictions)
        if not is_own:
            continue
        for name, count in as_counts(loss.count(batch)).items():
            counted[name] = counted.get(name, 0.0) + count
        for name, value in found.items():
            # fp64: a held-out set may hold more tokens than fp32 can count
            sums[name] = sums.get(name, 0.0) + value.double()
    for module, training in modes:
        module.training = training
    result = _means(sums, counted, engine.device, world)
    if data.bytes_per_token is not None:
        result["eval_bits_per_byte"] = result["eval_loss"] / math.log(2) / data.bytes_per_token
    for name, metric in metrics.items():
        result |= _numbers(f"eval_{name}", metric.compute())
    return result


def _reset(metrics: Mapping[str, EvaluationMetric], loss: Loss, device: torch.device) -> None:
    if metrics and not isinstance(loss, Predictor):
        raise MisuseError(f"metrics need predictions(model, batch) -> (predictions, targets) of {type(loss).__name__}")
    for metric in metrics.values():
        metric.reset()
        if isinstance(metric, nn.Module):
            metric.to(device)


def _plan(data: DataSpec, world: World, micro_batch_size: int) -> BatchPlan:
    assert data.eval_dataset is not None
    return BatchPlan(
        samples=len(data.eval_dataset),
        global_batch_size=micro_batch_size * world.size,
        micro_batch_size=micro_batch_size,
        world_size=world.size,
    )


def _batches(engine: Engine, data: DataSpec, world: World, micro_batch_size: int) -> Iterator[tuple[Any, bool]]:
    """This rank's batches; where a forward communicates, also those that only match the other ranks' number.

    Yields:
        A batch, and whether it counts.
    """
    plan = _plan(data, world, micro_batch_size)
    held_out, own = cast("Dataset[Any]", data.eval_dataset), 0
    for batch in DataLoader(held_out, batch_sampler=MicroBatchIds(plan, world.rank), collate_fn=data.collate):
        own += 1
        yield batch, True
    if engine.forward_communicates:
        for batch in DataLoader(held_out, sampler=[0] * (plan.windows_per_epoch - own), collate_fn=data.collate):
            yield batch, False


def _check_sums(engine: Engine, data: DataSpec, loss: Loss, world: World, micro_batch_size: int) -> None:
    """Computes the scores of a batch and of its two halves: sums add up, and a mean of both is their weighted mean.

    Raises:
        MisuseError: on every rank, if a score is a mean on any.
    """
    held_out, generators = cast("Dataset[Any]", data.eval_dataset), RNGState.capture(world.device)
    first = next(iter(MicroBatchIds(_plan(data, world, micro_batch_size), world.rank)), [])
    half = len(first) // 2
    found: list[tuple[Mapping[str, Tensor], float]] = []
    for ids in (first, first[:half], first[half:]) if half else ([0], [0], [0]):  # a forward may be a collective
        (batch,) = DataLoader(held_out, batch_sampler=[ids], collate_fn=data.collate)
        with engine.autocast():
            sums = scores(loss, engine.unwrapped_model, to_device(batch, engine.device))
        found.append((sums, sum(as_counts(loss.count(batch)).values())))
    generators.restore()
    means = []
    if half and all(count for _, count in found):
        (whole, _), (a, a_count), (b, b_count) = found
        counted = as_counts(loss.count(batch))
        for name in whole if SINGLE in counted or whole.keys() <= counted.keys() else ():  # host reads, once a run
            total, mean = a[name].item() + b[name].item(), (a[name].item() * a_count + b[name].item() * b_count)
            mean /= a_count + b_count
            near = abs(whole[name].item() - mean) <= _MEAN_TOLERANCE * abs(total)
            means += [name] if total and near else []
    means = list(world.all_gather_names(means))
    if means:
        problem = (
            f"scores() of {type(loss).__name__} gives means for {shorten(means)}, and they are divided by the count"
        )
        raise MisuseError(f"{problem} once: give sums over the batch, as in (prediction == target).sum()")


def _means(
    sums: Mapping[str, Tensor], counted: Mapping[str, float], device: torch.device, world: World
) -> dict[str, float]:
    """Each sum over all ranks, divided by the count of its name, or else by the single loss's count."""
    names, counts = (
        world.all_gather_names(list(sums)),
        world.all_gather_names(list(counted)),
    )  # a rank with no sample knows neither
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack([sums.get(name, nothing) for name in names]).unsqueeze(1)
    totals = world.all_reduce_(stacked).squeeze(1).tolist()  # host read: the evaluation's result
    over = dict(zip(counts, world.all_reduce_host([counted.get(name, 0.0) for name in counts]), strict=True))
    unknown = [name for name in names if name not in over and SINGLE not in over]
    missing = [name for name in counts if name not in names]
    if unknown or missing:
        problem = f"scores() gives {list(names)}, and count() {list(counts)}"
        raise MisuseError(f"{problem}: give each loss's sum, and sums by names that are counted")
    means = {name: total / (over.get(name, over.get(SINGLE)) or 1) for name, total in zip(names, totals, strict=True)}
    loss = sum(means[name] for name in counts)
    return {"eval_loss": loss} | {f"eval_{name}": mean for name, mean in means.items()}


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items()}
    return {name: float(value)}
