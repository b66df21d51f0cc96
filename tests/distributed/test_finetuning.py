"""The commands of docs/models.md, in their order, and what they leave."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from distaccum.checkpoint.tensors import TensorFiles
from tests.support.commands import ROOT, environment, metrics
from tests.support.optional import Library, needs
from tests.test_docs import blocks_of

transformers = Library("transformers")
pytestmark = needs("peft")


def _commands() -> list[list[str]]:
    found = "\n".join(block.text for block in blocks_of("docs/models.md", "Fine-tuning") if block.language == "bash")
    return [shlex.split(line) for line in found.replace("\\\n", " ").splitlines() if line]


@pytest.mark.heavy
def test_the_pages_commands(tmp_path: Path) -> None:
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    for command in _commands():
        program = ["-m", "distaccum"] if command[0] == "distaccum" else []
        whole = [sys.executable, *program, *command[1:]]
        done = subprocess.run(whole, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    records = metrics(tmp_path / "runs/whole")
    assert records[-1]["step"] == 20
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    saved = TensorFiles(tmp_path / "runs/whole/checkpoints/step-20", "model")
    adapters = TensorFiles(tmp_path / "runs/lora/checkpoints/step-20", "model")
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sorted(name.replace(".default.", ".") for name in adapters) == sorted(exported)
    assert metrics(tmp_path / "runs/lora")[-1]["loss"] < metrics(tmp_path / "runs/lora")[0]["loss"]
    assert all((tuned.state_dict()[name] == saved[name]).all() for name in saved)
