"""The fp32 weights that DeepSpeed steps: made, kept up with what the user changes, and gathered for an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.engines import frozen_base
from distaccum.engines.deepspeed.internals import (
    Gradients,
    copy_to_shard,
    fp32_copies,
    is_partitioned,
    shard,
    shards_from_whole,
    whole_shape,
)
from distaccum.engines.extra_state import extra_state, set_extra_state, to_bytes
from distaccum.engines.flat_memory import put_back

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
        for name, parameter in frozen_base.kept(self._model, own).items():
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
            buffers[name].copy_(tensors[name])
        for name in extras:
            set_extra_state(self._model, name, tensors[name])

    def whole(self, engine: Any, *, keep: bool) -> dict[str, Tensor]:
        """All weights in fp32, and the buffers, on the host; empty without ``keep``. A collective."""
        copies, found = fp32_copies(engine.optimizer), {}
        every = dict(self._model.named_parameters(remove_duplicate=False))
        for name, parameter in frozen_base.kept(self._model, every).items():
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
