"""State of unusual kinds on two ranks, and a callback that fails on one of them."""

from pathlib import Path

import pytest

from tests.support.commands import ROOT, run, status, succeed

WORKER = Path(__file__).parent / "workers" / "odd_state.py"


HEAVY = [pytest.param(engine, marks=pytest.mark.heavy) for engine in ("zero1", "deepspeed")]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow), *HEAVY])
def test_a_resumed_run_has_it_bit_for_bit(engine: str, tmp_path: Path) -> None:
    """Extra state was a raw error at the first save, or lost; 16-bit integers and 8-bit floats one at wrapping."""
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
        succeed(tmp_path, engine, world=2, script=WORKER, warm="deepspeed", DS_ACCELERATOR="cpu", PYTHONPATH=str(ROOT))
    else:
        succeed(tmp_path, engine, world=2, script=WORKER, PYTHONPATH=str(ROOT))


def test_a_callback_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    finished = run(tmp_path, "callback", world=2, script=WORKER, timeout=60, PYTHONPATH=str(ROOT))
    assert finished.returncode == 1
    assert "ZeroDivisionError: of the callback" in finished.stderr
    found = status(tmp_path / "fails")
    assert found["state"] == "failed"
    assert "rank 1: ZeroDivisionError: of the callback" in found["reason"]
