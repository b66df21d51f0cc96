"""Prompts with completions, or plain texts, from the user's own CSV or JSON-lines file, for language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from distaccum.config.checks import require_fraction
from distaccum.data.collate import PadCollator, check_lengths
from distaccum.data.datasets.blocks import IGNORED
from distaccum.data.datasets.labelled import labelled_text, read_rows, unreadable
from distaccum.data.datasets.tokenizer import load_tokenizer, padding_id
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError, near_misses


def prompts(
    *,
    path: str,
    tokenizer: str,
    prompt: str | None = "prompt",
    completion: str = "completion",
    max_length: int = 1024,
    held_out: float = 0.1,
    pad_to_multiple_of: int | None = None,
) -> DataSpec:
    """Samples ``{"input_ids": (T,), "attention_mask": (T,), "labels": (T,)}``, int64; a random share is held out.

    A completion ends with the tokenizer's end token. The tokens of the prompt are read and not learned: their labels
    are -100. Labels stand where their tokens do, as ``loss=causal_lm`` takes them.

    Args:
        path: a ``.csv`` or ``.tsv`` file with a line of column names, or a ``.jsonl`` file of one JSON object a line;
            in UTF-8.
        tokenizer: of a model, by its name or folder.
        prompt: the column of the prompts; None: there are none, and every token of a completion but its first is
            learned.
        completion: the column of the completions, or of the texts.
        max_length: the most tokens of both together; longer completions are truncated.
        held_out: the share of the samples to hold out, the same ones every time.
        pad_to_multiple_of: rounds the length of each batch up to a multiple of it.

    Raises:
        ConfigError: no such file, column or tokenizer, a line that cannot be read, a prompt that leaves no room for its
            completion, or a setting out of range.
    """
    require_fraction("data.held_out", held_out)
    check_lengths(None, pad_to_multiple_of, key="data.")
    if max_length < 2:  # noqa: PLR2004  a token, and the one before it
        raise ConfigError("data.max_length", max_length, "must be at least 2", "Give the tokens of a sample")
    known = load_tokenizer(tokenizer)
    rows = _read(path, prompt=prompt, completion=completion)
    samples = [_sample(known, path, *row, max_length=max_length) for row in rows]
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
        lengths=np.array([len(sample["input_ids"]) for sample in train], dtype=np.int64),
        tokenizer=known,
    )


def labelled(
    *,
    path: str,
    tokenizer: str | None = None,
    text: str = "text",
    label: str = "label",
    max_length: int = 256,
    held_out: float = 0.1,
    pad_to_multiple_of: int | None = None,
) -> DataSpec:
    """Texts with labels: the samples of :func:`labelled_text`, for ``loss=sequence_classification``.

    Args:
        path: a ``.csv``, ``.tsv`` or ``.jsonl`` file, in UTF-8.
        tokenizer: of a model, by its name or folder; None: one is trained on the texts.
        text: the column of the texts.
        label: the column of the labels, which may have any names.
        max_length: the most tokens of a text; longer ones are truncated.
        held_out: the share of the texts to hold out, the same ones every time.
        pad_to_multiple_of: rounds the length of each batch up to a multiple of it.

    Raises:
        ConfigError: as :func:`labelled_text`.
    """
    return labelled_text(
        path=path,
        text=text,
        label=label,
        tokenizer=tokenizer,
        max_length=max_length,
        held_out=held_out,
        pad_to_multiple_of=pad_to_multiple_of,
    ).source


def _read(path: str, *, prompt: str | None, completion: str) -> list[tuple[int, str, str]]:
    """The line, the prompt and the completion of each sample."""
    if not Path(path).is_file():
        raise ConfigError("data.path", path, "no such file", "Give the path of a CSV or JSON-lines file")
    columns = {"data.prompt": prompt, "data.completion": completion}
    found = []
    for line, row in read_rows(path):
        texts = []
        for key, column in columns.items():
            if column is not None and column not in row:
                problem = f"no such column: line {line} of {path} has {', '.join(row)}{near_misses(column, row)}"
                raise ConfigError(key, column, problem, "Name one that is there on every line")
            value = "" if column is None else row[column]
            if not isinstance(value, str) or not (value or column is None):
                raise unreadable(path, line, f"there is no text in column {column!r}")
            texts.append(value)
        found.append((line, texts[0], texts[1]))
    if len(found) < 2:  # noqa: PLR2004  one to train on, one to hold out
        problem = f"holds {len(found)} samples, and two are the least"
        raise ConfigError("data.path", path, problem, "Give a file with more of them")
    return found


def _sample(
    tokenizer: Any, path: str, line: int, prompt: str, completion: str, *, max_length: int
) -> dict[str, torch.Tensor]:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    before = begin + (tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else [])
    learned = tokenizer(completion, add_special_tokens=False)["input_ids"] + end
    ids = (before + learned)[:max_length]
    if len(ids) <= max(1, len(before)):
        problem = f"line {line}: its prompt has {len(before)} tokens, and data.max_length={max_length} leaves none"
        raise ConfigError("data.path", path, problem, "Raise data.max_length, or take that line out")
    labels = [IGNORED] * len(before) + ids[len(before) :]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.ones(len(ids), dtype=torch.int64),
        "labels": torch.tensor(labels),
    }
