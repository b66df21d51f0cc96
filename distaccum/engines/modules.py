"""What engines ask of a model: its trained parameters by name, and whether it has memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

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
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode; some of its modules may have been before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
