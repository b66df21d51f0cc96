"""Checkpoints by the clock, on two ranks of which one is slow."""

import shutil
from pathlib import Path

import pytest

from tests.support.commands import GOES_WRONG, ROOT, metrics, succeed

SETTINGS = (*GOES_WRONG, "model=cnn", "+data.how=slow", "trainer.max_steps=24", "checkpoint.keep=0")
EXACT = ("step", "window", "loss", "grad_norm", "lr", "samples", "tokens", "skipped")


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def records(folder: Path) -> list[list[object]]:
    return [[record[key] for key in EXACT] for record in metrics(folder)]


@pytest.mark.slow
def test_they_come_between_those_by_updates_and_change_no_metric(tmp_path: Path) -> None:
    """A window takes 40 ms at least: the clock's 300 ms are over within every ten of them."""
    for name, given in {
        "plain": ("checkpoint.every=0",),
        "clock": ("checkpoint.every=0", "checkpoint.every_minutes=0.005"),
        "both": ("checkpoint.every=10", "checkpoint.every_minutes=0.005"),
    }.items():
        succeed(*SETTINGS, *given, f"hydra.run.dir={tmp_path / name}", world=2, PYTHONPATH=str(ROOT))
    assert steps(tmp_path / "plain") == []
    for name in ("clock", "both"):
        assert records(tmp_path / name) == records(tmp_path / "plain")
        saved = steps(tmp_path / name)
        assert len(saved) >= 3
        assert saved[-1] == 24
        assert all(after - before <= 10 for before, after in zip([0, *saved], saved, strict=False))
    assert {10, 20, 24} < set(steps(tmp_path / "both"))
    assert any(step % 10 for step in steps(tmp_path / "clock"))

    # resumed from one in the middle
    first = next(step for step in steps(tmp_path / "clock") if step % 10)
    for step in steps(tmp_path / "clock"):
        if step > first:
            shutil.rmtree(tmp_path / "clock" / "checkpoints" / f"step-{step}")
    succeed(
        *SETTINGS,
        "checkpoint.every=0",
        "resume=auto",
        f"hydra.run.dir={tmp_path / 'clock'}",
        world=2,
        PYTHONPATH=str(ROOT),
    )
    assert records(tmp_path / "clock") == records(tmp_path / "plain")
