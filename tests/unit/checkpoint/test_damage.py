"""Checkpoints that are damaged, or made by somebody who means harm: passed over or refused, and nothing runs."""

import io
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.checkpoint.store import MANIFEST, CheckpointStore, _seal, verify
from distaccum.errors import CheckpointError, ConfigError
from tests.support.runs import settings

DATA = [(torch.full((4,), i / 16), torch.tensor(i % 3)) for i in range(16)]
FLIPS = 100
Says = Callable[[str], None]


def _train(folder: Path, steps: int) -> None:
    trainer = {"max_steps": steps, "eval_every": 0, "log_every": 1}
    config = settings((4, 4), trainer, save=1, checkpoint={"keep": 2}, resume="auto")
    torch.manual_seed(0)
    Trainer(nn.Linear(4, 3), CrossEntropy(), DataSpec(train=DATA), config=config, run_dir=folder).fit()


@pytest.fixture
def good(gloo_world: Any, tmp_path: Path) -> Path:
    _train(tmp_path / "good", 2)
    return tmp_path / "good"


def _copied(good: Path) -> Path:
    """The newest checkpoint of a copy of the run."""
    run = good.with_name("run")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(good, run)
    return run / "checkpoints" / "step-2"


def _newest(step: Path) -> str:
    found = CheckpointStore(step.parent, keep=0).newest_valid()
    assert found is not None
    return found.name


@pytest.mark.fault("a flipped bit in any file of a checkpoint (100 offsets)")
def test_a_flipped_bit_anywhere_is_found(good: Path, caplog: pytest.LogCaptureFixture, says: Says) -> None:
    step, chosen = _copied(good), random.Random(15)  # noqa: S311
    files = sorted(step.iterdir())
    assert len(files) == 5
    for file in files * (FLIPS // len(files)):
        before = file.read_bytes()
        content, at = bytearray(before), chosen.randrange(len(before))
        content[at] ^= 1 << chosen.randrange(8)
        file.write_bytes(content)
        assert _newest(step) == "step-1", (file, at)
        file.write_bytes(before)
    assert _newest(step) == "step-2"
    says(caplog.text)


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def _be_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _be_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _be_link(target: str) -> Callable[[Path], None]:
    def link(file: Path) -> None:
        kept = file.parent.parent / f"kept-{file.name}"
        file.rename(kept)
        file.symlink_to(target or kept)

    return link


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": _write(b""),
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "a list": _write(b"[]"),
    "null": _write(b"null"),
    "too deep": _write(b"[" * 100_000),
    "a folder": _be_folder,
    "a pipe": _be_pipe,
    "a link to its content": _be_link(""),
    "a link to a device": _be_link("/dev/zero"),
    "a link to nothing": _be_link("nowhere"),
}


@pytest.mark.timeout(60)
@pytest.mark.fault("a file of a checkpoint, its manifest too, missing, empty, cut short, a list,")
def test_a_damaged_file_costs_its_checkpoint_alone(good: Path, caplog: pytest.LogCaptureFixture, says: Says) -> None:
    """A manifest of brackets was an error without a fallback; to read a pipe or a device does not end."""
    step, whole = _copied(good), good / "checkpoints" / "step-2"
    for name in sorted(path.name for path in whole.iterdir()):
        for damage, act in DAMAGES.items():
            caplog.clear()
            shutil.rmtree(step)
            shutil.copytree(whole, step)
            act(step / name)
            assert _newest(step) == "step-1", (name, damage)
            says(caplog.text)
            assert step.is_dir()


