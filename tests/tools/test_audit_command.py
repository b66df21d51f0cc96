"""The audit names each loop's fault, and calls right loops right; as a context manager and as a command."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import answer
from tests.support.audit_loops import FAULTS, RIGHT, Expected
from tests.support.commands import ROOT, run, succeed

EVERY = [*FAULTS, *RIGHT]


@cache
def _loops() -> list[dict[str, Any]]:
    """What two ranks found in all loops."""
    found: list[dict[str, Any]] = answer("audit")
    assert len(found) == len(EVERY)
    return found


def _name(expected: Expected) -> str:
    return f"{expected.loop}-{expected.rig}"


@pytest.mark.parametrize("expected", FAULTS, ids=_name)
def test_a_fault_is_named(expected: Expected) -> None:
    found = _loops()[EVERY.index(expected)]
    assert not found["right"]
    finding = found["findings"][expected.window]
    assert not finding["right"]
    assert set(finding["causes"]) == expected.causes
    assert expected.words in found["text"]
    assert re.search(r"^  write: \S", found["text"], re.MULTILINE)


@pytest.mark.parametrize("expected", RIGHT, ids=_name)
def test_a_right_loop_is_called_right(expected: Expected) -> None:
    found = _loops()[EVERY.index(expected)]
    assert found["right"]
    assert max(finding["error"] for finding in found["findings"]) <= 1e-6
    assert "this loop's gradient is the global batch's" in found["text"]
    if expected.loop == "counted_without_no_sync":
        assert "reduced 4 times" in found["text"]
    if expected.loop == "counted_and_clipped":
        assert "clipped from norm" in found["text"]


def _assert_named(found: dict[str, Any], *, right: set[str]) -> None:
    """Frameworks that divide by the accumulation steps, and those that count."""
    for key, row in found.items():
        name, window = key.rsplit(", ", 1)
        (finding,) = row["findings"]
        if name in right:
            assert row["right"], row["text"]
            assert finding["error"] <= 1e-6
        else:
            short = ["short window"] if window == "ragged window" else []
            assert finding["causes"] == ["mean of means over micro-batches", *short], row["text"]


def test_distaccum_and_a_hand_written_loop() -> None:
    _assert_named(answer("audit_peers", "distaccum", "DDP, hand-written"), right={"distaccum"})


@pytest.mark.heavy
def test_the_frameworks_of_the_bench_are_named() -> None:
    from launch.bench.other_frameworks import FRAMEWORKS  # noqa: PLC0415  torch is imported for this test alone

    names = [name for name, framework in FRAMEWORKS.items() if framework.version is not None]
    right = {"accelerate, counted by hand", "transformers Trainer"}
    _assert_named(answer("audit_peers", *names), right=right)


@pytest.mark.parametrize(
    "kinds",
    [["fsdp2"], pytest.param([f"deepspeed-{stage}" for stage in range(4)], marks=pytest.mark.heavy)],
    ids=["fsdp2", "deepspeed"],
)
def test_sharded_gradients_are_gathered(kinds: list[str]) -> None:
    found = answer("audit_sharded", *kinds)
    for kind in kinds:
        assert found[f"{kind}, right"]["right"], found[f"{kind}, right"]["text"]
        assert max(finding["error"] for finding in found[f"{kind}, right"]["findings"]) <= 1e-6
        cause = "micro-batches summed" if kind == "fsdp2" else "divided by the micro-batches twice"
        assert {name for finding in found[f"{kind}, wrong"]["findings"] for name in finding["causes"]} == {cause}


# ------------------------------------------------------------------------------------------ the command

COMMAND = ROOT / "distaccum" / "__main__.py"
AUDIT = "audit"


def _command_of_the_page() -> list[str]:
    (line,) = re.findall(
        r"^torchrun --standalone --nproc-per-node=2 -m distaccum audit (launch/\S+ .*)$",
        (ROOT / "docs" / "tools.md").read_text(),
        re.MULTILINE,
    )[:1]
    return shlex.split(line)


def test_the_command_of_the_page() -> None:
    """Without an edit: the script's loader gives the batches, and its clean-up of the process group is waited for."""
    printed = succeed(AUDIT, *_command_of_the_page(), script=COMMAND, world=2, cwd=ROOT).stdout
    assert "NOT the global batch's in 2 of 2 windows (2 ranks)" in printed
    assert "mean of means: each micro-batch is divided by its own count" in printed
    assert "the batches are the DataLoader's" in printed
    assert "dropout was off in 3 modules" in printed
    assert "loss of the last micro-batch" not in printed  # it was stopped after two windows


def test_the_command_runs_a_script_to_its_end() -> None:
    finished = run(AUDIT, *_command_of_the_page(), "--to-the-end", "--fail", script=COMMAND, world=2, cwd=ROOT)
    assert finished.returncode == 1
    assert "window 10: WRONG" in finished.stdout
    assert "loss of the last micro-batch" in finished.stdout


ENGINES = """
import sys
import torch
from torch.utils.data import DataLoader
from distaccum import Accumulator, CrossEntropy
from tests.support.audit_loops import TokenModel, micro_batches

torch.manual_seed(0)
loss, model = CrossEntropy(), TokenModel()
data = [(i, l) for b in micro_batches(1, 20, even=False) for i, l in zip(b["input_ids"], b["labels"])]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
acc = Accumulator(model, optimizer, global_batch_size=26, micro_batch_size=5, count=loss.count, engine=sys.argv[1])
for batch in acc.batches(DataLoader(data, batch_size=5)):
    with acc.accumulate():
        acc.backward(loss(acc.model, batch))
"""


