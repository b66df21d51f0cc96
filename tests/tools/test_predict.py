"""``distaccum predict``: rows a sample, of runs of the command line, in one process and under torchrun."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distaccum.checkpoint.tensors import TensorFiles
from distaccum.config.instantiate import build
from distaccum.config.schema import RunConfig
from distaccum.data.datasets.labelled import labelled
from distaccum.errors import ConfigError
from distaccum.tools import predict
from tests.support.commands import ROOT, TINY, succeed
from tests.support.optional import needs

SCRIPT = ROOT / "distaccum" / "tools" / "predict.py"
SHORT = ("metrics=jsonl", "checkpoint.every=2", "trainer.max_steps=4", "trainer.eval_every=2")


def _rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    with file.open(newline="") as text:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(text)]


def _model_and_held_out(checkpoint: Path) -> tuple[nn.Module, Any]:
    """In fp64, built by hand."""
    config = RunConfig.from_dict(json.loads((checkpoint / "state.json").read_text())["config"])
    model: nn.Module = build("model", config.model).double().eval()
    model.load_state_dict(dict(TensorFiles(checkpoint)))
    return model, predict.build_data(config.data).eval_dataset


@needs("sklearn")
def test_a_classifiers_best_weights_say_a_class_and_its_probability(tmp_path: Path) -> None:
    """Ground truth: the weights in fp64, all samples at once. Two ranks, and other batches, write the same."""
    run, best = tmp_path / "run", ("checkpoint.best=eval_loss", "checkpoint.mode=max")  # of the first evaluation
    succeed("data=digits", "model=cnn", *SHORT, *best, f"hydra.run.dir={run}")
    checkpoint = run / "checkpoints" / (run / "checkpoints" / "best").read_text().strip()
    done = succeed(run, f"out={tmp_path}/one.jsonl", script=SCRIPT)
    assert done.stdout == f"{tmp_path}/one.jsonl: 360 predictions by {checkpoint}\n"
    succeed(run, f"out={tmp_path}/two.csv", "data=held_out", "batch.micro_size=7", script=SCRIPT, world=2)
    model, held_out = _model_and_held_out(checkpoint)
    with torch.no_grad():
        expected = model(held_out.tensors[0].double()).softmax(1)
    for rows in (_rows(tmp_path / "one.jsonl"), _rows(tmp_path / "two.csv")):
        assert [(row["index"], row["class"]) for row in rows] == list(enumerate(expected.argmax(1).tolist()))
        assert [row["probability"] for row in rows] == pytest.approx(expected.amax(1).tolist(), rel=1e-5)


def test_a_language_models_newest_weights_say_a_loss(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat sat on the mat, and the dog lay on the log. " * 20)
    succeed(*TINY, "data=text", f"data.path={tmp_path}/text", *SHORT, f"hydra.run.dir={tmp_path}/run")
    succeed(tmp_path / "run", f"out={tmp_path}/out.jsonl", script=SCRIPT, world=2)
    model, samples = _model_and_held_out(tmp_path / "run" / "checkpoints" / "step-4")
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x[None])[0], labels).item() for x, labels in samples]
    rows = _rows(tmp_path / "out.jsonl")
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [(row["index"], row["count"]) for row in rows] == [(i, 16) for i in range(len(losses))]


@needs("transformers")
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "text\n", "has no rows. Give a file with samples"),
        ("a.csv", "words\nHi\n", "line 2 has no column 'text'"),
        ("a.jsonl", '{"text": null}\n', "line 1 has no text in column 'text'"),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / "reviews.csv").write_text("text,label\nHi,a\nYo,b\n")
    (tmp_path / name).write_text(content)
    data = labelled(path=str(tmp_path / "reviews.csv"))
    with pytest.raises(ConfigError, match=f"data=.*{said}"):
        predict._dataset(data, str(tmp_path / name), {})
