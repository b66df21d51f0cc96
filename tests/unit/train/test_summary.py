"""What a run says of itself: its header, its results, its model's table beside the parameters themselves."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from distaccum import DataSpec
from distaccum.config.schema import RunConfig
from distaccum.data.adapters import to_data_spec
from distaccum.distributed.world import World
from distaccum.engines.factory import create_engine
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.models.gpt import GPT
from distaccum.tools.modules import summarize, table
from distaccum.train.components import build_components
from distaccum.train.run_dir import RunDir
from distaccum.train.summary import not_finite, print_header, print_results
from distaccum.train.trainer import Trainer
from tests.support.runs import settings


def test_the_introduction_says_what_computes_in_what(gloo_world: World, tmp_path: Path) -> None:
    data = to_data_spec(TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)))
    precision = {"name": "bf16", "keep_fp32": ["1"], "reduce_dtype": "bf16"}
    config = RunConfig.from_dict({"batch": {"global_size": 4, "micro_size": 2}, "precision": precision})
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
    components = build_components(config, data, model, CrossEntropy(), world_size=1, device=torch.device("cpu"))
    text = StringIO()
    engine = create_engine(model, components.optimizers, gloo_world, engine=config.engine, precision=config.precision)
    print_header(components, engine, RunDir(tmp_path), "", Console(file=text, width=80))
    lines = dict(line.split(maxsplit=1) for line in text.getvalue().splitlines())
    assert lines["precision"] == "bf16; fp32: 1; gradients reduced in bf16"
    assert lines["world"] == "1 x cpu"
    assert lines["engine"].startswith("ddp: parameters and gradients whole on every rank; ")
    assert len({line.index(lines[name]) for name, line in zip(lines, text.getvalue().splitlines(), strict=True)}) == 1


def test_a_sharded_model_has_its_own_name(gloo_world: World, tmp_path: Path) -> None:
    data = to_data_spec(TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)))
    settings = {"batch": {"global_size": 4, "micro_size": 2}, "engine": {"name": "fsdp2"}}
    config, model = RunConfig.from_dict(settings), nn.Sequential(nn.Linear(2, 3))
    components = build_components(config, data, model, CrossEntropy(), world_size=1, device=torch.device("cpu"))
    engine, text = create_engine(model, components.optimizers, gloo_world, engine=config.engine), StringIO()
    print_header(components, engine, RunDir(tmp_path), "", Console(file=text, width=80))
    assert "model      Sequential, 9 parameters" in text.getvalue()


@pytest.mark.fault("an evaluation that is NaN")
def test_an_evaluation_that_is_nan_is_in_the_status_and_the_summary(
    gloo_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Callable[[str], None]
) -> None:
    held_out = [(torch.tensor([torch.nan, 1.0]), torch.tensor(0))] * 4
    train = [(torch.ones(2), torch.tensor(0))] * 8
    config = settings((4, 2), {"eval_every": 1, "max_steps": 1}, metrics={"console": True}, schedule={})
    data = DataSpec(train=train, eval_dataset=held_out, description="")
    Trainer(nn.Linear(2, 2), CrossEntropy(), data, config=config, run_dir=tmp_path).fit()
    found = RunDir(tmp_path).status()
    assert (found["state"], found["reason"]) == ("done", "in the last evaluation, eval_loss is nan")
    says(capsys.readouterr().out)


def test_an_evaluation_that_is_no_number_is_said_in_words() -> None:
    assert not_finite({"eval_loss": 1.0}) == ""
    found = not_finite({"eval_loss": float("nan"), "eval_accuracy": 0.5, "eval_bits_per_byte": float("inf")})
    assert found == "in the last evaluation, eval_loss is nan, eval_bits_per_byte is inf"


def test_names_of_results_are_printed_as_they_are() -> None:
    """``rich`` takes brackets for styles: it leaves some out, and raises for others, after the run's last update."""
    text = StringIO()
    rows = {"f1[macro]": 0.5, "recall[@10]": 0.25, "recall[/5]": 0.125, "long" * 20: 1.0}
    print_results(rows, {"unigram[/b]": 2.0}, Console(file=text, width=80))
    found = [line.rsplit(maxsplit=1) for line in text.getvalue().splitlines()[1:5]]
    assert {name.strip(): float(value) for name, value in found} == rows
    assert "unigram[/b]" in text.getvalue()


def _numel(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_blocks_of_one_shape_are_one_row_and_the_rows_add_up() -> None:
    model = GPT(vocab_size=50, seq_len=8, n_layer=12, n_head=2, n_embd=8, positions="learned")
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
