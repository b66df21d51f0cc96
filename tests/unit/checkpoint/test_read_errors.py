"""An error of the file system is no damage: it is tried again, then it ends the run, and nothing is deleted."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distaccum.checkpoint import files, tensors
from distaccum.checkpoint.files import HashingWriter, retried
from distaccum.checkpoint.store import MANIFEST, CheckpointStore, UnreadableError, verify
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError

ERRORS = (errno.EIO, errno.ESTALE, errno.EINTR, errno.EACCES, errno.EMFILE)


def _write(content: str, folder: Path) -> None:
    (folder / "state.json").write_text(content)


@pytest.fixture
def store(gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """Two valid checkpoints, of steps 1 and 2; what is tried again is at once."""
    monkeypatch.setattr(files, "_PAUSES_S", (0.0,) * 3)
    made = CheckpointStore(tmp_path, keep=0)
    for step in (1, 2):
        made.save(step, gloo_world, partial(_write, "{}"))
    return made


def _failing(monkeypatch: pytest.MonkeyPatch, matches: Callable[[str], bool], number: int, times: float) -> list[str]:
    """Opening a path that matches fails ``times`` times; returns the paths that failed."""
    real_open, failed = Path.open, []

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if matches(str(path)) and len(failed) < times:
            failed.append(str(path))
            raise OSError(number, "injected", str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fails)
    return failed


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("file", ["state.json", MANIFEST])
def test_a_passing_error_costs_nothing(
    store: CheckpointStore, number: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = _failing(monkeypatch, lambda path: path.endswith(f"step-2/{file}"), number, 2)
    assert store.newest_valid() == store.root / "step-2"
    assert len(failed) == 2


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("file", ["state.json", MANIFEST])
def test_one_that_stays_ends_the_run_and_deletes_nothing(
    store: CheckpointStore, number: int, file: str, monkeypatch: pytest.MonkeyPatch, gloo_world: World
) -> None:
    """It used to be taken for damage: the run resumed from step 1, and its next save deleted step 2."""
    with monkeypatch.context() as patch:
        failed = _failing(patch, lambda path: path.endswith(f"/step-2/{file}"), number, 1e9)
        with pytest.raises(UnreadableError, match=r"step-2: cannot be read .*injected.*nothing was changed"):
            store.newest_valid()
        assert 2 <= len(failed) < 20
        # Also where somebody saves at or before that step all the same.
        store.save(2, gloo_world, partial(_write, '{"new": 1}'))
    assert json.loads((store.root / "step-2" / "state.json").read_text()) == {"new": 1}
    assert json.loads((store.root / "aside-step-2" / "state.json").read_text()) == {}
    verify(store.root / "aside-step-2")


def test_a_folder_that_cannot_be_listed_is_no_empty_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the error the run would start from zero, and save over what is there."""

    def fails(path: Path) -> Any:
        raise OSError(errno.ESTALE, "injected", str(path))

    monkeypatch.setattr(Path, "iterdir", fails)
    with pytest.raises(UnreadableError, match="injected"):
        store.newest_valid()


def test_a_listing_that_fails_is_no_missing_file(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Path.rglob`` passes over errors of a folder, whose files were then missing."""
    import os  # noqa: PLC0415

    folder = store.root / "step-2"
    real = os.scandir

    def fails(path: Any) -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, "injected", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(UnreadableError, match="injected"):
        verify(folder)


@pytest.mark.fault(
    "a checkpoint in the way of a new one",
    group="checkpoints",
    does="is renamed to `damaged-step-N` or `aside-step-N`, never deleted",
    says="step-2 is aside-step-2 now: it was in the way of a checkpoint of this run",
)
def test_what_lies_ahead_is_set_aside_and_never_deleted(
    store: CheckpointStore, gloo_world: World, caplog: pytest.LogCaptureFixture, says: Callable[[str], None]
) -> None:
    (store.root / "step-3").mkdir()
    (store.root / "damaged-step-3").mkdir()
    (store.root / "step-4").write_text("a file")
    (store.root / "step-5").symlink_to("nowhere")
    assert store.newest_valid() == store.root / "step-2"
    store.save(1, gloo_world, partial(_write, '{"new": 1}'))
    assert sorted(path.name for path in store.root.iterdir()) == [
        "aside-step-1",
        "aside-step-2",
        "damaged-step-3",
        "damaged-step-3-1",
        "damaged-step-4",
        "damaged-step-5",
        "latest",
        "step-1",
    ]
    assert store.newest_valid() == store.root / "step-1"
    says(caplog.text)


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"', "\xff"])
def test_a_manifest_that_is_none_is_damage(store: CheckpointStore, content: str) -> None:
    (store.root / "step-2" / MANIFEST).write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        verify(store.root / "step-2")
    assert not isinstance(caught.value, UnreadableError)
    assert store.newest_valid() == store.root / "step-1"


def test_what_is_not_there_is_not_tried_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def read() -> bytes:
        calls.append(1)
        return (tmp_path / "none").read_bytes()

    with pytest.raises(FileNotFoundError):
        retried(read)
    assert len(calls) == 1


def test_a_file_system_that_takes_no_tensors_is_named_with_its_file(gloo_world: World, tmp_path: Path) -> None:
    (file,) = tensors.share("model", {"weight": torch.ones(2)}, gloo_world, shared=False).files()
    with pytest.raises(FileNotFoundError) as caught, HashingWriter(tmp_path / "gone") as writer:
        writer.write(*file)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path / "gone" / "model.safetensors")
