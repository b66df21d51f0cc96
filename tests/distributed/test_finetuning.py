"""The recipes of docs/recipes.md with models of Hugging Face, in their order, and what they leave."""

from __future__ import annotations

import csv
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment, metrics
from tests.support.optional import Library, needs
from tests.test_docs import blocks_of

transformers = Library("transformers")
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
            done = subprocess.run(whole, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
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
