"""Samples of language models whose loss is over answers alone: prompts with completions, templates, and chats.

A sample's label is its token where that belongs to an answer, and is ignored elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import torch

from distaccum.config.checks import require
from distaccum.data.datasets.text import IGNORED
from distaccum.errors import ConfigError, shorten
from distaccum.tools.rows import CHAT, EITHER, PLAIN, read, unreadable

Tokens = tuple[list[int], list[bool]]
"""The ids of a sample's tokens, and whether each belongs to an answer."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ESCAPED = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
_REMEDY = r"Write columns in braces, as in 'Question: {question}\nAnswer: {answer}'; {{ is a brace"


def samples(
    tokenizer: Any,
    path: str,
    *,
    prompt: str | None,
    completion: str | None,
    template: str | None,
    messages: str | None,
    chat_template: str | None,
    max_length: int,
) -> list[dict[str, torch.Tensor]]:
    """Samples ``{"input_ids": (T,), "attention_mask": (T,), "labels": (T,)}``, int64, of the rows of a file.

    Arguments are those of :func:`distaccum.data.datasets.labelled.prompts`, with the tokenizer itself.

    Raises:
        ConfigError: no such file or column, a row without answers, or whose first answer ``max_length`` cuts off; or a
            tokenizer that cannot tell answers from the rest.
    """
    columns, holds = _columns(prompt, completion, template, messages)
    rows = read(path, columns, holds, "samples")
    if chat_template is not None:
        if template is not None or isinstance(rows[0][1][-1], str):
            problem, remedy = "writes messages, and the data are texts", "Name the column of messages: data.messages"
            raise ConfigError("data.chat_template", chat_template, problem, remedy)
        tokenizer.chat_template = _text_of(chat_template)
    if template is not None:  # a shell and YAML leave escapes as they are
        template = re.sub(r"\\[nt\\]", lambda found: _ESCAPED[found[0]], template)
    found = []
    for line, values in rows:
        try:
            if template is not None:
                ids, learned = _filled(tokenizer, template, completion, values)
            elif all(isinstance(value, str) for value in values):
                ids, learned = _pair(tokenizer, *values)
            else:
                ids, learned = _chat(tokenizer, values)
        except ConfigError:
            raise
        except ValueError as error:
            raise unreadable(path, line, str(error).rstrip(".")) from error
        found.append(_sample(path, line, ids, learned, max_length))
    return found


def _columns(
    prompt: str | None, completion: str | None, template: str | None, messages: str | None
) -> tuple[list[tuple[str, str | None]], str]:
    """The columns to read, each with the setting that names it, and what they hold."""
    if messages is not None:
        require(template is None, "data.template", template, f"and data.messages={messages} too", "State one of them")
        return [("data.messages", messages)], CHAT
    if template is None:
        remedy = "Name the column of completions, or of texts"
        require(completion is not None, "data.completion", "null", "there is nothing to learn", remedy)
        return [("data.prompt", prompt), ("data.completion", completion)], EITHER
    try:
        fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ConfigError("data.template", template, str(error), _REMEDY) from error
    sound = bool(fields) and all(name and not spec and not conversion for name, spec, conversion in fields)
    require(sound, "data.template", template, "is no text with columns in braces", _REMEDY)
    named = [name for name, *_ in fields]
    problem = f"data.template has {', '.join(f'{{{name}}}' for name in named)}"
    remedy = "Name the one with which answers begin, which stands there once, or null: all of a text is learned"
    require(completion is None or named.count(completion) == 1, "data.completion", completion, problem, remedy)
    return [("data.template", name) for name in named], PLAIN


def _sample(path: str, line: int, ids: list[int], learned: list[bool], max_length: int) -> dict[str, torch.Tensor]:
    if not any(learned[1:max_length]):  # nothing predicts the first token
        before = learned.index(True) if any(learned) else len(ids)
        problem = f"its prompt has {before} tokens, and data.max_length={max_length} leaves none"
        if before < max_length - 1:
            problem = "it has no token of an answer behind another one, and such are learned"
        raise unreadable(path, line, problem, "Raise data.max_length, or take that line out")
    ids = ids[:max_length]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.ones(len(ids), dtype=torch.int64),
        "labels": torch.tensor([token if own else IGNORED for token, own in zip(ids, learned, strict=False)]),
    }