@pytest.mark.fault("a file, or a link, named `step-N`")
def test_what_is_only_named_like_one(good: Path, caplog: pytest.LogCaptureFixture, says: Says) -> None:
    for make in (Path.touch, lambda path: path.symlink_to("nowhere"), Path.mkdir):
        caplog.clear()
        step = _copied(good)
        make(step.with_name("step-3"))
        assert _newest(step) == "step-2"
        _train(step.parent.parent, 3)
        assert _newest(step) == "step-3"
        assert "damaged-step-3" in {path.name for path in step.parent.iterdir()}
        says(caplog.text)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _torch(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save({"stream": value}, stream)
    return stream.getvalue()


def _tensors(header: Any, body: bytes = b"\0" * 60) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + body


LINEAR: dict[str, Any] = {
    "weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
    "bias": {"dtype": "F32", "shape": [3], "data_offsets": [48, 60]},
}


def _bias(**changes: Any) -> bytes:
    return _tensors(LINEAR | {"bias": LINEAR["bias"] | changes})


def _noted(notes: Any) -> bytes:
    return _tensors(LINEAR | {"__metadata__": {"distaccum": notes if isinstance(notes, str) else json.dumps(notes)}})


HEADERS = {
    "longer than the file": struct.pack("<Q", 2**63) + b"{}",
    "two tensors in one place": _bias(data_offsets=[0, 12]),
    "behind the end": _bias(data_offsets=[48, 10**12]),
    "before the beginning": _bias(data_offsets=[-48, 12]),
    "more elements than numbers": _bias(shape=[2**62, 2**62]),
    "no text": _tensors(b"\xff\xfe{}"),
    "too deep": _tensors(b"[" * 200_000),
    "a path": _tensors({"../../weight": LINEAR["weight"], "bias": LINEAR["bias"]}),
    "notes that are none": _noted("{"),
    "notes too deep": _noted("[" * 100_000),
    "notes that name a function": _noted({"weight": {"dtype": "load", "shape": [3, 4]}}),
    "notes of another size": _noted({"weight": {"dtype": "complex64", "shape": [3, 4]}}),
}
STATES = [b"[]", b"null", b'{"version": 3}', b"[" * 100_000, b"\x80", b'{"version": 3, "clocks": 1}']


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.fault("a checkpoint made to do harm, with a manifest that fits: pickles in place of")
def test_a_checkpoint_that_means_harm_does_none(good: Path, says: Says) -> None:
    """Of a sealed ``state.json`` without its parts, and of notes that are none, the error was a library's."""
    canary = good.with_name("canary")
    pickles = (pickle.dumps(Canary(canary), protocol=2), pickle.dumps(Canary(canary)), _torch(Canary(canary)))
    names = ("model.safetensors", "optimizer.safetensors", "model-7.safetensors", "state.json", "random-0.json")
    attacks = [(name, content) for name in (*names, "data-0.pt") for content in pickles]
    attacks += [(name, content) for name in names[:2] for key, content in HEADERS.items() if key != "a path"]
    attacks += [(names[0], HEADERS["a path"])]
    attacks += [(name, content) for name in names[3:] for content in STATES]
    said = []
    for name, content in attacks:
        step = _copied(good)
        (step / name).write_bytes(content)
        (step / MANIFEST).unlink()
        _seal(step)
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            _train(step.parent.parent, 3)
        said.append(str(caught.value))
        assert "step-2" in said[-1], (name, content[:40])
        assert len((step.parent.parent / "metrics.jsonl").read_text().splitlines()) == 2
    assert not canary.exists()
    says("\n".join(said))


@pytest.mark.fault("a manifest that names files outside (`..`, absolute paths, links to folders)")
def test_a_manifest_leads_nowhere(good: Path, caplog: pytest.LogCaptureFixture, says: Says) -> None:
    """The files of a folder that is a link were in no sum, and a manifest with the link alone was a valid one."""
    outside = good.with_name("outside")
    outside.mkdir()
    (outside / "file").write_text("x")
    os.mkfifo(outside / "pipe")  # to read it would not end
    for name in ("../../outside/pipe", str(outside / "pipe"), "../../outside/file", "deepspeed/"):
        caplog.clear()
        step = _copied(good)
        manifest = json.loads((step / MANIFEST).read_text())
        (step / MANIFEST).write_text(json.dumps(manifest | {name: "" if name.endswith("/") else "0" * 64}))
        if name.endswith("/"):
            (step / name.rstrip("/")).symlink_to(outside)
        with pytest.raises(CheckpointError):
            verify(step)
        assert _newest(step) == "step-1"
        says(caplog.text)
