"""Files of tensors: safetensors' own bytes, digests of what was meant; an error of the file system is no damage."""

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import files, state, tensors, weights
from distaccum.checkpoint.files import HashingWriter, digests, retried
from distaccum.checkpoint.store import MANIFEST, CheckpointStore, UnreadableError, verify
from distaccum.checkpoint.tensors import TYPES, pieces
from distaccum.distributed.world import World
from distaccum.engines.factory import create_engine
from distaccum.errors import CheckpointError, ConfigError
from distaccum.tools import export
from distaccum.train.adapters import check_base

RUN = state.RunState(progress=Progress(step=1), position={}, wandb_id="", config={}, callbacks={})
SHAPES = ((), (0, 3), (1,), (2, 3), (5, 7, 2))


def _of_all_types() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in TYPES:
        for shape in SHAPES:
            raw = torch.randint(0, 2, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
            found[f"{dtype}.{len(shape)}{len(found)}"] = raw.view(dtype).reshape(shape)
    return found | {name: torch.ones(2) for name in ('a "quoted"\n\t\x01\x7f', "größe.重み.🤗", "\uffff", "\U00010000")}


@pytest.mark.parametrize("metadata", [{}, {"distaccum": '{"a": "\u00e9"}'}])
def test_a_file_is_what_safetensors_itself_writes(tmp_path: Path, metadata: dict[str, str]) -> None:
    """Byte for byte, whatever the order in which tensors are given."""
    given = _of_all_types()
    save_file(given, tmp_path / "theirs", metadata=metadata or None)
    with HashingWriter(tmp_path) as writer:
        writer.write("ours", pieces(dict(reversed(given.items())), metadata))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = load_file(tmp_path / "ours")
    assert all(
        torch.equal(found[name].view(torch.uint8), one.view(torch.uint8)) for name, one in given.items() if one.ndim
    )


def _write(sizes: list[int], folder: Path) -> dict[str, str]:
    with HashingWriter(folder) as writer:
        for i, size in enumerate(sizes):
            writer.write(f"model-{i}.safetensors", [bytes([i]) * (size // 2), memoryview(bytes(size - size // 2))])
        return writer.digests


LARGE = files._LARGE


def test_digests_of_what_is_written_are_those_of_the_files(tmp_path: Path) -> None:
    """By more files than there are threads, some hashed in threads and some at once."""
    sizes = [0, 1, LARGE - 1, *[LARGE + i for i in range(files.THREADS + 2)]]
    found = _write(sizes, tmp_path)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        f"model-{i}.safetensors": size for i, size in enumerate(sizes)
    }
    assert found == {path.name: f"blake3:{blake3(path.read_bytes()).hexdigest()}" for path in tmp_path.iterdir()}
    assert digests({tmp_path / name: "" for name in found}) == list(found.values())


def test_a_digest_is_the_one_that_others_make() -> None:
    expected = "blake3:6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"  # BLAKE3's own test vector
    found = files.begin_digest()
    for piece in (b"a", b"", b"bc"):
        found.update(piece)
    assert files.digest_text(found) == expected


def test_a_machine_without_blake3_makes_its_own_digests_and_says_what_others_need(
    tmp_path: Path, gloo_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_both, store = dict(files._ALGORITHMS), CheckpointStore(tmp_path, keep=0)
    there = store.save(1, gloo_world, lambda folder: _write([3], folder))
    monkeypatch.setattr(files, "_ALGORITHMS", {"sha256": by_both["sha256"]})
    own = store.save(2, gloo_world, lambda folder: _write([4, LARGE], folder))
    assert {value.partition(":")[0] for value in json.loads((own / MANIFEST).read_text()).values()} == {"sha256"}
    verify(own)
    with pytest.raises(UnreadableError, match=r"step-1: its digests are BLAKE3's, .*: pip install blake3$"):
        verify(there)
    monkeypatch.setattr(files, "_ALGORITHMS", by_both)
    verify(own)
    (own / "model-0.safetensors").write_bytes(b"x" * 4)
    with pytest.raises(CheckpointError, match="changed: model-0"):
        verify(own)
    there_too, here = ({"adapters": {"base": "gpt2", "digest": f"{kind}:1"}} for kind in by_both)
    with pytest.raises(ConfigError, match=r"step-1 knows the weights of gpt2 by sha256, and this machine by blake3\."):
        check_base(there_too, here, "step-1")


@pytest.mark.fault("a write that the disk loses in silence, before the checkpoint is sealed")
@pytest.mark.parametrize("size", [100, LARGE])
def test_what_the_disk_loses_between_a_write_and_the_seal_is_found(
    size: int, gloo_world: World, tmp_path: Path, says: Callable[[str], None]
) -> None:
    """Rank 0 used to read the files again, and sealed what had become of them."""

    def lose(folder: Path) -> dict[str, str]:
        found = _write([size], folder)
        os.truncate(folder / "model-0.safetensors", size // 2)
        return found

    store = CheckpointStore(tmp_path, keep=0)
    first = store.save(1, gloo_world, partial(_write, [size]))
    assert store.newest_valid() == first
    second = store.save(2, gloo_world, lose)
    with pytest.raises(CheckpointError) as error:
        verify(second)
    says(str(error.value))
    assert store.newest_valid() == first


def test_a_file_that_rank_0_does_not_see_is_in_the_manifest(gloo_world: World, tmp_path: Path) -> None:
    """A network file system may show another host's file late: a checkpoint without it verified as whole."""

    def late(folder: Path) -> dict[str, str]:
        return _write([1], folder) | {"random-1.json": "0" * 64}

    path = CheckpointStore(tmp_path, keep=0).save(1, gloo_world, late)
    assert "random-1.json" in json.loads((path / MANIFEST).read_text())
    with pytest.raises(CheckpointError, match=r"missing, added or changed: random-1\.json"):
        verify(path)


@pytest.mark.parametrize("number", range(2))
def test_damage_of_a_large_file_is_found(number: int, gloo_world: World, tmp_path: Path) -> None:
    """Several are read at once, each by a thread."""
    path = CheckpointStore(tmp_path, keep=0).save(1, gloo_world, partial(_write, [LARGE, LARGE + 1, 5]))
    verify(path)
    with (path / f"model-{number}.safetensors").open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=rf"missing, added or changed: model-{number}\.safetensors$"):
        verify(path)


def test_an_error_while_a_large_file_is_read_is_tried_again(
    tmp_path: Path, gloo_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = CheckpointStore(tmp_path, keep=0).save(1, gloo_world, partial(_write, [LARGE, LARGE]))
    monkeypatch.setattr(files, "_PAUSES_S", (0.0,) * 3)
    real, failed = Path.open, []

    def fails(file: Path, *arguments: Any, **options: Any) -> Any:
        if file.name == "model-1.safetensors" and len(failed) < 2:
            failed.append(file)
            raise OSError(5, "injected", str(file))
        return real(file, *arguments, **options)

    monkeypatch.setattr(Path, "open", fails)
    verify(path)
    assert len(failed) == 2


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("asks", [True, False])
def test_an_error_names_the_file_whoever_writes_it(size: int, asks: bool) -> None:
    """A thread's error is raised at the end of the block, also where nobody asks for digests."""

    def write() -> None:
        with HashingWriter(Path("/dev")) as writer:
            writer.write("full", [bytes(size)])
            if asks:
                _ = writer.digests

    with pytest.raises(OSError, match="No space left") as caught:
        write()
    assert caught.value.filename == "/dev/full"
    assert not [thread for thread in enumerate_threads() if thread.name.startswith("checkpoint")]


def _engine(world: World) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    engine = create_engine(model, torch.optim.AdamW(model.parameters(), lr=0.1), world)
    with engine.micro_step(sync=True):
        engine.backward(engine.model(torch.ones(2, 64)).square().sum())
    engine.step()
    return engine


def test_a_large_optimizer_state_is_in_parts_that_are_read_as_one(
    gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model stays one file, which other programs read; of what is hashed, nothing is read again."""
    monkeypatch.setattr(tensors, "_PART", 30_000)
    engine = _engine(gloo_world)
    path = CheckpointStore(tmp_path / "a", keep=0).save(
        1, gloo_world, state.Part.of(engine, RUN, {"taken": 3}, gloo_world).write
    )
    names = {file.name for file in path.iterdir()}
    parts = {f"optimizer-{i}.safetensors" for i in range(5)}
    assert names == parts | {MANIFEST, "model.safetensors", "state.json", "random-0.json", "data-0.pt"}
    verify(path)
    saved = engine.state()
    stored: dict[str, Tensor] = {}
    for part in sorted(parts):
        stored |= load_file(path / part)
    assert stored.keys() == saved.optimizer.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in saved.optimizer.items())
    other = _engine(gloo_world)
    for parameter in other.unwrapped_model.parameters():
        parameter.data.zero_()
    assert state.restore(state.read(path), other, gloo_world) == (True, {"taken": 3})
    assert all(torch.equal(other.state().optimizer[name], tensor) for name, tensor in saved.optimizer.items())
    assert all(torch.equal(other.state().model[name], tensor) for name, tensor in saved.model.items())
    assert export.export(path, tmp_path / "weights.safetensors") == len(saved.model)
    weights.check(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), path)
    (path / "optimizer-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing, added or changed: optimizer-2\.safetensors"):
        verify(path)


def test_parts_have_a_bound() -> None:
    many = {str(i): torch.empty(2**27, dtype=torch.uint8, device="meta") for i in range(40)}
    parts = tensors._parts(many)
    assert len(parts) <= tensors._MOST_PARTS
    assert [name for part in parts for name in part] == list(many)
    assert tensors._parts({}) == [{}]


ERRORS = (errno.EIO, errno.ESTALE, errno.EINTR, errno.EACCES, errno.EMFILE)


def _write_text(content: str, folder: Path) -> None:
    (folder / "state.json").write_text(content)


@pytest.fixture
def store(gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """Two valid checkpoints, of steps 1 and 2; what is tried again is at once."""
    monkeypatch.setattr(files, "_PAUSES_S", (0.0,) * 3)
    made = CheckpointStore(tmp_path, keep=0)
    for step in (1, 2):
        made.save(step, gloo_world, partial(_write_text, "{}"))
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
        store.save(2, gloo_world, partial(_write_text, '{"new": 1}'))
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


@pytest.mark.fault("a checkpoint in the way of a new one")
def test_what_lies_ahead_is_set_aside_and_never_deleted(
    store: CheckpointStore, gloo_world: World, caplog: pytest.LogCaptureFixture, says: Callable[[str], None]
) -> None:
    (store.root / "step-3").mkdir()
    (store.root / "damaged-step-3").mkdir()
    (store.root / "step-4").write_text("a file")
    (store.root / "step-5").symlink_to("nowhere")
    assert store.newest_valid() == store.root / "step-2"
    store.save(1, gloo_world, partial(_write_text, '{"new": 1}'))
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
