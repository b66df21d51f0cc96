"""The optimizer's state by the names of parameters, of flat tensors in which each rank steps pieces of many of them.

It is the form of all engines (:mod:`distaccum.engines.optimizer_state`), so that the state goes on at another ZeRO
stage, in another precision, on another number of ranks and on another engine. DeepSpeed's universal checkpoints hold
the same, in files that a program of its own makes of a finished checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from distaccum.engines.deepspeed.internals import (
    Flat,
    Gradients,
    Piece,
    copy_to_shard,
    fp32_copies,
    is_partitioned,
    shard,
    shards_from_whole,
    whole_shape,
)
from distaccum.engines.modules import put_back
from distaccum.engines.optimizer_state import by_owner, check_kinds, entry, kinds, leave_out_frozen
from distaccum.engines.rules import Verdict, try_rule
from distaccum.engines.state import expect_kind, extra_state, set_extra_state, to_bytes, without_base
from distaccum.errors import CheckpointError, ConfigError, MisuseError, shorten

# Optimizers whose rule DeepSpeed's flat partitions keep: those that treat each element of a parameter by itself.

# Of the trial: matrices, and where they are cut; the second is large enough for moments in 8 bits, by blocks.
_TRIED = (((4, 6), 10), ((65, 64), 2000))
_OPTIMIZER_REMEDY = "Use engine.stage=0, engine=ddp, or engine=zero1, where each rank steps whole parameters"


def check_rule(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> None:
    """For stages 1 to 3, which give the optimizer one flat tensor a group, or a part of it.

    A rule that looks at a matrix's rows, at a parameter's norm (Adafactor, Muon, LAMB) or at the norm of all parameters
    is another one there.

    Raises:
        ConfigError: a step on matrices differs from steps on the same numbers, flat and in two parts, each alone; or a
            trained parameter is none of the optimizer's.
    """
    from distaccum.program import KEPT, load  # noqa: PLC0415  where an engine is made

    load(KEPT)(optimizer, "deepspeed")
    kind = type(optimizer).__name__
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, parameter in trained.items() if id(parameter) not in held]
    if left_out:
        problem = f"steps none of {shorten(left_out)}, and DeepSpeed reduces what it steps only"
        raise ConfigError("optimizer", kind, problem, "Give it all that needs a gradient, or requires_grad_(False)")
    if isinstance(optimizer, torch.optim.Adagrad):
        problem = "DeepSpeed's stages 1 to 3 make an Adagrad of their own, which neither schedules nor groups reach"
        raise ConfigError("optimizer", kind, problem, _OPTIMIZER_REMEDY)
    device = next(iter(trained.values())).device if trained else torch.device("cpu")
    verdicts = {_try(optimizer, device, shape, at) for shape, at in _TRIED}
    if Verdict.COUPLED in verdicts:
        problem = "its rule looks at more than one element, and DeepSpeed's stages 1 to 3 cut parameters up"
        raise ConfigError("optimizer", kind, problem, _OPTIMIZER_REMEDY)
    if Verdict.RANDOM in verdicts:
        problem = "its rule draws random numbers, and DeepSpeed's stages 1 to 3 give each rank a part of a parameter"
        raise ConfigError("optimizer", kind, problem, _OPTIMIZER_REMEDY)


def _try(optimizer: Optimizer, device: torch.device, shape: tuple[int, int], cut: int) -> Verdict:
    """Steps on a matrix a group, beside steps on its two parts, flat."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        [torch.randn(shape, generator=generator).to(device)] if group["params"] else []
        for group in optimizer.param_groups
    ]
    parts = [[matrix.flatten().tensor_split([cut]) for matrix in group] for group in whole]
    return try_rule(optimizer, whole, [[[pieces[i] for pieces in group] for group in parts] for i in range(2)])


def leaves_alone(optimizer: Optimizer) -> bool:
    """Whether a gradient of zeros changes neither a weight nor the state: plain SGD."""
    groups = optimizer.param_groups
    return type(optimizer) is SGD and not any(group["momentum"] or group["weight_decay"] for group in groups)


# The fp32 weights that DeepSpeed steps: made, kept up with what the user changes, and gathered for an export.

_ELEMENTS = 2**24  # that are compared at once


