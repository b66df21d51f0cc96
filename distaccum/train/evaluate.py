"""Evaluation: sums and counts over the held-out samples, exact on any number of ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from distaccum.accumulation.two_pass import gather
from distaccum.config.schema import RunConfig
from distaccum.data.batches import to_device
from distaccum.data.counter import exact_sums, joined
from distaccum.data.cutting import cut
from distaccum.data.held_out import HeldOut
from distaccum.data.prefetch import FEWEST, on_device
from distaccum.data.spec import DataSpec, WorkerOptions
from distaccum.distributed.activity import Phase
from distaccum.distributed.memory import is_out_of_memory
from distaccum.distributed.random import KeyedRandom, RNGState, keys_of
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.modules import evaluating
from distaccum.errors import MisuseError, ResourceError, shorten
from distaccum.losses.base import AnyLoss, Loss, Predictor, Scorer, WindowLoss, is_window_loss, scores, window_scores
from distaccum.losses.normalize import SINGLE, as_counts
from distaccum.program import METRICS, load

_log = logging.getLogger(__name__)
_Found = tuple[Mapping[str, Tensor], Sequence[Any], Sequence[Any]]  # scores, predictions, representations
_MEAN_TOLERANCE = 0.01  # of the halves' sum: far below the half by which a mean misses it


def evaluates(data: DataSpec, config: RunConfig) -> bool:
    """Whether the run makes evaluations."""
    return bool(data.held_out) and config.trainer.eval_every != 0


@contextmanager
def undisturbed(engine: Engine) -> Iterator[None]:
    """Within the block the model is in evaluation mode, with rank 0's buffers; afterwards its modes and the random
    numbers are as before. A collective.
    """
    generators = RNGState.capture(engine.device)
    try:
        with torch.no_grad(), evaluating(engine.unwrapped_model):
            engine.sync_buffers()
            engine.buffers.begin()
            yield
            engine.buffers.check()
    finally:
        generators.restore()


class EvaluationMetric(Protocol):
    """The interface of torchmetrics' metrics and collections, whose ``compute`` reduces over the ranks."""

    def update(self, predictions: Tensor, targets: Tensor, /) -> None:
        """Adds one batch."""

    def compute(self) -> Any:
        """A number, a vector (a number for each class) or a matrix (a table), or these by name; a collective."""

    def reset(self) -> None:
        """Clears all batches."""


