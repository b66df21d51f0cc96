"""The moving average on every engine: that of one process, and it goes on on another engine and number of ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.commands import TINY, metrics, succeed

SETTINGS = (
    *TINY,
    *("callbacks=ema", "callbacks.ema.decay=0.9", "callbacks.ema.evaluate=true", "optim.lr=1e-2"),
    *("batch.global_size=6", "batch.micro_size=2", "trainer.eval_every=2", "trainer.eval_samples=5"),
    *("checkpoint.every=2", "checkpoint.keep=0", "metrics=jsonl", "trainer.log_every=1", "trainer.max_steps=4"),
)


def _average(run: Path, step: int, kind: str = "ema") -> dict[str, Tensor]:
    files = sorted((run / "checkpoints" / f"step-{step}").glob(f"{kind}*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def _off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).norm() / value.norm().clamp(min=1e-3)) for name, value in expected.items())


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("fsdp2", marks=pytest.mark.slow),
        pytest.param("zero1", marks=pytest.mark.heavy),
        pytest.param("deepspeed engine.stage=1", marks=pytest.mark.heavy),
        pytest.param("deepspeed engine.stage=2", marks=pytest.mark.heavy),
    ],
)
def test_the_average_is_that_of_one_process(engine: str, tmp_path: Path) -> None:
    alone, ranks, parts = tmp_path / "alone", tmp_path / "ranks", tmp_path / "parts"
    arguments = f"engine={engine}".split()
    warm = "deepspeed" if "deepspeed" in engine else "distaccum"
    succeed(*SETTINGS, f"hydra.run.dir={alone}")
    succeed(*SETTINGS, *arguments, f"hydra.run.dir={ranks}", world=2, warm=warm)
    expected = _average(alone, 4)
    plain = {name: _average(alone, 4, "model")[name] for name in expected}
    assert _off(_average(ranks, 4), expected) < 1e-5
    assert _off(plain, expected) > 1e-2
    evaluated = [[record["eval_loss"] for record in metrics(run) if "eval_loss" in record] for run in (alone, ranks)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    # From two ranks to one, and to another engine.
    succeed(*SETTINGS, f"resume={ranks / 'checkpoints' / 'step-2'}", f"hydra.run.dir={parts}")
    assert _off(_average(parts, 4), expected) < 1e-5
    assert metrics(parts)[-1]["eval_loss"] == pytest.approx(evaluated[0][-1], rel=1e-5)


@pytest.mark.heavy
def test_the_same_bits_after_a_resume_on_shards(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sharded = (*SETTINGS, "engine=fsdp2", "engine.reshard_after_forward=false")
    succeed(*sharded, f"hydra.run.dir={whole}", world=2)
    succeed(*sharded, f"resume={whole / 'checkpoints' / 'step-2'}", f"hydra.run.dir={parts}", world=2)
    expected, found = _average(whole, 4), _average(parts, 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
