"""The model again, in fp64 on one process: the gradient of any micro-batch's loss sum."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.data.batches import map_tensors
from distaccum.engines.modules import clean
from distaccum.errors import MisuseError
from distaccum.losses.normalize import Count, LossSum, as_counts, as_loss_sums
from distaccum.tools.accelerators import accelerators

LossOfModel = Callable[[nn.Module, Any], LossSum]

# Whose hooks and replaced forwards belong to the wrapping and not to the model.
_OF_WRAPPERS = (
    "torch.distributed.",
    "deepspeed.",
    "accelerate.",
    "lightning.",
    "distaccum.tools.audit.",
    "distaccum.engines.",
)
_METHODS = ("forward", "zero_grad", "_apply", "__deepcopy__")  # that a wrapper may replace in an instance
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NO_GRADIENT = "a loss without a gradient"


class Reference:
    """A copy of a model that computes one micro-batch at a time.

    Args:
        model: bare; it may be sharded by ``fully_shard``, since only its structure is copied.
        weights: all of its parameters, whole, by name.
        training: which modules were in training mode, by name.
        loss_sum, count: as :func:`~distaccum.tools.audit.session.audit` takes them.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        training: Mapping[str, bool],
        loss_sum: LossOfModel,
        count: Count,
    ) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self.device = device if device.type == accelerators()[0] else torch.device("cpu")
        self.dtype = torch.float64
        self._model = _copied(model, weights, self.device)
        for name, module in self._model.named_modules():
            module.training = training.get(name, module.training)
        self._loss_sum, self._count = loss_sum, count
        self.draws = False  # whether a forward has drawn random numbers, dropout being off

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the weights of another window."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[clean(name)])

    def shapes(self) -> dict[str, nn.Parameter]:
        """The copy's parameters, by name."""
        return {clean(name): parameter for name, parameter in self._model.named_parameters()}

    def count(self, batch: Any) -> dict[str, float]:
        """The batch's count of each loss, by name.

        Raises:
            MisuseError: ``count`` cannot read the batch, or returns no number.
        """
        with self._explained("count", batch):
            found = self._count(batch)
            found = found.item() if isinstance(found, Tensor) else found
            return {name: float(value) for name, value in as_counts(found).items()}

    def gradient(self, batch: Any, names: Sequence[str], per_item: Mapping[str, float]) -> Tensor:
        """The gradient of the batch's loss sums, each times ``per_item`` of its name: flat, fp64, on the host.

        Raises:
            MisuseError: ``loss_sum`` cannot read the batch, or returns no loss with a gradient.
        """
        try:
            return self._gradient(batch, names, per_item)
        except MisuseError as error:
            if self.dtype != torch.float64 or not any(word in str(error) for word in ("dtype", "scalar type")):
                raise
        self.dtype = torch.float32  # the model makes fp32 tensors by itself
        self._model.float()
        return self._gradient(batch, names, per_item)

    def _gradient(self, batch: Any, names: Sequence[str], per_item: Mapping[str, float]) -> Tensor:
        parameters = self.shapes()
        wanted = [parameters[name] for name in names]

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

        with self._explained("loss_sum", batch), torch.enable_grad():
            before = _generators(self.device)
            sums = as_loss_sums(self._loss_sum(self._model, map_tensors(batch, moved)))
            now = _generators(self.device)
            self.draws |= not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
            if sums.keys() != per_item.keys():
                raise MisuseError(f"the losses are {sorted(sums)}, and what was counted is {sorted(per_item)}")
            total = torch.stack([part.sum() * per_item[name] for name, part in sums.items()]).sum()
            if not total.requires_grad:
                raise MisuseError(_NO_GRADIENT)
            self._model.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]  # reentrant checkpointing refuses torch.autograd.grad
            found = [parameter.grad for parameter in wanted]
        return self.flat(dict(zip(names, found, strict=True)))

    def flat(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """Gradients in their order, one after the other: fp64, on the host; zeros where there is none."""
        parameters = self.shapes()
        parts = []
        for name, gradient in gradients.items():
            found = torch.zeros_like(parameters[name]) if gradient is None else gradient
            parts.append((torch.view_as_real(found) if found.is_complex() else found).detach().flatten())
        return torch.cat([part.to("cpu", torch.float64) for part in parts])

    def sizes(self, names: Sequence[str]) -> list[int]:
        """How many elements each gradient has in :meth:`flat`; a complex number has two."""
        parameters = self.shapes()
        return [parameters[name].numel() * (2 if parameters[name].is_complex() else 1) for name in names]

    def _explained(self, function: str, batch: Any) -> _Explained:
        return _Explained(function, batch)


class _Explained:
    """Turns whatever a user's function raises within the block into a message that shows the batch."""

    def __init__(self, function: str, batch: Any) -> None:
        self._function, self._batch = function, batch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            raise MisuseError(
                f"{self._function} failed on a recorded batch, {described(self._batch)}: {type(error).__name__}: "
                f"{error}. It gets what the model's forward took, or the DataLoader's batch with it in it; where that "
                "is not the batch, say report.record(batch) before the forward, or audit(..., batches=[...])"
            ) from error


def described(batch: Any) -> str:
    """``{input_ids: int64 (4, 32), ...}``."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"{{{', '.join(f'{key}: {described(value)}' for key, value in batch.items())}}}"
    if isinstance(batch, list | tuple):
        return f"({', '.join(map(described, batch))})"
    return type(batch).__name__


def _copied(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """The model's structure with parameters of ``weights`` and floating tensors in fp64; without wrappers' hooks.

    ``copy.deepcopy`` would copy what sharding has hung on the modules, or refuse.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        whole = _wide(weights[clean(name)]).to(device, copy=True)
        memo[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _wide(buffer.detach()).to(device, copy=True)
    for module in model.modules():
        kind = type(module)
        if kind.__name__.startswith("FSDP") and kind.__mro__[1].__module__.startswith("torch.distributed"):
            kind = kind.__mro__[2]  # fully_shard made a class of its own
        memo[id(module)] = kind.__new__(kind)
    for module in model.modules():
        _fill(memo[id(module)], module, memo)
    copied: nn.Module = memo[id(model)]
    return copied


def _fill(shell: nn.Module, module: nn.Module, memo: dict[int, Any]) -> None:
    for name, value in vars(module).items():
        cast = name == "forward" and "_original_forward" in vars(module)  # by accelerate, for mixed precision
        if cast or name == "_compiled_call_impl" or (name in _METHODS and _replaced(value)):
            continue
        if name in _HOOKS:
            kept = {key: hook for key, hook in value.items() if not _replaced(hook)}
            shell.__dict__[name] = type(value)(copy.deepcopy(kept, memo))
        elif name in ("_parameters", "_buffers", "_modules"):
            shell.__dict__[name] = {key: memo.get(id(part), part) for key, part in value.items()}
        else:
            shell.__dict__[name] = value
            with suppress(Exception):  # what cannot be copied (groups, streams, engines) is shared
                shell.__dict__[name] = copy.deepcopy(value, memo)
    shell.__dict__["_compiled_call_impl"] = None


def _replaced(function: Any) -> bool:
    """Whether a wrapper put it there."""
    inner = getattr(function, "func", function)
    owner = getattr(inner, "__self__", None)
    homes = (getattr(inner, "__module__", None) or "", type(owner).__module__ if owner is not None else "")
    return any(f"{home}.".startswith(_OF_WRAPPERS) for home in homes)


def _generators(device: torch.device) -> list[Tensor]:
    """The states of the generators that a forward may draw from."""
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
