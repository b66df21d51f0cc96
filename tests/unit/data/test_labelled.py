"""Rows of files become samples: texts with labels, and prompts and chats of which answers alone are learned."""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distaccum.data.datasets.labelled import LabelledText, labelled, prompts
from distaccum.errors import ConfigError
from tests.support.optional import Library, needs
from tests.support.tokens import CHARACTERS, CHAT, characters_of, save_tokenizer, say

pytestmark = needs("transformers")
pyarrow, parquet = Library("pyarrow"), Library("pyarrow.parquet")


TEXTS = [("A fine lamp, really", "good"), ('It says "no"\non two lines', "bad"), ("Smörgåsbord 🍰", "good")]
ROWS = [(f"{text} {i}", label) for i in range(7) for text, label in TEXTS]
DIGEST = """
import hashlib, sys
from distaccum.data.datasets.labelled import labelled
data = labelled(path=sys.argv[1])
samples = [sample["input_ids"].tolist() for sample in [*data.train, *data.eval_dataset]]
print(hashlib.sha256(repr((sorted(data.tokenizer.get_vocab().items()), samples)).encode()).hexdigest())
"""


def _csv(path: Path) -> str:
    quoted = (f'"{text.replace(chr(34), chr(34) * 2)}",{label}' for text, label in ROWS)
    path.write_text("text,label\n" + "\n".join(quoted) + "\n", encoding="utf-8-sig")
    return str(path)


def _json_lines(path: Path) -> str:
    path.write_text("\n\n".join(json.dumps({"text": text, "label": label, "id": 3}) for text, label in ROWS))
    return str(path)


def _texts(data: LabelledText) -> list[tuple[str, str]]:
    samples = [*data.train, *data.eval_dataset]  # type: ignore[misc]
    read = [data.tokenizer.decode(sample["input_ids"], skip_special_tokens=True) for sample in samples]
    return [(text, data.classes[sample["labels"]]) for text, sample in zip(read, samples, strict=True)]


def _parquet(path: Path) -> str:
    rows = [{"text": text, "label": label, "id": 3} for text, label in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    return str(path)


@pytest.mark.parametrize(("suffix", "write"), [(".csv", _csv), (".jsonl", _json_lines), (".parquet", _parquet)])
def test_a_file_becomes_samples(tmp_path: Path, suffix: str, write: Callable[[Path], str]) -> None:
    data = labelled(path=write(tmp_path / f"reviews{suffix}"), held_out=0.2)
    assert data.classes == ("bad", "good")
    assert (len(data.train), len(data.eval_dataset)) == (16, 5)
    assert sorted(_texts(data)) == sorted(ROWS)
    assert _texts(data) != ROWS  # held out at random
    assert data.lengths is not None
    assert data.lengths.tolist() == [len(sample["input_ids"]) for sample in data.train]
    assert data.lengths.dtype == np.int64
    assert "16 texts to train on, 5 held out; 2 classes (bad, good)" in data.description
    assert max(int(sample["input_ids"].max()) for sample in data.train) < data.vocab_size <= 2000


def test_samples_are_padded_where_they_meet(tmp_path: Path) -> None:
    data = labelled(path=_csv(tmp_path / "reviews.csv"), max_length=12)
    assert data.collate is not None
    collate = pickle.loads(pickle.dumps(data.collate))  # noqa: S301  written a moment ago
    batch = collate([data.train[i] for i in range(8)])
    lengths = batch["attention_mask"].sum(1)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (8, int(lengths.max()))
    assert int(lengths.max()) <= 12
    assert torch.equal(batch["input_ids"] == data.pad_id, batch["attention_mask"] == 0)
    assert batch["labels"].shape == (8,)


@pytest.mark.slow
def test_every_process_makes_the_same_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _csv(tmp_path / "reviews.csv")
    command = [sys.executable, "-c", DIGEST, path]
    other = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    monkeypatch.setattr("sys.argv", ["", path])
    exec(DIGEST, {})  # noqa: S102  what the other process runs
    assert capsys.readouterr().out == other


def test_a_saved_tokenizer_can_be_named(tmp_path: Path) -> None:
    path = _csv(tmp_path / "reviews.csv")
    trained = labelled(path=path, vocab_size=300)
    trained.tokenizer.save_pretrained(tmp_path / "saved")
    again = labelled(path=path, tokenizer=str(tmp_path / "saved"))
    assert _texts(again) == _texts(trained)
    assert (again.vocab_size, again.pad_id) == (trained.vocab_size, trained.pad_id)


@pytest.mark.parametrize(
    ("file", "options", "key", "message"),
    [
        (("none.csv", None), {}, "data.path", "no such file"),
        (("a.txt", "text,label\na,b\n"), {}, "data.path", "neither CSV nor JSON lines nor Parquet"),
        (("a.csv", ""), {}, "data.path", "holds 0 texts"),
        (("a.csv", "text,label\n"), {}, "data.path", "holds 0 texts"),
        (("a.jsonl", "\n"), {}, "data.path", "holds 0 texts"),
        (("a.csv", "text,label\na,b\n"), {}, "data.path", "holds 1 texts"),
        (("a.csv", "text,label\na,x\nb,x\n"), {}, "data.label", "is 'x' on every line"),
        (("a.csv", "texts,label\na,b\n"), {}, "data.text", r"line 2 of .* has texts, label; did you mean texts\?"),
        (("a.jsonl", '{"text": "a", "stars": 1}'), {}, "data.label", "line 1 of .* has text, stars"),
        (("a.csv", "text,label\na,x\nb\n"), {}, "data.path", "line 3: there is no text or number in column 'label'"),
        (("a.csv", "text,label\na,x\n ,y\n"), {}, "data.path", "line 3: there is no text or number in column 'text'"),
        (("a.jsonl", '{"text": "a", "label": [1]}'), {}, "data.path", "line 1: there is no text or number in column"),
        (("a.csv", "text,label\na,x\nb,c,y\n"), {}, "data.path", "line 3: it has more fields than the columns text"),
        (("a.csv", "text,text,label\na,b,x\n"), {}, "data.path", "line 1: two columns have the name 'text'"),
        (("a.csv", "text,label\na,x\nb, x\n"), {}, "data.label", "has ' x' and 'x' in .* Take the blanks out"),
        (("a.csv", 'text,label\na,x\n"b,y\n'), {}, "data.path", "line 3: unexpected end of data"),
        (("a.jsonl", '{"text": "a", "label": 1}\n{"text"'), {}, "data.path", "line 2: Expecting ':'"),
        (("a.jsonl", "[1]"), {}, "data.path", "line 1: it is no JSON object"),
        (("a.csv", b"text,label\n\xff,b\n"), {}, "data.path", "not UTF-8"),
        (("a.csv", "text,label\na,x\nb,y\n"), {"held_out": 1.0}, "data.held_out", "not between 0 and 1"),
        (("a.csv", "text,label\na,x\nb,y\n"), {"max_length": 2}, "data.max_length", "at least 3"),
        (("a.csv", "text,label\na,x\nb,y\n"), {"vocab_size": 258}, "data.vocab_size", "too few for all bytes"),
        (("a.csv", "text,label\na,x\nb,y\n"), {"label": "text"}, "data.label", "the column of the texts too"),
        (("a.csv", "text,label\na,x\nb,y\n"), {"tokenizer": "/no/such"}, "data.tokenizer", "no such folder"),
        (("a.parquet", b"PAR1"), {}, "data.path", r"cannot be read as Parquet \(.*\)\. Give a whole Parquet file"),
        (("a.csv", "text,label,w\na,x,1\nb,y,\n"), {"weights": "w"}, "data.weights", "line 3 of .* has '' there"),
        (("a.csv", "text,label,w\na,x,1\nb,y,2\n"), {"weights": "ww"}, "data.weights", "is no file, and no column"),
        (("a.csv", "text,label\na,x\nb,y\n"), {"weights": __file__}, "data.weights", "holds no numbers"),
    ],
)
def test_bad_inputs_name_the_key_and_the_line(
    tmp_path: Path, file: tuple[str, str | bytes | None], options: dict[str, object], key: str, message: str
) -> None:
    name, content = file
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=message) as caught:
        labelled(path=str(tmp_path / name), **options)  # type: ignore[arg-type]
    assert caught.value.key == key


