"""Samples of which answers alone are learned: their characters and what is learned of them, written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distaccum.data.datasets.labelled import prompts
from distaccum.errors import ConfigError
from tests.support.optional import needs
from tests.support.tokens import CHARACTERS, CHAT, characters_of, save_tokenizer, say

pytestmark = needs("transformers")

PREFILLED = CHAT.replace("{{ m.content }}", "{{ '~' if loop.last and m.role == 'assistant' }}{{ m.content }}")
MARKED = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }};{% endgeneration %}"
MARKED += "{% else %}{{ m.content }},{% endif %}{% endfor %}"
PICKY = "{{ raise_exception('no roles') }}"
LOUD = CHAT.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")
TURNS = say("u:Hi", "a:Yo", "u:And", "a:Bye")
PAIR = {"prompt": "Hi ", "completion": "Yo"}
QUESTION = {"q": "one", "a": 1}
CHAT_ROW, CHATS, WHOLE = {"messages": TURNS}, {"messages": "messages"}, {"completion": None}

# Rows; what is stated; the sample, "%" and "$" its begin and end; and under each "^" what is learned.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "chat": (
        CHAT_ROW,
        CHATS,
        "[u]Hi;[a]Yo;[u]And;[a]Bye;",
        "         ^^^          ^^^^",
    ),
    "chat of other columns and roles": (
        {"said": [*say("s:Be", "u:Hi", "a:Yo"), {"role": "tool", "content": "a:no", "name": None}]},
        {"messages": "said"},
        "[s]Be;[u]Hi;[a]Yo;[t]a:no;",
        "               ^^^        ",
    ),
    "chat with a turn that counts nothing": (
        {"messages": [*TURNS[:1], TURNS[1] | {"weight": 0}, *TURNS[2:]]},
        CHATS,
        "[u]Hi;[a]Yo;[u]And;[a]Bye;",
        "                      ^^^^",
    ),
    "chat whose template leaves parts of earlier turns out": (
        CHAT_ROW,
        CHATS | {"chat_template": PREFILLED},
        "[u]Hi;[a]Yo;[u]And;[a]~Bye;",
        "         ^^^          ^^^^^",
    ),
    "chat whose template marks answers": (
        CHAT_ROW,
        CHATS | {"chat_template": MARKED},
        "Hi,Yo;And,Bye;",
        "   ^^^    ^^^^",
    ),
    "chat that is cut": (
        CHAT_ROW,
        CHATS | {"max_length": 11},
        "[u]Hi;[a]Yo",
        "         ^^",
    ),
    "prompt and completion": (PAIR, {}, "%Hi Yo$", "    ^^^"),
    "completions alone": (PAIR, {"prompt": None, "max_length": 2}, "%Y", " ^"),
    "prompt and completion as messages": (
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {},
        "[u]Hi;[a]Yo;[u]And;[a]Bye;",
        "                      ^^^^",
    ),
    "template": (
        QUESTION,
        {"template": r"Q: {q}\nA: {a}!", "completion": "a"},
        "%Q: one\nA: 1!$",
        "           ^^^",
    ),
    "template that is learned whole": (
        QUESTION,
        {"template": r"{{{q}}} \\n", "completion": None},
        r"%{one} \n$",
        "^^^^^^^^^^",
    ),
}


NO_ROLE = "line 1: message 1 is no mapping with role and content: "
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (CHAT_ROW, CHATS | {"chat_template": "/no/such"}, "data.chat_template=/no/such: no such file"),
    (PAIR, {"chat_template": CHAT}, "the data are texts. Name the column of messages: data.messages"),
    ({"messages": say("u:Hi")}, CHATS, "line 1: there is no message of the role 'assistant' to learn"),
    ({"messages": [{"from": "gpt", "value": "Hi"}]}, CHATS, f"{NO_ROLE}from, value"),
    ({"messages": [{"role": "user", "content": None}]}, CHATS, f"{NO_ROLE}role, content"),
    ({"messages": ["Hi"]}, CHATS, f"{NO_ROLE}'Hi'"),
    ({"messages": "Hi"}, CHATS, "line 1: there is no list of messages in column 'messages'"),
    ({"prompt": "Hi", "completion": TURNS}, {}, f"{NO_ROLE}'H'"),
    (CHAT_ROW, CHATS | {"chat_template": LOUD}, "line 1: the chat template writes message 2 otherwise when others"),
    (CHAT_ROW, CHATS | {"chat_template": PICKY}, "line 1: the chat template refuses its messages: no roles"),
    (CHAT_ROW, CHATS | {"max_length": 9}, "line 1: its prompt has 9 tokens, and data.max_length=9 leaves none"),
    (CHAT_ROW, CHATS | {"template": "{x}"}, "data.template={x}: and data.messages=messages too"),
    (QUESTION, {"template": "Q: {q}"}, "data.completion=completion: data.template has {q}. Name the one"),
    (QUESTION, {"template": "{q} {a} {a}", "completion": "a"}, "data.completion=a: data.template has {q}, {a}, {a}"),
    (QUESTION, WHOLE | {"template": "{q} {b}"}, "data.template=b: no such column: line 1 of"),
    (QUESTION, WHOLE | {"template": "{q"}, "data.template={q: expected"),
    (QUESTION, WHOLE | {"template": "{}"}, "data.template={}: is no text with columns in braces"),
    (QUESTION, WHOLE | {"template": "A: a"}, "data.template=A: a: is no text with columns in braces"),
    (PAIR, {"completion": "answer"}, "data.completion=answer: no such column"),
    (PAIR, {"max_length": 4}, "line 1: its prompt has 4 tokens, and data.max_length=4 leaves none"),
    (PAIR, WHOLE, "data.completion=null: there is nothing to learn"),
]


def _data(folder: Path, row: dict[str, Any], stated: dict[str, Any]) -> Any:
    file = folder / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2)
    if "{" in (template := stated.get("chat_template", "")):
        (folder / "chat.jinja").write_text(template)
        stated = stated | {"chat_template": str(folder / "chat.jinja")}
    return prompts(path=str(file), tokenizer=save_tokenizer(folder / "model"), **stated)


@pytest.mark.parametrize("name", CASES)
def test_answers_alone_are_learned(tmp_path: Path, name: str) -> None:
    row, stated, text, learned = CASES[name]
    data = _data(tmp_path, row, stated)
    sample = data.train[0]
    assert characters_of(sample["input_ids"]) == text
    labels = (one if mark == "^" else "_" for one, mark in zip(text, learned, strict=True))
    assert characters_of(sample["labels"]) == "".join(labels)
    assert sample["attention_mask"].tolist() == [1] * len(text)
    assert data.lengths.tolist() == [len(text)]
    assert data.tokenizer.encode("Hi") == [CHARACTERS.index("H"), CHARACTERS.index("i")]  # for texts of evaluations


@pytest.mark.parametrize(("row", "stated", "message"), REFUSED)
def test_rows_without_answers_are_refused_in_one_line(
    tmp_path: Path, row: dict[str, Any], stated: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        _data(tmp_path, row, stated)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_chat_template_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(CHAT_ROW)}\n" * 2)
    bare = save_tokenizer(tmp_path / "bare", chat_template=None)
    with pytest.raises(ConfigError, match=r"data.tokenizer=.* has no chat template.* data.chat_template=FILE"):
        prompts(path=str(tmp_path / "rows.jsonl"), tokenizer=bare, messages="messages")
