"""On engines of every kind, from the command line and with groups of parameters: the numbers of a plain loop."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import answer
from tests.support.commands import ROOT, environment, status


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
def test_deepspeeds_own_launcher(tmp_path: Path) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")  # installed with the tests' environment, active or not
    command = [str(launcher), "--no_local_rank", "--num_gpus", "2", str(ROOT / "launch" / "train.py"), *SMALL]
    command += ["engine=deepspeed", "trainer.max_steps=2", f"hydra.run.dir={tmp_path}"]
    subprocess.run(command, check=True, env=environment(DS_ACCELERATOR="cpu"), timeout=120, cwd=tmp_path)
    assert status(tmp_path)["step"] == 2
