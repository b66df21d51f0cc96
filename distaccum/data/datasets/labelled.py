"""Texts with labels, from the user's own CSV or JSON-lines file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from distaccum.config.checks import require_fraction
from distaccum.data.collate import PadCollator, check_lengths
from distaccum.data.datasets.text import IGNORED
from distaccum.data.datasets.tokenizer import load_tokenizer, padding_id, train_tokenizer
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError, near_misses

_CSV = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_FEWEST = 3  # tokens: the two special tokens of a text, and one more


@dataclass(frozen=True, kw_only=True)
class LabelledText(DataSpec):
    """Samples ``{"input_ids": (T,), "attention_mask": (T,), "labels": ()}``, int64, and how they were made.

    Args:
        labels: the classes' names, sorted; a sample's label is its index among them.
        pad_id: the token that ``input_ids`` are padded with, to the longest of their micro-batch.
        tokenizer: a transformers tokenizer.
    """

    labels: tuple[str, ...]
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
) -> LabelledText:
    """Texts with labels, for ``loss=sequence_classification``.

    Args:
        path: a ``.csv``, ``.tsv`` or ``.jsonl`` file, in UTF-8; with a line of column names, or one JSON object a line.
        tokenizer: of a model, by its name or folder; None: one is trained on the texts.
        text: the column of the texts.
        label: the column of the labels, which may have any names.
        vocab_size: the most tokens of a tokenizer that is trained.
        max_length: the most tokens of a text; longer ones are truncated.
        held_out: the share of the texts to hold out, the same ones every time.
        pad_to_multiple_of: rounds the length of each batch up to a multiple of it.

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
    rows = _read(path, {"data.text": text, "data.label": label}, numbers=True, what="texts")
    texts, names = zip(*(row for _, row in rows), strict=True)
    labels = tuple(sorted(set(names)))
    if len(labels) == 1:
        raise ConfigError("data.label", label, f"is {labels[0]!r} on every line of {path}", "Give texts of two classes")
    order = np.random.default_rng(0).permutation(len(texts))
    cut = min(max(1, int(len(texts) * (1 - held_out))), len(texts) - 1)
    trained_on = [texts[i] for i in order[:cut]]
    known = load_tokenizer(tokenizer) if tokenizer else train_tokenizer(trained_on, vocab_size=vocab_size)
    ids = known([texts[i] for i in order], truncation=True, max_length=max_length)["input_ids"]
    samples = [_sample(tokens, labels.index(names[i])) for tokens, i in zip(ids, order, strict=True)]
    pad_id = padding_id(known)
    return LabelledText(
        train=samples[:cut],
        eval_dataset=samples[cut:],
        description=f"{path}: {cut:,} texts to train on, {len(texts) - cut:,} held out; {_classes(labels)}",
        collate=PadCollator({"input_ids": pad_id, "attention_mask": 0}, pad_to_multiple_of=pad_to_multiple_of),
        ignored={"labels": IGNORED},
        lengths=np.array([len(tokens) for tokens in ids[:cut]], dtype=np.int64),
        labels=labels,
        pad_id=pad_id,
        tokenizer=known,
    )


def _sample(tokens: list[int], label: int) -> dict[str, torch.Tensor]:
    ids = torch.tensor(tokens)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(label)}


def _classes(labels: tuple[str, ...], shown: int = 5) -> str:
    more = ", ..." if len(labels) > shown else ""
    return f"{len(labels)} classes ({', '.join(labels[:shown])}{more})"


def _read(path: str, columns: Mapping[str, str | None], *, numbers: bool, what: str) -> list[tuple[int, list[str]]]:
    """The line of each row, and its texts by column: empty ones of a column that is None.

    Args:
        path: of the file.
        columns: their names, by the settings that state them.
        numbers: whether numbers are texts, too, and blanks are none.
        what: a row is.
    """
    if not Path(path).is_file():
        raise ConfigError("data.path", path, "no such file", "Give the path of a CSV or JSON-lines file")
    found = []
    for line, row in read_rows(path):
        texts = []
        for key, column in columns.items():
            if column is not None and column not in row:
                problem = f"no such column: line {line} of {path} has {', '.join(row)}{near_misses(column, row)}"
                raise ConfigError(key, column, problem, "Name one that is there on every line")
            value = "" if column is None else row[column]
            is_text = isinstance(value, str | int | float if numbers else str)
            if column is not None and not (is_text and (str(value).strip() if numbers else value)):
                raise unreadable(path, line, f"there is no text{' or number' if numbers else ''} in column {column!r}")
            texts.append(str(value))
        found.append((line, texts))
    if len(found) < 2:  # noqa: PLR2004  one to train on, one to hold out
        problem = f"holds {len(found)} {what}, and two are the least"
        raise ConfigError("data.path", path, problem, "Give a file with more of them")
    return found


def read_rows(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each row's line number (the last, if it spans several lines), and its values by column."""
    suffix = Path(path).suffix.lower()
    if suffix not in (*_CSV, *_JSON_LINES):
        remedy = f"Give a file whose name ends in one of {', '.join((*_CSV, *_JSON_LINES))}"
        raise ConfigError("data.path", path, "neither CSV nor JSON lines by its name", remedy)
    # utf-8-sig: spreadsheets write a byte order mark, which would become part of the first column's name
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from _csv_rows(path, file, _CSV[suffix]) if suffix in _CSV else _json_rows(path, file)
        except UnicodeDecodeError as error:
            raise ConfigError("data.path", path, f"not UTF-8 ({error})", "Save it as UTF-8") from error


def _csv_rows(path: str, file: TextIO, delimiter: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.DictReader(file, delimiter=delimiter, strict=True)  # strict: else a stray quote swallows lines silently
    try:
        for row in rows:
            if None in row:
                names = ", ".join(rows.fieldnames or ())
                raise unreadable(path, rows.line_num, f"it has more fields than the columns {names}")
            yield rows.line_num, row
    except csv.Error as error:
        raise unreadable(path, rows.reader.line_num, str(error)) from error


def _json_rows(path: str, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise unreadable(path, number, str(error)) from error
        if not isinstance(row, dict):
            raise unreadable(path, number, "it is no JSON object")
        yield number, row


def unreadable(path: str, line: int, problem: str) -> ConfigError:
    """The error of a line that cannot be read."""
    return ConfigError("data.path", path, f"line {line}: {problem}", "Mend that line, or take it out")


# Prompts with completions, or plain texts, from the user's own CSV or JSON-lines file, for language models.


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
    rows = _read(path, {"data.prompt": prompt, "data.completion": completion}, numbers=False, what="samples")
    samples = [_prompt_sample(known, path, line, *texts, max_length=max_length) for line, texts in rows]
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


def _prompt_sample(
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
