"""A rank that holds another number than the others ends the run before that is saved: the checkpoint before is good."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distaccum.checkpoint.store import verify
from tests.support.commands import ROOT, TINY, metrics, run, status, succeed

SETTINGS = (
    *TINY,
    "batch.global_size=16",
    "batch.micro_size=4",
    "trainer.max_steps=12",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "checkpoint.every=4",
    "metrics=jsonl",
    "resume=auto",
)
EXACT = ("step", "window", "loss", "grad_norm", "lr", "samples", "tokens")
DEEPSPEED = {"warm": "deepspeed", "DS_ACCELERATOR": "cpu"}


def moving(folder: Path, what: str, step: int) -> list[str]:
    settings = {"_target_": "tests.support.diverging.Moves", "what": what, "step": step, "once": folder / "moved"}
    return [f"+callbacks.moves.{key}={value}" for key, value in settings.items()]


def expect_found_and_resumed(
    folder: Path, what: str, step: int, good: int, *engine: str, world: int = 2, **options: str
) -> str:
    """The run ends, its checkpoint is whole, and the same command goes on as if nothing had been; returns its words."""
    given = (*SETTINGS, *engine, f"hydra.run.dir={folder / 'run'}")
    options = {"PYTHONPATH": str(ROOT), **options}
    moved = moving(folder, what, step)
    finished = run(*given, *moved, world=world, timeout=60, **options)
    assert finished.returncode == 1, finished.stdout
    found = status(folder / "run")
    assert found["state"] == "failed"
    assert found["reason"].count("VerificationError") == 1
    saved = folder / "run" / "checkpoints"
    assert sorted(path.name for path in saved.glob("step-*")) == [f"step-{good}"]
    verify(saved / f"step-{good}")
    assert str(saved / f"step-{good}") in found["reason"]
    succeed(*given, *moved, world=world, **options)
    assert status(folder / "run")["state"] == "done"
    succeed(*SETTINGS, *engine, f"hydra.run.dir={folder / 'whole'}", world=world, **options)
    ours, theirs = ([[record[key] for key in EXACT] for record in metrics(folder / name)] for name in ("run", "whole"))
    assert ours == theirs
    reason: str = found["reason"]
    return reason


@pytest.mark.slow
@pytest.mark.fault("one element of a weight changes on one rank")
def test_a_weight_that_moves_on_one_rank(tmp_path: Path, says: Callable[[str], None]) -> None:
    says(expect_found_and_resumed(tmp_path, "weight", 5, 4))


@pytest.mark.fault("one element of the optimizer's state changes on one rank")
@pytest.mark.heavy
def test_a_moment_that_moves_on_one_rank(tmp_path: Path, says: Callable[[str], None]) -> None:
    says(expect_found_and_resumed(tmp_path, "exp_avg", 8, 4, world=3))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("engine", "what", "named"),
    [
        (("engine=zero1",), "weight", "the weights are no longer"),
        (("engine=fsdp2",), "step", "in step of"),
        (("engine=fsdp2", "engine.replicas=2"), "exp_avg", "in exp_avg of"),
        (("engine=fsdp2", "engine.replicas=2"), "weight", "in the shard of"),
        (("engine=deepspeed", "engine.stage=0"), "exp_avg", "in exp_avg of"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_every_engine_compares_what_it_holds_twice(
    tmp_path: Path, engine: tuple[str, ...], what: str, named: str
) -> None:
    if "deepspeed" in engine[0]:
        pytest.importorskip("deepspeed")
    options = DEEPSPEED if "deepspeed" in engine[0] else {}
    assert named in expect_found_and_resumed(tmp_path, what, 8, 4, *engine, **options)
