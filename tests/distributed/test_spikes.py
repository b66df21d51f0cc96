"""Gradients that spike on two ranks, beside an fp64 loop on whole batches with the rule written out again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workers import spikes as worker
from tests.support.commands import ROOT, succeed

Found = dict[str, Any]
ENGINES = [
    *(pytest.param({"name": name}, marks=pytest.mark.heavy, id=name) for name in ("fsdp2", "zero1")),
    *(
        pytest.param({"name": "deepspeed", "stage": stage}, marks=pytest.mark.heavy, id=f"deepspeed-{stage}")
        for stage in range(4)
    ),
]


def launch(folder: Path, engine: Found, *cases: str) -> tuple[Found, str]:
    """What two ranks found, and what they printed."""
    options: dict[str, str] = {}
    if engine["name"] == "deepspeed":
        pytest.importorskip("deepspeed")
        options = {"warm": "deepspeed", "DS_ACCELERATOR": "cpu"}
    arguments = (folder / "found.json", folder / "runs", json.dumps(engine), *cases)
    finished = succeed(*arguments, world=2, script=Path(worker.__file__), PYTHONPATH=str(ROOT), **options)
    found: Found = json.loads((folder / "found.json").read_text())
    return found, finished.stderr


def expect_oracle(found: Found, *, spikes: list[int], tolerance: float = 1e-5) -> None:
    """The same windows, decisions, samples, losses, norms and rates; in the end the same weights."""
    assert not found["said"]
    assert [record["window"] for record in found["oracle"] if record["spike"]] == spikes
    assert len(found["run"]) == len(found["oracle"])
    for ours, true in zip(found["run"], found["oracle"], strict=True):
        for key in ("step", "window", "applied", "samples"):
            assert ours[key] == true[key], (key, true)
        for key in ("loss", "grad_norm", "lr"):
            assert abs(ours[key] - true[key]) <= tolerance * abs(true[key]), (key, true)
        assert ours["skipped"] == ours["window"] - ours["step"]
    assert found["off"] <= tolerance


def expect_resumed(found: Found) -> None:
    """As if it had not been stopped, bit for bit; each rollback was made once."""
    assert found["said"] == ["RuntimeError: killed here", "RuntimeError: killed here", "", ""]
    assert (found["records"], found["weights"], found["state"]) == (True, True, True)
    at = [(one["to_step"], one["after_window"]) for one in found["history"]]
    assert at == [(15, 20), (15, 22), (25, 33)]


@pytest.mark.fault("a gradient norm far above those before, with `trainer.on_spike=rollback`")
def test_a_rollback_leaves_out_what_led_to_the_spike(tmp_path: Path, says: Callable[[str], None]) -> None:
    found, printed = launch(tmp_path, {"name": "ddp"}, "rollback")
    says(printed)
    expect_oracle(found["rollback"], spikes=[20, 22, 33])
    last = found["rollback"]["run"][-1]
    assert (last["window"], last["step"], last["skipped"], last["nonfinite"]) == (38, 30, 8, 0)
    assert found["rollback"]["saved"] == ["latest", "step-25", "step-30"]


@pytest.mark.slow
@pytest.mark.fault("a gradient norm far above those before, with `trainer.on_spike=skip`")
def test_windows_that_spike_are_skipped(tmp_path: Path, says: Callable[[str], None]) -> None:
    found, printed = launch(tmp_path, {"name": "ddp"}, "skip", "in a row", "verified", "fp16", "before a checkpoint")
    expect_oracle(found["skip"], spikes=[20, 28])
    expect_oracle(found["verified"], spikes=[20, 28])
    expect_oracle(found["before a checkpoint"], spikes=[10])
    expect_oracle(found["fp16"], spikes=[20, 28], tolerance=2e-2)
    scales = {record["window"]: record["loss_scale"] for record in found["fp16"]["run"]}
    assert scales[20] == scales[21] == scales[22] == 2**6  # a spike is no overflow
    assert scales[32] == 2**7
    said, last = found["in a row"]["said"], found["in a row"]["run"][-1]
    says(printed + said)
    assert said.startswith("SpikeError: window 22 spikes")
    assert (last["window"], last["step"], last["skipped"]) == (22, 19, 3)
    assert printed.count("; it makes no step") == 2 + 1 + 2 + 2 + 1  # once for those in a row
    assert "there is no checkpoint yet, so the window is skipped only" in printed


@pytest.mark.heavy
def test_a_warning_changes_nothing(tmp_path: Path) -> None:
    found, printed = launch(tmp_path, {"name": "ddp"}, "warn")
    expect_oracle(found["warn"], spikes=[20, 21, 28])
    assert printed.count("it is trained on (on_spike=warn)") == 2
    assert [record["spikes"] for record in found["warn"]["run"]][18:] == [0, 1, *[2] * 7, *[3] * 3]


@pytest.mark.heavy
@pytest.mark.fault("a spike after each of three rollbacks to one checkpoint")
def test_rollbacks_to_one_checkpoint_come_to_an_end(tmp_path: Path, says: Callable[[str], None]) -> None:
    found, _ = launch(tmp_path, {"name": "ddp"}, "again and again")
    says(found["again and again"]["said"])
    assert found["again and again"]["saved"] == ["latest", "step-10", "step-15"]


@pytest.mark.slow
def test_a_run_that_was_rolled_back_resumes_where_it_was(tmp_path: Path) -> None:
    found, _ = launch(tmp_path, {"name": "ddp"}, "resumed: rollback", "resumed: stream")
    for name in found:
        expect_oracle(found[name]["undisturbed"], spikes=[20, 22, 33])
        expect_resumed(found[name])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_skips_and_rolls_back(engine: Found, tmp_path: Path) -> None:
    found, _ = launch(tmp_path, engine, "skip", "resumed: rollback")
    expect_oracle(found["skip"], spikes=[20, 28])
    expect_oracle(found["resumed: rollback"]["undisturbed"], spikes=[20, 22, 33])
    expect_resumed(found["resumed: rollback"])