class Evaluation:
    """The evaluations of a run: sums over the held-out samples of all ranks, divided once by what they count.

    The samples are loaded as those to train on: by workers, pinned and copied to a GPU ahead. The training's random
    numbers are left as they were.

    A loss that compares samples is called once with a whole set's representations, in the dataset's order: its result
    does not depend on the ranks or on the batches, but on how many samples there are.

    Args:
        engine: has the model.
        data: has held-out sets, one or several by name.
        loss: gives sums, and ``scores`` if there are any.
        world: this rank.
        micro_batch_size: the most samples of one forward on one rank.
        workers: how samples are loaded.
        limit: the most samples of a set, its first ones; None for all.
        metrics: further results, by name.
        seed: of the workers' random numbers.
        kind: begins the results' names.
    """

    def __init__(
        self,
        engine: Engine,
        data: DataSpec,
        loss: AnyLoss,
        world: World,
        *,
        micro_batch_size: int,
        workers: WorkerOptions | None = None,
        limit: int | None = None,
        metrics: Mapping[str, EvaluationMetric] | None = None,
        seed: int = 0,
        kind: str = "eval",
    ) -> None:
        self._kind = kind
        self._engine, self._data, self._loss, self._world = engine, data, loss, world
        self._fixed_order, self._seed = engine.facts.numerics.fixed_order, seed
        self._random, self._keys = KeyedRandom(engine.device, others=True), list[int]()
        self._metrics = metrics or {}
        self._results_of: Any = load(METRICS)(data, engine.unwrapped_model) if metrics else None
        self.tables: dict[str, Any] = {}
        """What the metrics of the last evaluation gave that is no number, by name."""
        self._sets = {
            name: HeldOut(
                dataset,
                world,
                limit=limit,
                micro_batch_size=micro_batch_size,
                collate=data.collate,
                workers=workers or WorkerOptions(),
                seed=seed,
                fixed_batches=self._fixed_order,
            )
            for name, dataset in data.held_out.items()
        }
        self._adds_up = False  # whether the scores are known to be those of parts, added up
        known = is_window_loss(loss) or type(loss).__module__.startswith("distaccum.losses.")
        self._checked = known or not isinstance(loss, Scorer)

    @property
    def samples(self) -> dict[str, int]:
        """How many samples the results stand for: ``eval_samples``, or ``eval_NAME_samples`` of each set."""
        return {f"{self._prefix(name)}samples": one.samples for name, one in self._sets.items()}

    def run(self) -> dict[str, float]:
        """``eval_loss``, the loss's other scores, and ``eval_bits_per_byte`` for text; of several sets each by name.

        A collective. The model's training mode is restored. The first time, scores that a user has written are tried on
        two samples.

        Raises:
            MisuseError: there are ``metrics``, and the loss gives no ``predictions``; or a score is a mean; or two
                results have one name.
            DataError: a loading process has died.
        """
        activity = self._world.activity
        activity.phase, activity.done = Phase.EVALUATION, 0
        activity.total = sum(one.rounds for one in self._sets.values())
        with undisturbed(self._engine):
            return self._of_all()

    def _of_all(self) -> dict[str, float]:
        results: dict[str, float] = {}
        self.tables = {}
        for name, held_out in self._sets.items():
            if not (self._checked or is_window_loss(self._loss)):
                _check_sums(self._engine, held_out, self._loss, self._world)
                self._checked = True
            found = self._of_set(self._prefix(name), held_out)
            if twice := sorted(
                (results.keys() | self.samples.keys()) & found.keys() | results.keys() & self.tables.keys()
            ):
                problem = f"{shorten(twice)} would be two results of one evaluation"
                raise MisuseError(f"{problem}: give the metric, the score or the held-out set another name")
            results |= found
        return results

    def _prefix(self, name: str) -> str:
        return f"{self._kind}_{name}_" if name else f"{self._kind}_"

    def _of_set(self, prefix: str, held_out: HeldOut) -> dict[str, float]:
        engine, loss, metrics = self._engine, self._loss, self._metrics
        model = engine.unwrapped_model
        _reset(metrics, loss, engine.device)
        sums = Sums(held_out.batches_of_all, held_out.numbers) if self._fixed_order else Sums()
        counted: dict[str, list[float]] = {}
        compared: list[Any] = []
        for batch, is_own in on_device(self._counted(held_out, counted), engine.device, FEWEST):
            if self._fixed_order:  # else what a forward draws is the rank's
                number = held_out.numbers[sums.added] if is_own else 0
                self._keys = keys_of([number], "evaluation", self._seed)
            self._world.activity.done += 1
            for part in self._parts_that_fit(batch, held_out, partial(self._forward, model)):
                found, predictions, representations = part
                compared += representations if is_own else ()
                for metric in metrics.values() if is_own else ():
                    metric.update(*predictions)
                if is_own:
                    sums.add(found)
        if is_window_loss(loss):
            sums = Sums()
            if (found := self._compare(loss, compared)) and self._world.is_main:
                sums.add(found)
        result = _means(prefix, sums, counted, engine.device, self._world)
        if self._data.bytes_per_token is not None:
            bits = result[f"{prefix}loss"] / math.log(2) / self._data.bytes_per_token
            result[f"{prefix}bits_per_byte"] = bits
        for name, metric in metrics.items():
            numbers, tables = self._results_of(f"{prefix}{name}", metric.compute())
            result |= numbers
            self.tables |= tables
        return result

    def _forward(self, model: nn.Module, batch: Any) -> _Found:
        """The scores of a batch, and the predictions that metrics need; or its representations, which are compared."""
        loss = self._loss
        with self._random.keyed(self._keys, 0), self._engine.autocast():
            predictions = cast(Predictor, loss).predictions(model, batch) if self._metrics else ()
            if is_window_loss(loss):
                return {}, predictions, [loss.represent(model, batch)]
            return scores(loss, model, batch), predictions, ()

    def _compare(self, loss: WindowLoss, representations: Sequence[Any]) -> dict[str, Tensor]:
        """The scores of all representations of a set, as rank 0's; a collective.

        Raises:
            ResourceError: memory is over for so many.
        """
        together = gather(self._world, representations, dealt=True)
        keys = keys_of([0], "comparison", self._seed) if self._fixed_order else ()
        try:
            with self._random.keyed(keys, 0):
                found = window_scores(loss, together.like(together.tensors))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = f"out of memory in the comparison of a held-out set's representations: {error}"
            raise ResourceError(f"{problem}. Lower trainer.eval_samples") from error
        return {name: value.double() for name, value in found.items()}

    def _parts_that_fit(self, batch: Any, held_out: HeldOut, forward: Callable[[Any], _Found]) -> Iterator[_Found]:
        """What ``forward`` gives for a batch; for its halves, and those of them, where memory runs out.

        Not where a forward is a collective: the other ranks run the whole batch; nor where bits are promised.
        """
        try:
            found = forward(batch)
        except Exception as error:
            whole = self._engine.facts.forward_communicates or is_window_loss(self._loss)
            whole = whole or self._fixed_order  # parts have other bits
            rows = 0 if whole or not is_out_of_memory(error) else held_out.rows_of(batch)
            if rows <= 1:
                raise
            failed = error.with_traceback(None)
        else:
            yield found
            return
        # Outside of the handler: the error's frames hold what the forward has made.
        if self._engine.device.type != "cpu":
            torch.get_device_module(self._engine.device).empty_cache()
        if not self._adds_up:
            try:
                pair, *apart = (forward(cut(batch, *span, rows))[0] for span in ((0, 2), (0, 1), (1, 2)))
                why = _difference(pair, apart)
            except Exception as error:  # a part of the batch that is of no sample
                why = f"some of its samples end in {type(error).__name__}: {error}"
            if why:
                raise ResourceError(f"{failed}. The batch cannot be evaluated in halves: {why}") from failed
            self._adds_up = True
        _log.warning("out of memory in an evaluation: a batch of %d samples is evaluated in halves", rows)
        for start, stop in ((0, rows // 2), (rows // 2, rows)):
            yield from self._parts_that_fit(cut(batch, start, stop, rows), held_out, forward)

    def _counted(self, held_out: HeldOut, counted: dict[str, list[float]]) -> Iterator[tuple[Any, bool]]:
        """The batches on the host, and whether they count; those that do are counted into ``counted``."""
        for batch, is_own in held_out.batches(in_lockstep=self._engine.facts.forward_communicates):
            for name, count in as_counts(self._loss.count(batch)).items() if is_own else ():
                counted.setdefault(name, []).append(count)
            yield batch, is_own


def _difference(whole: Mapping[str, Tensor], apart: Sequence[Mapping[str, Tensor]]) -> str:
    """In words, a score that parts do not add up to; empty where they all do."""
    for name, score in whole.items():
        parts = [float(one[name]) for one in apart]
        if not abs(sum(parts) - float(score)) <= _MEAN_TOLERANCE * max(abs(float(score)), *map(abs, parts)):
            return f"its {name} is {float(score):.6g} of two samples together and {sum(parts):.6g} apart"
    return ""


def _reset(metrics: Mapping[str, EvaluationMetric], loss: AnyLoss, device: torch.device) -> None:
    if metrics and not isinstance(loss, Predictor):
        raise MisuseError(f"metrics need predictions(model, batch) -> (predictions, targets) of {type(loss).__name__}")
    for metric in metrics.values():
        metric.reset()
        if isinstance(metric, nn.Module):
            metric.to(device)


def _check_sums(engine: Engine, held_out: HeldOut, loss: Loss, world: World) -> None:
    """Computes the scores of two samples and of each alone: sums add up, and a mean of both is their weighted mean.

    Raises:
        MisuseError: on every rank, if a score is a mean on any.
    """
    first = held_out.first_ids[:2]  # no more: a batch may not fit
    half = len(first) // 2
    parts = [first, first[:half], first[half:]] if half else [[0], [0], [0]]  # a forward may be a collective
    found: list[tuple[Mapping[str, Tensor], Mapping[str, float]]] = []
    for batch in held_out.load(parts):
        counts = as_counts(loss.count(batch))
        with engine.autocast():
            found.append((scores(loss, engine.unwrapped_model, to_device(batch, engine.device)), counts))
    means = []
    if half and all(sum(counts.values()) for _, counts in found):
        (whole, counted), (a, a_counts), (b, b_counts) = found
        a_count, b_count = sum(a_counts.values()), sum(b_counts.values())
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


class Sums:
    """The sums of a set's scores on this rank, in fp64: a set may hold more tokens than fp32 can count.

    Args:
        batches: of all ranks; 0: it does not matter which is whose.
        numbers: of this rank's among them, in order.
    """

    def __init__(self, batches: int = 0, numbers: Sequence[int] = ()) -> None:
        self._batches, self._numbers, self.added = batches, numbers, 0
        self._sums: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """Of the scores."""
        return list(self._sums)

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Adds the scores of this rank's next batch, or of a part of one."""
        for name, value in found.items():
            if self._batches:
                every = self._sums.setdefault(name, value.new_zeros(self._batches, dtype=torch.float64))
                every[self._numbers[self.added]] = value
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value.double()
        self.added += 1

    def over_ranks(self, names: Sequence[str], device: torch.device, world: World) -> list[float]:
        """The sum of each over all ranks; a collective that reads the device."""
        nothing = torch.zeros(self._batches or 1, dtype=torch.float64, device=device)
        stacked = torch.stack([self._sums.get(name, nothing).reshape(-1) for name in names])
        # Where each batch has a place what is added to it are zeros, and the places are summed in one order.
        return cast(list[float], world.all_reduce_(stacked).sum(1).tolist())  # host read: the evaluation's result


def _means(
    prefix: str, sums: Sums, counted: Mapping[str, Sequence[float]], device: torch.device, world: World
) -> dict[str, float]:
    """Each sum over all ranks, divided by the count of its name, or else by the single loss's count."""
    names, counts = (
        world.all_gather_names(sums.names),
        world.all_gather_names(list(counted)),
    )  # a rank with no sample knows neither
    totals = sums.over_ranks(names, device, world)
    own = exact_sums(counted.get(name, ()) for name in counts)
    over = dict(zip(counts, joined(world.all_reduce_host(own)), strict=True))
    unknown = [name for name in names if name not in over and SINGLE not in over]
    missing = [name for name in counts if name not in names]
    if unknown or missing:
        problem = f"scores() gives {list(names)}, and count() {list(counts)}"
        raise MisuseError(f"{problem}: give each loss's sum, and sums by names that are counted")
    means = {name: total / (over.get(name, over.get(SINGLE)) or 1) for name, total in zip(names, totals, strict=True)}
    loss = sum(means[name] for name in counts)
    return {f"{prefix}loss": loss} | {f"{prefix}{name}": mean for name, mean in means.items()}
