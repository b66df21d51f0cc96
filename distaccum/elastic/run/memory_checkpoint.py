"""Checkpoints in the ranks' memory: each rank keeps its share of a run's state, and a copy of a neighbour's.

For engines that keep a part of the state on each rank, which a rank that is lost takes with it. The others go back to
the newest checkpoint of which they still have every share between them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distaccum.config.checks import size_of
from distaccum.distributed.random import RNGState
from distaccum.distributed.world import World
from distaccum.elastic.engine.message import digest_of, from_message, to_message
from distaccum.elastic.group.mirrors import Mark, keepers_of, newest_whole, to_note
from distaccum.elastic.group.views import Report, View
from distaccum.elastic.run.carried import NOT_BEGUN, PER_WINDOW, Carried
from distaccum.engines.base import EngineState
from distaccum.errors import PeerError


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """What one rank has of a checkpoint: shares, as bytes, by the rank that made them."""

    mark: Mark
    shares: Mapping[int, Tensor]
    random: RNGState


class MemoryCheckpoints:
    """This rank's part of the checkpoints in memory, from view to view.

    Args:
        every: windows from one to the next.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.reached = 0
        """How many windows of the run have ended here, those included that are to be computed again."""
        self.tell: Callable[[str], None] | None = None
        """Told what a checkpoint costs, once in this process."""
        self._is_told = False
        self._kept = list[_Checkpoint]()  # ascending
        self._view, self._world = View(generation=-1, members=()), World(rank=0, size=1, device=torch.device("cpu"))
        self._saved_step = 0
        self._handed = list[dict[str, Tensor]]()

    def enter(self, view: View, world: World) -> None:
        """Checkpoints are those of this view from here on."""
        self._view, self._world = view, world

    def window_ended(self, window: int, saved_step: int) -> bool:
        """Whether one is due now; the same on every rank. All ranks have the newest one by now: so the others go.

        One is due after each checkpoint on disk, too: so nobody goes back behind it, and makes it once more.
        """
        del self._kept[:-1]
        self.reached = window
        return window - self._kept[-1].mark.window >= self.every or saved_step > self._saved_step

    def take(self, make: Callable[[], Carried]) -> None:
        """Keeps this rank's share, and the one of which it is the keeper; a collective between two windows.

        The one before is kept until a window has ended on all ranks, by which all of them have this one.

        Args:
            make: gives this rank's share of the engine's state and of the average, and the rest whole.
        """
        began, world = perf_counter(), self._world
        share = make()
        own, progress = _packed(share), share.run.progress
        sizes, keepers = _gathered(own.numel(), world), keepers_of(self._view.members)
        shares = {world.rank: own} | (self._exchanged(own, sizes, keepers) if world.size > 1 else {})
        assert share.random is not None
        mark = Mark(window=progress.window, generation=self._view.generation, step=progress.step, ranks=world.size)
        self._kept = [*self._kept[-1:], _Checkpoint(mark=mark, shares=shares, random=share.random)]
        self._saved_step = share.saved_step
        if self.tell is not None and progress.step and not self._is_told:  # before a step optimizers have no state
            self._is_told = True
            self.tell(self._cost(sizes, keepers, took_s=perf_counter() - began))

    def _exchanged(self, own: Tensor, sizes: Sequence[int], keepers: Sequence[int]) -> dict[int, Tensor]:
        """The share of which this rank is the keeper, by its rank; a collective."""
        rank, size = self._world.rank, self._world.size
        given = keepers.index(rank)
        came, to, of = torch.empty(sizes[given], dtype=torch.uint8), [0] * size, [0] * size
        to[keepers[rank]], of[given] = own.numel(), sizes[given]
        dist.all_to_all_single(came, own, of, to)
        return {given: came}

    def _cost(self, sizes: Sequence[int], keepers: Sequence[int], *, took_s: float) -> str:
        alone = len(sizes) == 1
        held = max(size + (0 if alone else sizes[keepers.index(rank)]) for rank, size in enumerate(sizes))
        sent = "nothing" if alone else f"up to {size_of(max(sizes))}"
        cost = f"a rank holds up to {size_of(held)} for it, twice that while one is made, and sends {sent} to another"
        each = f"a checkpoint every {self.every} windows (elastic.memory_every)"
        return f"memory     {each}: {cost}; it took {1000 * took_s:.0f} ms"

    def report(self, member: str) -> Report:
        """What the other members are told."""
        held = {one.mark: tuple(one.shares) for one in self._kept}
        position = max((mark.window for mark in held), default=0) * PER_WINDOW + PER_WINDOW - 1 if held else NOT_BEGUN
        return Report(member=member, position=position, note={"memory": to_note(held), "reached": self.reached})

    def hand_over(self, view: View, reports: Mapping[str, Report]) -> Carried:
        """The state of the newest whole one on every rank, whose whole it takes in memory; a collective of a new view.

        Raises:
            PeerError: what came is not what was sent.
        """
        found = newest_whole(view, reports)
        assert found is not None
        mark, holders = found
        own = next((one for one in self._kept if one.mark == mark), None)
        carried: list[Carried] = []
        for share, holder in enumerate(holders):
            here = None if own is None else own.shares.get(share)
            carried.append(_unpacked(self._received(here, holder)))
        first, values = carried[0], dict[str, Any]()
        model, optimizer, average = self._handed = [{}, {}, {}]
        for one in carried:
            model |= one.engine.model
            optimizer |= one.engine.optimizer
            values |= one.engine.optimizer_values
            average |= one.average or {}
        engine = EngineState(model=model, optimizer=optimizer, optimizer_values=values, scaler=first.engine.scaler)
        return replace(
            first,
            engine=engine,
            average=None if first.average is None else average,
            random=None if own is None else own.random,
            stop=next((one.stop for one in carried if one.stop), ""),
        )

    def forget_handed(self) -> None:
        """Frees what :meth:`hand_over` has given: an engine has taken its part of it."""
        for tensors in self._handed:
            tensors.clear()

    def _received(self, here: Tensor | None, holder: int) -> Tensor:
        """A share, from the rank that holds it."""
        sends = self._world.rank == holder
        digest = digest_of(here) if sends and here is not None else ""
        box: list[Any] = [(0 if here is None else here.numel(), digest)]
        dist.broadcast_object_list(box, src=holder, device=torch.device("cpu"))
        size, told = box[0]
        content = here if sends and here is not None else torch.empty(size, dtype=torch.uint8)
        if self._world.size > 1:
            dist.broadcast(content, src=holder)
        if not sends and digest_of(content) != told:
            raise PeerError(f"the state that rank {holder} has sent has come damaged", "while the run went back")
        return content.clone() if sends else content  # what is kept stays as it is, whatever an engine does with it


def _gathered(number: int, world: World) -> list[int]:
    return [number] if world.size == 1 else world.all_gather_object(number)


def _packed(share: Carried) -> Tensor:
    """A copy of all of it in one piece."""
    kinds = {"model": share.engine.model, "optimizer": share.engine.optimizer, "average": share.average or {}}
    rest = replace(
        share,
        engine=replace(share.engine, model={}, optimizer={}),
        average=None if share.average is None else {},
        random=None,
    )
    names = [(kind, name) for kind, tensors in kinds.items() for name in tensors]
    return to_message(pickle.dumps((rest, names)), [kinds[kind][name] for kind, name in names])


def _unpacked(content: Tensor) -> Carried:
    """What :func:`_packed` was given; its tensors lie in ``content``."""
    words, tensors = from_message(content)
    rest, names = pickle.loads(words)  # noqa: S301  of this run's own ranks
    found: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "average": {}}
    for (kind, name), tensor in zip(names, tensors, strict=True):
        found[kind][name] = tensor
    carried: Carried = rest
    return replace(
        carried,
        engine=replace(carried.engine, model=found["model"], optimizer=found["optimizer"]),
        average=None if carried.average is None else found["average"],
    )
