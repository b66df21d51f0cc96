"""The soak itself: two minutes of it pass, and every check of it is seen to fail."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distaccum.checkpoint.store import _seal
from launch.soak.attempt import Attempt, SoakError
from launch.soak.compare import Bounds, problems, read
from launch.soak.injections import _quiet
from launch.soak.main import NotOursError, _options, run
from launch.soak.run import SAVE_EVERY, STEPS, Run
from launch.soak.schedule import COURSES
from tests.support.commands import ROOT, captured, environment

LAST = f"checkpoints/step-{STEPS}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soak")
    run = Run(COURSES["zero1"], folder / "run", folder / "logs")
    assert run.start(resume="never").end(200) == 0
    return run.folder


def _another_bit(folder: Path) -> None:
    """In the smallest way, and with a manifest that agrees."""
    file = folder / LAST / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(torch.int32).flatten()[0] ^= 1
    save_file(tensors, file)
    (folder / LAST / "manifest.json").unlink()
    _seal(folder / LAST)


def _metrics(change: Callable[[list[str]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "metrics.jsonl"
        lines = file.read_text().splitlines()
        change(lines)
        file.write_text("".join(f"{line}\n" for line in lines))

    return edit


def _other_loss(lines: list[str]) -> None:
    record = json.loads(lines[7])
    lines[7] = json.dumps(record | {"loss": record["loss"] + 2**-23})


def _no_evaluation(lines: list[str]) -> None:
    at = next(i for i, line in enumerate(lines) if "eval_loss" in line)
    lines[at] = json.dumps({k: v for k, v in json.loads(lines[at]).items() if not k.startswith("eval_")})


def _superseded(folder: Path) -> None:
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[3])
    (folder / "metrics.superseded.jsonl").write_text(json.dumps(line | {"loss": 1.0}) + "\n")


def _flipped(folder: Path) -> None:
    file = folder / f"checkpoints/step-{STEPS - STEPS % SAVE_EVERY}" / "state.json"
    file.write_bytes(file.read_bytes() + b" ")


SABOTAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a weight": (_another_bit, "1 of "),
    "a bit of a loss": (_metrics(_other_loss), "metrics.jsonl: step 8 differs"),
    "an update is missing": (_metrics(lambda lines: lines.pop(5)), "metrics.jsonl has the updates"),
    "an update twice": (_metrics(lambda lines: lines.insert(5, lines[5])), "metrics.jsonl has the updates"),
    "an evaluation is missing": (_metrics(_no_evaluation), "has the keys"),
    "a repeated update differs": (_superseded, "metrics.superseded.jsonl: step 4 differs"),
    "a status": (lambda f: (f / "status.json").write_text('{"state": "running"}'), "status.json says"),
    "a half-made checkpoint": (lambda f: (f / "checkpoints/.saving-step-5").mkdir(), "left behind: .saving-step-5"),
    "a lock": (lambda f: (f / "owner.json").write_text("{}"), "left behind: owner.json"),
    "a temporary file": (lambda f: (f / ".status.json.4711").touch(), "left behind: .status.json.4711"),
    "a damaged checkpoint": (_flipped, "distaccum verify: step-"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("what", SABOTAGE)
def test_what_is_not_as_undisturbed_is_found(undisturbed: Path, tmp_path: Path, what: str) -> None:
    expected = read(undisturbed)
    assert not list(problems(undisturbed, expected, Bounds()))
    sabotage, words = SABOTAGE[what]
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    sabotage(folder)
    found = list(problems(folder, expected, Bounds()))
    assert any(words in problem for problem in found), found


@pytest.mark.heavy
def test_a_process_that_is_left_and_a_traceback_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start whose settings are wrong, which ends at once."""
    monkeypatch.setattr("launch.soak.attempt._GONE_S", 1.0)
    attempt = Attempt(tmp_path / "run", ("trainer.max_steps=0",), world=2, log=tmp_path / "log", temporary=tmp_path)
    mark = f"DISTACCUM_SOAK={attempt._mark}".split("=")
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env={mark[0]: mark[1]})
    try:
        with pytest.raises(SoakError, match="processes are left"):
            attempt.end(60)
    finally:
        orphan.kill()
        orphan.wait()
    assert attempt.end(1) == 2
    _quiet(attempt)
    for noise in ("Traceback (most recent call last):\n", "a line\n" * 26):
        attempt.log.with_suffix(".err").write_text(noise)
        with pytest.raises(SoakError, match="on the screen"):
            _quiet(attempt)


def test_it_deletes_nothing_that_it_has_not_made(tmp_path: Path) -> None:
    own = tmp_path / "thesis.txt"
    own.touch()
    with pytest.raises(NotOursError, match="holds what no soak has made; nothing is deleted"):
        run(_options([f"out={tmp_path}"]))
    assert own.exists()


@pytest.mark.slow
def test_two_minutes_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.soak", f"out={tmp_path / 'soak'}", "seed=1", "minutes=2"]
    finished = captured(command, cwd=ROOT)
    if "cannot be mounted" in finished.stdout:
        pytest.skip("may not mount a tmpfs")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "Nothing lost." in finished.stdout
    entries = [json.loads(line) for line in (tmp_path / "soak" / "soak.jsonl").read_text().splitlines()]
    assert any("fault" in entry for entry in entries)
    assert any("bitwise" in entry for entry in entries)
    assert "Nothing lost." in (tmp_path / "soak" / "soak.md").read_text()
    assert not os.path.ismount(tmp_path / "soak" / "disk")


@pytest.mark.heavy
def test_a_fault_that_is_not_survived_fails_the_soak(tmp_path: Path) -> None:
    """The runs of this soak import a package whose checkpoints cannot be verified: a damaged one is taken up."""
    package = tmp_path / "broken" / "sitecustomize.py"
    package.parent.mkdir()
    package.write_text(
        "import sys\n"
        "if 'launch/local.py' in ' '.join(sys.orig_argv) or 'train.py' in ' '.join(sys.orig_argv):\n"
        "    import distaccum.checkpoint.store as store\n"
        "    store._digests = lambda *_: {}\n"
    )
    command = [sys.executable, "-m", "launch.soak", f"out={tmp_path / 'soak'}", "seed=1", "only=12"]
    path = os.pathsep.join([str(package.parent), str(ROOT)])
    env = environment(PYTHONPATH=path)
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "FAILED at fault 12 (a bit flipped in the newest checkpoint (down))" in finished.stdout
    assert "to replay: python -m launch.soak seed=1 only=12" in finished.stdout
    assert (tmp_path / "soak" / "failed" / "metrics.jsonl").exists()


@pytest.mark.heavy
def test_it_ends_with_all_its_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.soak", f"out={tmp_path / 'soak'}"]
    soak = subprocess.Popen(command, cwd=ROOT, env=environment())
    try:
        while not list((tmp_path / "soak" / "disk").glob("*/metrics.jsonl")):
            assert soak.poll() is None
    finally:
        soak.send_signal(signal.SIGTERM)
    assert soak.wait(timeout=60) == 128 + signal.SIGTERM
    assert not os.path.ismount(tmp_path / "soak" / "disk")
    listed = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True)  # noqa: S607
    assert str(tmp_path) not in listed.stdout
