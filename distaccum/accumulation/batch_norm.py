"""A warning for modules whose result accumulation cannot make equal to that of the global batch."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distaccum.errors import BatchStatisticsWarning, shorten


def batch_statistics(model: nn.Module) -> list[str]:
    """The names of modules that normalise over a micro-batch."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
    ]


def warn_of_batch_statistics(model: nn.Module) -> None:
    """Warns once, by name, of modules that normalise over a micro-batch."""
    found = batch_statistics(model)
    if not found:
        return
    warnings.warn(
        f"{shorten(found, 1)}: batch normalisation takes its statistics from a micro-batch on one rank, so the "
        "gradient depends on the micro-batch size (SyncBatchNorm joins the ranks of one micro-step, not the "
        "micro-steps of a window). Use GroupNorm or LayerNorm, or freeze it with eval()",
        BatchStatisticsWarning,
        stacklevel=3,
    )
