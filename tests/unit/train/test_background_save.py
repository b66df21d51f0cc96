"""Saves behind a training that goes on: the same checkpoints, of the weights of their own step, or a word of it."""

import errno
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from distaccum import CrossEntropy, DataSpec, Logger, Trainer
from distaccum.accumulation.step import Outcome
from distaccum.checkpoint.store import CheckpointStore, verify
from distaccum.distributed import memory as free_memory
from distaccum.train.callbacks import Callback, Run
from distaccum.train.owner import OwnershipLostError
from distaccum.train.saving import BackgroundSave, HostMemory
from tests.support.runs import settings

DATA = [(torch.full((4,), i / 16), torch.tensor(i % 3)) for i in range(16)]


class Watch(Callback):
    """Opens ``gate`` after update ``at``, and notes at which step which checkpoint was there, whole."""

    def __init__(self, gate: Event | None = None, at: int = 0, raises: int = 0) -> None:
        self.gate, self.at, self.raises = gate, at, raises
        self.seen: list[tuple[int, str]] = []
        self.updated = 0

    def on_update(self, run: Run, outcome: Outcome) -> None:
        self.updated = run.progress.step
        if self.gate is not None and run.progress.step == self.at:
            self.gate.set()
        if run.progress.step == self.raises:
            raise ValueError("on purpose")

    def on_checkpoint(self, run: Run, path: Path) -> None:
        verify(path)
        assert (path.parent / "latest").read_text() == f"{path.name}\n"
        state = json.loads((path / "state.json").read_text())
        assert run.progress.window == state["clocks"]["window"]
        assert path.name == f"step-{run.progress.step}"
        self.seen.append((self.updated, path.name))


def _train(
    folder: Path, *callbacks: Callback, steps: int = 8, loggers: Sequence[Logger] = (), **checkpoint: Any
) -> None:
    trainer = {"max_steps": steps, "eval_every": 0, "log_every": 1}
    config = settings((4, 2), trainer, save=2, checkpoint={"keep": 0, **checkpoint}, resume="auto")
    torch.manual_seed(0)
    given: Any = {"config": config, "callbacks": callbacks, "loggers": loggers, "run_dir": folder}
    Trainer(nn.Linear(4, 3), CrossEntropy(), DataSpec(train=DATA), **given).fit()


def _content(folder: Path) -> dict[str, bytes]:
    """All that trains, of each checkpoint."""
    found = {}
    for step in CheckpointStore(folder / "checkpoints", keep=0).steps():
        verify(step)
        for file in sorted(step.glob("*.safetensors")):
            found[f"{step.name}/{file.name}"] = file.read_bytes()
        record = json.loads((step / "state.json").read_text())
        found[step.name] = json.dumps([record["clocks"], record["logged"], record["optimizer_values"]]).encode()
    return found


def _opening(monkeypatch: pytest.MonkeyPatch, of: str, act: Callable[[Path], None]) -> None:
    """Has ``act`` come before a file whose path contains ``of`` is opened for writing."""
    real = Path.open

    def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if of in str(path) and "w" in mode:
            act(path)
        return real(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)


