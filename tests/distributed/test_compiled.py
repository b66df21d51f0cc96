"""Compiled forwards: the gradient of the global batch, bitwise resumes, checkpoints that eager runs read."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import answer
from tests.support.commands import TINY, metrics, succeed

# The worst of what rounding in another order does, over what it does in a plain eager loop on the same weights.
TIMES = 3

QUICK = ["gradient,fsdp2 boundary,blocks,aot_eager,bf16"]
ENGINES = ["ddp,blocks", "ddp,model", "zero1,blocks", "zero1,model", "fsdp2 boundary,blocks", "fsdp2 every,blocks"]
RECOMPUTED = ["fsdp2 recomputed,blocks", "fsdp2 selective,blocks"]
SLOW = ["gradient,ddp,model,aot_eager,fp32", "resume,fsdp2 recomputed,blocks,aot_eager,fp32"]
INDUCTOR = [f"{task},ddp,blocks,inductor,fp32" for task in ("gradient", "slope")]
# Of DeepSpeed what it trains in fp32; its state is its own.
DEEPSPEED = [f"deepspeed {stage},{parts}" for stage in range(3) for parts in ("blocks", "model")]
PARTS = 2  # compiled: the model's, or the code that its blocks share, and the loss


def _every(engine: str, backend: str) -> list[str]:
    if engine.startswith("deepspeed"):
        return [f"gradient,{engine},{backend},fp32"]
    tasks = ("gradient,fp32", "gradient,bf16", "resume,fp32", "slope,fp32")
    return [f"{task},{engine},{backend},{precision}" for task, precision in (one.split(",") for one in tasks)]


def _run(
    folder: Path, cells: Sequence[str], world: int, timeout: float = 240, cache: Path | None = None
) -> dict[str, Any]:
    options = {"TORCHINDUCTOR_CACHE_DIR": str(cache or folder / "cache")}  # nothing of another run's
    if any("deepspeed" in cell for cell in cells):
        options |= {"warm": "deepspeed", "DS_ACCELERATOR": "cpu"}
    found: dict[str, Any] = answer("compiled", *cells, world=world, timeout=timeout, **options)
    assert sorted(found) == sorted(cells)
    return found


def _judge(found: dict[str, Any]) -> None:
    for cell, values in found.items():
        print(cell, {name: value for name, value in values.items() if not isinstance(value, list)})
        if cell.startswith("gradient"):
            assert 0 < values["plain"] < 0.02, cell
            assert values["error"] <= TIMES * values["plain"], cell
            assert values["clean"], cell
            assert values["graphs"] >= PARTS, cell
        elif cell.startswith("slope"):
            assert values["slope"] == pytest.approx(values["norm"], rel=1e-6), cell
        else:
            assert values["resumed"] == values["whole"], cell
            assert values["resumed"] != values["eager after"] or "aot_eager" in cell, cell
            if "aot_eager" in cell:  # torch's own kernels, with the eager run's random numbers
                assert values["whole"] == pytest.approx(values["eager"], rel=1e-12, abs=1e-12), cell
                assert values["eager after"] == pytest.approx(values["whole"], rel=1e-12, abs=1e-12), cell


@pytest.mark.slow
def test_a_compiled_gradient_is_that_of_the_global_batch(tmp_path: Path) -> None:
    _judge(_run(tmp_path, QUICK, 2))


@pytest.mark.heavy
def test_recomputation_and_resumes(tmp_path: Path) -> None:
    _judge(_run(tmp_path, SLOW, 2))


@pytest.mark.heavy
def test_what_inductor_makes(tmp_path: Path) -> None:
    _judge(_run(tmp_path, INDUCTOR, 1))
    assert list((tmp_path / "cache" / "fxgraph").rglob("*"))


@pytest.mark.heavy
def test_a_run_counts_what_is_compiled_and_an_eager_one_goes_on(tmp_path: Path) -> None:
    common = (*TINY, "trainer.log_every=1", "trainer.eval_every=0", "metrics=jsonl", f"hydra.run.dir={tmp_path}")
    compiled = ("compile=blocks", "compile.backend=aot_eager", "engine=fsdp2", "model.dropout=0.1")
    succeed(*common, *compiled, "trainer.max_steps=4", "resume=auto", world=2)
    assert [record["recompiles"] for record in metrics(tmp_path)] == [0, 0, 0, 0]
    goes_on = succeed(*common, "model.dropout=0.1", "trainer.max_steps=6", "resume=auto", world=1)
    assert "compile.name: blocks -> none" in goes_on.stdout
    assert [record.get("recompiles") for record in metrics(tmp_path)] == [0, 0, 0, 0, None, None]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's folder for all of the cells below: the engines compute in the same blocks."""
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("backend", "engine", "world"),
    [
        *product(("aot_eager", "inductor"), (*ENGINES, *RECOMPUTED), (1, 2)),
        *product(("aot_eager",), DEEPSPEED, (2,)),  # which does not start without a launcher
        *product(("inductor",), DEEPSPEED[-2:], (2,)),
    ],
)
def test_every_cell(engine: str, world: int, backend: str, tmp_path: Path, cache: Path) -> None:
    if engine.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    _judge(_run(tmp_path, _every(engine, backend), world, timeout=1700, cache=cache))
