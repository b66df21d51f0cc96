"""The record of runs that changes of structure are compared by: it is repeatable, and it names what differs."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support import replay
from tests.support.commands import ROOT

pytestmark = pytest.mark.heavy

RUN = "ddp-1"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for folder in folders:
        replay.record(folder, ROOT, [RUN])
    return folders


@pytest.fixture
def changed(records: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the second record, for a test to change."""
    return Path(shutil.copytree(records[1], tmp_path / "changed"))


def test_the_same_code_leaves_the_same_record(records: tuple[Path, Path]) -> None:
    assert replay.compare(*records) == []
    assert len(replay.contents(records[0] / RUN)["metrics"]) == 8


def test_a_changed_bit_of_a_weight_is_named(records: tuple[Path, Path], changed: Path) -> None:
    file = changed / RUN / "checkpoints" / "step-8" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1).untyped_storage()[0] ^= 1
    save_file(tensors, file)
    (difference,) = replay.compare(records[0], changed)
    assert difference.startswith(f"{RUN}: model.safetensors: {name} differs")


def test_a_changed_metric_is_named(records: tuple[Path, Path], changed: Path) -> None:
    file = changed / RUN / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[2]["step_time_s"] += 1  # a time may differ
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert replay.compare(records[0], changed) == []
    lines[2]["loss"] += 1e-6
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (difference,) = replay.compare(records[0], changed)
    assert difference.startswith(f"{RUN}: metrics differs")
