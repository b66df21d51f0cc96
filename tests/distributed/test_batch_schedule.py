"""``batch.schedule`` on every engine and over changes of the number of ranks: the run of one process, in fp64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import wide
from tests.support.commands import QUIET, ROOT, TINY, metrics, run, succeed

SCHEDULE = "batch.schedule=[{global_size:3,updates:3},{global_size:5,tokens:240}]"  # 16 tokens a sample: 3 windows
SETTINGS = (*TINY, *QUIET, "batch.global_size=11", "batch.micro_size=2", "schedule=constant", "trainer.max_steps=9")
SAMPLES = [3, 6, 9, 14, 19, 24, 35, 46, 57]
ENGINES = {
    "ddp": ("engine=ddp",),
    "zero1": ("engine=zero1",),
    "fsdp2": ("engine=fsdp2",),
    "fsdp2, every micro-step": ("engine=fsdp2", "engine.sync=every"),
}
OTHERS = ("zero1", "fsdp2, every micro-step")
DEEPSPEED = [pytest.param(stage, marks=() if stage == 2 else pytest.mark.heavy) for stage in (0, 1, 2, 3)]


def _losses(run_dir: Path) -> list[float]:
    records = metrics(run_dir)
    assert [record["samples"] for record in records] == SAMPLES
    assert [record["tokens"] for record in records] == [16 * samples for samples in SAMPLES]
    return [record["loss"] for record in records]


def _run(run_dir: Path, *settings: str, **options: Any) -> list[float]:
    succeed(*SETTINGS, SCHEDULE, *settings, f"hydra.run.dir={run_dir}", PYTHONPATH=str(ROOT), **options)
    return _losses(run_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process in fp64, each of its windows in one micro-batch."""
    return _run(tmp_path_factory.mktemp("whole"), wide.MODEL, "batch.micro_size=11")


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.heavy), 2, pytest.param(4, marks=pytest.mark.heavy)]
)
@pytest.mark.parametrize(
    "engine", ["ddp", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("fsdp2", *OTHERS))]
)
def test_every_engine_trains_as_one_process_does(tmp_path: Path, whole: list[float], engine: str, world: int) -> None:
    assert _run(tmp_path, wide.MODEL, *ENGINES[engine], world=world) == pytest.approx(whole, rel=wide.AGREES)


def _error(found: Sequence[float], exact: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, exact, strict=True))


@pytest.mark.heavy
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", DEEPSPEED)
def test_deepspeed_is_as_near_as_plain_fp32(tmp_path: Path, whole: list[float], stage: int, world: int) -> None:
    plain = _run(tmp_path / "plain", "batch.micro_size=11")
    found = _run(tmp_path / "run", "engine=deepspeed", f"engine.stage={stage}", world=world, warm="deepspeed")
    assert _error(found, whole) <= 4 * _error(plain, whole)


@pytest.mark.slow
def test_it_goes_on_on_other_numbers_of_ranks(tmp_path: Path, whole: list[float]) -> None:
    settings = (
        *SETTINGS,
        SCHEDULE,
        wide.MODEL,
        "resume=auto",
        "checkpoint.every=9",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    for world, steps in ((2, 2), (1, 3), (3, 5), (4, 7), (2, 9)):  # within a stage, at its end, within the last one
        printed = succeed(*settings, f"trainer.max_steps={steps}", world=world, PYTHONPATH=str(ROOT)).stdout
        assert ("resuming" in printed) == (steps > 2)
    assert _losses(tmp_path / "run") == pytest.approx(whole, rel=wide.AGREES)
    refused = run(*settings, "batch.schedule=[]", "trainer.max_steps=10", PYTHONPATH=str(ROOT))
    assert refused.returncode == 2
    assert "batch.global_size=11: but" in refused.stderr
    assert "counts its windows with batch.global_size=3 for 3 updates, 5 for 240 tokens, then 11" in refused.stderr
