"""The optimizer's state by the names of parameters, of flat tensors in which each rank steps pieces of many of them.

It is the form of all engines (:mod:`distaccum.engines.optimizer_state`), so that the state goes on at another ZeRO
stage, in another precision, on another number of ranks and on another engine. DeepSpeed's universal checkpoints hold
the same, in files that a program of its own makes of a finished checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from distaccum.engines.deepspeed.internals import Flat, Piece, whole_shape
from distaccum.engines.optimizer_state import by_owner, check_kinds, entry, kinds
from distaccum.errors import CheckpointError, MisuseError, shorten

_STEP = "step"  # what torch calls the number of steps
_REMEDY = "Continue on ddp, zero1 or fsdp2, or at engine.stage=0; or begin another run from the weights with init_from"


def collect(
    optimizer: Optimizer, flats: Iterable[Flat], names: Mapping[int, str], *, owns: Callable[[str], bool]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Whole tensors, on the host, and plain values of the parameters that this rank ``owns``; a collective.

    One tensor at a time is whole on the device.

    Args:
        optimizer: what DeepSpeed lets step.
        flats: what it steps.
        names: of the parameters, by ``id``.
        owns: whether this rank gives the state of the parameter of that name; each has one such rank.

    Raises:
        MisuseError: on all ranks alike: the optimizer keeps something else than numbers and one an element.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {**kinds([optimizer])}
    for flat, pieces in flats:
        for key, value in optimizer.state.get(flat, {}).items():
            for piece in pieces:
                name = names[id(piece.parameter)]
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    whole = _gathered(value, piece)
                    if owns(name):
                        tensors[entry(name, key)] = whole
                elif isinstance(value, Tensor) and not value.ndim:
                    if owns(name):
                        tensors[entry(name, key)] = value.detach().to("cpu", copy=True)
                elif isinstance(value, bool | int | float | str | None):
                    if owns(name):
                        values[entry(name, key)] = value
                else:
                    problem = f"{type(optimizer).__name__} keeps {key}, which is neither a number nor one an element"
                    raise MisuseError(f"{problem}: a checkpoint cannot hold it. Use engine=ddp")
    return tensors, values


def _gathered(value: Tensor, piece: Piece) -> Tensor:
    """A parameter's whole tensor of pieces on all ranks, bit by bit: a sum of bytes, which are 0 elsewhere."""
    shape = whole_shape(piece.parameter)
    whole = torch.zeros(shape.numel(), dtype=value.dtype, device=piece.parameter.device)
    own = value.detach()[piece.start : piece.start + piece.numel]
    whole[piece.offset : piece.offset + piece.numel] = own.to(whole.device)
    if whole.numel():
        dist.all_reduce(whole.view(torch.uint8))
    return whole.view(shape).cpu()


def load(
    optimizer: Optimizer,
    flats: Iterable[Flat],
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Restores what any engine has kept by parameter; each rank takes its pieces.

    Raises:
        MisuseError: it is the state of an optimizer of another class.
        CheckpointError: parameters that DeepSpeed steps as one have kept different things, such as numbers of steps.
        KeyError: something was kept of a parameter that is not trained.
        RuntimeError: a tensor has another shape than its parameter.
    """
    check_kinds([optimizer], values)
    kept, _ = by_owner(tensors, values)
    unknown = kept.keys() - names.values()
    if unknown:
        raise KeyError(f"optimizer state of {sorted(unknown)[0]!r}, which is no trained parameter of the model")
    new = {}
    for flat, pieces in flats:  # all are read before one is replaced
        held = {piece: kept.get(names[id(piece.parameter)], {}) for piece in pieces}
        _check_alike(held, names)
        keys = next(iter(held.values()), {})
        new[flat] = {key: _flat_value(flat, key, held, tensors, values) for key in keys}
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)  # torch's rule
    for flat, entries in new.items():
        before = optimizer.state.pop(flat, {})
        device = flat.device if on_device else None
        if entries:
            optimizer.state[flat] = {key: _placed(before.get(key), value, device) for key, value in entries.items()}


def _check_alike(held: Mapping[Piece, Mapping[str, str]], names: Mapping[int, str]) -> None:
    """Raises CheckpointError where some parameters of a flat tensor have kept something that others have not."""
    first = next(iter(held.values()), {}).keys()
    others = [names[id(piece.parameter)] for piece, entries in held.items() if entries.keys() != first]
    if others:
        one = names[id(next(iter(held)).parameter)]
        problem = f"the optimizer's state of {shorten(others)} has other entries than that of {one}"
        raise CheckpointError(f"{problem}, and DeepSpeed steps them as one. {_REMEDY}")


def _flat_value(
    flat: Tensor,
    key: str,
    held: Mapping[Piece, Mapping[str, str]],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> Any:
    """Of one entry: a flat tensor with this rank's elements in it, or the one value that all parameters share."""
    found = {p: tensors[full] if (full := entries[key]) in tensors else values[full] for p, entries in held.items()}
    shaped = [isinstance(value, Tensor) and value.ndim > 0 for value in found.values()]
    # Parameters of no dimension keep tensors of none: what there is one of an element, the others tell, or the name.
    if not any(shaped) and not (key != _STEP and _has_no_dimensions(found)):
        return _same(key, list(found.values()))
    dtypes = {value.dtype for value in found.values() if isinstance(value, Tensor)}
    whole = torch.zeros_like(flat, dtype=dtypes.pop())
    for (parameter, start, offset, numel), value in found.items():
        if not isinstance(value, Tensor) or value.shape != whole_shape(parameter) or dtypes:
            shape = tuple(whole_shape(parameter))
            raise RuntimeError(f"{key} of a parameter of shape {shape} has another shape, type or kind")
        whole[start : start + numel] = value.flatten()[offset : offset + numel].to(flat.device)
    return whole


def _has_no_dimensions(found: Mapping[Piece, Any]) -> bool:
    return all(isinstance(value, Tensor) and not whole_shape(piece.parameter) for piece, value in found.items())


def _same(key: str, found: Sequence[Any]) -> Any:
    """The one value of all; raises CheckpointError where they differ."""
    first = found[0]
    if any(value != first for value in found):
        counts = ", ".join(dict.fromkeys(str(one.item() if isinstance(one, Tensor) else one) for one in found))
        problem = f"the parameters of one group have different values of {key} ({counts})"
        raise CheckpointError(f"{problem}, and DeepSpeed keeps one for all of them. {_REMEDY}")
    return first.clone() if isinstance(first, Tensor) else first


def _placed(before: Any, value: Any, device: torch.device | None) -> Any:
    """In the memory that the optimizer has for it, which DeepSpeed may refer to; else a number is on ``device``."""
    if isinstance(before, Tensor) and isinstance(value, Tensor) and before.shape == value.shape:
        return before.copy_(value) if before.dtype == value.dtype else value.to(before.device)
    return value.to(device) if isinstance(value, Tensor) and not value.ndim else value
