"""On engines of every kind, from the command line and with groups of parameters: the numbers of a plain loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import answer
from tests.support.commands import ROOT, environment, metrics, status, succeed


def _hold(*engines: str, rel: float = 1e-11, off: float = 1e-13, **options: Any) -> None:
    found = answer("groups", *engines, **options)
    truth = found.pop("truth")
    bits = {name: found.pop(name) for name in list(found) if name.endswith(", bits")}
    assert bits == {f"{engine}, bits": True for engine in engines}
    assert len(found) == len(engines) + len(engines) ** 2
    for name, weights in found.items():
        for parameter, values in truth.items():
            assert weights[parameter] == pytest.approx(values, rel=rel, abs=off), (name, parameter)


@pytest.mark.slow
def test_every_engine_steps_the_groups_as_a_plain_loop_and_takes_the_others_state() -> None:
    _hold("ddp", "zero1", "fsdp2")


@pytest.mark.slow
def test_deepspeed_steps_the_groups_of_one_optimizer() -> None:
    """In fp32, which is all that it steps.

    Adam divides a gradient's rounding by the gradient: where that is small, an update of 0.01 is off by some 1e-5 of
    it, by how much depends on the processor. A group's setting that is lost moves a weight by 1e-4 and more.
    """
    _hold("deepspeed", rel=2e-6, off=1e-6, warm="deepspeed")


SMALL = (
    "data=lines",
    "model.n_layer=1",
    "model.n_embd=16",
    "model.n_head=2",
    "batch.micro_size=4",
    "metrics=jsonl",
    "trainer.log_every=1",
    "trainer.eval_every=0",
)


@pytest.mark.heavy
def test_deepspeed_then_fsdp2_with_its_state(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    first, second = tmp_path / "first", tmp_path / "second"
    succeed(
        *SMALL,
        "engine=deepspeed",
        "engine.stage=3",
        "trainer.max_steps=3",
        "checkpoint.every=2",
        f"hydra.run.dir={first}",
        world=2,
    )
    assert json.loads((first / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 3
    assert "ZeRO-3" in json.loads((first / "plan.json").read_text())["engine"]
    went_on = succeed(
        *SMALL,
        "engine=fsdp2",
        "trainer.max_steps=3",
        f"resume={first}/checkpoints/step-2",
        f"hydra.run.dir={second}",
        world=2,
    )
    text = " ".join(went_on.stdout.split())
    assert "at step 2; everything carries over" in text
    assert "(saved by engine deepspeed on 2 ranks)" in text
    (again,) = metrics(second)
    assert again["loss"] == pytest.approx(metrics(first)[2]["loss"], rel=1e-6)

    succeed(*SMALL, "engine=fsdp2", "resume=auto", "trainer.max_steps=4", f"hydra.run.dir={first}")
    assert status(first)["state"] == "done"
    assert [record["step"] for record in metrics(first)] == [1, 2, 3, 4]


@pytest.mark.heavy
def test_exported_weights_start_a_run(tmp_path: Path) -> None:
    first, file = tmp_path / "first", tmp_path / "weights.safetensors"
    succeed(*SMALL, "engine=fsdp2", "trainer.max_steps=2", "checkpoint.every=2", f"hydra.run.dir={first}", world=2)
    succeed(f"{first}/checkpoints/step-2", file, script=ROOT / "distaccum" / "tools" / "export.py")
    succeed(*SMALL, f"init_from={file}", "trainer.max_steps=1", f"hydra.run.dir={tmp_path / 'second'}")
    went_on = f"resume={first}/checkpoints/step-2"
    succeed(*SMALL, went_on, "trainer.max_steps=3", f"hydra.run.dir={tmp_path / 'third'}")
    (begun,), (resumed,) = metrics(tmp_path / "second"), metrics(tmp_path / "third")
    assert (begun["step"], resumed["step"]) == (1, 3)
    assert begun["loss"] != resumed["loss"]  # of other windows, by the same weights


@pytest.mark.heavy
def test_deepspeeds_own_launcher(tmp_path: Path) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")  # installed with the tests' environment, active or not
    command = [str(launcher), "--no_local_rank", "--num_gpus", "2", str(ROOT / "launch" / "train.py"), *SMALL]
    command += ["engine=deepspeed", "trainer.max_steps=2", f"hydra.run.dir={tmp_path}"]
    subprocess.run(command, check=True, env=environment(DS_ACCELERATOR="cpu"), timeout=120, cwd=tmp_path)
    assert status(tmp_path)["step"] == 2
