"""Mistakes: each exits with 2 and one message that names the key, the value and what to change."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import metrics, run, status, succeed

# What a user types, and what the message must name: key, value, remedy.
MISTAKES = {
    "unknown key": (["optim.learning_rate=1"], ["optim.learning_rate=1", "no such setting", "Write optim.lr=1"]),
    "misspelt key": (["optim.lrr=1"], ["optim.lrr=1", "did you mean optim.lr"]),
    "interpolation of nothing": (
        ["data.seq_len=${no.such}"],
        ["data.seq_len=${no.such}: names no setting", "Name one"],
    ),
    "another library's decimal": (["optim.clip_norm=none"], ["optim.clip_norm=none", "Write null for none"]),
    "thousands": (["batch.global_size=64k"], ["batch.global_size=64k", "Write 64000"]),
    "a thousand steps": (["trainer.max_steps=1e3"], ["trainer.max_steps=1000.0", "Write 1000"]),
    "misspelt group": (["optimm=sgd"], ["optimm=sgd", "did you mean optim"]),
    "not a number": (["optim.lr=abc"], ["optim.lr=abc", "Float", "Give a value of the type"]),
    "negative rate": (["optim.lr=-1"], ["optim.lr=-1.0", "positive finite", "Use a value"]),
    "NaN rate": (["optim.lr=nan"], ["optim.lr=nan", "positive finite", "Use a value"]),
    "infinite rate": (["optim.lr=inf"], ["optim.lr=inf", "positive finite", "Use a value"]),
    "zero clip norm": (["optim.clip_norm=0"], ["optim.clip_norm=0", "positive finite", "Use a value"]),
    "micro above global": (
        ["batch.global_size=8", "batch.micro_size=9"],
        ["batch.micro_size=9", "batch.global_size=8", "lower the one"],
    ),
    "no batch": (["batch.global_size=0"], ["batch.global_size=0", "at least 1", "State a positive number"]),
    "no end": (["trainer.max_steps=null"], ["trainer.max_steps=null", "trainer.max_epochs", "State one"]),
    "no logging interval": (["trainer.log_every=0"], ["trainer.log_every=0", "at least 1", "whole number from 1"]),
    "negative checkpoint interval": (["checkpoint.every=-1"], ["checkpoint.every=-1", "0 to save none"]),
    "unknown engine": (["engine=horovod"], ["engine=horovod", "no such choice", "Use one of ddp"]),
    "unknown precision": (["precision=fp4"], ["precision=fp4", "no such choice", "bf16, ", "fp16, ", "fp32, ", "tf32"]),
    "TF32 on a CPU": (["precision=tf32"], ["precision=tf32", "a CPU has no TF32", "precision=fp32, or bf16"]),
    "module that is not there": (
        ["precision=bf16", "precision.keep_fp32=[tokns]"],
        ["precision.keep_fp32=tokns", "matches no module of GPT", "did you mean tokens?", "model.named_modules()"],
    ),
    "chosen module that is not there": (
        ["precision=bf16", "precision.only=[blocks.*.atention]"],
        ["precision.only=blocks.*.atention", "matches no module of GPT", "did you mean blocks.", "* matches any"],
    ),
    "no list of modules": (["precision.only=head"], ["precision.only=head", "List", "Give a value of the type"]),
    "optimizer that cannot fuse": (
        [
            "optim=sgd",
            "optim.fused=true",
            "optim.optimizer._target_=torch.optim.Rprop",
            "~optim.optimizer.momentum",
            "~optim.optimizer.weight_decay",
        ],
        ["optim.fused=True", "torch.optim.Rprop takes no fused argument", "Use optim.fused=auto"],
    ),
    "unknown model": (["model=gpt5"], ["model=gpt5", "did you mean gpt", "Use one of cnn, gpt"]),
    "missing path": (["data=text"], ["data.path=???", "is required", "Add data.path="]),
    "missing file": (["data=text", "data.path=nowhere"], ["data.path=nowhere", "no such file", "Give the path"]),
    "empty file": (["data=text", "data.path=empty.txt"], ["data.path=empty.txt", "holds no text", "Give a path"]),
    "too little text": (["data=text", "data.path=short.txt"], ["data.seq_len=128", "19 tokens", "shorter"]),
    "no shard": (["data=tokens", "data.path='*.bin'", "data.vocab_size=9"], ["data.path=*.bin", "matches no file"]),
    "data without tokens": (
        ["data=digits"],
        ["model.vocab_size", "data.vocab_size", "(float32 (1, 8, 8), ", "Choose groups that go together"],
    ),
    "argument of another type": (["model.n_layer=two"], ["model.n_layer=two", "not of type int", "Give a number"]),
    "unknown argument": (["+model.depth=2"], ["model.depth=2", "no such argument", "It takes vocab_size"]),
    "heads that do not fit": (["model.n_head=3"], ["model.n_embd=128", "model.n_head=3", "multiple"]),
    "target that is not there": (
        ["model._target_=no.such.Model"],
        ["model._target_=no.such.Model", "cannot be imported", "PYTHONPATH"],
    ),
    "unwritable run directory": (["hydra.run.dir=short.txt/run"], ["hydra.run.dir=", "short.txt", "writable folder"]),
    "checkpoint that is not there": (["resume=nowhere"], ["resume=nowhere", "no such checkpoint", "never, auto or"]),
    "folder that is no checkpoint": (["resume=folder"], ["resume=folder", "manifest.json", "checkpoints/step-N"]),
    "negative seed": (["seed=-1"], ["seed=-1", "out of range", "whole number from 0"]),
    "unknown W&B mode": (["metrics.wandb.mode=on"], ["metrics.wandb.mode=", "no such choice", "offline, online"]),
    "broken override": (["optim.lr=[1"], ["optim.lr=[1", "key=value"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    (path / "empty.txt").touch()
    (path / "short.txt").write_text("just a few words of it")
    (path / "folder").mkdir()
    return path


FEW = [*MISTAKES][::4]  # that CI runs


REFUSED = pytest.mark.fault("a setting or a plan that cannot be (some 45 of them), or no plan at all, under")


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=pytest.mark.slow if name in FEW else pytest.mark.heavy) for name in MISTAKES]
)
@REFUSED
def test_a_mistake_is_one_message_and_exit_code_2(folder: Path, mistake: str, says: Callable[[str], None]) -> None:
    words, named = MISTAKES[mistake]
    finished = run(*words, "metrics=jsonl" if "wandb" not in str(words) else "seed=0", cwd=folder)
    said = finished.stderr
    assert finished.returncode == 2, said
    says(said)
    lines = said.strip().splitlines()
    assert len(lines) == 1, said
    assert lines[0].startswith("distaccum: configuration error: ")
    missing = [word for word in named if word not in lines[0]]
    assert not missing, (lines[0], missing)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [pytest.param(["optim.lr=abc"], marks=pytest.mark.heavy), ["batch.micro_size=1000"]],
    ids=["composing", "building"],
)
@REFUSED
def test_under_torchrun_it_is_said_once_before_any_process_group(
    tmp_path: Path, arguments: list[str], says: Callable[[str], None]
) -> None:
    finished = run(*arguments, f"hydra.run.dir={tmp_path}", world=2, torchrun=True)
    assert finished.returncode != 0  # torchrun's own, which is 1 for any failure
    says(finished.stderr)
    assert finished.stderr.count("configuration error") == 1
    assert "exitcode  : 2" in finished.stderr


@pytest.mark.parametrize(
    "mistake", ["batch.micro_size=1000", "optim.lr=abc", pytest.param("optim.nothing=1", marks=pytest.mark.slow)]
)
def test_the_status_says_why(tmp_path: Path, mistake: str) -> None:
    finished = run(mistake, f"hydra.run.dir={tmp_path}")
    found = status(tmp_path)
    assert finished.returncode == 2
    assert (found["state"], found["step"]) == ("config_error", 0)
    assert mistake in found["reason"]


def test_a_check_says_the_same_and_leaves_nothing(tmp_path: Path) -> None:
    good = succeed("--check", cwd=tmp_path)
    assert good.stdout.startswith("check passed: GPT with ")
    assert (good.stdout.count("\n"), good.stderr) == (1, "")
    bad = run("--check", "batch.micro_size=1000", cwd=tmp_path)
    assert bad.returncode == 2
    assert "batch.micro_size=1000" in bad.stderr
    assert not list(tmp_path.iterdir())


def test_environment_of_half_a_launcher(tmp_path: Path) -> None:
    finished = run(cwd=tmp_path, RANK="0", WORLD_SIZE="2")
    assert finished.returncode == 2
    assert "LOCAL_RANK" in finished.stderr
    assert "torchrun" in finished.stderr


def test_a_gradient_that_is_not_finite_stops_the_run_before_anything_is_saved_from_it(tmp_path: Path) -> None:
    finished = run(
        "data.seq_len=16",
        "model.n_layer=1",
        "model.n_embd=16",
        "batch.global_size=4",
        "batch.micro_size=2",
        "optim.lr=1e30",
        "optim.clip_norm=null",
        "trainer.max_steps=50",
        "checkpoint.every=1",
        "trainer.log_every=1",
        "schedule=constant",
        "metrics=jsonl",
        f"hydra.run.dir={tmp_path}",
        world=2,
    )
    assert finished.returncode == 1
    assert "NaN or infinite" in finished.stderr
    assert status(tmp_path)["state"] == "failed"
    assert "NonFiniteError" in status(tmp_path)["reason"]
    last = metrics(tmp_path)[-1]["step"]
    newest = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert newest == last < 50
