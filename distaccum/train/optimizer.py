"""Builds the optimizer that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.instantiate import build, signature_of, target_of
from distaccum.config.schema import OptimConfig
from distaccum.errors import ConfigError


def build_optimizer(config: OptimConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """The optimizer over the model's parameters, with its fused kernel as ``optim.fused`` and its own node say.

    The model may still be elsewhere than on ``device``, where it is going to be trained.

    Raises:
        ConfigError: it cannot be built, or has no fused kernel and must.
    """
    key, node = "optim.optimizer", config.optimizer

    def make(parameters: Iterable[nn.Parameter], **fused: bool) -> Optimizer:
        return cast(Optimizer, build(key, node, parameters, lr=config.lr, **fused))

    if "fused" in node:
        return make(model.parameters())
    if "fused" not in signature_of(target_of(key, node)):
        if config.fused is True:
            problem = f"{node['_target_']} takes no fused argument"
            raise ConfigError("optim.fused", True, problem, "Use optim.fused=auto")
        return make(model.parameters())
    if config.fused is False:
        return make(model.parameters(), fused=False)
    try:
        _try_fused(make, model, device)
    except Exception as error:  # any error: the build below raises what is not about fusing
        optimizer = make(model.parameters())
        if config.fused is True:
            problem = f"{node['_target_']} cannot: {error}"
            raise ConfigError("optim.fused", True, problem, "Use optim.fused=auto") from error
        return optimizer
    return make(model.parameters(), fused=True)


def _try_fused(make: Callable[..., Optimizer], model: nn.Module, device: torch.device) -> None:
    """A step on one zero of each kind that the model trains: some of torch's optimizers refuse only then."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    zeros = [nn.Parameter(torch.zeros(1, device=device, dtype=dtype)) for dtype in kinds]
    for zero in zeros:
        zero.grad = torch.zeros_like(zero)
    make(zeros, fused=True).step()
