"""A model's tensors by name, and the whole of an engine's state on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.engines import frozen_base
from distaccum.engines.base import Engine, EngineState, StateLayout
from distaccum.engines.extra_state import from_bytes, is_extra, to_bytes
from distaccum.engines.shares import Shares
from distaccum.errors import shorten

_PICKLED = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the model as it was written; shards where it is sharded.

    The extra state of modules is among them, as bytes; a base that was set aside (:mod:`frozen_base`) is not.

    Raises:
        CheckpointError: a module's extra state cannot be saved.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: PLC0415  a second to import

    found: Any = frozen_base.kept(model, get_model_state_dict(model))
    return {name: to_bytes(name, value) if is_extra(name) else value for name, value in found.items()}


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restores :func:`model_state`.

    Raises:
        RuntimeError, KeyError, ValueError: as torch does, where the tensors belong to another model.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # noqa: PLC0415

    given: Any = {name: from_bytes(value) if is_extra(name) else value for name, value in tensors.items()}
    aside = frozen_base.names_of(model)
    found = set_model_state_dict(model, given, options=StateDictOptions(strict=not aside))
    missing = set(found.missing_keys) - aside
    if missing or found.unexpected_keys:
        raise KeyError(f"the state and the model differ in {shorten(sorted({*missing, *found.unexpected_keys}))}")


def whole_state(engine: Engine, world: World) -> EngineState:
    """A copy of the whole state, on every rank; a collective where each rank keeps a share of it.

    The copy is made tensor by tensor, where the tensors are: on the device, or on the host if that is where an engine
    gathers them. It is all the memory that this takes beside one tensor more.
    """
    state = engine.state()
    parts, values = [dict(state.model), dict(state.optimizer)], state.optimizer_values
    rest = replace(state, model={}, optimizer={})
    del state  # so that what was gathered is freed as it is copied
    if engine.state_layout is StateLayout.SHARDED:
        parts = [gathered(parts.pop(0), world) for _ in range(2)]
        values = merged(values, world)
    for part in parts:
        _copy_in_place(part)
    model, optimizer = parts
    return replace(rest, model=model, optimizer=optimizer, optimizer_values=dict(values))


def own_state(engine: Engine, shares: Shares) -> EngineState:
    """A copy of what every rank has, on this rank; the optimizers' state is in its ``shares``, and the loss scale's."""
    model = dict(engine.state().model)
    _copy_in_place(model)
    return EngineState(model=model, optimizer={}, optimizer_values={}, scaler=shares.scaler)


def _copy_in_place(tensors: dict[str, Tensor]) -> None:
    """Replaces each tensor by a copy; names of the same tensor share it."""
    copies: dict[tuple[object, ...], Tensor] = {}
    for name, tensor in tensors.items():
        same = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        if same not in copies:
            copies[same] = tensor.detach().clone()
        tensors[name] = copies[same]


def merged(values: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What any rank has, on every rank; a collective."""
    return {name: value for given in world.all_gather_object(dict(values)) for name, value in given.items()}


def gathered(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """What any rank has, on every rank; on the host, where it comes from another one. A collective."""
    given = world.all_gather_object(list(tensors))
    missed = {name for names in given for name in names if not all(name in others for others in given)}
    whole, sent = dict(tensors), set[str]()
    for rank, names in enumerate(given):
        due = [name for name in names if name in missed - sent]
        box: list[Any] = [{name: _Sent.of(tensors[name]) for name in due} if rank == world.rank else None]
        if due:
            dist.broadcast_object_list(box, src=rank, group=world.host_group)
            whole = {name: sent_one.tensor() for name, sent_one in box[0].items()} | whole
        sent.update(due)
    return whole


class _Sent(NamedTuple):
    """A tensor on its way to another rank, on the host: pickle knows only some types."""

    content: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Sent:
        whole = tensor.detach().cpu()
        pickled = whole.dtype in _PICKLED
        return cls(whole if pickled else whole.contiguous().unsqueeze(-1).view(torch.uint8), whole.dtype)

    def tensor(self) -> Tensor:
        """As it was."""
        return self.content if self.dtype in _PICKLED else self.content.view(self.dtype).squeeze(-1)
