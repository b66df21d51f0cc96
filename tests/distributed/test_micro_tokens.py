"""``batch.micro_tokens`` on several ranks and over resumes: the run of one process and plain micro-batches, in fp64."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import wide
from tests.support.commands import QUIET, ROOT, TINY, metrics, run, succeed

LINES = ("data=lines", "data.seq_len=64", *TINY[1:])
SETTINGS = (*LINES, *QUIET, "batch.global_size=24", "schedule=constant", "trainer.max_steps=6", wide.MODEL)
TOKENS = "batch.micro_tokens=256"
GROUPED = "batch.group_by_length=true"
slow, heavy = pytest.mark.slow, pytest.mark.heavy
Record = dict[str, Any]


def _records(run_dir: Path) -> list[Record]:
    names = ("loss", "grad_norm", "samples", "tokens")
    return [{name: record[name] for name in names} for record in metrics(run_dir)]


def _run(run_dir: Path, *settings: str, **options: Any) -> list[Record]:
    succeed(*SETTINGS, *settings, f"hydra.run.dir={run_dir}", PYTHONPATH=str(ROOT), **options)
    return _records(run_dir)


def _alike(found: list[Record], exact: list[Record]) -> None:
    assert len(found) == len(exact) == 6
    for one, other in zip(found, exact, strict=True):
        assert one == pytest.approx(other, rel=wide.AGREES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """One process in fp64, each of its windows in one micro-batch."""
    return _run(tmp_path_factory.mktemp("whole"), "batch.micro_size=24")


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(1, (), marks=heavy),
        pytest.param(1, (GROUPED,), marks=slow),
        pytest.param(2, (), marks=slow),
        pytest.param(2, (GROUPED, "trainer.num_workers=1"), marks=slow),
        pytest.param(2, ("engine=zero1",), marks=heavy),
        pytest.param(2, ("engine=fsdp2",), marks=slow),  # ranks have other numbers of micro-batches
        pytest.param(2, ("engine=fsdp2", GROUPED), marks=heavy),
        pytest.param(2, ("batch.micro_size=2",), marks=heavy),
        pytest.param(4, (), marks=heavy),
        pytest.param(4, (GROUPED,), marks=heavy),
        pytest.param(2, ("engine=fsdp2", "batch.balance=flops"), marks=heavy),
        pytest.param(4, (GROUPED, "batch.balance=tokens", "trainer.num_workers=1"), marks=heavy),
    ],
)
def test_it_trains_as_one_process_does(
    tmp_path: Path, whole: list[Record], world: int, settings: tuple[str, ...]
) -> None:
    _alike(_run(tmp_path, TOKENS, *settings, world=world), whole)
    plan = json.loads((tmp_path / "plan.json").read_bytes())
    assert (plan["micro_tokens"], plan["world_size"]) == (256, world)
    assert plan["accumulation_steps"] > 1


@pytest.mark.heavy
def test_it_goes_on_with_another_limit_on_other_numbers_of_ranks(tmp_path: Path, whole: list[Record]) -> None:
    parts = (
        (2, 2, TOKENS),
        (1, 3, "batch.micro_tokens=100"),
        (3, 4, "batch.micro_size=5"),
        (4, 6, "batch.micro_tokens=300"),
    )
    for world, steps, limit in parts:
        settings = (limit, "resume=auto", "checkpoint.every=9", f"trainer.max_steps={steps}")
        _run(tmp_path, *settings, world=world)
    _alike(_records(tmp_path), whole)


def test_a_sample_that_is_longer_is_refused_before_there_are_ranks(tmp_path: Path) -> None:
    refused = run(*SETTINGS, "batch.micro_tokens=63", f"hydra.run.dir={tmp_path}", world=2, PYTHONPATH=str(ROOT))
    assert refused.returncode != 0
    assert "batch.micro_tokens=63: the longest sample has 64 tokens. Give at least 64" in refused.stderr
