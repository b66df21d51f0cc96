"""``batch.micro_size=auto``: the same on every rank, the same run as with that size stated, kept by a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.commands import QUIET, TINY, metrics, succeed

RUN = (*TINY, *QUIET[2:], "trainer.eval_every=0", "trainer.max_steps=4", "checkpoint.every=2", "batch.global_size=32")
EXACT = ("step", "window", "epoch", "loss", "grad_norm", "lr", "samples", "tokens")


def _plan(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


def _weights(folder: Path, step: int) -> dict[str, Any]:
    files = sorted(folder.glob(f"checkpoints/step-{step}/*.safetensors"))
    assert files
    return {f"{file.name}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["ddp", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("zero1", "fsdp2"))]
)
def test_it_is_bitwise_the_run_with_that_size_stated(engine: str, tmp_path: Path) -> None:
    """Weights, buffers and random numbers are what they were before it, and the data's order does not change."""
    found, stated, resumed = tmp_path / "found", tmp_path / "stated", tmp_path / "found"
    settings = (*RUN, "model.dropout=0.1", f"engine={engine}")
    first = succeed(*settings, "batch.micro_size=auto", f"hydra.run.dir={found}", world=2)
    plan = _plan(found)
    size = plan["memory"]["micro_size"]
    assert plan["micro_size"] == size
    assert size in (1, 2, 4, 8, 16)
    assert plan["memory"]["seconds"] < 60  # 10 s, and what was begun; a machine may be slow
    assert f"micro {size}: " in first.stdout
    succeed(*settings, f"batch.micro_size={size}", f"hydra.run.dir={stated}", world=2)
    ours, theirs = ([[row.get(key) for key in EXACT] for row in metrics(run)] for run in (found, stated))
    assert ours == theirs
    assert len(ours) == 4
    own, others = _weights(found, 4), _weights(stated, 4)
    assert own.keys() == others.keys()
    assert all(own[name].equal(tensor) for name, tensor in others.items())
    again = succeed(
        *settings, "trainer.max_steps=6", "batch.micro_size=auto", "resume=auto", f"hydra.run.dir={resumed}", world=2
    )
    assert _plan(resumed)["memory"] == plan["memory"]  # taken up: a second rehearsal takes other times
    assert f"micro {size}: " in again.stdout


@pytest.mark.slow
def test_tokens_of_a_micro_batch_are_found_too(tmp_path: Path) -> None:
    """As many as the size that is found has, of the longest samples; the stated number is the same run."""
    settings = (*RUN, "data=lines", "data.seq_len=16", "batch.group_by_length=true")
    found, stated = tmp_path / "found", tmp_path / "stated"
    said = succeed(*settings, "batch.micro_tokens=auto", f"hydra.run.dir={found}", world=2).stdout
    plan = _plan(found)
    tokens, size = plan["micro_tokens"], plan["memory"]["micro_size"]
    assert (tokens, plan["micro_size"]) == (16 * size, None)
    assert f"micro {size}: {plan['memory']['reason'].partition(': ')[2]}" in " ".join(said.split())
    assert plan["memory"]["reason"].endswith(f"; so micro-batches have {tokens:,} padded tokens")
    succeed(*settings, f"batch.micro_tokens={tokens}", f"hydra.run.dir={stated}", world=2)
    ours, theirs = ([[row.get(key) for key in EXACT] for row in metrics(run)] for run in (found, stated))
    assert ours == theirs
    succeed(
        *settings, "trainer.max_steps=6", "batch.micro_tokens=auto", "resume=auto", f"hydra.run.dir={found}", world=2
    )
    assert _plan(found)["memory"] == plan["memory"]


@pytest.mark.slow
def test_a_stated_size_rehearses_nothing(tmp_path: Path) -> None:
    succeed(*RUN, "batch.micro_size=4", f"hydra.run.dir={tmp_path}")
    assert "memory" not in _plan(tmp_path)
