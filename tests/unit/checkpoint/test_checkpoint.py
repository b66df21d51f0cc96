"""Checkpoints: what they hold, how one appears, takes the place of another, and which is the latest."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state
from distaccum.checkpoint import store as module
from distaccum.checkpoint.files import pointed, write_text
from distaccum.checkpoint.store import CheckpointStore, find, verify
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.factory import create_engine
from distaccum.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def _engine(world: World) -> Engine:
    torch.manual_seed(1)
    model = Tied()
    return create_engine(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), world)


def _update(engine: Engine) -> None:
    for sync in (False, True):
        with engine.micro_step(sync=sync):
            engine.backward(engine.model(torch.randn(2, 3)).square().sum())
    engine.step()


RUN = state.RunState(
    progress=Progress(step=2, window=3, epoch=1, epoch_window=1, samples=24, tokens=48.5, skipped=1),
    position={"batch.global_size": 8, "samples": 100, "seed": 0},
    wandb_id="abcd1234",
    config={"seed": 0},
    callbacks=[{"best": 0.25, "waited": 1}, {}],
)


def _save(store: CheckpointStore, engine: Engine, world: World, step: int, data: Any = None) -> Path:
    return store.save(step, world, lambda folder: state.Part.of(engine, RUN, data, world).write(folder))


def test_each_rank_finds_where_its_data_stood(gloo_world: World, tmp_path: Path) -> None:
    first = {"taken": 7, "ended": [False, True], "stream": {"buffer": torch.arange(3), "epoch": 1}}
    engine = _engine(gloo_world)
    ranks = [World(rank=rank, size=2, device=gloo_world.device) for rank in range(2)]
    for world, data in zip(ranks, (first, {"taken": 9}), strict=True):
        state.Part.of(engine, RUN, data, world).write(tmp_path)
    assert state.read(tmp_path).run == RUN
    continued, found = state.restore(state.read(tmp_path), engine, ranks[0])
    assert continued
    assert torch.equal(found["stream"].pop("buffer"), first["stream"].pop("buffer"))
    assert found == first
    assert state.restore(state.read(tmp_path), engine, ranks[1]) == (True, {"taken": 9})
    assert state.restore(state.read(tmp_path), engine, gloo_world) == (False, None)  # of another world size


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_its_files_may_be_read_by_whom_the_umask_says(gloo_world: World, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = _save(CheckpointStore(tmp_path, keep=0), _engine(gloo_world), gloo_world, 2)
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {
        name: oct(0o666 & ~umask)
        for name in ("manifest.json", "model.safetensors", "optimizer.safetensors", "random-0.json", "state.json")
    }


def test_a_death_while_saving_leaves_the_one_before(gloo_world: World, tmp_path: Path) -> None:
    engine, store = _engine(gloo_world), CheckpointStore(tmp_path, keep=1)
    first = _save(store, engine, gloo_world, 1)

    def die(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, gloo_world, die)
    assert store.newest_valid() == first
    assert (tmp_path / "latest").read_text() == "step-1\n"
    second = _save(store, engine, gloo_world, 2)  # the rest of the dead attempt is not in the way
    assert store.newest_valid() == second
    assert not first.exists()  # keep=1
    assert not list(tmp_path.glob(".saving*"))


def test_another_model_is_refused_by_name(gloo_world: World, tmp_path: Path) -> None:
    path = _save(CheckpointStore(tmp_path, keep=0), _engine(gloo_world), gloo_world, 1)
    model = nn.Linear(2, 2)
    other = create_engine(model, torch.optim.AdamW(model.parameters()), gloo_world)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        state.restore(state.read(path), other, gloo_world)


def test_another_version_is_refused(gloo_world: World, tmp_path: Path) -> None:
    path = _save(CheckpointStore(tmp_path, keep=0), _engine(gloo_world), gloo_world, 1)
    record = json.loads((path / "state.json").read_text())
    del record["hooks"]  # which an older one of this version has not
    (path / "state.json").write_text(json.dumps(record))
    assert state.read(path).run.hooks == {}
    (path / "state.json").write_text(json.dumps(record | {"version": 999}))
    with pytest.raises(CheckpointError, match="format 999, this distaccum reads 3"):
        state.read(path)


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_ahead_do_not_cost_the_one_being_saved(
    gloo_world: World, tmp_path: Path, keep: int
) -> None:
    engine, store = _engine(gloo_world), CheckpointStore(tmp_path, keep=keep)
    for step in (100, 150):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "model.safetensors").write_bytes(b"damaged")
    path = _save(store, engine, gloo_world, 50)
    assert store.newest_valid() == path
    aside = ["damaged-step-100", "damaged-step-150"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*aside, "latest", "step-50"]


def test_what_nothing_reads_may_lie_in_a_checkpoint(gloo_world: World, tmp_path: Path) -> None:
    """As a callback's own file, or ``.nfs0001``: the checkpoint was passed over, and then deleted."""
    store = CheckpointStore(tmp_path, keep=0)
    first, second = (_save(store, _engine(gloo_world), gloo_world, step, {"taken": step}) for step in (1, 2))
    (second / "folder").mkdir()
    for name in ("folder/notes.txt", "extra.pt", ".nfs0001"):
        (second / name).touch()
    assert store.newest_valid() == second
    for name in ("model-9.safetensors", "optimizer-9.safetensors", "random-9.json", "data-9.pt"):
        (second / name).touch()
        with pytest.raises(CheckpointError, match=f"missing, added or changed: {re.escape(name)}"):
            verify(second)
        assert store.newest_valid() == first
        (second / name).unlink()
    assert store.newest_valid() == second
    os.truncate(second / "data-0.pt", 10)
    assert store.newest_valid() == first


