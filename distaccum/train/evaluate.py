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
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import MisuseError
from distaccum.losses.base import Loss, Predictor, scores
from distaccum.losses.normalize import SINGLE, as_counts


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
) -> dict[str, float]:
    """``eval_loss``, the loss's other scores, and ``eval_bits_per_byte`` for text: sums over all ranks, divided once.

    A collective. The model's training mode is restored. Samples are taken in the dataset's own order, each once.

    Raises:
        MisuseError: there are ``metrics``, and the loss gives no ``predictions``.
    """
    assert data.eval_dataset is not None
    metrics = metrics or {}
    if metrics and not isinstance(loss, Predictor):
        raise MisuseError(f"metrics need predictions(model, batch) -> (predictions, targets) of {type(loss).__name__}")
    for metric in metrics.values():
        metric.reset()
        if isinstance(metric, nn.Module):
            metric.to(engine.device)
    engine.sync_buffers()
    model = engine.unwrapped_model
    modes = [(module, module.training) for module in model.modules()]  # some may be frozen
    model.eval()
    sums: dict[str, Tensor] = {}
    counted: dict[str, float] = {}
    for batch, is_own in _batches(engine, data, world, micro_batch_size):
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


def _batches(engine: Engine, data: DataSpec, world: World, micro_batch_size: int) -> Iterator[tuple[Any, bool]]:
    """This rank's batches; where a forward communicates, also those that only match the other ranks' number.

    Yields:
        A batch, and whether it counts.
    """
    assert data.eval_dataset is not None
    samples = len(data.eval_dataset)
    plan = BatchPlan(
        samples=samples,
        global_batch_size=micro_batch_size * world.size,
        micro_batch_size=micro_batch_size,
        world_size=world.size,
    )
    held_out, own = cast("Dataset[Any]", data.eval_dataset), 0
    for batch in DataLoader(held_out, batch_sampler=MicroBatchIds(plan, world.rank), collate_fn=data.collate):
        own += 1
        yield batch, True
    if engine.forward_communicates:
        for batch in DataLoader(held_out, sampler=[0] * (plan.windows_per_epoch - own), collate_fn=data.collate):
            yield batch, False


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
