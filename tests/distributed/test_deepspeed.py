"""The real DeepSpeed on gloo, beside one fp64 process on whole batches."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distaccum.engines.deepspeed.compat import check_known_bugs
from distaccum.engines.deepspeed.internals import WORKING
from distaccum.errors import ConfigError
from tests.support.answers import answer
from tests.support.commands import ROOT
from tests.support.commands import run as run_script
from tests.support.optional import needs

pytestmark = [pytest.mark.slow, needs("deepspeed")]


WORKER = ROOT / "tests" / "distributed" / "workers" / "deepspeed_engine.py"
# Of a window's gradient: DeepSpeed computes in these types from cast weights on, so their rounding is all there is.
TOLERANCE = {"fp32": 1e-6, "bf16": 3e-2, "fp16": 2e-3}
QUICK = ("norms", "padding", "reductions", "resume", "refusals", "ends", "older")
SLOW = ("variants", "offload", "accumulation", "given_up")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What two ranks found, all in one launch."""
    return launch(tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture(scope="module")
def quick() -> Any:
    """As ``found``, of what takes seconds."""
    return answer("deepspeed_engine", *QUICK, warm="deepspeed", timeout=280)


def launch(folder: Path) -> Mapping[str, Any]:
    """Runs the worker under torchrun; its imports say nothing either."""
    result = folder / "result.json"
    arguments = ("--standalone", "--nproc-per-node=2", WORKER, result, *SLOW)
    finished = run_script(*arguments, script=TORCHRUN, warm="torch", timeout=280, PYTHONPATH=str(ROOT))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    noise = [line for line in (finished.stdout + finished.stderr).splitlines() if "OMP_NUM_THREADS" not in line]
    assert not [line for line in noise if "DeepSpeed" in line or "Warning" in line], noise
    values: Mapping[str, Any] = json.loads(result.read_text())
    return values


TORCHRUN = Path(__import__("torch.distributed.run", fromlist=["run"]).__file__)


@pytest.mark.heavy
@pytest.mark.parametrize("part", ["variants", "offload"])
def test_a_window_is_the_whole_batchs_gradient(found: Mapping[str, Any], part: str) -> None:
    for cell, errors in found[part].items():
        bound = TOLERANCE[cell.split()[1]]
        assert errors["gradient"] <= bound, cell
        assert errors["norm"] <= bound, cell


@pytest.mark.heavy
def test_gradients_add_up_in_fp32(found: Mapping[str, Any]) -> None:
    """ZeRO-2 rounds once, where it fills its buckets."""
    errors = found["accumulation"]
    assert max(errors[stage] for stage in "013") <= 1e-6
    assert errors["2"] <= 2.0**-9


@pytest.mark.heavy
def test_a_window_that_is_given_up_leaves_nothing(found: Mapping[str, Any]) -> None:
    assert len(found["given_up"]) == 16
    assert all(found["given_up"].values()), found["given_up"]


def test_every_rank_is_told_the_norm_of_each_whole_gradient(quick: Mapping[str, Any]) -> None:
    assert len(quick["norms"]) == 4
    assert max(quick["norms"].values()) <= 1e-6


def test_what_fills_slices_up_is_no_memory_as_it_was_found(quick: Mapping[str, Any]) -> None:
    assert not quick["padding"]


def test_one_reduction_a_window(quick: Mapping[str, Any]) -> None:
    assert len(quick["reductions"]) == 24
    assert {tuple(counts) for counts in quick["reductions"].values()} == {(0, 0, 0, 0, 1)}


def test_an_engine_that_is_closed_has_no_reduction_left_to_make(quick: Mapping[str, Any]) -> None:
    assert quick["ends"] == []


def test_an_older_deepspeed_is_refused_by_what_it_lacks(quick: Mapping[str, Any]) -> None:
    seen = quick["older"]
    assert "has no DeepSpeedEngine.coalesce_grad_reduction" in seen["no coalesced"]
    assert "has no DeepSpeedZeroOptimizer.gradients_elsewhere" in seen["elsewhere"]
    for said in seen.values():
        assert said.endswith(f"Install deepspeed>={WORKING[0]},<={WORKING[1]}")


def test_resumes_bitwise(quick: Mapping[str, Any]) -> None:
    said = quick["resume"]
    assert len(said) == 12
    assert all(said.values()), said


@pytest.mark.slow
def test_no_stage_rounds_a_gradient_to_16_bits() -> None:
    found = answer("deepspeed_formats", world=3, warm="deepspeed")
    assert max(found["frozen"]) <= 1e-6, found
    assert max(found["bf16"]) <= 1e-6, found


def test_mistakes_are_refused_by_name(quick: Mapping[str, Any]) -> None:
    said = quick["refusals"]
    for name in ("step", "backward", "optimizer", "zero_grad"):
        assert "was called by hand" in said[name]
    assert said["between"] == "went through"
    assert said["lies"].startswith("engine=deepspeed: cannot flatten this model: weight is not contiguous in memory")
    assert "the forward went past the engine" in said["past"]
    assert said["fp16"].startswith("precision=fp16: DeepSpeed does not compute in fp16 on this cpu. Use precision=bf16")
    assert said["describe"].startswith("ZeRO-2: optimizer state and reduced gradients sharded")
    assert said["artifacts"] == ["deepspeed.json"]
    assert said["floor"] == 2.0**8


def test_silent_faults_are_refused_by_version() -> None:
    def refused(version: str, device: str = "cpu", *, fp16: bool = False, **zero: Any) -> str:
        try:
            check_known_bugs({"zero_optimization": {"stage": 2} | zero, "fp16": {"enabled": fp16}}, version, device)
        except ConfigError as error:
            return error.key.rsplit(".", 1)[1]
        return ""

    assert refused("0.19.7", contiguous_gradients=False) == "contiguous_gradients"
    assert not refused("0.19.7", "cuda", contiguous_gradients=False)
    assert refused("0.18.2+cpu", "cuda", reduce_scatter=False) == "reduce_scatter"
    assert not refused("0.19.8", contiguous_gradients=False, reduce_scatter=False)
    assert refused("0.19.8", round_robin_gradients=True) == "round_robin_gradients"
    for device in ("cpu", "cuda"):  # the rows of docs/engines.md
        assert refused("0.19.7", device, stage=1, fp16=True) == "stage"
        assert refused("0.19.2", device, stage=3) == "stage"
        assert not refused("0.19.8", device, stage=1, fp16=True)
        assert not any(refused("0.19.7", device, stage=stage) for stage in range(4))
        assert not refused("0.19.3", device, stage=3)