def _pair(tokenizer: Any, prompt: str, completion: str) -> Tokens:
    """A prompt and its completion, which are made tokens one without the other."""
    before = _mark(tokenizer.bos_token_id) + (_ids(tokenizer, prompt) if prompt else [])
    learned = _ids(tokenizer, completion) + _mark(tokenizer.eos_token_id)
    return before + learned, [False] * len(before) + [True] * len(learned)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _mark(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _filled(tokenizer: Any, template: str, completion: str | None, values: Sequence[Any]) -> Tokens:
    """A template's text as a whole; the answer begins where its column stands."""
    text, begin, left = "", 0, iter(values)
    for literal, name, *_ in Formatter().parse(template):
        text += literal
        if name is not None:
            begin = len(text) if name == completion else begin
            text += str(next(left))
    ids, learned = _within(tokenizer, text, [(begin, len(text))])
    before, after = _mark(tokenizer.bos_token_id), _mark(tokenizer.eos_token_id)
    return before + ids + after, [completion is None] * len(before) + learned + [True] * len(after)


def _within(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> Tokens:
    """A text's tokens, and whether each has characters in one of these spans."""
    if not tokenizer.is_fast:
        problem = "does not say which characters its tokens are, by which answers are found"
        raise ConfigError("data.tokenizer", tokenizer.name_or_path, problem, "Name one with a tokenizer.json")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [any(first < end and last > begin for begin, end in spans) for first, last in found["offset_mapping"]]
    return found["input_ids"], learned


# Chats: which of a template's characters are an assistant's, by what the template writes of a part of the messages.


def _chat(tokenizer: Any, values: Sequence[Any]) -> Tokens:
    """The messages of all ``values`` in the tokenizer's chat template; the last value's assistant is learned."""
    if not tokenizer.chat_template:
        problem = "has no chat template, in which messages are written"
        remedy = "Name the tokenizer of a chat model, or give a template: data.chat_template=FILE (in Jinja)"
        raise ConfigError("data.tokenizer", tokenizer.name_or_path, problem, remedy)
    messages = [_message(one, i) for i, one in enumerate((one for value in values for one in value), 1)]
    first = len(messages) - len(values[-1])
    turns = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    learned = [i for i in turns if i >= first and messages[i].get("weight", 1)]
    if not learned:
        raise ValueError("there is no message of the role 'assistant' to learn")
    text = _rendered(tokenizer, messages)
    for i, one in enumerate(messages, 1):
        if isinstance(one["content"], list) and str(one["content"]) in text:
            problem = "its content is a list, which the chat template writes as Python shows it"
            raise ValueError(f"message {i}: {problem}: give one text, or a template that takes lists")
    if learned == turns and _MARKED.search(tokenizer.get_chat_template()):
        return _within(tokenizer, *_marked(tokenizer, messages))
    return _within(tokenizer, text, list(_turns(tokenizer, messages, learned, text)))


def _marked(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[str, Sequence[tuple[int, int]]]:
    """What the template writes, and where its ``generation`` blocks begin and end.

    Transformers' own mask finds no end of a block whose last character is in no token, as blanks of many tokenizers.
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415  for chats alone

    options = {"chat_template": tokenizer.get_chat_template(), **tokenizer.special_tokens_map}
    there = [{key: value for key, value in one.items() if value is not None} for one in messages]
    rendered: Any = render_jinja_template([there], return_assistant_tokens_mask=True, **options)
    (text,), (spans,) = rendered
    return text, spans


def _message(one: Any, number: int) -> dict[str, Any]:
    """A message without what a column of Parquet has for other messages alone."""
    known = one if isinstance(one, Mapping) else {}
    if not known.get("role") or (known.get("content") is None and not known.get("tool_calls")):
        raise ValueError(f"message {number} is no mapping with role and content: {shorten(known) or repr(one)}")
    return {key: value for key, value in known.items() if value is not None or key == "content"}


def _turns(
    tokenizer: Any, messages: list[dict[str, Any]], learned: Sequence[int], text: str
) -> Iterator[tuple[int, int]]:
    """Where each turn to learn begins and ends in the ``text`` of all messages, with the mark that ends it."""
    reached = 0
    for i in learned:
        after = _rendered(tokenizer, messages[: i + 1])
        before = _before(tokenizer, messages[:i], after)
        end = len(after)
        if not text.startswith(after):  # the template leaves a part of earlier turns out, as thoughts
            said = str(messages[i].get("content") or "").strip()
            _, there, mark = after.rpartition(said) if said else ("", "", "")
            end = text.find(said + mark, len(before)) + len(said + mark) if there else 0
        if not (text.startswith(before) and reached <= len(before) < end):
            problem = f"what the chat template writes does not tell where message {i + 1} begins or ends"
            raise ValueError(f"{problem}: mark answers in one of your own (data.chat_template) by {{% generation %}}")
        yield len(before), end
        reached = end


def _before(tokenizer: Any, messages: list[dict[str, Any]], after: str) -> str:
    """What stands before the turn that follows ``messages`` and ends ``after``, the text with it."""
    if messages:
        return str(_rendered(tokenizer, messages, add_generation_prompt=True))
    asked = [{"role": "user", "content": ""}]  # nothing is written of no messages: a turn's beginning is that of others
    beginning = _rendered(tokenizer, asked, add_generation_prompt=True)[len(_rendered(tokenizer, asked)) :]
    first, there, _ = after.partition(beginning) if beginning else ("", "", "")
    return f"{first}{there}" if there else after


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    from jinja2 import TemplateError  # noqa: PLC0415  as transformers needs it for chats alone

    try:
        return tokenizer.apply_chat_template(messages, **{"tokenize": False} | options)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses its messages: {error}") from error


def _text_of(path: str) -> str:
    if not Path(path).is_file():
        raise ConfigError("data.chat_template", path, "no such file", "Give the path of a chat template in Jinja")
    return Path(path).read_text(encoding="utf-8")
