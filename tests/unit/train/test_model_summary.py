"""The model's table: its numbers beside those of the parameters themselves."""

from __future__ import annotations

import torch
from torch import nn

from distaccum.models.gpt import GPT
from distaccum.train.summary import summarize, table


def _gpt() -> GPT:
    return GPT(vocab_size=50, seq_len=8, n_layer=12, n_head=2, n_embd=8, positions="learned")


def _numel(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_blocks_of_one_shape_are_one_row_and_the_rows_add_up() -> None:
    model = _gpt()
    rows = summarize(model, 1)
    assert [(row.name, row.kind, row.parameters) for row in rows] == [
        ("tokens", "TokenEmbedding", _numel(model.tokens)),
        ("positions", "TokenEmbedding", _numel(model.positions)),
        ("blocks.0-11", "12x Block", _numel(model.blocks)),
        ("norm", "LayerNorm", _numel(model.norm)),
    ]
    assert sum(row.parameters for row in rows) == _numel(model)
    assert sum(row.size for row in rows) == 4 * _numel(model)
    assert all(row.trained == row.parameters and not row.shared for row in rows)
    assert len(table(rows)) <= 10
    assert summarize(model, 0) == []


def test_modules_of_modules_are_indented_below_them() -> None:
    lines = table(summarize(_gpt(), 2))
    names = [line[:18].rstrip() for line in lines]
    begin = names.index("blocks.0-11")
    assert names[begin + 1 : begin + 6] == ["  attention_norm", "  attention", "  norm", "  expand", "  contract"]
    assert names[-1] == "norm"
    assert max(map(len, lines)) <= 80 - 11  # with the header's margin they fit on a terminal


def test_each_depth_adds_up() -> None:
    model = _gpt()
    rows = summarize(model, 3)
    inner = {}
    for index, row in enumerate(rows):
        below = []
        for other in rows[index + 1 :]:
            if other.depth <= row.depth:
                break
            below += [other.parameters] if other.depth == row.depth + 1 else []
        if below:
            inner[row.name] = (row.parameters, sum(below))
    assert "blocks.0-11" in inner
    assert all(whole == parts for whole, parts in inner.values()), inner
    names = dict(model.named_modules())
    block = next(row for row in rows if row.depth == 2 and row.name.startswith("blocks.0-11."))
    part = block.name.removeprefix("blocks.0-11.")
    assert block.parameters == sum(_numel(names[f"blocks.{number}.{part}"]) for number in range(12))


def test_tied_weights_count_once_and_what_is_frozen_is_told() -> None:
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(10, 4), nn.Linear(4, 10)
    model.head.weight = model.embedding.weight
    model.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    model.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model.body[0].requires_grad_(requires_grad=False)
    rows = {row.name: row for row in summarize(model, 1)}
    found = {name: (row.parameters, row.trained, row.shared, row.size) for name, row in rows.items()}
    assert found == {
        "scale": (3, 0, 0, 6),
        "embedding": (40, 40, 0, 160),
        "head": (10, 10, 40, 40),
        "body": (40, 20, 0, 160),
    }
    assert sum(row.parameters for row in rows.values()) == sum(p.numel() for p in model.parameters())
    lines = table(list(rows.values()))
    assert lines[0].split() == ["scale", "Parameter", "3", "6", "B", "bfloat16,", "frozen"]
    assert lines[2].endswith("float32, 40 tied")
    assert lines[3].endswith("float32, 20 frozen")


def test_a_sequence_folds_what_is_equal_and_follows() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))
    rows = summarize(model, 1)
    assert [(row.name, row.kind) for row in rows] == [("0-2", "3x Linear"), ("4", "Linear"), ("5", "Linear")]


def test_equal_parameters_in_other_modules_are_rows_of_their_own() -> None:
    pair = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(pair, nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    rows = summarize(model, 3)
    assert [(row.name, row.parameters, row.depth) for row in rows] == [
        *(("0", 12, 1), ("0.0", 6, 2), ("0.1", 6, 2), ("0.1.0", 6, 3)),
        *(("1", 12, 1), ("1.0", 6, 2), ("1.1", 6, 2), ("1.1.0", 6, 3)),
    ]


def test_modules_with_names_of_their_own_stay_apart() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("query", "key", "value")})
    assert [row.name for row in summarize(model, 1)] == ["query", "key", "value"]


def test_a_long_table_ends_in_words() -> None:
    model = nn.Sequential(*(nn.Linear(1, width) for width in range(1, 41)))
    lines = table(summarize(model, 1))
    assert len(lines) == 31
    assert lines[-1] == "... 10 more rows"
