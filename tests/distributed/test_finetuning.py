"""The recipes of docs/recipes.md with models of Hugging Face, in their order, and what they leave."""

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

from tests.support.commands import ROOT, captured, metrics
from tests.support.optional import Library, needs
from tests.test_docs import blocks_of

transformers = Library("transformers")
peft = Library("peft")
pytestmark = needs("peft")


def _walk(section: str, folder: Path) -> str:
    """Runs each command and each Python block; what the last printed."""
    (folder / "launch").symlink_to(ROOT / "launch")
    for block in blocks_of("docs/recipes.md", section):
        commands = [shlex.split(line)[1:] for line in block.text.splitlines()] if block.language == "bash" else []
        if block.language == "python":
            (folder / "block.py").write_text(block.text)
            commands = [["block.py"]]
        for arguments in commands:
            program = [] if arguments[0].endswith(".py") else ["-m", "distaccum"]
            whole = [sys.executable, *program, *arguments]
            done = captured(whole, cwd=folder)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "LOAD REPORT" not in done.stderr
            assert "train" in arguments or "learning rate" not in done.stderr
    return done.stdout


@pytest.mark.heavy
def test_a_recipe_of_a_classifier(tmp_path: Path) -> None:
    said = _walk("Fine-tune a Hugging Face classifier", tmp_path)
    assert "'label': 'positive'" in said
    assert metrics(tmp_path / "runs/reviews")[-1]["eval_accuracy"] > 0.9
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["index", "class", "probability", "name"]
    assert {(row["class"], row["name"]) for row in rows} == {("0", "negative"), ("1", "positive")}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers
def test_a_recipe_of_a_chat_model(tmp_path: Path) -> None:
    assert _walk("A LoRA chat model", tmp_path).strip()
    losses = [record["eval_loss"] for record in metrics(tmp_path / "runs/chat") if "eval_loss" in record]
    said = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    mean = sum(row["loss"] * row["count"] for row in said) / sum(row["count"] for row in said)
    assert mean == pytest.approx(min(losses), rel=1e-4)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-llama")
    with_adapters = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "chat")
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(merged(ids).logits, with_adapters(ids).logits, rtol=1e-4, atol=1e-5)
