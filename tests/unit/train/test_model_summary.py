"""The model's table: its numbers beside those of the parameters themselves."""

from __future__ import annotations

import torch
from torch import nn

from distaccum.models.gpt import GPT
from distaccum.tools.modules import summarize, table


def _gpt() -> GPT:
    return GPT(vocab_size=50, seq_len=8, n_layer=12, n_head=2, n_embd=8, positions="learned")


def _numel(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_blocks_of_one_shape_are_one_row_and_the_rows_add_up() -> None:
    model = _gpt()
    rows = summarize(model)
    assert [(row.name, row.kind, row.parameters) for row in rows] == [
        ("tokens", "TokenEmbedding", _numel(model.tokens)),
        ("positions", "TokenEmbedding", _numel(model.positions)),
        ("blocks.0-11", "12x Block", _numel(model.blocks)),
        ("norm", "LayerNorm", _numel(model.norm)),
    ]
    assert sum(row.parameters for row in rows) == _numel(model)
    assert sum(row.size for row in rows) == 4 * _numel(model)
    assert all(row.trained == row.parameters and not row.shared for row in rows)
    assert len(table(rows)) == 4
    assert max(map(len, table(rows))) <= 80 - 11  # with the header's margin they fit on a terminal


def test_tied_weights_count_once_and_what_is_frozen_is_told() -> None:
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(10, 4), nn.Linear(4, 10)
    model.head.weight = model.embedding.weight
    model.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    model.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model.body[0].requires_grad_(requires_grad=False)
    rows = {row.name: row for row in summarize(model)}
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
    rows = summarize(model)
    assert [(row.name, row.kind) for row in rows] == [("0-2", "3x Linear"), ("4", "Linear"), ("5", "Linear")]


def test_lists_in_lists_are_in_their_place() -> None:
    blocks = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    model = nn.Sequential(blocks, nn.Linear(2, 1))
    rows = summarize(model)
    assert [(row.name, row.kind, row.parameters) for row in rows] == [
        ("0.0.0-1", "2x Linear", 12),
        ("0.1.0-1", "2x Linear", 12),
        ("1", "Linear", 3),
    ]


def test_modules_with_names_of_their_own_stay_apart() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("query", "key", "value")})
    assert [row.name for row in summarize(model)] == ["query", "key", "value"]


def test_a_long_table_ends_in_words() -> None:
    model = nn.Sequential(*(nn.Linear(1, width) for width in range(1, 41)))
    lines = table(summarize(model))
    assert len(lines) == 31
    assert lines[-1] == "... 10 more rows"