@pytest.mark.parametrize("engine", ["zero1", "fsdp2", pytest.param("deepspeed", marks=pytest.mark.heavy)])
def test_distaccums_engines_in_a_script(tmp_path: Path, engine: str) -> None:
    """Ranks that each step on a part of the parameters, on shards of all, and within DeepSpeed's engine."""
    script = tmp_path / "train.py"
    script.write_text(ENGINES)
    arguments = (script, engine, "--loss", "distaccum:CrossEntropy", "--to-the-end")
    warm = "deepspeed" if engine == "deepspeed" else "distaccum"
    printed = succeed(AUDIT, *arguments, script=COMMAND, world=2, warm=warm, PYTHONPATH=str(ROOT)).stdout
    assert "this loop's gradient is the global batch's (2 ranks)" in printed
    assert printed.count(": right") == 3


TRAINER = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, attention_dropout=0.1,
))
ids, lengths = torch.randint(0, 31, (64, 12)), torch.randint(3, 12, (64, 1))
labels = torch.where(torch.arange(12) < lengths, ids, -100)

class OldTrainer(Trainer):  # that was written before there was num_items_in_batch
    def compute_loss(self, model, inputs, **kwargs):
        return model(**inputs).loss

kind = OldTrainer if sys.argv[1] == "old" else Trainer
arguments = TrainingArguments(
    output_dir=sys.argv[2], use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=4,
    num_train_epochs=1, max_grad_norm=1.0, save_strategy="no", report_to="none", disable_tqdm=True,
    average_tokens_across_devices=sys.argv[1] != "local", ddp_find_unused_parameters=False,
)
data = [{"input_ids": i, "labels": l} for i, l in zip(ids, labels)]
kind(model=model, args=arguments, train_dataset=data).train()
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "causes"),
    [
        ("new", []),
        ("local", ["each rank divides by its own count"]),
        ("old", ["each micro-batch is divided by its own count", "4.00x = 4 micro-batches"]),
    ],
)
def test_transformers_trainer_in_a_script(tmp_path: Path, kind: str, causes: list[str]) -> None:
    """huggingface/transformers#34242 and #34191: with and without the count over devices, and without any."""
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    printed = succeed(AUDIT, script, kind, tmp_path / "out", script=COMMAND, world=2, timeout=280).stdout
    assert ("this loop's gradient is the global batch's" in printed) == (not causes)
    assert all(cause in printed for cause in causes)
    assert "the loss is the model's own" in printed


LIGHTNING = """
import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(13, 6), torch.nn.Linear(6, 13)
    def forward(self, x):
        return self.head(self.embedding(x))
    def training_step(self, batch, index):
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
ids, lengths = torch.randint(0, 13, (42, 9)), torch.randint(1, 9, (42, 1))
labels = torch.where(torch.arange(9) < lengths, ids.roll(-1, 1), -100)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=4, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Model(), DataLoader(list(zip(ids, labels)), batch_size=3))
"""


@pytest.mark.heavy
def test_lightnings_trainer_in_a_script(tmp_path: Path) -> None:
    """Its backwards run within the optimizer's step; 7 micro-batches a rank are windows of 4 and 3."""
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    printed = succeed(
        AUDIT, script, "--loss", "distaccum:CrossEntropy", "--to-the-end", script=COMMAND, world=2, timeout=280
    ).stdout
    assert "window 2: WRONG" in printed
    assert "mean of means: each micro-batch is divided by its own count" in printed
    assert "short window: 3 micro-batches divided by 4" in printed


OWN_LOSS = """
import sys
import torch
from torch import nn

class Output(dict):
    pass

class TinyForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)
    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}

model = TinyForCausalLM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in range(3):
    for length in (3, 9):
        ids = torch.randint(0, 7, (2, length))
        labels = torch.where(torch.arange(length) < length // 2 + 1, ids, -100)
        output = model(input_ids=ids, labels=labels)
        (output["loss"] * float(sys.argv[1]) if sys.argv[1] != "count" else
         output["loss"] * 2 * (length // 2) / 10).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_loss_of_a_model_that_returns_it(tmp_path: Path) -> None:
    """In one process; the count is that of the labels behind the shift."""
    script = tmp_path / "train.py"
    script.write_text(OWN_LOSS)
    printed = succeed(AUDIT, script, "count", script=COMMAND).stdout
    assert "this loop's gradient is the global batch's (1 rank)" in printed
    assert "but for the first of each row" in printed
    printed = succeed(AUDIT, script, "0.5", script=COMMAND).stdout
    assert "mean of means: each micro-batch is divided by its own count, which is 2 to 8" in printed


def test_what_cannot_be_audited_says_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('no loop')")
    finished = run(AUDIT, script, script=COMMAND)
    assert finished.returncode == 2
    assert "no training forward was seen" in finished.stderr
    script.write_text(OWN_LOSS)
    finished = run(AUDIT, script, "0.5", "--loss", "distaccum:CrossEntropy", script=COMMAND)
    assert finished.returncode == 2
    assert "count failed on a recorded batch, {input_ids: int64 (2, 3), labels: int64 (2, 3)}" in finished.stderr
    finished = run(AUDIT, script, "0.5", "--loss", "distaccum:Nothing", script=COMMAND)
    assert "--loss=distaccum:Nothing: AttributeError" in finished.stderr
