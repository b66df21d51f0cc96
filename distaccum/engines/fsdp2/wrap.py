"""How a unit that FSDP2 shards comes to its device: from rank 0, or from meta."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distaccum.errors import ConfigError


def move_and_sync(unit: nn.Module, device: torch.device, fill: Callable[[Tensor], None]) -> None:
    """Moves what is not sharded yet to ``device``, where ``fill`` overwrites it with rank 0's."""
    for module in unit.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(device)
                    fill(tensor.data)


def materialize(unit: nn.Module, names: dict[nn.Module, str], seed: int) -> None:
    """Gives what is on the meta device memory on the CPU, and initial weights by each module's ``reset_parameters``.

    A module that holds others is asked after these, unless some of them are sharded already. The random numbers of a
    module depend on ``seed`` and its name: every rank makes the same weights, however many there are.

    Raises:
        ConfigError: a module that has weights or buffers itself has no ``reset_parameters``.
    """
    made: dict[int, Any] = {}  # tied weights stay tied
    for module in unit.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty: Any = torch.empty_like(tensor, device="cpu")
                    trains = tensor.requires_grad
                    made[id(tensor)] = nn.Parameter(empty, trains) if isinstance(tensor, nn.Parameter) else empty
                tensors[name] = made[id(tensor)]
    fresh = set(map(id, made.values()))
    for module in reversed(list(unit.modules())):  # what is inside comes before what holds it
        own = (*module._parameters.values(), *module._buffers.values())
        inside = list(module.parameters())
        all_fresh = bool(inside) and all(id(tensor) in fresh for tensor in inside)
        if any(id(tensor) in fresh for tensor in own) or (all_fresh and hasattr(module, "reset_parameters")):
            _initialise(module, names.get(module, ""), seed)


def _initialise(module: nn.Module, name: str, seed: int) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        problem = f"{name or 'the model'} ({type(module).__name__}) has no reset_parameters() to make its weights with"
        raise ConfigError("engine.meta_init", True, problem, "Give it one, that sets its own parameters and buffers")
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest))
        reset()
