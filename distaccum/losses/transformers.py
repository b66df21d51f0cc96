"""Losses for models like those of Hugging Face transformers, which take a batch by name and return logits.

Only the logits are used: the model gets no ``labels`` and no ``num_items_in_batch``, and its own loss is not called.
The losses in chunks do without logits: they use the hidden states that the model gives to its output layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum.errors import ConfigError, MisuseError, kinds_of
from distaccum.losses.cross_entropy import checked_chunk
from distaccum.losses.linear_cross_entropy import ChunkedOutput, call_output_layer, find_output_layer

Batch = Mapping[str, Any]
"""Tensors by name: ``labels`` for the loss, the others for the model."""

_PROBLEMS = ("single_label", "regression", "multi_label")


class _Adapter:
    """The base of the losses, which differ only in the target of each logit.

    Args:
        problem: one of ``_PROBLEMS``.
        ignore_index: class labels of this value neither contribute nor count.
        weights: the name in the batch of its samples' weights, ``(B,)`` and at least 0; None: all are 1.
        chunk: of classes alone: the most tokens whose logits are in memory at once; None: all.
    """

    def __init__(self, *, problem: str, ignore_index: int, weights: str | None, chunk: int | None = None) -> None:
        self.problem, self.ignore_index, self.weights = problem, ignore_index, weights
        self._chunk = checked_chunk(chunk)

    def check_model(self, model: nn.Module) -> None:
        """Refuses a model whose output layer cannot be made to give the loss in chunks.

        Raises:
            ConfigError: it names none, it is no plain linear layer, or the model does more to its logits.
        """
        if self._chunk is not None:
            find_output_layer(model, self._chunk)

    def count(self, batch: Batch) -> float:
        """The number of labels that count, or the sum of their weights; computed on the host.

        Raises:
            MisuseError: the batch has no labels, or texts in their place.
        """
        if not isinstance(labels := batch.get("labels"), Tensor):
            problem = f"{type(self).__name__} takes batches with labels, a tensor, and the data gives {kinds_of(batch)}"
            remedy = 'dataset.class_encode_column("label") numbers texts; rename_column("label", "labels") names'
            raise MisuseError(f"{problem}: collate them so; of datasets, {remedy}")
        counted = self._counted(self._targets(labels))
        return float(_total(counted.double(), self._weights_of(batch)))

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The sum of the (weighted) losses of all labels that count: 0-dim, at least fp32.

        Raises:
            MisuseError: the model's output has no logits; or, in chunks, other ones than its output layer gave.
            ConfigError: in chunks, as :meth:`check_model`.
        """
        if self._chunk is not None:
            return self._in_chunks(model, batch, self._chunk, scores=False)
        return self.of_logits(self._logits(model, batch), self._targets(batch["labels"]), self._weights_of(batch))

    def of_logits(self, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """The sum of the (weighted) losses of whole logits: the target of each, and the samples' weights."""
        return _total(self._losses(_wide(logits), targets), weights)

    @property
    def to_compile(self) -> str:
        """:meth:`of_logits`; in chunks nothing, as there are none."""
        return "of_logits" if self._chunk is None else ""

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of :meth:`scores`."""
        return ("loss",) if self.problem == "regression" else ("loss", "accuracy")

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """0-dim sums over the count: ``loss``, and for classes the (weighted) correct predictions as ``accuracy``."""
        if self._chunk is not None:
            loss, right = self._in_chunks(model, batch, self._chunk, scores=True)
            return {"loss": loss, "accuracy": right}
        logits, targets, weights = self._logits(model, batch), self._targets(batch["labels"]), self._weights_of(batch)
        found = {"loss": self.of_logits(logits, targets, weights)}
        if self.problem == "regression":
            return found
        named = logits > 0 if self.problem == "multi_label" else logits.argmax(-1).reshape(targets.shape)
        return found | {"accuracy": _total((named == targets).float(), weights)}

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """``(predictions, targets)`` of the labels that count.

        For classes: logits ``(n, classes)`` and labels ``(n,)``. For regression and several labels per sample: both in
        the shape of the batch's labels.
        """
        logits, targets = _wide(self._logits(model, batch)), self._targets(batch["labels"])
        if self.problem != "single_label":
            return logits.reshape(targets.shape), targets
        counted = self._counted(targets).flatten()
        return logits.flatten(0, -2)[counted], targets.flatten()[counted]

    def _targets(self, labels: Tensor) -> Tensor:
        """The target of the logits at each position."""
        return labels

    def _counted(self, targets: Tensor) -> Tensor:
        classes = self.problem == "single_label"
        return targets != self.ignore_index if classes else torch.ones_like(targets, dtype=torch.bool)

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target, in the targets' shape; 0 where a target does not count."""
        if self.problem == "single_label":
            flat = logits.flatten(0, -2), targets.flatten()
            return F.cross_entropy(*flat, ignore_index=self.ignore_index, reduction="none").reshape(targets.shape)
        criterion = F.mse_loss if self.problem == "regression" else F.binary_cross_entropy_with_logits
        losses: Tensor = criterion(logits.reshape(targets.shape), targets.to(logits.dtype), reduction="none")
        return losses

    def _weights_of(self, batch: Batch) -> Tensor | None:
        """``(B,)``; None where all are 1."""
        weights: Tensor | None = None if self.weights is None else batch[self.weights]
        return weights

    def _in_chunks(self, model: nn.Module, batch: Batch, chunk: int, *, scores: bool) -> Tensor:
        targets = self._targets(batch["labels"])
        weights = self._weights_of(batch)
        if weights is not None:
            weights = weights.reshape(len(targets), *[1] * (targets.dim() - 1)).expand(targets.shape)
        output = ChunkedOutput.of(targets, weights=weights, ignore_index=self.ignore_index, chunk=chunk, scores=scores)
        return call_output_layer(model, self._inputs(batch), output)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        own = ("labels", self.weights)
        return {name: value for name, value in batch.items() if name not in own}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        output: Any = model(**self._inputs(batch))
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if isinstance(output, Mapping):
            logits = output.get("logits")
        elif isinstance(output, tuple) and logits is None:
            logits = output[0]
        if not isinstance(logits, Tensor):
            raise MisuseError(
                f"{type(model).__name__} gives no logits: use a model with a head for {type(self).__name__}"
            )
        return logits


def _wide(logits: Tensor) -> Tensor:
    """At least fp32, whatever the forward's dtype: 16 bits are too few for a sum over thousands of tokens."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _total(values: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of values ``(B, ...)``, each multiplied by its sample's weight."""
    if weights is None:
        return values.sum()
    return (values * weights.to(values.dtype).reshape(len(values), *[1] * (values.dim() - 1))).sum()


class CausalLM(_Adapter):
    """Next-token cross entropy in nats, for batches with ``input_ids`` and ``labels``, both ``(B, T)``.

    As everywhere in transformers, labels are the inputs themselves (ignored where padded). The loss shifts them by one
    position, so that a sample of T labels counts T - 1 at most.

    Args:
        ignore_index: Labels with this value are ignored and not counted.
        weights: Name of the sample weights in the batch, of shape ``(B,)`` and at least 0, which apply to their tokens:
            the loss is sum(w * l) / sum(w). The model does not get them.
        chunk: Upper limit of the tokens whose logits are in memory at once, such as 1024. null: all. The model needs a
            plain linear output layer, named by its ``get_output_embeddings``, and may not change its logits afterwards.

    Raises:
        ConfigError: the chunk is no positive whole number.
    """

    shifts_labels = True

    def __init__(self, *, ignore_index: int = -100, weights: str | None = None, chunk: int | None = None) -> None:
        super().__init__(problem="single_label", ignore_index=ignore_index, weights=weights, chunk=chunk)

    def _targets(self, labels: Tensor) -> Tensor:
        # The labels are shifted, not the logits: slicing those would copy the largest tensor of the step.
        return F.pad(labels[:, 1:], (0, 1), value=self.ignore_index)


class MaskedLM(_Adapter):
    """Cross entropy in nats, one label per position: batches with ``input_ids`` and ``labels``, both ``(B, T)``.

    For masked language models, for token classification, and for encoder-decoder models whose batches contain
    ``decoder_input_ids``.

    Args:
        ignore_index: Labels with this value, such as tokens that were not masked, are ignored and not counted.
        chunk: Upper limit of the tokens whose logits are in memory at once, as for ``causal_lm``. null: all.

    Raises:
        ConfigError: the chunk is no positive whole number.
    """

    def __init__(self, *, ignore_index: int = -100, chunk: int | None = None) -> None:
        super().__init__(problem="single_label", ignore_index=ignore_index, weights=None, chunk=chunk)


class SequenceClassification(_Adapter):
    """The loss of labels for whole samples: the sum of what transformers' heads for ``problem`` average.

    Args:
        problem: ``single_label``: cross entropy in nats of int64 labels ``(B,)``; -100 is not counted.
            ``regression``: squared error of ``(B,)`` or ``(B, values)``, counted in values.
            ``multi_label``: binary cross entropy of ``(B, classes)`` zeros and ones, counted in entries.
        weights: Name of the sample weights in the batch, of shape ``(B,)`` and at least 0: the loss is sum(w * l) /
            sum(w). The model does not get them.

    Raises:
        ConfigError: an unknown ``problem``.
    """

    def __init__(self, *, problem: str = "single_label", weights: str | None = None) -> None:
        if problem not in _PROBLEMS:
            raise ConfigError("loss.problem", problem, "no such problem", f"Use one of {', '.join(_PROBLEMS)}")
        super().__init__(problem=problem, ignore_index=-100, weights=weights)
