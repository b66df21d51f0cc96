from __future__ import annotations

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
from distaccum.train.components import build_components
from distaccum.train.run_dir import RunDir
from distaccum.train.summary import not_finite, print_header, print_results
from distaccum.train.trainer import Trainer


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


@pytest.mark.fault(
    "an evaluation that is NaN",
    group="numbers",
    does="`done`, with that as the status's reason and in the summary",
    says="in the last evaluation, eval_loss is nan",
)
def test_an_evaluation_that_is_nan_is_in_the_status_and_the_summary(
    gloo_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Callable[[str], None]
) -> None:
    held_out = [(torch.tensor([torch.nan, 1.0]), torch.tensor(0))] * 4
    train = [(torch.ones(2), torch.tensor(0))] * 8
    settings = {"trainer": {"eval_every": 1}, "checkpoint": {"every": 0}, "metrics": {"wandb": {"mode": "disabled"}}}
    Trainer(
        nn.Linear(2, 2),
        CrossEntropy(),
        DataSpec(train=train, eval_dataset=held_out, description=""),
        global_batch_size=4,
        micro_batch_size=2,
        max_steps=1,
        config=RunConfig.from_dict(settings),
        run_dir=tmp_path,
    ).fit()
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
