"""The units that FSDP2 shards one by one, and how each comes to its device: from rank 0, or from meta."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distaccum.errors import ConfigError, near_misses

# What a selective checkpoint keeps: what takes long to compute and little memory to hold. Attention is an operator for
# each kernel: flash, memory-efficient, cuDNN's, or one of a back end from elsewhere; without one it is matrix products.
_LONG = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_fused_attention_overrideable",
    *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
)
_PACKETS = [getattr(torch.ops.aten, name) for name in _LONG if hasattr(torch.ops.aten, name)]  # torch 2.8 lacks some
_FORMS = [getattr(packet, form) for packet in _PACKETS for form in packet.overloads()]
_KEPT = frozenset(form for form in _FORMS if not form._schema.is_mutable)


def blocks_of(model: nn.Module, globs: Sequence[str], *, key: str = "engine.blocks") -> list[nn.Module]:
    """The modules to shard one by one: those the globs name; by default a transformer's layers, as it lists them.

    Those are of the classes in Hugging Face's ``_no_split_modules``, or else the elements of each outermost
    ``ModuleList``; but none that shares a parameter with what is outside of it, as tied embeddings do.

    ``key`` is the setting that the globs are of.

    Raises:
        ConfigError: a glob matches nothing.
    """
    modules = dict(model.named_modules())
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in modules):
            problem = f"matches no module of {type(model).__name__}{near_misses(glob, modules)}"
            raise ConfigError(key, glob, problem, "Use names as of model.named_modules()")
    if globs:
        chosen = [m for name, m in modules.items() if name and any(fnmatchcase(name, glob) for glob in globs)]
    else:
        unsplit = set(getattr(model, "_no_split_modules", None) or ())
        chosen = [module for module in modules.values() if type(module).__name__ in unsplit] or list(_listed(model))
        chosen = _sharing_nothing(model, chosen)
    # A module comes before what it holds, which has to be sharded first.
    once = dict.fromkeys(reversed(chosen))  # a layer may be used in several places
    return [module for module in once if any(p.requires_grad for p in module.parameters())]


def _sharing_nothing(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    places: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), set()).add(module)
    return [block for block in blocks if all(places[id(p)] <= set(block.modules()) for p in block.parameters())]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _listed(child)


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


def checkpoint_activations(model: nn.Module, blocks: Sequence[nn.Module], *, selective: bool) -> None:
    """Recomputes each block of ``model`` in the backward instead of keeping its activations.

    ``selective`` keeps those of matrix products and attention.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # Hugging Face's: what is recomputed would be kept twice
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keeps)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)  # the innermost: FSDP2's hooks go around it


def _keeps(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
