"""Level 2: exact accumulation in a user's own loop, which never calls ``optimizer.step``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from functools import cached_property, partial
from inspect import Parameter, Signature, signature
from math import inf, nan
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.accumulation.batch_norm import expect_repeats, warn_of_batch_statistics
from distaccum.accumulation.foreign_parameters import ForeignParameters
from distaccum.accumulation.loader_factory import GlobalBatch, LoaderFactory
from distaccum.accumulation.lockstep import Lockstep, SettingsAgreement
from distaccum.accumulation.open_window import NoWindow, OpenWindow, Phase, refuse
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.restart import Restarting, check_marks, fitting
from distaccum.accumulation.schedulers import EvaluationWeights, OwnedScheduler, check_schedulers
from distaccum.accumulation.settings import AccumulatorKeywords, AccumulatorSettings
from distaccum.accumulation.spikes import Spikes
from distaccum.accumulation.step import LossSums, Outcome
from distaccum.accumulation.tracker import ProgressTracker
from distaccum.config.checks import require_choice
from distaccum.data.arriving import ArrivingWindows, NothingArrivedError
from distaccum.data.cursor import DataCursor
from distaccum.data.hooks import BeforeStep, Hooks, WindowHook
from distaccum.data.loader import WindowLoader
from distaccum.data.window import Window
from distaccum.distributed import activity
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState
from distaccum.engines.factory import create
from distaccum.engines.state import whole_state
from distaccum.errors import ConfigError, DataError, DistaccumError, MisuseError, NonFiniteError, SpikeError
from distaccum.losses.base import AnyLoss, Loss, from_mean, is_window_loss
from distaccum.losses.normalize import SINGLE, Count, Counts, LossSum, as_counts, nearest_power_of_two
from distaccum.verification.replicas import Replicas
from distaccum.verification.verifier import Verifier

if TYPE_CHECKING:
    from distaccum.accumulation.rehearsal import Rehearsal

_EVERYWHERE = "call it on every rank: it is a collective on this engine, also in an evaluation"
_OF_ENGINE = ("model", "optimizer", "optimizer_values", "scaler")  # in a state dict


class Accumulator:
    """Computes exactly the gradient of the stated global batch, and steps once per window::

        acc = Accumulator(model, optimizer, global_batch_size=64, micro_batch_size=8, count=count_labels)
        for epoch in range(3):
            for window in acc.windows(loader):
                for micro in window:
                    with acc.accumulate():
                        acc.backward(loss_sum(acc.model, micro.batch))
                print(acc.last.grad_norm)

    The last micro-batch of a window ends with the optimizer step, the schedule's step and the zeroing. A window that
    counts nothing makes no step.

    Args:
        model: is moved to this rank's device and wrapped: call :attr:`model` from then on.
        optimizer: over the model's parameters, or several, over disjoint sets of them; only the accumulator steps them.
        global_batch_size: samples per optimizer step over all ranks.
        micro_batch_size: the most samples one forward/backward on one rank takes; ``auto``: found in a rehearsal with
            the first data that :meth:`windows` is given, by rate and memory.
        tokens: tokens per optimizer step in place of ``global_batch_size``, for a ``DataSpec`` with ``lengths``.
        count: the count of a batch, read on the host: labels that are not ignored, samples, or numbers by loss. Without
            it every :meth:`backward` is given the count, which costs one more small all-reduce per window.
        loss: what a rehearsal runs: ``loss(model, batch)`` gives the sum of a batch's losses, ``loss.count(batch)`` the
            count, which is the windows' too where ``count`` is left out. Of a ``WindowLoss``, its ``represent``.
        scheduler: torch's, or several; stepped after every applied update, before the next window steps. A
            ``ReduceLROnPlateau`` is stepped by :meth:`scheduler_step`.
        schedule: instead, a function from the number of applied updates to a factor of the learning rate.
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: instead, largest absolute value of its elements.
        nonfinite: what a NaN or infinite gradient does: ``stop`` or ``skip``. In fp16 the loss scale falls first.
        max_skips: windows skipped in a row, at the lowest loss scale, that stop the run in any case.
        on_spike: what a window does whose gradient norm stands out: nothing (``off``), ``warn``, or ``skip`` its step.
        spike_zscore: by how many standard deviations above their mean.
        spike_window: of how many windows before; half as many are enough to begin.
        engine: owner of the wrapped parameters, by name or with settings.
        precision: the precision policy, by name or with settings.
        compile: what ``torch.compile`` is given until :meth:`close`: nothing (``none``), each of the model's
            ``blocks``, or the ``model``; or settings.
        seed: for the order of samples, and for the random numbers that the model draws in micro-steps, as for dropout.
        prefetch: micro-batches on the device at once, the one being computed included; at least 2.
        prefetch_windows: windows that the loading processes of a ``DataLoader`` have ahead; 0: as torch has it.
        verify: which windows prove their gradient before their step: the ``first`` of this process, that and one
            every so many, or ``never``; see docs/verification.md.
        verify_allow: relations that the program breaks on purpose: some of ``counts``, ``parts``, ``samples``,
            ``weights``, ``state``, ``hooks``, ``size``.
        on_divergence: what ranks whose weights differ do: ``stop`` the run or ``warn``.
        numerics: ``fast``, or ``reproducible``: the same numbers bit for bit on any number of ranks, with deterministic
            kernels and as many threads; see docs/reproducible.md.
        virtual_ranks: the blocks in which a reproducible window is summed; the most ranks.
        world: this rank; by default the open process group, or a new one of the ranks that the launcher started.

    Raises:
        ConfigError: sizes or names that cannot work.
        MisuseError: another accumulator that is not closed has the model, the optimizer or the scheduler.
    """

    _stepped: tuple[Window, Outcome, Loss | None] | None = None  # not noted yet

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        world: World | None = None,
        **settings: Unpack[AccumulatorKeywords],
    ) -> None:
        for key in settings.keys() - AccumulatorKeywords.__annotations__.keys():
            raise TypeError(f"Accumulator.__init__() got an unexpected keyword argument {key!r}")
        own, world = AccumulatorSettings(**settings), world or World.join()
        if world.is_main and own.splits_batches(world.size):
            warn_of_batch_statistics(model)
        context = own.prepare(model, world)
        context.numerics.check_loop(world, own.count, rehearses=own.rehearses)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        check_schedulers(own.schedulers, optimizers)
        weights = EvaluationWeights(optimizers)
        self._start(own, create(context, model, optimizers, world), weights)

    __signature__ = Signature(
        [
            Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation="nn.Module"),
            Parameter("optimizer", Parameter.POSITIONAL_OR_KEYWORD, annotation="Optimizer | Sequence[Optimizer]"),
            *signature(AccumulatorSettings).parameters.values(),
            Parameter("world", Parameter.KEYWORD_ONLY, default=None, annotation="World | None"),
        ]
    )

    @classmethod
    def of_engine(cls, engine: Engine, optimizers: Sequence[Optimizer], settings: AccumulatorSettings) -> Accumulator:
        """Over an engine that was made already, whose own settings then say nothing; a collective.

        Args:
            engine: before its first window.
            optimizers: that it was made for.
            settings: of the windows; ``clip_norm`` and ``clip_value`` are the engine's.
        """
        if engine.world.is_main and settings.splits_batches(engine.world.size):
            warn_of_batch_statistics(engine.unwrapped_model)
        engine.facts.numerics.check_loop(engine.world, settings.count, rehearses=settings.rehearses)
        made = cls.__new__(cls)
        made._start(settings, engine, EvaluationWeights(optimizers))
        return made

    def _start(self, own: AccumulatorSettings, engine: Engine, weights: EvaluationWeights) -> None:
        self.world, self.engine, self._evaluation_weights = engine.world, engine, weights
        self._open: OpenWindow | NoWindow = NoWindow()
        try:
            weights.attach(engine, lambda: self._open.is_open)
        except ConfigError:
            engine.close()
            raise
        self._prefetch, self._restarting, self._counts_beforehand = (
            own.prefetch,
            Restarting(engine),
            own.counts_beforehand,
        )
        self._schedulers = [OwnedScheduler(one) for one in own.schedulers]
        self._counter = engine.facts.numerics.counter(self.world, own.count)
        self._loader_factory = LoaderFactory(
            engine,
            own.sizes,
            own.rehearsed,
            seed=own.seed,
            prefetch_windows=own.prefetch_windows,
            arrange=engine.facts.numerics.plan,
        )
        self._global_batch = GlobalBatch(own.sizes)
        self._arriving = ArrivingWindows(self.world, seed=own.seed, planned=engine.facts.numerics.fixed_order)
        self._arrival: Generator[OpenWindow, None, None] | None = None
        self._cursor = DataCursor(self._loader_factory, self._global_batch.give_on)
        self.tracker = ProgressTracker(
            engine,
            schedule=own.schedule,
            schedulers=self._schedulers,
            skips=own.nonfinite == "skip",
            max_skips=own.max_skips,
            meet=self._counter.sum_together,
            spikes=own.spikes(),
        )
        if engine.facts.forward_communicates:
            engine.meet = partial(self._counter.sum_together, "a forward of acc.model", remedy=_EVERYWHERE)
        self._attach_hooks(own)
        self._items_per_sample = 1.0  # of the last window, to the nearest power of two; for counts known late
        # The last one: the latest loop over windows().
        self._abandoned, self._closed, self._loop = False, False, object()
        self._repeats = not engine.facts.numerics.fixed_order  # else a loss's bits are to be the same a second time

    def _attach_hooks(self, own: AccumulatorSettings) -> None:
        """Before a step the tracker comes first: what it raises is of the window before, and no other rank waits."""
        from distaccum.program import STRAGGLERS, load  # noqa: PLC0415  what is loaded by its name

        engine, world = self.engine, self.world
        self._verifier = Verifier(
            engine,
            own.verify,
            clip_norm=own.clip_norm,
            clip_value=own.clip_value,
            count=own.count,
            steps=lambda: self.tracker.progress.step,
            allow=own.verify_allow,
        )
        self.replicas = Replicas(engine, stops=own.on_divergence == "stop")
        self._lockstep = Lockstep(world, self._counter, self.replicas)
        self.stragglers = load(STRAGGLERS)(world, forward_communicates=engine.facts.forward_communicates)
        settings = SettingsAgreement(engine, self.tracker.next_factors)
        among_ranks = [self._lockstep, settings, self.stragglers, self.replicas]
        engine.hooks = self._counter.hooks = Hooks(
            *([self._evaluation_weights] if self._evaluation_weights.needed else []),
            BeforeStep(self._begin_step),
            *(among_ranks if world.size > 1 else []),
            self._verifier,
        )
        # On one rank, with nothing left to divide by, a foreign gradient is right without the engine, too.
        if not (world.size == 1 and own.counts_beforehand and engine.loss_scale is None):
            engine.hooks.add(ForeignParameters(engine))

    @property
    def model(self) -> nn.Module:
        """The wrapped model, for the forward."""
        return self.engine.model

    @property
    def progress(self) -> Progress:
        """The progress with the last window, whose step this waits for."""
        return self.tracker.progress

    @property
    def last(self) -> Outcome | None:
        """The outcome of the last window; None before the first."""
        return self.tracker.last

    @property
    def spikes(self) -> Spikes | None:
        """What judges the gradient norms; None with ``on_spike="off"``."""
        return self.tracker.spikes

    @property
    def verified(self) -> str:
        """What the last window that proved its gradient says of it; empty where none did."""
        return self._verifier.summary

    @property
    def rehearsal(self) -> Rehearsal | None:
        """The micro-batch that was found with ``micro_batch_size="auto"``, and why; None before, or without it."""
        return self._loader_factory.rehearsal

    @property
    def stopping(self) -> bool:
        """Whether some rank has asked to :meth:`stop`; the same on every rank."""
        return self._counter.stopping

    @property
    def global_batch_size(self) -> int | None:
        """Samples of the next window over all ranks; None where ``tokens`` says its size."""
        return self._global_batch.size

    def set_global_batch_size(self, global_batch_size: int) -> None:
        """Changes the global batch from the next window on; between two windows, a collective.

        The epoch goes on with the sample that comes next: none is taken twice, and none is left out. The size is in
        :meth:`state_dict`. The learning rate stays as it is.

        Raises:
            ConfigError: a size that cannot work, or that differs between the ranks.
            MisuseError: in the middle of a window, or the windows are cut by ``tokens`` or by a ``WindowLoader`` of
                your own.
        """
        self._expect_no_window("set_global_batch_size()")
        size = self._global_batch.agree(global_batch_size, self.world)
        self._global_batch.set(size, self.progress, self._cursor.loader)

    def scheduler_step(self, metric: float | Tensor) -> None:
        """Steps the ``ReduceLROnPlateau`` among the schedulers with ``metric``; between two windows, a collective.

        Args:
            metric: the same on every rank, as an evaluation's result over all of them or :meth:`mean_loss` is.

        Raises:
            MisuseError: in the middle of a window, there is no such scheduler, or ranks give different metrics.
        """
        self._expect_no_window("scheduler_step()")
        taking = [scheduler for scheduler in self._schedulers if scheduler.takes_metric]
        if not taking:
            refuse("scheduler_step()", "without a ReduceLROnPlateau", "give scheduler= one; others step by themselves")
        value = float(metric)
        values = self.world.all_gather_object(value)
        if len({repr(each) for each in values}) > 1:
            each = ", ".join(map(str, values))
            refuse(f"scheduler_step({value})", f"where the ranks give {each}", "reduce the metric over the ranks first")
        self.tracker.resolve_last_step()
        for scheduler in taking:
            scheduler.step_with(value)

    def use_evaluation_weights(self) -> None:
        """Puts the weights to evaluate and to save in place, until the next window.

        They differ from those that train where the optimizer has ``train()`` and ``eval()``, as a schedule-free one:
        the next window calls the first, this the second. :meth:`state_dict` and a forward of the model in evaluation
        mode or without gradients do it by themselves. With any other optimizer this does nothing.
        """
        self._expect_no_window("use_evaluation_weights()")
        self._evaluation_weights.eval()

    def stop(self) -> None:
        """Asks all ranks to stop before the next window; of a stream, after it, as its items are taken already."""
        self._counter.request_stop()

    def windows(self, data: Any) -> Generator[OpenWindow, None, None]:
        """The windows of one epoch, or the rest of it after :meth:`load_state_dict` or a ``break``.

        Windows that count nothing are skipped, not yielded, and counted in ``progress.skipped``. So is a window that
        was abandoned, if the same loop goes on; if it is left, the next one begins with that window again. Other data
        than in the last loop begin an epoch of their own, and what a ``break`` has left of the one before is dropped.

        Args:
            data: a ``DataLoader``, a dataset (a list is one) or a ``DataSpec``, planned over the ranks; any other
                iterable as this rank's own stream of micro-batches, of any length; or a ``WindowLoader``.

        Raises:
            MisuseError: a window was left before its last micro-batch was run, or another loop has begun meanwhile.
            DataError: no window of the epoch counts anything.
            NonFiniteError: too many gradients were NaN or infinite; raised on every rank, the weights are untouched.
            SpikeError: too many windows in a row were skipped for their gradient norms; on every rank.
        """
        self._expect_no_window("windows()")
        if self.stopping:
            return
        if self._cursor.turns_to(data):
            self._counter.sum_together("the first window of its data")
        if self.progress.epoch_window and self._cursor.leaves_epoch(data):
            self.tracker.next_epoch()
        loader = self._cursor.as_loader(data)
        self._global_batch.give(loader)
        start, counted, self._abandoned = self.progress.epoch_window, False, False
        loop = self._loop = object()
        try:
            for planned in self._planned(loader):
                window = fitting(planned, self.engine, planned.counted or self._counter.micro_batch)
                if self._counts_beforehand and not any(window.counts.values()):
                    self.tracker.skip_window(window.samples)
                    continue
                counted = True
                for begin in self.engine.hooks.window_begins:
                    begin(window)
                self._open = OpenWindow(
                    window,
                    self.engine,
                    prefetch=self._prefetch,
                    finish=self._finish,
                    failed=self._fail,
                    provisional_count=window.samples * self._items_per_sample,
                    ranks=self.world.size,
                    proof=self._verifier.proof,
                )
                yield self._open
                self._expect_no_window("the next window", tells=True)
                if self._loop is not loop:
                    remedy = "run one loop after the other: they would take turns at one epoch"
                    refuse("the next window", "of a loop in which another acc.windows() began", remedy)
                if self._abandoned:
                    self._abandoned = False
                    self.tracker.skip_window(window.samples)
        finally:
            self.tracker.resolve_last_step()  # also after a break: schedulers include the last window
        self.tracker.raise_if_nonfinite()
        if self._counter.stopping:
            return
        self._lockstep.epoch_ended()
        if not counted and not start:
            raise DataError(f"epoch {self.progress.epoch}: none of its windows counts anything for the loss")
        self.tracker.next_epoch()

    def _planned(self, loader: WindowLoader) -> Iterator[Window]:
        """The rest of the epoch, planned anew where the global batch changes."""
        while True:
            change, own = self._global_batch.change, self.world.activity
            own.phase, own.loading_at = activity.Phase.LOADING, perf_counter()
            epoch, start = self.progress.epoch, self.progress.epoch_window
            self._lockstep.begin(epoch, start)
            for window in loader.windows(epoch, start, self._counter):
                self._lockstep.window_counted()
                yield window
                own.phase, own.loading_at = activity.Phase.LOADING, perf_counter()
                if change is not self._global_batch.change:
                    break
            if change is self._global_batch.change or self._counter.stopping:
                return

    def batches(self, data: Any) -> Iterator[Any]:
        """This rank's batches of one epoch, on the device, without their windows: see :meth:`windows`."""
        for window in self.windows(data):
            for micro in window:
                yield micro.batch

    def window(self, micro_batches: Iterable[Any], *, count: Count | None = None) -> OpenWindow | tuple[()]:
        """The window of what has arrived on the ranks, as after rollouts; a collective. There is no plan.

        The global batch is what came, so the accumulator needs no size. Several passes over the same micro-batches are
        several windows. Random numbers of micro-steps depend on the rank.

        Args:
            micro_batches: this rank's: any number, of any size, or none; each is counted before the first forward.
            count: what each counts in this window, in place of the accumulator's ``count``; the same on all ranks.

        Returns:
            An iterable of this rank's micro-batches, as :meth:`windows` yields them; ``()`` where no rank's counts
            anything: there is no step then.

        Raises:
            ConfigError: with ``numerics=reproducible``, whose order of sums is a plan's.
            MisuseError: in the middle of a window, after :meth:`stop`, with one batch in place of a list, or with a
                ``count`` where the accumulator has none.
            PeerError: another rank could not make its micro-batches.
        """
        self._expect_no_window("window()", tells=True)
        if self.stopping:
            refuse("window()", "after stop()", "end the loop once acc.stopping is true")
        if count is not None and not self._counts_beforehand:
            refuse("window(count=...)", "of an Accumulator without a count", "give Accumulator(count=...) too")
        self._arriving.take(micro_batches, count)
        if self._arrival:
            self._arrival.close()
        self._arrival = self.windows(self._arriving)
        try:
            return next(self._arrival)
        except NothingArrivedError:
            return ()

    def accumulate(self) -> AbstractContextManager[None]:
        """The context of one micro-batch's forward and backward; the last one of a window ends with the step."""
        return self._open.current("accumulate()")

    def backward(
        self, loss: LossSum, num_items: float | Tensor | Counts | None = None, *, reduction: str = "sum"
    ) -> None:
        """Accumulates the gradient of one micro-batch's loss.

        Args:
            loss: 0-dim; or one for each of several losses, by name.
            num_items: how many items it sums or averages over; optional where the accumulator was given ``count``.
            reduction: how ``loss`` combines its items: a ``sum``, or a ``mean`` over ``num_items``, as most functions
                and models return it. A mean over no item, which is NaN, adds nothing.

        Raises:
            ConfigError: another ``reduction``.
            MisuseError: called twice for a micro-batch or outside :meth:`accumulate`, without a count, or with another
                count than the one beforehand; or a mean of several losses.
        """
        window = self._open.current("backward()")
        if reduction != "sum":
            require_choice("reduction", reduction, ("sum", "mean"))
            if isinstance(loss, Mapping) or isinstance(num_items, Mapping):
                refuse("backward() of several means", "at once", "give their sums, by name")
            loss = from_mean(loss, window.count if num_items is None else num_items)
        window.backward(loss, num_items)

    def step(self, window: OpenWindow, loss: AnyLoss) -> Outcome:
        """Runs the whole window: every micro-batch's forward, loss and backward, and the step.

        With a ``WindowLoss``, which compares the samples of the window, every forward is run twice.

        Raises:
            MisuseError: it is not the current window, a micro-batch of it was taken, or there is no ``count``.
        """
        if window is not self._open or not self._counts_beforehand:
            refuse("step()", "with another window, or without count=", "give it the current one, and count=loss.count")
        window.expect(Phase.OPEN, "step()", "give it a window of which no micro-batch was taken")
        records = window.proof.records if window.proof else None
        second, by_micro_batch, run = None, None, loss
        if is_window_loss(loss):
            from distaccum.accumulation.two_pass import represented  # noqa: PLC0415  few losses compare samples

            compared = bool(records)
            run = second = represented(self.engine, window.plain, loss, prefetch=self._prefetch, compared=compared)
        else:
            run = by_micro_batch = loss
            if not self._repeats:
                self._repeats = True
                expect_repeats(self.engine, window.plain, loss)
            self._verifier.check_loss(window.plain, loss)
            if self.engine.memory_marks.failed and not self.engine.memory_marks.looked:
                check_marks(self.engine, window.plain, loss)
        with self._verifier.stepping() as report:
            outcome = self._restarting.run(window.plain, run, records, prefetch=self._prefetch)
            if second:
                outcome = second.outcome(outcome)
            self._stepped = window.plain, outcome, by_micro_batch
            report(outcome.grad_norm)
        self._stepped = None
        self.tracker.end_step(window.plain, outcome, by_micro_batch)
        self._end(window)
        return outcome

    def interrupted(self) -> tuple[Window, Outcome] | Window | None:
        """Where an error has ended :meth:`step`: the window and its outcome, if it had stepped, which is noted then.

        Else the window that is open, of which ``engine.kept`` tells what this rank has; None where none is.
        """
        if self._stepped:
            window, outcome, _ = stepped = self._stepped
            self.tracker.end_step(*stepped)
            self._stepped, self._open = None, NoWindow()
            return window, outcome
        return self._open.plain

    def run_windows_by(self, run: Callable[..., Outcome]) -> None:
        """Has :meth:`step` run a window by this function, in place of ``step.run_window``."""
        self._restarting = Restarting(self.engine, run)

    def trust(self) -> None:
        """Leaves out what is looked at once a process: another accumulator of this one has looked."""
        self._repeats = True

    def verify(self, window: OpenWindow, loss: Loss) -> None:
        """Has a window prove its gradient before its step, whatever ``verify`` says, by running it again with ``loss``.

        In a loop of your own the proof otherwise walks the graph of each loss a second time, and says nothing of the
        loss itself; on engines that shard the model it cannot.

        Args:
            window: the current one, of which no micro-batch was taken; every rank calls this.
            loss: gives for a micro-batch what the loop passes to :meth:`backward`; with ``count``.

        Raises:
            VerificationError: it is no sum over what it counts; on all ranks. The gradient is compared before the step.
        """
        if window is not self._open:
            refuse("verify()", "with another window", "give it the current one")
        window.expect(Phase.OPEN, "verify()", "give it a window of which no micro-batch was taken")
        if is_window_loss(loss):
            remedy = "call acc.step(window, loss), which runs the window: its first one proves its gradient"
            refuse("verify()", "with a loss that compares the samples of a window", remedy)
        window.proof = self._verifier.prove(window.plain, loss)

    def abandon(self) -> None:
        """Drops the current window and its gradients, as after an error.

        On ddp and zero1 one rank that calls it is enough: no rank steps on the window, and in fp16 the loss scale falls
        once. Elsewhere every rank must call it, at the same place; so must they on ddp after the window's last
        backward, and where the model's forward communicates.

        If the loop over :meth:`windows` goes on, the window is skipped; if it is left, on all ranks, the next one
        begins with it.
        """
        try:
            if self._open.is_open:
                self._give_up(self._open)
        finally:  # hooks of other windows' errors may raise in it
            self._drop()

    def close(self, *, alone: bool = False) -> None:
        """Gives model, optimizer and scheduler back, which are then as any others: final, and for every rank.

        The ranks' weights are compared a last time. Where a window is open, which is dropped, while an error is
        handled, or where this rank is ``alone``, they are not, and the call is local. The weights stay where the engine
        has put them: on the device, and sharded where it shards. Where the engine leaves each rank a share of the
        optimizer's state (fsdp2, DeepSpeed) make a new optimizer; zero1 gathers it, a collective in any case.

        Raises:
            VerificationError: the ranks' weights differ; on all ranks, and after everything was given back.
        """
        if self._closed:
            return
        alone = alone or self._open.is_open or self._abandoned or sys.exc_info()[0] is not None
        self.tracker.resolve_last_step()  # the schedulers include the last window
        try:
            if self._lockstep.ran and not alone:
                self._lockstep.check_replicas("close()")
        finally:
            with ExitStack() as rest:  # the last one first; all of it, whatever a hook raises
                for scheduler in self._schedulers:
                    rest.callback(scheduler.release)
                rest.callback(self.engine.close)
                for close in reversed(self.engine.hooks.close):
                    rest.callback(close)
                self._closed = True
                self._drop()
            self.engine.hooks = Hooks()

    def mean_loss(self) -> float:
        """The last window's loss, each part averaged over its global count; a collective that reads the device."""
        return self.tracker.mean_loss(self._counter)

    def state_dict(self) -> dict[str, Any]:
        """Everything that :meth:`load_state_dict` needs to continue: a copy, which later windows do not change.

        It needs as much memory as the weights and the optimizer's state, where these are: on the device, or on the host
        if that is where the engine gathers them. The states of random number generators are not in it. What the model
        draws in micro-steps does not need them: it depends on the seed and the micro-batch alone.

        A collective, in which the ranks' weights and optimizer state are compared.

        Raises:
            VerificationError: they differ; on all ranks.
            MisuseError: in the middle of a window, as accumulated gradients are not saved; or after :meth:`abandon` on
                a stream, whose items are taken.
            NonFiniteError: as :meth:`windows`.
        """
        own, state = self.state_of_loop("state_dict()"), whole_state(self.engine, self.world)
        return {name: dict(getattr(state, name)) for name in _OF_ENGINE} | own

    def state_of_loop(self, what: str) -> dict[str, Any]:
        """The part of :meth:`state_dict` that is not the engine's, for ``what``; with all that is checked before."""
        self._expect_no_window(what)
        cursor = self._cursor.state()
        if self._abandoned and cursor["data"] is not None:
            remedy = "run it first: the next acc.windows() begins with it"
            refuse(what, "after abandon(), when a stream has given away the window's items", remedy)
        self._lockstep.check_replicas(what)
        self.replicas.check_state()
        self.tracker.raise_if_nonfinite(together=self.world.size > 1)  # all ranks are here
        self._evaluation_weights.eval()
        return {
            "progress": asdict(self.progress),
            "per_sample": self._items_per_sample,
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "batch": self._global_batch.state(),
            "memory": self._loader_factory.state(),
            "spikes": self.spikes.state_dict() if self.spikes else {},
            "hooks": self.engine.hooks.state(),
            **cursor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` gave; :meth:`windows` then continues with the window that came next.

        A global batch that was set is restored with it, and so are the settings of the optimizer's groups that had
        changed since the start, learning rates among them; the others stay those of this program. The state is copied,
        and can be loaded again.
        """
        self._expect_no_window("load_state_dict()")
        self._evaluation_weights.eval()
        self.engine.load_state(EngineState(**{name: state[name] for name in _OF_ENGINE}))
        self.load_state_of_loop(state)

    def load_state_of_loop(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_of_loop` gave, once the engine has its state."""
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self._items_per_sample = state["per_sample"]
        self._global_batch.restore(state.get("batch"))
        self._loader_factory.restore(state.get("memory", {}))
        judged, hooks = state.get("spikes", {}), state.get("hooks", {})
        self.restore(Progress(**state["progress"]), state["position"], state["data"], judged, hooks)

    def save(self, folder: str | PathLike[str], *, keep: int = 2, state: Mapping[str, Any] | None = None) -> Path:
        """Saves a checkpoint ``folder/checkpoints/step-N`` with everything that :meth:`resume` needs; a collective.

        It is there whole or not at all, and has the random generators' states beside those of :meth:`state_dict`.

        Args:
            folder: on a file system that all ranks share.
            keep: the newest checkpoints to keep; 0: all.
            state: the loop's own, by name: objects with ``state_dict()``; or numbers, strings, tensors, lists, dicts.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: the folder cannot be written, or not seen by all ranks; or another run's checkpoints are there.
            CheckpointError: something in ``state`` cannot be saved.
            VerificationError, MisuseError, NonFiniteError: as :meth:`state_dict`.
        """
        return Path(self._checkpoints.save(Path(folder), keep=keep, own=state or {}))

    def resume(self, folder: str | PathLike[str], *, state: MutableMapping[str, Any] | None = None) -> int:
        """Continues from the newest whole checkpoint that :meth:`save` has left there; a collective.

        Any engine reads it, on any number of ranks. On as many as saved it, the loop goes on bit for bit.

        Args:
            folder: as :meth:`save` was given it; damaged checkpoints in it are passed over, with a warning.
            state: as :meth:`save` was given it: objects get their state back by ``load_state_dict()``, and other values
                are put into the mapping.

        Returns:
            The step to go on from; 0 where nothing was saved yet, and nothing is changed.

        Raises:
            CheckpointError: there are checkpoints and none is whole; or it is another model's or optimizer's.
            MisuseError: in the middle of a window.
        """
        self._expect_no_window("resume()")
        self._counter.sum_together("resume()")  # a rank alone would wait for the others
        self._evaluation_weights.eval()
        return int(self._checkpoints.resume(Path(folder), own={} if state is None else state))

    @cached_property
    def _checkpoints(self) -> Any:
        from distaccum.program import LOOP_CHECKPOINTS, load  # noqa: PLC0415  in loops that save

        return load(LOOP_CHECKPOINTS)(self)

    def restore(
        self,
        progress: Progress,
        position: Mapping[str, Any],
        data: Any,
        spikes: Mapping[str, Any],
        hooks: Mapping[str, Any],
    ) -> None:
        """Sets the progress, where the next :meth:`windows` begins, what spikes are judged by, and the hooks' state.

        A :meth:`stop` is forgotten.
        """
        self._cursor.restore(position, data)
        self._counter.clear_stop()
        if self.spikes:
            self.spikes.load_state_dict(spikes)
        self.go_on_from(progress)
        self.engine.hooks.load_state(hooks)

    def go_on_from(self, progress: Progress) -> None:
        """Sets the progress after other weights were loaded, in the middle of an epoch: its data go on."""
        self.tracker.restore(progress)
        for restart in self.engine.hooks.restarted:
            restart()

    @property
    def counted(self) -> tuple[str, ...]:
        """What batches count, by name; empty before the first window."""
        return self._counter.names

    def know_counted(self, names: Sequence[str]) -> None:
        """Goes on with what an earlier part of the run has :attr:`counted`, on all ranks alike."""
        self._counter.know(names)

    def add_hook(self, hook: WindowHook) -> None:
        """Has a hook look at every window from the next one on; between two windows, on all ranks.

        Raises:
            MisuseError: in the middle of a window, of which it would see a part; or it is no hook.
        """
        self._expect_no_window("add_hook()")
        if not isinstance(hook, WindowHook):
            kind = hook.__name__ if isinstance(hook, type) else type(hook).__name__
            refuse(f"add_hook({kind})", "of no WindowHook", "inherit from WindowHook, and give an object of the class")
        self.engine.hooks.add(hook)

    def _expect_no_window(self, what: str, *, tells: bool = False) -> None:
        """Raises MisuseError where a window is open; where it ``tells``, the other ranks learn of it."""
        if self._closed:
            refuse(what, "after close()", "make a new Accumulator")
        self._open.expect_none(what, tells=tells)

    def _drop(self) -> None:
        """Drops the current window, on this rank."""
        self.engine.zero_gradients()
        for drop in self.engine.hooks.window_dropped:
            drop()
        if self._open.is_open:
            self._open.drop()
            self._open, self._abandoned = NoWindow(), True

    def _give_up(self, window: OpenWindow) -> bool:
        """Takes part in the rest of a window, which no rank then steps on, for the sake of those that have run it.

        Returns:
            Whether a rank of this engine can do so alone; if not, nothing was done.
        """
        sends = self.engine.give_up(window.plain.assignment)
        if sends is None:
            return False
        if window.steps:  # an error in the step itself, or of a hook, which all ranks have raised
            return True
        if not sends and window.counts:  # they step, unless they call abandon() too
            for before in self.engine.hooks.before_step:
                before(1.0)
            return True
        self._finish(LossSums(self.engine.device), nan, given_up=True)
        if window.counts:  # else they were told with the count
            self.tracker.note_given_up()
        return True

    def _fail(self, error: MisuseError) -> None:
        """Tells the other ranks of an error that this one is about to raise, and that they may not have."""
        if not self._open.is_open:
            return
        alone = True
        with suppress(DistaccumError):
            alone = self._give_up(self._open)
        if alone:
            self._drop()
            self._counter.tell(error)

    def _begin_step(self, _: float) -> None:
        self._open.steps = True
        try:
            self.tracker.begin_step()
        except (NonFiniteError, SpikeError, MisuseError):  # of the window before: this one can be run again
            self._drop()
            raise

    def _finish(self, sums: LossSums, late_count: float | Tensor, *, given_up: bool = False) -> None:
        """Makes the step of a window that was run micro-batch by micro-batch; none where a rank has given it up."""
        begun = self._open.current("the step")
        window, counts, divisor = begun.plain, begun.counts, 1.0
        if not counts:  # reads the device once, if the loop counted there
            own = float(late_count)
            total, ranks_gone = self.world.all_reduce_host([own if 0 <= own < inf else nan, given_up])
            total = 0.0 if ranks_gone else total  # NaN refuses it on every rank
            counts, divisor = as_counts({SINGLE: total}), total / begun.provisional_count
            if total:
                self._items_per_sample = nearest_power_of_two(total / window.samples)
        if divisor:
            with self._verifier.stepping() as report:
                outcome = sums.outcome(counts, self.engine.step(divisor=divisor))
                report(outcome.grad_norm)
        else:
            self.engine.zero_gradients()
            outcome = sums.outcome(counts, None)
            self._verifier.window_dropped()
        if given_up:
            self._tell_ended(window)
        else:
            self.tracker.end_step(window, outcome)
            self._end(begun)

    def _end(self, window: OpenWindow) -> None:
        """Ends a window that is noted: what a hook raises is no error of it, and it is not run again."""
        self._open = NoWindow()
        window.mark_done()
        self._tell_ended(window.plain)

    def _tell_ended(self, window: Window) -> None:
        for after in self.engine.hooks.after_step:
            after(window)
