"""What a rank has of a sharded state, by parameter: packed, united with another's, and dealt among other ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.elastic.engine.message import digest_of, from_message, to_message
from distaccum.engines.optimizer_state import by_owner
from distaccum.errors import DistaccumError, PeerError, shorten


class LostStateError(DistaccumError):  # what happened, not what is wrong
    """No rank that is left has the optimizer's state of a parameter."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Some parameters' part of a state.

    Args:
        parameters: their names, also of those that have no state yet.
        model: weights by name; of none, where every rank has them.
        optimizer: the optimizers' tensors, as in ``EngineState``.
        values: their plain values, and those that belong to no parameter.
    """

    parameters: frozenset[str] = frozenset()
    model: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def __or__(self, other: Share) -> Share:
        return Share(
            parameters=self.parameters | other.parameters,
            model={**other.model, **self.model},
            optimizer={**other.optimizer, **self.optimizer},
            values={**other.values, **self.values},
        )

    def of(self, parameters: Collection[str], *, weights: Collection[str] = ()) -> Share:
        """The part of these ``parameters``, and the ``weights`` that it has; what belongs to none stays with it."""
        kept, _ = by_owner(self.optimizer, self.values)
        left_out = {full for name, entries in kept.items() if name not in parameters for full in entries.values()}
        return Share(
            parameters=self.parameters.intersection(parameters),
            # Of a checkpoint's files only what is asked for is read.
            model={name: self.model[name] for name in weights if name in self.model},
            optimizer={name: self.optimizer[name] for name in self.optimizer if name not in left_out},
            values={name: value for name, value in self.values.items() if name not in left_out},
        )

    def packed(self) -> Tensor:
        """A copy in one piece."""
        words = {
            "parameters": sorted(self.parameters),
            "values": dict(self.values),
            "model": list(self.model),
            "optimizer": list(self.optimizer),
        }
        return to_message(json.dumps(words).encode(), [*self.model.values(), *self.optimizer.values()])

    @classmethod
    def unpacked(cls, content: Tensor) -> Share:
        """What was :meth:`packed`; its tensors lie in ``content``."""
        heading, tensors = from_message(content)
        words = json.loads(heading)
        weights = len(words["model"])
        return cls(
            parameters=frozenset(words["parameters"]),
            model=dict(zip(words["model"], tensors[:weights], strict=True)),
            optimizer=dict(zip(words["optimizer"], tensors[weights:], strict=True)),
            values=words["values"],
        )

    def copy(self) -> Share:
        """In memory of its own."""
        return Share.unpacked(self.packed())


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What a rank has of the state when ranks are lost.

    Args:
        now: of the last step that was made, with the weights of its parameters.
        ahead: of the next one, if this rank has its own part and its predecessor's.
        torn: whether some weights may be the next step's.
        scaler: the loss scale's state, of ``now``.
    """

    now: Share
    ahead: Share | None = None
    torn: bool = False
    scaler: Mapping[str, Any] = field(default_factory=dict)

    def with_those_of(self, before: Shares) -> Shares:
        """With what this rank had of the same moment before it was dealt anew: others may not have got theirs."""
        return replace(self, now=self.now | before.now)


def dealt(share: Share, wanted: Sequence[Collection[str]], world: World, *, weights: bool) -> Share:
    """What this rank is to have of the state, from whoever has it; a collective.

    The shares are of one moment, so that those who have the same have the same bits; the first rank sends it. Each
    rank's part comes with its digest.

    Args:
        share: what this rank has.
        wanted: by rank, of which parameters it is to have the state.
        world: this rank.
        weights: whether every rank gets the weights that are in the shares, too.

    Returns:
        A copy.

    Raises:
        LostStateError: nobody has what a rank is to have; on every rank.
        PeerError: what came is not what was sent.
    """
    held = [frozenset(names) for names in world.all_gather_object(sorted(share.parameters))]
    sender = {name: rank for rank in reversed(range(world.size)) for name in held[rank]}
    lost = sorted({name for names in wanted for name in names} - sender.keys())
    if lost:
        problem = f"the optimizer's state of {shorten(lost)} is gone: who has stepped it and who had a copy of it"
        raise LostStateError(f"{problem} have ended together")
    mine = [name for name, rank in sender.items() if rank == world.rank]
    due = {name for name in mine for rank, names in enumerate(wanted) if name in names and name not in held[rank]}
    given = share.of(due, weights=mine if weights else ())
    content = given.packed() if due or given.model or given.values else torch.empty(0, dtype=torch.uint8)
    sent = world.all_gather_object((len(content), digest_of(content)))
    found = share.of(wanted[world.rank], weights=mine if weights else ()).copy()
    for rank, (size, digest) in enumerate(sent):
        if not size:
            continue
        arriving = content if rank == world.rank else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(arriving, src=rank)
        if rank == world.rank:
            continue
        if digest_of(arriving) != digest:
            raise PeerError(f"the state that rank {rank} sent has come damaged", "while the state was dealt anew")
        other = Share.unpacked(arriving)
        found = found | other.of(wanted[world.rank], weights=list(other.model)).copy()
    return found
