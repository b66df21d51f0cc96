"""Refuses padding to fixed shapes where it would change the gradient: what can be seen of the model beforehand."""

from __future__ import annotations

from torch import nn

from distaccum.accumulation.batch_norm import batch_statistics
from distaccum.data.collate import PadCollator
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError, shorten


def check_padding(data: DataSpec, model: nn.Module) -> None:
    """Statistics of a micro-batch would be those of its padding too.

    A loss or a model that sees padding otherwise is found in the first window, by its value: see
    :mod:`distaccum.verification.additivity`.

    Raises:
        ConfigError: the model has such statistics, and micro-batches are filled up, or padded to more than their
            longest sample.
    """
    found = batch_statistics(model)
    lengthens = isinstance(data.collate, PadCollator) and data.collate.bare is not None
    if not found or not (data.pad_rows or lengthens):
        return
    key = "batch.pad_rows" if data.pad_rows else "data.pad_to"
    problem = f"the model's {shorten(found, 1)} takes statistics of the micro-batch, of which padding would be a part"
    raise ConfigError(key, data.pad_rows or None, problem, "Leave it out, or use GroupNorm or LayerNorm")
