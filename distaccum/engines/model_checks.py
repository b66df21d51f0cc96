"""What no engine can train: models that are wrapped already, odd types, optimizers of sparse gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from distaccum.engines.dtensor import is_sharded
from distaccum.errors import ConfigError, shorten

# By name, since their modules take long to import: where each class's module begins, and what to do.
_UNWRAP = "delete the line that wraps it, or give what is inside (.module): the engine wraps it"
_UNSHARD = (
    "delete the line that shards it: engine=fsdp2 does. What an Accumulator has sharded stays so after close(): build "
    "the model anew, and load its weights"
)
_WRAPPERS = {
    "DistributedDataParallel": ("torch.nn.parallel.", _UNWRAP),
    "DataParallel": ("torch.nn.parallel.", _UNWRAP),
    "FullyShardedDataParallel": ("torch.distributed.", _UNSHARD),
    "FSDPModule": ("torch.distributed.", _UNSHARD),
    "ReplicateModule": ("torch.distributed.", "delete the line that calls replicate(): engine=ddp does it"),
    "DeepSpeedEngine": ("deepspeed.", "delete deepspeed.initialize(), or give what is inside (.module)"),
}
_TRAINABLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_wrappers(model: nn.Module) -> None:
    """A model that reduces or shards its own gradients would do so twice.

    Raises:
        ConfigError: it or a module in it is torch's or DeepSpeed's wrapper, or a parameter of it is sharded.
    """
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            origin, remedy = _WRAPPERS.get(base.__name__, ("", ""))
            if origin and base.__module__.startswith(origin):
                part = f"its {name}" if name else "it"
                problem = f"{part} is in {base.__name__} already, and gradients would be reduced twice"
                raise ConfigError("model", type(model).__name__, problem, remedy[0].upper() + remedy[1:])
    sharded = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
    if sharded:
        problem = f"its parameters {shorten(sharded)} are sharded over ranks already (DTensor)"
        remedy = "Delete what shards them: engine=fsdp2 does. Tensor parallelism is not supported"
        raise ConfigError("model", type(model).__name__, problem, remedy)


def check_dtypes(model: nn.Module) -> None:
    """Parameters that are stepped must be of a type that torch's optimizers and collectives compute in.

    Raises:
        ConfigError: a trainable parameter is of another type.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _TRAINABLE:
            problem = f"its parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, which cannot be trained"
            remedy = "Keep it in float32, or freeze it (requires_grad=False) before"
            raise ConfigError("model", type(model).__name__, problem, remedy)


def check_sparse(optimizer: Optimizer) -> None:
    """Gradients are dense on every engine, also those of an ``nn.Embedding(sparse=True)``.

    Raises:
        ConfigError: the optimizer takes sparse gradients only.
    """
    if isinstance(optimizer, SparseAdam):
        problem = "it takes sparse gradients only, and all gradients are dense here"
        raise ConfigError("optimizer", type(optimizer).__name__, problem, "Use torch.optim.Adam, Adagrad or SGD")
