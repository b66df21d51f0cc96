"""A run between two views of an elastic job: what a resume reads from a checkpoint, in memory, and the open window.

Ranks that were in a view carry it over themselves. Who is behind, and who is new, takes the state of the one that is
furthest, over the new group; its digest travels with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distaccum.accumulation.accumulator import Accumulator
from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.checkpoint.state import RunState
from distaccum.data.plan.units import Again, Deal, SecondDeal
from distaccum.data.window import Window
from distaccum.distributed.elastic.views import Report, View, shares_of, source_of
from distaccum.distributed.message import digest_of, from_message, to_message
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.engines.base import EngineState
from distaccum.engines.partial_sums import PartialWindow
from distaccum.engines.shares import Share, Shares
from distaccum.errors import DistaccumError, PeerError
from distaccum.train import ema
from distaccum.train.callbacks import Callback, named


class Beginnings:
    """The settings of the optimizers' groups as the run began with them, which an engine reckons from.

    Args:
        optimizers: not stepped yet.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._settings = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"} for group in self._groups()
        ]

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    def put_back(self) -> None:
        """Before an engine is made of them again."""
        for group, settings in zip(self._groups(), self._settings, strict=True):
            group.update(deepcopy(settings))


STAGES = 4
"""After a window's step: nothing is told yet; callbacks are; it is logged; all that was due is done.

A window that was skipped is logged before callbacks are told.
"""


_CALLS = 1024  # more than a run has callbacks
PER_WINDOW = STAGES * _CALLS
"""Positions from one window to the next: within a stage, of how many callbacks a hook was called."""

