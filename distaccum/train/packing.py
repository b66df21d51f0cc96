"""Packed documents: whether a loss and a model can have several in a row, each on its own."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.accumulation.batch_norm import batch_statistics
from distaccum.config.batch import BatchConfig
from distaccum.config.checks import DOCUMENTS
from distaccum.data.collate import PadCollator
from distaccum.data.packing import PackCollator, packed, parts
from distaccum.data.spec import DataSpec
from distaccum.engines.modules import evaluating, is_meta
from distaccum.errors import ConfigError, shorten

# Refuses padding to fixed shapes where it would change the gradient: what can be seen of the model beforehand.


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


_KEY = "batch.packing"
_LOOKED_AT = 12  # tokens of a document, at most
_ROUNDING = 1e-2  # of the largest logit: a document alone has another shape, and may be in 16 bits


def pack(data: DataSpec, batch: BatchConfig, loss: Any) -> DataSpec:
    """The data, packed where the configuration says so.

    Raises:
        ConfigError: the data, or the loss, cannot be packed.
    """
    if batch.packing != DOCUMENTS:
        return data
    shifted = getattr(loss, "shifts_labels", None)
    if shifted is None:
        problem = f"{type(loss).__name__} does not say whether it shifts labels, or is no loss of next tokens"
        remedy = "Use the cross entropy of next tokens, or give your loss an attribute shifts_labels, True or False"
        raise ConfigError(_KEY, DOCUMENTS, problem, remedy)
    return packed(data, row_tokens=batch.row_tokens, shifted=shifted)


@torch.no_grad()
def check_model(model: nn.Module, data: DataSpec) -> None:
    """Tries two documents in a row: nothing of the first may be seen in the second.

    Raises:
        ConfigError: the model does not take positions, or the second document depends on the first, or on its place.
    """
    if not isinstance(data.collate, PackCollator):
        return
    name = type(model).__name__
    if is_meta(model):
        problem = "a model on the meta device cannot be tried, whether it tells documents apart"
        raise ConfigError(_KEY, DOCUMENTS, problem, "Use engine.meta_init=false")
    samples: Any = data.train
    first, second = (parts(samples[i])[0][:_LOOKED_AT] for i in (0, -1 % len(samples)))
    other = first.flip(0) if bool((first != first.flip(0)).any()) else second[:1].expand_as(first)
    try:
        with evaluating(model):
            said = [_of_last(model, rows, samples[0]) for rows in ([first, second], [other, second], [second])]
    except TypeError as error:
        problem = f"{name} does not take position_ids, which tell documents apart ({error})"
        raise ConfigError(_KEY, DOCUMENTS, problem, "Use distaccum's GPT, or a causal model of transformers") from error
    if not torch.equal(said[0], said[1]):
        problem = f"{name} sees the documents before another one in its row"
        remedy = "Use a model whose attention follows position_ids (sdpa or eager, of transformers), or leave it out"
        raise ConfigError(_KEY, DOCUMENTS, problem, remedy)
    if (said[0] - said[2]).abs().max() > _ROUNDING * said[2].abs().max():
        problem = f"{name} gives a document other logits in another place of a row"
        raise ConfigError(_KEY, DOCUMENTS, problem, "Use a model whose positions follow position_ids, or leave it out")


def _of_last(model: nn.Module, documents: list[Tensor], sample: Any) -> Tensor:
    """The logits of a row's last document, ``(T, classes)``; the model is called as the losses do."""
    device = next(model.parameters()).device
    ids = torch.cat(documents)[None].to(device)
    positions = torch.cat([torch.arange(len(one)) for one in documents])[None].to(device)
    named = "input_ids" if isinstance(sample, Mapping) else next(iter(signature(model.forward).parameters))
    output: Any = model(**{named: ids}, position_ids=positions)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits[0, -len(documents[-1]) :].float()
