"""Texts with labels, from the user's own CSV, JSON-lines or Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distaccum.config.checks import require_fraction
from distaccum.data.collate import PadCollator, check_lengths
from distaccum.data.datasets.text import IGNORED
from distaccum.data.datasets.tokenizer import load_tokenizer, padding_id, train_tokenizer
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError
from distaccum.program import ANSWERS, TARGETS, WEIGHTS, load

_FEWEST = 3  # tokens: the two special tokens of a text, and one more


@dataclass(frozen=True, kw_only=True)
class LabelledText(DataSpec):
    """Samples ``{"input_ids": (T,), "attention_mask": (T,), "labels": ()}``, int64, and how they were made.

    ``labels`` of several classes a sample are ``(classes,)``, and like those of a regression fp32.

    Args:
        pad_id: the token that ``input_ids`` are padded with, to the longest of their micro-batch.
        tokenizer: a transformers tokenizer.
    """

    pad_id: int
    tokenizer: Any

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return len(self.tokenizer)


def labelled(
    *,
    path: str,
    tokenizer: str | None = None,
    text: str = "text",
    label: str = "label",
    vocab_size: int = 2000,
    max_length: int = 256,
    held_out: float = 0.1,
    pad_to_multiple_of: int | None = None,
    weights: str | None = None,
    classes: Sequence[str] = (),
    problem: str = "single_label",
) -> LabelledText:
    """Texts with labels, for ``loss=sequence_classification``.

    Args:
        path: A ``.csv``, ``.tsv`` or ``.jsonl`` file in UTF-8, with a line of column names or one JSON object a line;
            or a ``.parquet`` file.
        tokenizer: A model's tokenizer, by name or folder. null: one is trained on the texts.
        text: Column of the texts.
        label: Column of the labels, which may have any names.
        vocab_size: Upper limit of the tokens of a tokenizer that is trained.
        max_length: Upper limit of a text in tokens; longer texts are truncated.
        held_out: Share of the texts to hold out, the same ones every time.
        pad_to_multiple_of: Round the length of each batch up to a multiple of this, such as 8.
        weights: Sampling weights: a column, or a file (``.npy``, or a number a line), see ``DataSpec.weights``.
        classes: Labels in the order of their numbers, such as ``[negative,positive]``. Empty: sorted by name.
        problem: Kind of labels: ``single_label``; ``multi_label``, lists of names such as ``["a", "b"]`` or ``a, b``;
            ``regression``, numbers.

    Raises:
        ConfigError: no such file or column, a line that cannot be read, too little to train on, a setting out of
            range, a tokenizer that cannot be loaded; or transformers is not installed.
    """
    require_fraction("data.held_out", held_out)
    check_lengths(None, pad_to_multiple_of, key="data.")
    if max_length < _FEWEST:
        raise ConfigError("data.max_length", max_length, f"must be at least {_FEWEST}", "Give the tokens of a text")
    if text == label:
        raise ConfigError("data.label", label, "is the column of the texts too", "Name two columns")
    texts, targets, names = load(TARGETS)(path, text, label, classes, problem)
    order = np.random.default_rng(0).permutation(len(texts))
    cut = min(max(1, int(len(texts) * (1 - held_out))), len(texts) - 1)
    trained_on = [texts[i] for i in order[:cut]]
    known = load_tokenizer(tokenizer) if tokenizer else train_tokenizer(trained_on, vocab_size=vocab_size)
    ids = known([texts[i] for i in order], truncation=True, max_length=max_length)["input_ids"]
    samples = [_sample(tokens, targets[i]) for tokens, i in zip(ids, order, strict=True)]
    pad_id = padding_id(known)
    return LabelledText(
        train=samples[:cut],
        eval_dataset=samples[cut:],
        description=f"{path}: {cut:,} texts to train on, {len(texts) - cut:,} held out; {_shown(names)}",
        collate=PadCollator(
            {"input_ids": pad_id, "attention_mask": 0, "labels": None}, pad_to_multiple_of=pad_to_multiple_of
        ),
        ignored={"labels": IGNORED} if problem == "single_label" else None,
        weights=None if weights is None else load(WEIGHTS)(path, weights, len(samples))[order[:cut]],
        lengths=np.array([len(tokens) for tokens in ids[:cut]], dtype=np.int64),
        classes=names,
        pad_id=pad_id,
        tokenizer=known,
    )


def _sample(tokens: list[int], label: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.tensor(tokens)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label}


def _shown(names: tuple[str, ...], shown: int = 5) -> str:
    if not names:
        return "labels are numbers"
    return f"{len(names)} classes ({', '.join(names[:shown])}{', ...' if len(names) > shown else ''})"


# Prompts with completions, chats or plain texts, from the user's own file, for language models.


def prompts(
    *,
    path: str,
    tokenizer: str,
    prompt: str | None = "prompt",
    completion: str | None = "completion",
    template: str | None = None,
    messages: str | None = None,
    chat_template: str | None = None,
    max_length: int = 1024,
    held_out: float = 0.1,
    pad_to_multiple_of: int | None = None,
    weights: str | None = None,
) -> DataSpec:
    """Samples ``{"input_ids": (T,), "attention_mask": (T,), "labels": (T,)}``, int64; a random share is held out.

    Answers alone are learned: completions, or what an assistant says. Other tokens are read, and their labels are
    -100. Labels stand where their tokens do, as ``loss=causal_lm`` takes them.

    Args:
        path: A ``.csv`` or ``.tsv`` file with a line of column names, or a ``.jsonl`` file of one JSON object a line,
            in UTF-8; or a ``.parquet`` file.
        tokenizer: A model's tokenizer, by name or folder.
        prompt: Column of the prompts. null: no prompts, every token of a completion but its first is learned.
        completion: Column of the completions or texts, which end with the tokenizer's end token. Both may be lists of
            messages. With a template: the column with which the answer begins; null: all of it is learned.
        template: Text of a sample, with columns in braces: ``"Question: {question}\\nAnswer: {answer}"``.
        messages: Instead, the column of chats: lists of messages, each with ``role`` and ``content``, written in the
            tokenizer's chat template. Turns of the role ``assistant`` are learned, with the mark that ends them, except
            those with ``"weight": 0``.
        chat_template: A file with a chat template in Jinja that replaces the tokenizer's. If it marks answers by ``{%
            generation %}``, these are learned.
        max_length: Upper limit of a sample in tokens; longer samples are truncated at their end.
        held_out: Share of the samples to hold out, the same ones every time.
        pad_to_multiple_of: Round the length of each batch up to a multiple of this, such as 8.
        weights: Sampling weights: a column, or a file (``.npy``, or a number a line), see ``DataSpec.weights``.

    Raises:
        ConfigError: no such file, column or tokenizer, a line that cannot be read, a sample without an answer within
            ``max_length``, a tokenizer without a chat template, or a setting out of range.
    """
    require_fraction("data.held_out", held_out)
    check_lengths(None, pad_to_multiple_of, key="data.")
    if max_length < 2:  # noqa: PLR2004  a token, and the one before it
        raise ConfigError("data.max_length", max_length, "must be at least 2", "Give the tokens of a sample")
    known = load_tokenizer(tokenizer)
    columns = {"prompt": prompt, "completion": completion, "template": template, "messages": messages}
    samples = load(ANSWERS)(known, path, **columns, chat_template=chat_template, max_length=max_length)
    order = np.random.default_rng(0).permutation(len(samples))
    cut = min(max(1, int(len(samples) * (1 - held_out))), len(samples) - 1)
    train, rest = ([samples[i] for i in part] for part in (order[:cut], order[cut:]))
    return DataSpec(
        train=train,
        eval_dataset=rest,
        description=f"{path}: {len(train):,} samples to train on, {len(rest):,} held out",
        collate=PadCollator(
            {"input_ids": padding_id(known), "attention_mask": 0, "labels": IGNORED},
            pad_to_multiple_of=pad_to_multiple_of,
        ),
        ignored={"labels": IGNORED},
        weights=None if weights is None else load(WEIGHTS)(path, weights, len(samples))[order[:cut]],
        lengths=np.array([len(sample["input_ids"]) for sample in train], dtype=np.int64),
        tokenizer=known,
    )
