"""``batch.micro_size=auto`` where there is nothing to find; ``memory.json``: what the next start takes up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.data.cutting import Shape
from distaccum.distributed.world import World
from distaccum.engines.memory_marks import MemoryMarks
from distaccum.train.failure import RUN_NOTE
from distaccum.train.micro_batch import NAME, ended_by_memory, memory_noted, noted_for_launcher
from distaccum.train.run_dir import RunDir
from tests.support.runs import settings


def samples(number: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(x, x[:3].argmax()) for x in torch.randn(number, 4, generator=generator)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples(40))


def trained(folder: Path, model: nn.Module, data: Any) -> dict[str, Any]:
    config = settings((8, "auto"), {"max_steps": 2, "eval_every": 0, "verify": "never"})
    Trainer(model, CrossEntropy(), DataSpec(train=data, eval_dataset=None), config=config, run_dir=folder).fit()
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


@pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning")
@pytest.mark.parametrize(
    ("model", "data", "why"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
            samples(40),
            "1 takes statistics of a micro",
        ),
        (nn.Linear(4, 3), Stream(), "a stream gives its items once, so that nothing is rehearsed"),
    ],
    ids=["batch norm", "stream"],
)
def test_the_size_stays_what_it_is(model: nn.Module, data: Any, why: str, gloo_world: World, tmp_path: Path) -> None:
    plan = trained(tmp_path, model, data)
    assert plan["micro_size"] == 8
    assert plan["memory"]["reason"].startswith(f"micro 8: {why}")
    assert "trials" not in plan["memory"]


def test_elsewhere_it_is_found(gloo_world: World, tmp_path: Path) -> None:
    plan = trained(tmp_path, nn.Linear(4, 3), samples(40))
    assert plan["micro_size"] == plan["memory"]["micro_size"]
    assert plan["memory"]["trials"][0]["size"] == 1


HERE = "this hardware"


def _known(folder: Path, world: World, hardware: str = HERE) -> MemoryMarks:
    marks = MemoryMarks()
    with memory_noted(RunDir(folder), marks, {}, hardware, world, resume="never"):
        pass
    return marks


def _fails(folder: Path, world: World, *, resume: str = "never", error: Exception | None = None) -> None:
    raised = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def train() -> None:
        marks = MemoryMarks()
        with memory_noted(RunDir(folder), marks, {}, HERE, world, resume=resume):
            marks.fail(Shape(8, 16))
            raise raised

    with pytest.raises(type(raised)):
        train()


def test_the_next_start_takes_it_up_once(gloo_world: World, tmp_path: Path) -> None:
    _fails(tmp_path, gloo_world)
    assert ended_by_memory(tmp_path)
    assert not _known(tmp_path, gloo_world, "another").failed
    _fails(tmp_path, gloo_world)
    assert _known(tmp_path, gloo_world).failed == (Shape(8, 16),)
    assert not ended_by_memory(tmp_path)  # of the start that has taken it up
    assert _known(tmp_path, gloo_world).failed == (Shape(8, 16),)


def test_another_error_leaves_no_note(gloo_world: World, tmp_path: Path) -> None:
    _fails(tmp_path, gloo_world, error=ValueError("of the user's own"))
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", "null", '{"failed": "abc"}', '{"failed": [[1]]}', '{"failed": [["a", 2]]}']
)
def test_a_damaged_note_is_passed_over_with_a_warning(
    content: str, gloo_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_text(content)
    assert not _known(tmp_path, gloo_world).failed
    assert "memory.json is passed over, so that nothing is cut because of it" in caplog.text
    assert not ended_by_memory(tmp_path)


@pytest.mark.parametrize(
    ("resume", "told"), [("never", True), ("auto", True), ("runs/other/checkpoints/step-3", False)]
)
def test_a_run_from_elsewhere_is_not_begun_again(
    resume: str, told: bool, gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note: Any = tmp_path / "launcher" / "run"
    note.parent.mkdir()
    monkeypatch.setenv(RUN_NOTE, str(note))
    _fails(tmp_path, gloo_world, resume=resume)
    assert noted_for_launcher(note).exists() == told
    assert json.loads((tmp_path / NAME).read_text())["failed"] == [[8, 16]]  # for the same command, if it is given