class EditedWeights:
    """Takes weights that the user has changed between two steps into the fp32 copies that DeepSpeed steps.

    Otherwise the step would undo what was changed, as it writes its copies over the weights. In fp32 a copy is what the
    weights are. In 16 bits an element that is no longer what its copy rounds to is taken; the others keep the digits
    that only the copy has. The host does not wait for the device.

    Args:
        engine: DeepSpeed's.
        gradients: of its wrapper, which knows where copies lie.
        trained: the parameters.
    """

    def __init__(self, engine: Any, gradients: Gradients, trained: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._gradients = engine.optimizer, gradients
        whole = gradients.flat and not (trained and is_partitioned(trained[0]))
        self._places = [(p, p.detach()) for p in trained if whole]

    @torch.no_grad()
    def take_in(self) -> None:
        """Called before a step, and before the copies are saved.

        Raises:
            MisuseError: a parameter has got another shape or type.
        """
        for parameter, place in self._places:
            put_back(parameter, place)
        self.take_into_shards()
        for weights, master in self._gradients.masters():
            if weights.dtype is master.dtype:
                if weights.data_ptr() != master.data_ptr():
                    master.copy_(weights)
                continue
            for own, copy in _pieces(weights, master):
                here = own.to(copy.device)
                copy.copy_(torch.where(copy.to(own.dtype) == here, copy, here.to(copy.dtype)))

    def take_into_shards(self) -> None:
        """At stage 3: a rank's parts of what stays whole."""
        if hasattr(self._optimizer, "persistent_parameters"):
            shards_from_whole(self._optimizer)


def _pieces(weights: Tensor, master: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """So that what is compared needs little memory besides."""
    if not (weights.is_contiguous() and master.is_contiguous()):
        yield weights, master
        return
    parts = (torch.split(tensor.view(-1), _ELEMENTS) for tensor in (weights, master))
    yield from zip(*parts, strict=True)


class MasterWeights:
    """The weights of a model from before DeepSpeed wraps it.

    DeepSpeed casts a model to 16 bits first, and makes its fp32 weights of what is left. At stage 0 it then lets the
    optimizer step on zeros, which counts as a step of Adam and decays the weights.

    Args:
        deepspeed: the module.
        model: in fp32.
        casts: whether DeepSpeed will.
    """

    def __init__(self, deepspeed: Any, model: nn.Module, *, casts: bool) -> None:
        self._deepspeed = deepspeed
        self._model = model
        # A cast makes new memory, and this stays as it is.
        self._before = {name: p.data for name, p in model.named_parameters() if casts and p.requires_grad}

    def restore(self, engine: Any) -> None:
        """Undoes the rounding and the step, once the model is wrapped; every rank gets rank 0's weights."""
        before, self._before = self._before, {}
        copies, parameters = fp32_copies(engine.optimizer), dict(self._model.named_parameters())
        for name, kept in before.items():
            value = kept.float()
            torch.distributed.broadcast(value, src=0)
            self._set(parameters[name], value, copies)
        if copies:
            engine.optimizer.optimizer.state.clear()

    def _set(self, parameter: nn.Parameter, value: Tensor, copies: Mapping[int, Tensor]) -> None:
        if id(parameter) in copies:
            copies[id(parameter)].data.copy_(value)
        elif is_partitioned(parameter):
            self._deepspeed.utils.safe_set_local_fp32_param(parameter, shard(value, parameter))
        else:
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, value)

    def load(self, engine: Any, tensors: Mapping[str, Tensor]) -> None:
        """Restores weights and buffers, in fp32 and in the format that the model computes in.

        Raises:
            KeyError: one is missing.
            RuntimeError: one has another shape, or no place in the model.
        """
        own = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        extras = {name for name in extra_state(self._model) if name in tensors}
        strangers = set(tensors) - set(own) - set(buffers) - extras
        if strangers:
            raise RuntimeError(f"no such weight in this model: {', '.join(sorted(strangers))}")
        copies = fp32_copies(engine.optimizer)
        for name, parameter in without_base(self._model, own).items():
            value, shape = tensors[name].to(engine.device), whole_shape(parameter)
            if value.shape != shape:
                raise RuntimeError(f"{name} has shape {tuple(value.shape)}, in this model {tuple(shape)}")
            if parameter.requires_grad:
                self._set(parameter, value.float(), copies)
            if is_partitioned(parameter):
                copy_to_shard(parameter, value)
            if parameter.data.shape == shape:  # else its memory is given back until the next forward
                parameter.data.copy_(value)
        for name in set(buffers) & set(tensors):
            expect_kind(name, tensors[name], buffers[name])
            buffers[name].copy_(tensors[name])
        for name in extras:
            set_extra_state(self._model, name, tensors[name])

    def whole(self, engine: Any, *, keep: bool) -> dict[str, Tensor]:
        """All weights in fp32, and the buffers, on the host; empty without ``keep``. A collective."""
        copies, found = fp32_copies(engine.optimizer), {}
        every = dict(self._model.named_parameters(remove_duplicate=False))
        for name, parameter in without_base(self._model, every).items():
            value = copies.get(id(parameter))
            if value is None and parameter.requires_grad:
                value = self._deepspeed.utils.safe_get_full_fp32_param(parameter)
            if value is None:
                with self._deepspeed.zero.GatheredParameters([parameter], enabled=is_partitioned(parameter)):
                    value = parameter.detach().clone()
            if keep:
                found[name] = value.detach().float().to("cpu", copy=True)
        if keep:
            kept = set(self._model.state_dict())  # not all buffers are persistent
            buffers = self._model.named_buffers(remove_duplicate=False)
            found |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers if name in kept}
            found |= {name: to_bytes(name, value) for name, value in extra_state(self._model).items()}
        return found


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
    *,
    model: Iterable[str] = (),
) -> None:
    """Restores what any engine has kept by parameter of the ``model``; each rank takes its pieces.

    Raises:
        MisuseError: it is the state of an optimizer of another class.
        CheckpointError: parameters that DeepSpeed steps as one have kept different things, such as numbers of steps.
        KeyError: something was kept of a parameter that is not trained.
        RuntimeError: a tensor has another shape than its parameter.
    """
    check_kinds([optimizer], values)
    kept, _ = by_owner(tensors, values)
    leave_out_frozen(kept, names.values(), model)
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