@pytest.mark.parametrize(("module", "extra"), [("transformers", "hf"), ("pyarrow", "parquet")])
def test_without_a_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    path = _csv(tmp_path / "reviews.csv") if extra == "hf" else _parquet(tmp_path / "reviews.parquet")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"-m pip install .*'distaccum\[{extra}\]'"):
        labelled(path=path)


def test_weights_are_a_column_or_a_file(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": f"{i % 2}", "weight": i / 2} for i in range(10)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    np.save(tmp_path / "weights.npy", np.arange(10) / 2)
    (tmp_path / "weights.txt").write_text("\n".join(f"{i / 2}" for i in range(10)))
    order = np.random.default_rng(0).permutation(10)[:9]
    for stated in ("weight", str(tmp_path / "weights.npy"), str(tmp_path / "weights.txt")):
        assert np.array_equal(labelled(path=str(path), weights=stated).weights, order / 2)  # type: ignore[arg-type]


# Samples of which answers alone are learned: their characters and what is learned of them, written by hand.

PREFILLED = CHAT.replace("{{ m.content }}", "{{ '~' if loop.last and m.role == 'assistant' }}{{ m.content }}")
MARKED = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }};\t{% endgeneration %}"
MARKED += "{% else %}{{ m.content }},{% endif %}{% endfor %}"
PICKY = "{{ raise_exception('no roles') }}"
LOUD = CHAT.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")
TURNS = say("u:Hi", "a:Yo", "u:And", "a:Bye")
PAIR = {"prompt": "Hi ", "completion": "Yo"}
QUESTION = {"q": "one", "a": 1}
CHAT_ROW, CHATS, WHOLE = {"messages": TURNS}, {"messages": "messages"}, {"completion": None}

# Rows; what is stated; the sample, "%" and "$" its begin and end; and under each "^" what is learned.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "chat": (CHAT_ROW, CHATS, "[u]Hi;[a]Yo;[u]And;[a]Bye;", "         ^^^          ^^^^"),
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
    "chat that is cut": (CHAT_ROW, CHATS | {"max_length": 11}, "[u]Hi;[a]Yo", "         ^^"),
    "prompt and completion": (PAIR, {}, "%Hi Yo$", "    ^^^"),
    "completions alone": (PAIR, {"prompt": None, "max_length": 2}, "%Y", " ^"),
    "prompt and completion as messages": (
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {},
        "[u]Hi;[a]Yo;[u]And;[a]Bye;",
        "                      ^^^^",
    ),
    "template": (QUESTION, {"template": r"Q: {q}\nA: {a}!", "completion": "a"}, "%Q: one\nA: 1!$", "           ^^^"),
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
    ({"messages": [{"role": "user", "content": [1]}, TURNS[1]]}, CHATS, "message 1: its content is a list, which the"),
    ({"prompt": "Hi", "completion": TURNS}, {}, f"{NO_ROLE}'H'"),
    (CHAT_ROW, CHATS | {"chat_template": LOUD}, "does not tell where message 2 begins or ends: mark answers"),
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
