"""``memory.json``: what the next start takes up, and what it passes over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distaccum.data.cutting import Shape
from distaccum.distributed.world import World
from distaccum.engines.memory_marks import MemoryMarks
from distaccum.train.failure import RUN_NOTE
from distaccum.train.micro_batch import NAME, ended_by_memory, memory_noted, noted_for_launcher
from distaccum.train.run_dir import RunDir

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
