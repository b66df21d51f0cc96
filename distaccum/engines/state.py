"""The whole of an engine's state on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState, StateLayout
from distaccum.errors import MisuseError


def whole_state(engine: Engine, world: World) -> EngineState:
    """The state on every rank, whichever had it; a collective where the engine keeps a share on each.

    Raises:
        MisuseError: it goes to files only.
    """
    state = engine.state()
    if engine.state_layout is StateLayout.FULL:
        return state
    if engine.state_layout is StateLayout.EXTERNAL:
        raise MisuseError("this engine's state is only kept in files: save with the Trainer, which resumes from them")
    model, optimizer = (
        {name: tensor.detach().clone() for name, tensor in gathered(part, world).items()}
        for part in (state.model, state.optimizer)
    )  # clones: of what only some ranks hold, only they would see later updates
    return replace(state, model=model, optimizer=optimizer, optimizer_values=merged(state.optimizer_values, world))


def merged(values: Mapping[str, Any], world: World) -> dict[str, Any]:
    return {name: value for given in world.all_gather_object(dict(values)) for name, value in given.items()}


def gathered(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """What any rank has, on every rank; on the host, where it comes from another one. A collective."""
    given = world.all_gather_object(list(tensors))
    missed = {name for names in given for name in names if not all(name in others for others in given)}
    whole, sent = dict(tensors), set[str]()
    for rank, names in enumerate(given):
        due = [name for name in names if name in missed - sent]
        box: list[Any] = [{name: tensors[name].cpu() for name in due} if rank == world.rank else None]
        if due:
            dist.broadcast_object_list(box, src=rank, group=world.host_group)
            whole = box[0] | whole
        sent.update(due)
    return whole
