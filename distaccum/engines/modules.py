"""What engines ask of a model: its trained parameters by name, and whether it has memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.errors import MisuseError

# An asynchronous copy of a few numbers from the device to the host.


class HostCopy:
    """Copies a small tensor to the host after the work that is queued; only reading it waits, and for that work alone.

    Args:
        numbers: on any device; not changed in place until they are read.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: Any = None
        self._copy = numbers.detach()
        if numbers.device.type != "cpu":
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._copy.copy_(numbers, non_blocking=True)
            self._arrived = torch.get_device_module(numbers.device).Event()
            self._arrived.record()

    def read(self) -> Any:
        """The numbers, as ``tolist()`` gives them."""
        if self._arrived is not None:
            self._arrived.synchronize()  # of this copy: what was queued after it runs on
            self._arrived = None
        return self._copy.numpy().tolist()


def from_host(numbers: Sequence[float], like: Tensor) -> Tensor:
    """The numbers in one dimension, of the type and on the device of ``like``; the host waits for none of its work."""
    made = torch.tensor(numbers, dtype=like.dtype)
    return made if like.device.type == "cpu" else made.pin_memory().to(like.device, non_blocking=True)


# Sharded and whole tensors: torch's ``DTensor``, sharded along dimension 0. ``torch.distributed.tensor`` takes as long
# to import as torch itself. Before something has imported it no tensor can be a ``DTensor``, so these functions look
# for it among the loaded modules.

_MODULE = "torch.distributed.tensor"


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, and of containers in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(tensors_in, value.values()))
    elif isinstance(value, list | tuple | set):
        yield from chain.from_iterable(map(tensors_in, value))


def is_of_an_engine(function: type) -> bool:
    """Whether an autograd function is one that an engine has put into the model, as DeepSpeed does around modules."""
    return function.__module__.partition(".")[0] == "deepspeed"


def to_local(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor; any other one as it is."""
    module = sys.modules.get(_MODULE)  # not by is_sharded: this runs for every gradient
    local: Tensor = tensor.to_local() if module is not None and isinstance(tensor, module.DTensor) else tensor
    return local


def as_real(tensor: Tensor) -> Tensor:
    """A complex one with a dimension more, of real and imaginary parts; any other one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def owners_by_size(sizes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each of ``sizes``: the largest go first, each to the rank with the least so far."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def full_tensor(tensor: Any) -> Tensor:
    """All of a sharded tensor, on every rank (a collective); any other one as it is."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def shard_like(tensor: Tensor, pattern: Any) -> Tensor:
    """This rank's part of ``tensor``, sharded as ``pattern`` of the same shape is; any other one as it is.

    Nothing is communicated: every rank has the whole.
    """
    return shard_over(tensor, pattern) if is_sharded(pattern) and tensor.shape == pattern.shape else tensor


def shard_over(tensor: Tensor, pattern: Any) -> Tensor:
    """As :func:`shard_like`, of any shape with as many dimensions as the sharded ``pattern``."""
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415  loaded already, see above

    mesh, rows = pattern.device_mesh, tensor
    for dimension, placement in enumerate(pattern.placements):
        if isinstance(placement, Shard):
            parts = rows.chunk(mesh.size(dimension), placement.dim)
            i = mesh.get_local_rank(dimension)
            rows = parts[i] if i < len(parts) else rows.narrow(placement.dim, 0, 0)
    part = rows.to(to_local(pattern).device)
    if part.untyped_storage().nbytes() > part.nbytes:  # a view, that would keep the whole
        part = part.clone()
    return DTensor.from_local(
        part, mesh, pattern.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


# Parameters that lie in flat memory, which an engine sends and steps: a user may have put them elsewhere.


def put_back(parameter: nn.Parameter, place: Tensor) -> None:
    """Copies a weight that lies elsewhere (after ``p.data = ...``) to ``place``, and has the parameter lie there again.

    Raises:
        MisuseError: it has another shape or type.
    """
    if parameter.data_ptr() == place.data_ptr() and parameter.shape == place.shape:
        return
    if parameter.shape != place.shape or parameter.dtype is not place.dtype:
        now, before = (f"{list(t.shape)} in {str(t.dtype).removeprefix('torch.')}" for t in (parameter, place))
        raise MisuseError(
            f"a parameter of {before} was made one of {now} after the model was wrapped (.data = ..., half(), to()): "
            "change the model before, or choose precision= instead"
        )
    place.copy_(parameter.detach())
    parameter.data = place


_WRAPPERS = ("_orig_mod",)  # torch.compile's, in names


def clean(name: str) -> str:
    """A parameter's or module's name in the model as it was written."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that need a gradient, by their clean names."""
    return {clean(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer of it is on the meta device: it has a shape, and no memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Within the block the model is in evaluation mode; some of its modules may have been before.

    Gives a function that ends it sooner.
    """
    modes = [(module, module.training) for module in model.modules()]

    def as_before() -> None:
        for module, training in modes:
            module.training = training

    model.eval()
    try:
        yield as_before
    finally:
        as_before()


_MODES = "_distaccum_modes"


def leave_evaluating(model: nn.Module) -> None:
    """Leaves the model in evaluation mode; it keeps which of its modules were not frozen in that."""
    vars(model)[_MODES] = [module.training for module in model.modules()]
    model.eval()


def train_again(model: nn.Module) -> None:
    """Undoes :func:`leave_evaluating`, unless somebody has put the model into training mode since."""
    modes = vars(model).pop(_MODES, [])
    modules = list(model.modules())
    if not model.training and len(modes) == len(modules):
        for module, training in zip(modules, modes, strict=True):
            module.training = training
