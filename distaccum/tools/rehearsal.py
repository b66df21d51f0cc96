"""A rehearsal before the first window finds the micro-batch: by rate, within the memory.

The gradient does not depend on the micro-batch, so it may be chosen for speed alone. Micro-batches of the longest
samples run forward and backward, as in a window but without its reduction and step; random numbers, buffers and
gradients are put back, and no weight moves. All ranks take every decision together.

Memory of a micro-step is linear in its padded tokens: the peaks of two sizes predict the next one's, which is run only
if it is to fit, and is measured then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from distaccum.accumulation.rehearsal import Rehearsal, Trial
from distaccum.data.batches import to_device
from distaccum.data.cutting import Shape, shape_of
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.memory import is_out_of_memory
from distaccum.distributed.random import KeyedRandom
from distaccum.engines.base import Engine
from distaccum.engines.buffers import state_restored
from distaccum.engines.compiled import uncompiled
from distaccum.engines.memory_marks import memory_by_part
from distaccum.engines.ownership import is_owned, leaves_of
from distaccum.errors import ResourceError
from distaccum.losses.base import Loss
from distaccum.losses.normalize import as_counts, normalize_loss
from distaccum.tools.memory import LiveMemory, memory_left, state_to_come

_log = logging.getLogger(__name__)

SECONDS = 10.0  # of a rehearsal
_SHARE = 0.9  # of the memory
_NEAR = 0.99  # of the best rate: the rest of the 2 % is for what a rehearsal does not run, such as loading
_CLOSE = 0.85  # of the best rate: sizes that are timed again, as what else the machine does may have met them alone
_CLOSER = 0.95  # the same, once they are timed in turns
_TIMED_S, _MOST_RUNS = 0.1, 5  # of one size
_ROUNDS, _LEAST = 10, 3
_REHEARSED = "This was a rehearsal of the micro-batch, of {}: state its size instead"
_KEY = 0  # of the random numbers


def rehearse(
    engine: Engine, loss: Loss, batch_of: Callable[[int], Any], *, most: int, seconds: float = SECONDS
) -> Rehearsal:
    """Finds the smallest power of two within 1 % of the best rate and at most 90 % of memory; a collective.

    Args:
        engine: before its first window, or between two.
        loss: sums over a batch.
        batch_of: gives a micro-batch of so many samples, on the host: the longest ones.
        most: samples that a rank has in a window, at most.
        seconds: that it may take; a size that has begun is finished.

    Raises:
        ResourceError: memory is over for a single sample.
    """
    return _Rehearsal(engine, loss, batch_of).run(most, seconds)


class _Rehearsal:
    def __init__(self, engine: Engine, loss: Loss, batch_of: Callable[[int], Any]) -> None:
        self._engine, self._world, self._loss, self._batch_of = engine, engine.world, loss, batch_of
        self._shapes: dict[int, Shape] = {}
        self._gpu: Any = None if engine.device.type == "cpu" else torch.get_device_module(engine.device)

    def run(self, most: int, seconds: float) -> Rehearsal:
        began = perf_counter()
        engine = self._engine
        to_come = state_to_come(engine.optimizers)
        with state_restored(engine), uncompiled:
            modes = [(module, module.training) for module in engine.unwrapped_model.modules()]
            if not any(training for _, training in modes):  # after an evaluation: a loop sets it for its windows
                engine.unwrapped_model.train()
            try:
                found = self._search(most, seconds, began, to_come)
            finally:
                engine.zero_gradients()
                for module, training in modes:
                    module.training = training
        if self._gpu is not None:
            self._gpu.empty_cache()
            self._gpu.reset_peak_memory_stats(engine.device)
        shape = self._shapes[found.micro_size]
        if found.memory is not None:
            engine.memory_marks.prove(shape)
        return found

    def _search(self, most: int, seconds: float, began: float, to_come: int) -> Rehearsal:
        batches: dict[int, Any] = {}
        limit = self._limit(to_come)
        trials: dict[int, Trial] = {}
        left_out: int | None = None
        size = self._first(most)
        while size <= most:
            batches[size] = self._take(size)
            trial = self._trial(size, batches[size], list(trials.values()), limit)
            if trial is None:
                left_out = size
                break
            trials[size] = trial
            if self._is_over(began, seconds, 2 * trial.seconds * (_MOST_RUNS + 1)) or _falls(trials):
                break
            size *= 2
        self._time_again(trials, batches, began, seconds)
        return self._choice(trials, limit, left_out, perf_counter() - began)

    def _trial(self, size: int, batch: Any, before: Sequence[Trial], limit: int | None) -> Trial | None:
        """Runs a size; None where it would not fit, or did not. The first one, which nothing is ``before``, has to."""
        allowed = inf if limit is None else _SHARE * limit
        if before and (
            self._engine.memory_marks.is_too_large(self._shapes[size]) or _predicted(before, size) > allowed
        ):
            return None
        memory, error = self._measure(batch)
        if error is not None and not before:
            raise error
        if error is not None or (before and memory is not None and memory > allowed):
            return None
        return self._timed(size, batch, memory)

    def _first(self, most: int) -> int:
        """The size to begin with: 1, or 2 where a model does not take a single sample, as batch normalisation.

        It is run for what is made once: kernels, workspaces, threads.
        """
        error: Exception | None = None
        try:
            self._run(self._take(1))
        except Exception as problem:
            if is_out_of_memory(problem):
                raise self._too_large(problem) from problem
            if self._engine.facts.forward_communicates:
                raise
            error = problem.with_traceback(None)
            self._engine.zero_gradients()
        (failed,) = self._world.all_reduce_max_host([error is not None])
        if not failed:
            return 1
        if error is not None and most < 2:  # noqa: PLR2004
            raise error
        try:
            self._run(self._take(2))
        except Exception as problem:
            problem.add_note(_REHEARSED.format("two samples"))
            raise
        return 2

    def _too_large(self, problem: Exception) -> ResourceError:
        said = (str(problem).splitlines() or [type(problem).__name__])[0]
        remedy = "Use activation checkpointing, or an engine that shards the model (fsdp2, deepspeed)"
        held = memory_by_part(self._engine)
        return ResourceError(f"out of memory in the rehearsal, with a single sample: {said}. {held}. {remedy}")

    def _limit(self, to_come: int) -> int | None:
        left = memory_left(self._engine.device, sharing=max(1, LaunchEnvironment.from_environment().local_size))
        known = -1 if left is None else max(0, left - to_come)
        fewest = -self._world.all_reduce_max_host([-known])[0]
        return None if fewest < 0 else fewest

    def _take(self, size: int) -> Any:
        batch = self._batch_of(size)
        self._shapes[size] = shape_of(batch)
        return batch

    # --- one micro-step

    def _run(self, batch: Any) -> float:
        """Seconds of a forward and backward, which accumulates on this rank only; the gradient is dropped."""
        engine, random = self._engine, KeyedRandom(self._engine.device)
        engine.begin_window(1)
        counts = as_counts(self._loss.count(batch))
        divisors = {name: value or 1.0 for name, value in counts.items()}
        moved = to_device(batch, engine.device)
        self._wait()
        began = perf_counter()
        with random.keyed([_KEY], 0), engine.micro_step(sync=False):
            with engine.autocast():
                total = self._loss(engine.model, moved)
            divided = normalize_loss(total, divisors, engine.gradient_divide_factor, own_counts=counts)
            foreign = _ForeignGradients(divided)
            engine.backward(divided)
            foreign.restore()
        self._wait()
        taken = perf_counter() - began
        engine.zero_gradients()
        return taken

    def _measure(self, batch: Any) -> tuple[int | None, Exception | None]:
        """The bytes that a micro-step takes beside weights and gradients, the most of all ranks; or it does not fit."""
        own, error = -1, None
        try:
            own = self._memory_of(batch)
        except Exception as problem:
            if not is_out_of_memory(problem):
                problem.add_note(_REHEARSED.format(shape_of(batch)))
                raise
            if self._engine.facts.forward_communicates:  # the ranks begin again, without it
                self._engine.memory_marks.fail(shape_of(batch))
                raise
            error = type(problem)(*problem.args)  # without its frames, which hold what the forward has made
        if error is not None:
            self._engine.zero_gradients()
            if self._gpu is not None:
                self._gpu.empty_cache()
        memory, failed = self._world.all_reduce_max_host([own, error is not None])
        if failed and error is None:
            error = RuntimeError("another rank is out of memory")
        return (memory if memory >= 0 else None), error

    def _memory_of(self, batch: Any) -> int:
        device = self._engine.device
        if self._gpu is not None:
            self._gpu.synchronize(device)
            self._gpu.reset_peak_memory_stats(device)
            before = self._gpu.memory_allocated(device)
            self._run(batch)
            return int(self._gpu.max_memory_allocated(device) - before)
        if self._engine.facts.forward_communicates:
            self._run(batch)
            return -1  # sharded parameters do not go through a dispatch mode of ours
        live = LiveMemory("cpu")
        with live, torch.autograd.set_multithreading_enabled(False):
            self._run(batch)
        return live.peak

    def _wait(self) -> None:
        if self._gpu is not None:
            self._gpu.synchronize(self._engine.device)

    # --- times

    def _timed(self, size: int, batch: Any, memory: int | None) -> Trial:
        first = self._slowest(self._run(batch))
        runs = max(1, min(_MOST_RUNS, int(_TIMED_S / first)))
        own = min(self._run(batch) for _ in range(runs))
        return Trial(size=size, seconds=min(first, self._slowest(own)), memory=memory)

    def _time_again(self, trials: dict[int, Trial], batches: dict[int, Any], began: float, seconds: float) -> None:
        """Times the sizes that come near the best in turns, so that what else the machine does meets all of them.

        Of each as many samples at once as the largest has: of short runs more would be undisturbed than of long ones.
        """
        best = max(trial.rate for trial in trials.values())
        near = [trial for trial in trials.values() if trial.rate >= _CLOSE * best]
        most = max(trial.size for trial in near)
        least = dict.fromkeys((trial.size for trial in near), inf)
        for turn in range(_ROUNDS):
            if len(near) == 1 or self._is_over(began, seconds, sum(most / trial.rate for trial in near)):
                break
            for trial in near:
                runs = most // trial.size
                own = sum(self._run(batches[trial.size]) for _ in range(runs)) / runs
                least[trial.size] = min(least[trial.size], self._slowest(own))
                trials[trial.size] = replace(trial, seconds=least[trial.size])
            if turn >= _LEAST:
                best = max(trials[trial.size].rate for trial in near)
                near = [trial for trial in near if trials[trial.size].rate >= _CLOSER * best]

    def _slowest(self, seconds: float) -> float:
        """Of all ranks."""
        return self._world.all_reduce_max_host([round(seconds * 1e9)])[0] / 1e9

    def _is_over(self, began: float, seconds: float, more: float) -> bool:
        """Whether ``more`` seconds do not fit; the same on every rank."""
        return bool(self._world.all_reduce_max_host([perf_counter() - began + more > seconds])[0])

    # --- the choice

    def _choice(self, trials: dict[int, Trial], limit: int | None, left_out: int | None, seconds: float) -> Rehearsal:
        best = max(trials.values(), key=lambda trial: trial.rate)
        chosen = next(trial for trial in trials.values() if trial.rate >= _NEAR * best.rate)
        said = ["the best rate" if chosen is best else f"{1 - chosen.rate / best.rate:.1%} from the best rate"]
        if limit is not None and chosen.memory is not None:
            share = chosen.memory / max(1, limit)
            said.append("less than 1% of memory" if share < 0.01 else f"{share:.0%} of memory")  # noqa: PLR2004
        parts = [", ".join(said)]
        if left_out is not None:
            parts.append(f"{left_out} would not fit")
        shape = self._shapes[chosen.size]
        return Rehearsal(
            micro_size=chosen.size,
            tokens=shape.rows * shape.elements,
            reason=f"micro {chosen.size}: {'; '.join(parts)}",
            trials=list(trials.values()),
            memory=limit,
            left_out=left_out,
            seconds=seconds,
        )


def _predicted(trials: Sequence[Trial], size: int) -> float:
    """The memory of a size, by a line through the last two; 0 where these are not known."""
    if len(trials) < 2:  # noqa: PLR2004  a line
        return 0.0
    (a, b) = trials[-2:]
    if a.memory is None or b.memory is None:
        return 0.0
    return b.memory + (b.memory - a.memory) / (b.size - a.size) * (size - b.size)


def _falls(trials: dict[int, Trial]) -> bool:
    """Whether the last two sizes are slower than the best before them: larger ones will not be faster."""
    rates = [trial.rate for trial in trials.values()]
    return len(rates) > 2 and max(rates[-2:]) < _CLOSE * max(rates[:-2])  # noqa: PLR2004


class _ForeignGradients:
    """The gradients of learned tensors outside of the model, which a rehearsal must not change."""

    def __init__(self, loss: Tensor) -> None:
        leaves = [leaf for leaf in leaves_of(loss) if not is_owned(leaf)] if loss.requires_grad else []
        self._kept = [(leaf, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]

    def restore(self) -> None:
        for leaf, gradient in self._kept:
            leaf.grad = gradient