NOT_BEGUN = 0
"""The position of a member that was started with the run, and has not come to its first window."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What a window is still owed: its record, evaluation, checkpoint; ``stage`` of ``STAGES``."""

    window: Window
    outcome: Outcome
    lr: float
    stage: int = 0

    @classmethod
    def after(cls, window: Window, outcome: Outcome, lr: float, stage: int = 0) -> Tail:
        """What is owed to a window that has run with this rate; it is kept without its batches."""
        plain = Window(
            epoch=window.epoch, samples=window.samples, counts=window.counts, micro_batches=(), data_wait_s=0.0
        )
        return cls(window=plain, outcome=outcome, lr=lr, stage=stage)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The open window of a rank: which, its counts, how many units and blocks, and what the rank has of it."""

    epoch: int
    window: int
    counts: Mapping[str, float]
    units: int
    blocks: int
    kept: PartialWindow

    @classmethod
    def of(cls, progress: Progress, window: Window, deal: Deal, kept: PartialWindow) -> Begun:
        """The window that comes after ``progress``."""
        if kept.along is None:  # not run to its end here
            kept = PartialWindow()
        return cls(
            epoch=progress.epoch,
            window=progress.epoch_window,
            counts=window.counts,
            units=deal.units,
            blocks=deal.blocks,
            kept=kept,
        )

    @property
    def note(self) -> dict[str, Any]:
        """For a report."""
        return {
            "epoch": self.epoch,
            "window": self.window,
            "counts": dict(self.counts),
            "units": self.units,
            "blocks": self.blocks,
        }


@dataclass(frozen=True, kw_only=True)
class Carried:
    """The state of a run after a window, on one rank.

    ``record`` is the last one, which rank 0 may not have written before it was lost; ``stop`` is why the run is to end,
    and ``ends`` the error that it ends with. ``unlogged`` is the last update, where its record was not due. ``called``
    is the hook that callbacks were being called by, and of how many it was; ``telling`` the evaluation that they were
    told. ``shares`` is what this rank has of a state that is sharded, which is then not in ``engine``.
    """

    run: RunState
    engine: EngineState
    shares: Shares | None = None
    average: Mapping[str, Tensor] | None
    tail: Tail | None
    saved_step: int
    evaluation: tuple[int, dict[str, float]] | None
    verified: bool
    record: Mapping[str, Any] | None = None
    stop: str = ""
    ends: DistaccumError | None = None
    unlogged: Tail | None = None
    called: tuple[str, int] = ("", 0)
    telling: tuple[int, dict[str, float]] | None = None
    skips_in_a_row: int = 0
    random: RNGState | None = None
    begun: Begun | None = None

    @property
    def position(self) -> int:
        """How far the run has come here."""
        stage = STAGES - 1 if self.tail is None else self.tail.stage
        return self.run.progress.window * PER_WINDOW + stage * _CALLS + self.called[1]

    def report(self, member: str) -> Report:
        """What the other members are told."""
        begun, torn = self.begun, self.shares is not None and self.shares.torn
        note = {name: True for name, holds in ((_TORN, torn), (_AVERAGE, self.average is not None)) if holds}
        if begun is None:
            return Report(member=member, position=self.position, note=note)
        held = tuple(sorted(begun.kept.sums))
        return Report(member=member, position=self.position, held=held, note=begun.note | note)


_TORN, _AVERAGE = "torn", "average"
"""Noted by a member some of whose weights may be those of after a step that is not made; that it keeps an average."""


@dataclass
class Begin:
    """How a view begins: with what state, and which window is open.

    Nothing else holds the state, a copy of all weights, so that it goes with :meth:`release`.
    """

    carried: Carried | None = None
    again: Again | None = None
    kept: PartialWindow = field(default_factory=PartialWindow)

    def release(self) -> None:
        """The run has it, and carries it on by itself."""
        self.carried, self.kept = None, PartialWindow()

    def report(self, member: str) -> Report:
        """What the other members are told."""
        return Report(member=member, position=NOT_BEGUN) if self.carried is None else self.carried.report(member)


def hand_over(view: View, reports: Mapping[str, Report], member: str, carried: Carried | None, world: World) -> Begin:
    """The state that all members go on from; a collective of a view's new group.

    Raises:
        PeerError: what came is not what was sent.
    """
    source = view.members.index(source_of(view, reports))
    furthest = reports[view.members[source]].position
    if furthest <= NOT_BEGUN:
        return Begin()
    own = carried if world.rank == source else None
    shares = None if own is None or own.shares is None else Shares(now=Share())
    plain = None if own is None else replace(own, engine=_nothing, shares=shares, average=None, random=None, begun=None)
    averages = reports[view.members[source]].note.get(_AVERAGE, False)  # each callback has a part in it
    lacks = [
        name
        for name in view.members
        if _lacks(reports[name].position, furthest) or (averages and reports[name].position < furthest)
    ]
    content = _packed(own) if own is not None and lacks else torch.empty(0, dtype=torch.uint8)
    box: list[Any] = [(plain, len(content), digest_of(content))]
    _broadcast_object(box, source)
    told, size, digest = box[0]
    if told.shares is not None and any(reports[name].position == NOT_BEGUN for name in view.members):
        return Begin()  # somebody of the first view has no share yet, so that no window was stepped
    came: tuple[EngineState, Mapping[str, Tensor] | None] | None = None
    if lacks:
        if own is None:
            content = torch.empty(size, dtype=torch.uint8)
        torch.distributed.broadcast(content, src=source)
        if member in lacks:
            if digest_of(content) != digest:
                raise PeerError(f"the state that {view.members[source]} sent has come damaged", "while this one joined")
            came = _unpacked(content)
    shares = _shares(carried, view, reports, member) if told.shares is not None else None
    if came is not None:
        engine, average = came
        carried = replace(told, engine=engine, shares=shares, average=average)
    else:
        assert carried is not None
        carried = replace(
            told,
            engine=carried.engine,
            shares=shares,
            average=carried.average,
            random=carried.random,
            begun=carried.begun,
            stop=told.stop or carried.stop,
        )
    again = _again(view, reports)
    kept = PartialWindow()
    if again is not None and carried.begun is not None and again.deal.held_by(world.rank):
        kept = carried.begun.kept
    return Begin(carried, again, kept)


def _shares(carried: Carried | None, view: View, reports: Mapping[str, Report], member: str) -> Shares:
    """What this member has of the state that all go on from: that of after the step, if anybody has made it."""
    furthest = reports[source_of(view, reports)].position // PER_WINDOW
    there = [reports[name] for name in view.members if reports[name].position // PER_WINDOW == furthest]
    torn = any(report.note.get(_TORN, False) for report in there)
    if carried is None or carried.shares is None:
        return Shares(now=Share(), torn=torn)
    own = carried.shares.now if reports[member].position // PER_WINDOW == furthest else carried.shares.ahead
    return Shares(now=own or Share(), torn=torn)


def _lacks(position: int, furthest: int) -> bool:
    """Whether a member there has not the weights of the furthest one."""
    return position <= NOT_BEGUN or position // PER_WINDOW < furthest // PER_WINDOW


def _again(view: View, reports: Mapping[str, Report]) -> Again | None:
    """The window that goes on, if a member that is not behind holds a part of it."""
    source = reports[source_of(view, reports)]
    notes = [r.note for r in reports.values() if r.position == source.position and r.held and r.member in view.members]
    if not notes:
        return None
    note = notes[0]
    shares = shares_of(view, reports, note["blocks"])
    held, computed = tuple(share.held for share in shares), tuple(share.blocks for share in shares)
    deal = SecondDeal(note["units"], note["blocks"], len(view.members), held, computed)
    return Again(epoch=note["epoch"], window=note["window"], deal=deal, counts=note["counts"])


_nothing = EngineState(model={}, optimizer={}, optimizer_values={})


def _packed(carried: Carried) -> Tensor:
    state, average = carried.engine, carried.average
    words = {
        "model": list(state.model),
        "optimizer": list(state.optimizer),
        "average": None if average is None else list(average),
        "values": dict(state.optimizer_values),
        "scaler": dict(state.scaler),
    }
    tensors = [*state.model.values(), *state.optimizer.values(), *(average or {}).values()]
    return to_message(json.dumps(words).encode(), tensors)


def _unpacked(content: Tensor) -> tuple[EngineState, Mapping[str, Tensor] | None]:
    """The engine's state and the average, if there is one."""
    words, tensors = from_message(content)
    told, left = json.loads(words), iter(tensors)
    model, optimizer, average = (
        dict(zip(told[kind] or (), left, strict=False)) for kind in ("model", "optimizer", "average")
    )
    state = EngineState(model=model, optimizer=optimizer, optimizer_values=told["values"], scaler=told["scaler"])
    return state, None if told["average"] is None else average