def test_a_checkpoint_holds_its_own_step_however_late_it_is_written(
    gloo_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of step 2 wait until update 3 is made; they are what a run that waits writes, byte for byte."""
    _train(tmp_path / "waits", Watch(), background=False)
    gate = Event()
    _opening(monkeypatch, ".saving-step-2/", lambda _: None if gate.wait(60) else pytest.fail("never opened"))
    watch = Watch(gate, at=3)
    _train(tmp_path / "run", watch, background=True)
    assert _content(tmp_path / "run") == _content(tmp_path / "waits")
    assert [name for _, name in watch.seen] == ["step-2", "step-4", "step-6", "step-8"]
    assert watch.seen[0][0] in (3, 4)  # the next save waits for it
    assert watch.seen[-1][0] == 8


def test_a_callback_sees_the_model_of_the_checkpoint_unless_asked(gloo_world: Any, tmp_path: Path) -> None:
    watch = Watch()
    _train(tmp_path, watch)
    assert watch.seen == [(step, f"step-{step}") for step in (2, 4, 6, 8)]


def test_where_memory_is_short_training_waits_and_a_line_says_so(
    gloo_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A made-up machine, which has as little left as the first save wants."""
    machine = tmp_path / "machine"
    (machine / "proc").mkdir(parents=True)
    (machine / "proc" / "meminfo").write_text("MemAvailable: 0 kB\n")
    monkeypatch.setattr(free_memory, "available", partial(free_memory.available, machine))
    _train(tmp_path / "short")
    said = [record.getMessage() for record in caplog.records if "checkpoint.background=auto" in record.getMessage()]
    assert len(said) == 1
    assert "training waits for saves, as rank 0 would take 0.0 MiB, more than half of the 0.0 MiB" in said[0]
    caplog.clear()
    _train(tmp_path / "forced", background=True)
    assert _content(tmp_path / "forced") == _content(tmp_path / "short")
    assert "checkpoint.background" not in caplog.text


def _full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.mark.fault("a full disk during a save in the background (`checkpoint.background=true`)")
def test_a_failure_is_told_and_the_next_save_mends_it(
    gloo_world: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    says: Callable[[str], None],
) -> None:
    said: list[str] = []

    class Status(Callback):
        def on_update(self, run: Run, outcome: Outcome) -> None:
            said.append(json.loads((tmp_path / "status.json").read_text()).get("reason", ""))

    _opening(monkeypatch, ".saving-step-4/", _full)
    _train(tmp_path, Status(), background=True)
    says(caplog.text)
    assert any("step 4 could not be saved" in reason for reason in said)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-2", "step-6", "step-8", "latest"}


def test_two_failures_in_a_row_end_the_run(
    gloo_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 6):
        _opening(monkeypatch, f".saving-step-{step}/", _full)
    with pytest.raises(OSError, match="No space left"):
        _train(tmp_path, background=True, steps=20)
    assert caplog.text.count("the run goes on, and ends if the next save fails, too") == 1
    assert "step 6 could not be saved" in caplog.text
    assert "it is the second in a row, and the run ends" in caplog.text
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "failed"
    newest = CheckpointStore(tmp_path / "checkpoints", keep=0).newest_valid()
    assert newest is not None
    assert newest.name == "step-2"
    monkeypatch.undo()
    _train(tmp_path, background=True)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"


def test_the_last_save_waits_and_is_made_again(
    gloo_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk at the last save in the background: the run saves once more, and fails if that fails too."""
    left = [1]

    def once(path: Path) -> None:
        if left and left.pop():
            _full(path)

    _opening(monkeypatch, ".saving-step-8/", once)
    with caplog.at_level(logging.WARNING):
        _train(tmp_path / "once", background=True)
    assert "step 8 could not be saved" in caplog.text
    assert (tmp_path / "once" / "checkpoints" / "latest").read_text() == "step-8\n"
    _opening(monkeypatch, ".saving-step-8/", _full)
    with pytest.raises(OSError, match="No space left"):
        _train(tmp_path / "always", background=True)


def test_an_error_in_the_run_waits_for_the_save_and_tells_trackers_of_it(gloo_world: Any, tmp_path: Path) -> None:
    told: list[str] = []

    class Told(Logger):
        def checkpoint(self, path: Path, *, step: int, best: bool) -> None:
            verify(path)
            told.append(f"{path.name} of {step}")

    with pytest.raises(ValueError, match="on purpose"):
        _train(tmp_path, Watch(raises=5), background=True, loggers=[Told()])
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-4\n"
    assert told == ["step-2 of 2", "step-4 of 4"]
    _train(tmp_path, steps=6, background=True, loggers=[Told()])
    assert told == ["step-2 of 2", "step-4 of 4", "step-6 of 6"]


def test_a_run_that_was_taken_over_touches_nothing_of_what_the_other_one_saves(gloo_world: Any, tmp_path: Path) -> None:
    """The other one saves the same step, and what its ranks leave for each other lies in a folder of the same name."""
    theirs = tmp_path / "checkpoints" / ".saving-step-2" / ".rank-7.json"

    class TakenOver(Callback):
        def on_update(self, run: Run, outcome: Outcome) -> None:
            if run.progress.step == 3:
                lock = tmp_path / "owner.json"
                lock.write_text(json.dumps(json.loads(lock.read_text()) | {"token": "another"}))
                theirs.write_text("{}")

    with pytest.raises(OwnershipLostError):
        _train(tmp_path, TakenOver(), background=True)
    assert theirs.exists()
    assert not (tmp_path / "checkpoints" / "step-2").exists()


def test_only_its_own_number_says_that_a_save_has_ended(tmp_path: Path) -> None:
    """Counts are sent ahead: what arrives after a save has begun may have been sent before."""
    saves = BackgroundSave(0, 2)
    assert saves.outgoing(1, 1) == [0.0]
    saves.begin(1, tmp_path, [])
    while saves.outgoing(1, 1) != [1.0]:
        pass
    saves.incoming([1.0])
    assert not saves.ready
    saves.incoming([2.0])
    assert saves.ready
    assert saves.take().error is None
    assert not saves.ready
    saves.begin(2, tmp_path / "nowhere", [("file", [b"x"])])
    saves.incoming([2.0])
    assert not saves.ready
    written = saves.take()
    assert isinstance(written.error, FileNotFoundError)
    assert not saves.pending


def test_memory_is_taken_once() -> None:
    memory = HostMemory(torch.device("cpu"))
    given = [torch.arange(6).reshape(2, 3), torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 3)]
    first = [memory.copy(tensor) for tensor in given]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(first, given, strict=True))
    places = [copy.data_ptr() for copy in first]
    memory.reuse([tensor.nbytes for tensor in given])
    again = [memory.copy(tensor + 1) for tensor in given]
    assert [copy.data_ptr() for copy in again] == places
    assert torch.equal(again[0], given[0] + 1)
    memory.reuse()
    assert torch.equal(memory.copy(torch.ones(5)), torch.ones(5))  # of another size


def test_pinned_memory_is_little_more_than_the_tensors_though_torch_pins_powers_of_two() -> None:
    sizes = [2**20 + 4] * 300 + [3] * 50
    assert sum(sizes) <= HostMemory(torch.device("cuda")).missing(sizes) <= 1.03 * sum(sizes)
