"""A run whose forward is a collective begins again by itself after an out-of-memory error, with smaller parts."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import QUIET, ROOT, TINY, environment, metrics, succeed

LOCAL = ROOT / "launch" / "local.py"
RUN = (
    *TINY,
    *QUIET[2:],
    "trainer.eval_every=0",
    "trainer.verify=never",  # whose forwards the model would count
    "model._target_=tests.support.greedy.GreedyGPT",
    "model.dropout=0",  # parts draw masks of their own
    "batch.global_size=32",
    "batch.micro_size=8",
    "trainer.max_steps=6",
    "checkpoint.every=2",
    "precision=fp32",
)
SHARDED = [
    pytest.param(("engine=fsdp2",), marks=pytest.mark.heavy),
    pytest.param(("engine=fsdp2", "engine.sync=every"), marks=pytest.mark.heavy),
    pytest.param(("engine=deepspeed", "engine.stage=3"), marks=pytest.mark.heavy),
]


def _launched(folder: Path, *arguments: str, **extra: str) -> tuple[int, str]:
    command = [sys.executable, str(LOCAL), *RUN, *arguments, f"hydra.run.dir={folder}"]
    said = environment(NPROC="2", PYTHONPATH=str(ROOT), **extra)
    finished = subprocess.run(command, env=said, capture_output=True, text=True, check=False, timeout=240)
    return finished.returncode, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One process, whole micro-batches, and memory for all."""
    folder = tmp_path_factory.mktemp("undisturbed")
    greedy = {"GREEDY_FROM": "1", "GREEDY_ROWS": "99"}
    succeed(*RUN, f"hydra.run.dir={folder}", PYTHONPATH=str(ROOT), **greedy)
    return metrics(folder)


@pytest.mark.slow
@pytest.mark.fault("out of memory in a micro-step of fsdp2, or of DeepSpeed")
@pytest.mark.parametrize("engine", SHARDED, ids=" ".join)
def test_a_sharded_run_goes_on_with_less(
    engine: tuple[str, ...], undisturbed: list[dict[str, Any]], says: Callable[[str], None], tmp_path: Path
) -> None:
    code, said = _launched(tmp_path, *engine, GREEDY_FROM="5", GREEDY_ROWS="4")
    assert code == 0, said
    says(said)
    assert said.count("going on from step 2: micro-batches from 8 x 16 on are run in parts") == 1, said
    note = json.loads((tmp_path / "memory.json").read_text())
    assert note["failed"] == [[8, 16]]
    assert note["reason"] == ""  # this start has not failed
    found = metrics(tmp_path)
    assert [row["step"] for row in found] == [row["step"] for row in undisturbed] == list(range(1, 7))
    for row, truth in zip(found, undisturbed, strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(truth[name], rel=1e-5), (row, truth)


@pytest.mark.heavy
def test_it_halves_until_it_fits_and_begins_again_at_zero_where_nothing_is_saved(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    code, said = _launched(tmp_path, "engine=fsdp2", GREEDY_FROM="2", GREEDY_ROWS="2")
    assert code == 0, said
    for rows in (8, 4):
        assert said.count(f"going on from the beginning: micro-batches from {rows} x 16 on are run in parts") == 1, said
    for row, truth in zip(metrics(tmp_path), undisturbed, strict=True):
        assert row["loss"] == pytest.approx(truth["loss"], rel=1e-5)


@pytest.mark.heavy
def test_it_ends_where_a_single_sample_does_not_fit(tmp_path: Path) -> None:
    code, said = _launched(tmp_path, "engine=fsdp2", "batch.micro_size=2", GREEDY_FROM="1", GREEDY_ROWS="0")
    assert code == 1
    assert said.count("distaccum: going on from the beginning") == 1, said  # with 1
    assert "the run failed: rank" in said
    assert "out of memory in a forward of window 1" in said


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("engine", "starts"),
    [("fsdp2", 2), ("ddp", 1)],  # on ddp it is known before it is cut
)
def test_what_may_not_be_cut_is_not_cut_by_another_start(engine: str, starts: int, tmp_path: Path) -> None:
    given = (f"engine={engine}", "loss._target_=tests.support.greedy.Coupled")
    code, said = _launched(tmp_path, *given, GREEDY_FROM="1", GREEDY_ROWS="4")
    assert code == 1
    assert said.count("distaccum: going on") == starts - 1, said
    assert "is no sum over samples" in said
    assert not metrics(tmp_path)


@pytest.mark.heavy
def test_ranks_that_draw_differently_are_looked_at_together(undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    """Where one of them cannot cut its random numbers, none runs the forwards that would show how."""
    given = ("engine=fsdp2", "loss._target_=tests.support.greedy.Uneven")
    code, said = _launched(tmp_path, *given, GREEDY_FROM="5", GREEDY_ROWS="4")
    assert code == 0, said
    assert said.count("going on from step 2") == 1, said
    assert [row["step"] for row in metrics(tmp_path)] == [row["step"] for row in undisturbed]


@pytest.mark.heavy
@pytest.mark.parametrize("written", ["resume", "++resume", "--resume"])
def test_a_resumed_run_elsewhere_is_not_mixed_with_its_own_records(written: str, tmp_path: Path) -> None:
    code, said = _launched(tmp_path / "first", "engine=fsdp2", "trainer.max_steps=2", GREEDY_FROM="99", GREEDY_ROWS="1")
    assert code == 0, said
    saved = tmp_path / "first" / "checkpoints" / "step-2"
    # As it may be written: by a flag, or by force.
    code, said = _launched(tmp_path / "second", "engine=fsdp2", f"{written}={saved}", GREEDY_FROM="1", GREEDY_ROWS="4")
    assert code == 1
    assert "going on" not in said
    assert "Lower batch.micro_size" in said