def _broadcast_object(box: list[Any], source: int) -> None:
    torch.distributed.broadcast_object_list(box, src=source, device=torch.device("cpu"))


class RestoreCarried:
    """Restores a run from what was carried; as :class:`~distaccum.train.resume.Restore` does from a checkpoint."""

    def __init__(self, carried: Carried, callbacks: Sequence[Callback]) -> None:
        self._carried: Carried | None = carried
        self._run, self._callbacks = carried.run, callbacks

    def before_wrap(self) -> None:
        """The weights are in the model, or come with the engine's state."""

    def after_wrap(self, accumulator: Accumulator, *, wandb_id: str) -> tuple[str, str]:
        """Restores all that a run has in memory, and lets go of it.

        Returns:
            The id of the W&B run, and no note.
        """
        carried, self._carried = self._carried, None
        assert carried is not None
        if carried.shares is None:
            accumulator.engine.load_state(carried.engine)
        else:
            accumulator.engine.load_dealt(carried.engine, carried.shares.now, torn=carried.shares.torn)
        run = carried.run
        accumulator.restore(run.progress, run.position, None, run.spikes)
        accumulator.tracker.skips_in_a_row = carried.skips_in_a_row
        for name, callback in named(self._callbacks).items():
            if name in run.callbacks:
                callback.load_state_dict(run.callbacks[name])
        ema.begin(self._callbacks, accumulator.engine, None)
        average = ema.of(self._callbacks)
        if average is not None and carried.average is not None:
            average.load(carried.average)
        if carried.random is not None:
            carried.random.restore()
        return run.wandb_id, ""

    @property
    def memory(self) -> Mapping[str, Any]:
        """What the run knows of memory."""
        return self._run.memory

    @property
    def logged(self) -> Mapping[str, int]:
        """Window and step of the last record."""
        return self._run.logged
