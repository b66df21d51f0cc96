"""A checkpoint that is saved again, as after a rollback, takes the place of the one before; never is there none."""

from __future__ import annotations

from pathlib import Path

import pytest

from distaccum.checkpoint.store import CheckpointStore
from distaccum.distributed.world import World


def save(store: CheckpointStore, world: World, content: str, *, again: bool = False) -> Path:
    return store.save(5, world, lambda folder: (folder / "state.json").write_text(content) and None, again=again)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_new_one_replaces_it(gloo_world: World, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, gloo_world, "before")
    path = save(store, gloo_world, "after", again=True)
    assert path.joinpath("state.json").read_text() == "after"
    assert store.newest_valid() == path
    assert names(tmp_path) == ["latest", "step-5"]


def test_one_that_cannot_be_written_leaves_the_one_before(gloo_world: World, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    path = save(store, gloo_world, "before")

    def write(folder: Path) -> None:
        folder.joinpath("state.json").write_text("half of")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.save(5, gloo_world, write, again=True)
    assert store.newest_valid() == path
    assert path.joinpath("state.json").read_text() == "before"


@pytest.mark.parametrize("published", [False, True])
def test_a_process_that_dies_in_between_loses_nothing(gloo_world: World, tmp_path: Path, published: bool) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    path = save(store, gloo_world, "before")
    path.rename(tmp_path / ".replaced-step-5")  # where it died
    if published:
        save(store, gloo_world, "after")
    store.recover()
    assert store.newest_valid() == path
    assert path.joinpath("state.json").read_text() == ("after" if published else "before")
    assert names(tmp_path) == ["latest", "step-5"]
