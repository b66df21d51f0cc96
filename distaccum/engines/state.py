"""A model's tensors by name, and the whole of an engine's state on every rank."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState, StateLayout
from distaccum.engines.modules import clean
from distaccum.errors import CheckpointError, shorten

# Modules' extra state (``get_extra_state``) as tensors of bytes, so that it goes wherever tensors go.
#
# Its values may be anything that ``torch.load(weights_only=True)`` reads: plain values, tensors, containers of them.

_SUFFIX = "_extra_state"  # the end of its name in a state dict
_ZIP = b"PK"  # how a file of torch.save begins


def is_extra(name: str) -> bool:
    """Whether a state dict keeps extra state under this name."""
    return name.rpartition(".")[2] == _SUFFIX


def has_extra(module: nn.Module) -> bool:
    """Whether the module itself keeps extra state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def takes_extra(module: nn.Module) -> bool:
    """Whether the module itself keeps extra state, and takes it back."""
    return has_extra(module) and type(module).set_extra_state is not nn.Module.set_extra_state


def extra_state(model: nn.Module) -> dict[str, Any]:
    """The extra state of the model's modules, by its names in a state dict; not encoded."""
    modules = model.named_modules(remove_duplicate=False)
    extras = {clean(name): module.get_extra_state() for name, module in modules if has_extra(module)}
    return {f"{name}.{_SUFFIX}".lstrip("."): value for name, value in extras.items()}


def to_bytes(name: str, value: Any) -> Tensor:
    """The value as a 1-dim uint8 tensor on the host.

    Raises:
        CheckpointError: reading it back would execute code.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"{name} cannot be saved ({type(error).__name__}: {reason})"
        raise CheckpointError(f"{problem}: let it be tensors, numbers, texts, and lists and dicts of them") from error
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def from_bytes(value: Tensor) -> Any:
    """What :func:`to_bytes` was given; a tensor that others have saved as it is.

    Raises:
        CheckpointError: reading it would execute code, or it is damaged.
    """
    content = value.cpu()
    if content.dtype is not torch.uint8 or content.ndim != 1 or bytes(content[:2].tolist()) != _ZIP:
        return value
    try:
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), type(error).__name__)
        raise CheckpointError(f"it holds more than tensors and plain values ({reason}), and is not read") from error


def set_extra_state(model: nn.Module, name: str, value: Tensor) -> None:
    """Hands saved extra state to the module that ``name`` belongs to."""
    owner = name.rpartition(".")[0]
    for own_name, module in model.named_modules(remove_duplicate=False):
        if clean(own_name) == owner:
            module.set_extra_state(from_bytes(value))


# The frozen weights of a model with adapters, which no engine's state holds: they are where they came from.

_ATTRIBUTE = "_distaccum_frozen_base"
Value = TypeVar("Value")


@dataclass(frozen=True)
class FrozenBase:
    """The names of parameters, in the model as it was written."""

    names: frozenset[str]


def leave_frozen_out(model: nn.Module) -> None:
    """From here on what is frozen of the model, before an engine wraps it, is no part of an engine's state."""
    named = model.named_parameters(remove_duplicate=False)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    names = frozenset(clean(name) for name, parameter in named if id(parameter) not in trained)
    vars(model)[_ATTRIBUTE] = FrozenBase(names)


def names_set_aside(model: nn.Module) -> frozenset[str]:
    """What was set aside of it; empty for most models."""
    base = vars(model).get(_ATTRIBUTE)
    return base.names if isinstance(base, FrozenBase) else frozenset()


def without_base(model: nn.Module, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Without what was set aside."""
    aside = names_set_aside(model)
    return {name: value for name, value in tensors.items() if name not in aside}


_PICKLED = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the model as it was written; shards where it is sharded.

    The extra state of modules is among them, as bytes; a base that was set aside (:func:`leave_frozen_out`) is not.

    Raises:
        CheckpointError: a module's extra state cannot be saved.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: PLC0415  a second to import

    found: Any = without_base(model, get_model_state_dict(model))
    return {name: to_bytes(name, value) if is_extra(name) else value for name, value in found.items()}


def kind_of(dtype: torch.dtype) -> str:
    """Of which kind its numbers are: ``bool``, ``int``, ``float`` or ``complex``."""
    if dtype is torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def expect_kind(name: str, given: Tensor, own: Tensor) -> None:
    """Raises CheckpointError where a copy would change the kind of a tensor's numbers."""
    if kind_of(given.dtype) != kind_of(own.dtype):
        raise CheckpointError(f"{name} is {given.dtype} in the state, and {own.dtype} in the model: another kind")


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restores :func:`model_state`.

    Raises:
        CheckpointError: a tensor holds numbers of another kind.
        RuntimeError, KeyError, ValueError: as torch does, where the tensors belong to another model.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # noqa: PLC0415

    given: Any = {name: from_bytes(value) if is_extra(name) else value for name, value in tensors.items()}
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        if clean(name) in given:
            expect_kind(clean(name), given[clean(name)], own)
    aside = names_set_aside(model)
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
    if engine.facts.state_layout is StateLayout.SHARDED:
        parts = [gathered(parts.pop(0), world) for _ in range(2)]
        values = merged(values, world)
        places = {name: place for place, name in enumerate(engine.unwrapped_model.state_dict(keep_vars=True))}
        parts[0] = dict(sorted(parts[0].items(), key=lambda entry: places.get(entry[0], len(places))))
    for part in parts:
        copy_in_place(part)
    model, optimizer = parts
    return replace(rest, model=model, optimizer=optimizer, optimizer_values=dict(values))


def copy_in_place(tensors: dict[str, Tensor]) -> None:
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