def _write(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


def test_an_older_one_stays_while_a_kept_one_is_damaged(gloo_world: World, tmp_path: Path) -> None:
    """Of three to keep, one that was damaged before this process began counted, and the oldest whole one went."""
    for step in (1, 2, 3):
        CheckpointStore(tmp_path, keep=3).save(step, gloo_world, _write)
    (tmp_path / "step-2" / "state.json").write_text("[]")
    store = CheckpointStore(tmp_path, keep=3)
    assert store.newest_valid() == tmp_path / "step-3"
    store.save(4, gloo_world, _write)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "damaged-step-2", "step-3", "step-4", "latest"}


def test_an_error_before_publishing_leaves_what_was_there(gloo_world: World, tmp_path: Path) -> None:
    """As where another run has taken the folder over in the meantime."""

    def fail() -> None:
        raise OSError("taken over")

    store = CheckpointStore(tmp_path, keep=1)
    store.save(2, gloo_world, _write)
    with pytest.raises(OSError, match="taken over"):
        store.save(1, gloo_world, _write, before_publishing=fail)
    assert store.newest_valid() == tmp_path / "step-2"
    assert not (tmp_path / "step-1").exists()


def test_a_damaged_record_of_the_best_is_set_aside(gloo_world: World, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "best.json").write_text("[")
    assert store.best() is None
    assert (tmp_path / "damaged-best.json").read_text() == "["


@pytest.mark.parametrize("late", [False, True])
def test_a_process_that_slept_before_it_wrote_names_what_another_has_saved(
    gloo_world: World, tmp_path: Path, late: bool
) -> None:
    """The other process takes the run over within the first one's last write, before or after the file is written."""
    writes = 0

    def sleeps(path: Path, text: str) -> None:
        nonlocal writes
        writes += 1
        if writes > 1:
            write_text(path, text)
            return
        if late:
            write_text(path, text)
        CheckpointStore(tmp_path, keep=1).save(2, gloo_world, _write)
        if not late:
            write_text(path, text)

    with patch.object(module, "write_text", sleeps):
        CheckpointStore(tmp_path, keep=1).save(1, gloo_world, _write)
    assert (tmp_path / "latest").read_text() == "step-2\n"
    assert not (tmp_path / "step-1").exists()


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


class Killed(BaseException):
    """Ends the process."""


def test_best_names_a_whole_one_whenever_the_process_dies(gloo_world: World, tmp_path: Path) -> None:
    """At any of its calls that change the disk, of which there are some ten."""
    left = 0

    def dying(act: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return act(*args, **options)

        return called

    def save(root: Path, step: int) -> None:
        store = CheckpointStore(root, keep=1)
        mark = partial(store.mark_best, root / f"step-{step}", metric="eval_loss", mode="min", value=9.0 - step)
        store.save(step, gloo_world, lambda folder: (folder / "x").write_text("") and None, before_publishing=mark)

    for n in range(1, 99):
        root = tmp_path / str(n) / "checkpoints"
        save(root, 1)
        left = n
        with ExitStack() as patched, suppress(Killed):
            for owner, name in ((module, "write_text"), (module, "write_json"), (Path, "rename"), (shutil, "rmtree")):
                patched.enter_context(patch.object(owner, name, dying(getattr(owner, name))))
            save(root, 2)
        named = pointed(root / "best")
        verify(named)
        CheckpointStore(root, keep=1).recover()
        assert find(root.parent, best=True) == pointed(root / "best")
        if left > 0:
            break
    assert n > 5
    assert named.name == "step-2"
    assert sorted(path.name for path in root.iterdir()) == ["best", "best.json", "latest", "step-2"]
