"""W&B, the real one, offline: what it stores is what metrics.jsonl says, and its troubles are not ours."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from tests.support.commands import ROOT, TINY, environment, metrics, run, succeed

SETTINGS = (
    *TINY,
    "batch.global_size=8",
    "batch.micro_size=2",
    "trainer.max_steps=6",
    "trainer.log_every=1",
    "trainer.eval_every=3",
    "checkpoint.every=3",
)
BLOCK, HEADER = 32768, 7


def _records(path: Path) -> Iterator[bytes]:
    """The records of an offline run file: LevelDB's log format (32 KiB blocks of checksum, length, type, data)."""
    content, position, parts = path.read_bytes(), HEADER, b""
    while position + HEADER <= len(content):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + HEADER])
        if kind == 0:
            return
        parts += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def _history(path: Path) -> tuple[list[dict[str, Any]], set[str], str]:
    """Logged rows, configuration keys, and the run's id."""
    rows, keys, run_id = [], set(), ""
    for content in _records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        match record.WhichOneof("record_type"):
            case "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                rows.append(row)
            case "run":
                run_id = record.run.run_id
                keys |= {item.key for item in record.run.config.update}
    return rows, keys, run_id


def test_the_offline_file_holds_what_the_metrics_file_says(tmp_path: Path) -> None:
    succeed(*SETTINGS, f"hydra.run.dir={tmp_path}", world=2)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, keys, run_id = _history(file)
    expected = metrics(tmp_path)
    assert len(expected) == 6
    assert [{key: row[key] for key in record} for row, record in zip(rows, expected, strict=True)] == expected
    assert {"config", "plan", "git_commit"} <= keys
    saved = json.loads((tmp_path / "checkpoints" / "step-6" / "state.json").read_text())
    assert saved["wandb_id"] == run_id


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path: Path) -> None:
    resumed = [*SETTINGS, "schedule=constant", "resume=auto", f"hydra.run.dir={tmp_path}"]
    for steps in (3, 6):
        succeed(*resumed, f"trainer.max_steps={steps}")
        time.sleep(1.1)  # W&B names an offline folder by the second
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    histories = [_history(file) for file in files]
    assert len(histories) == 2
    assert len({run_id for _, _, run_id in histories}) == 1
    assert [row["step"] for rows, _, _ in histories for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "trouble",
    [
        {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40},  # nobody listens there
        {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "not a key"},
    ],
    ids=["unreachable", "bad key"],
)
def test_a_server_that_cannot_be_reached_costs_seconds(tmp_path: Path, trouble: dict[str, str]) -> None:
    began = time.monotonic()
    succeed(*SETTINGS, "metrics=jsonl", f"hydra.run.dir={tmp_path / 'without'}")
    without = time.monotonic() - began
    began = time.monotonic()
    finished = run(*SETTINGS, "metrics.wandb.mode=online", f"hydra.run.dir={tmp_path / 'with'}", **trouble)
    with_trouble = time.monotonic() - began
    assert finished.returncode == 0, finished.stderr
    assert "Weights & Biases" in finished.stderr
    assert len(metrics(tmp_path / "with")) == 6
    assert with_trouble < without + 20  # a bound on hanging (the server's own time-out is 100 s), not a timing


@pytest.mark.slow
def test_when_its_process_is_killed_nothing_is_lost_and_little_is_said(tmp_path: Path) -> None:
    data = ("model=cnn", "~data.seq_len", "~data.held_out", "~data.vocab_size")
    settings = [setting for setting in SETTINGS if not setting.startswith(("data.", "model."))]
    finished = run(
        *data,
        *settings,
        "schedule=constant",
        "data._target_=tests.support.deaths.Images",
        "+callbacks.dies._target_=tests.support.deaths.Dies",
        "trainer.max_steps=12",
        f"hydra.run.dir={tmp_path}",
        HOW="core",
        PYTHONPATH=str(ROOT),
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr
    (said,) = finished.stderr.splitlines()
    assert said.startswith("distaccum: Weights & Biases: ")
    assert f"metrics.jsonl has every record: distaccum-wandb-upload {tmp_path} makes a W&B run of it" in said
    uploads = [sys.executable, "-m", "distaccum.train.metrics.wandb", "--offline", "--id=again", str(tmp_path)]
    subprocess.run(uploads, check=True, timeout=100, env=environment(PYTHONPATH=str(ROOT)))
    (file,) = tmp_path.glob("wandb/offline-run-*-again/*.wandb")
    rows, keys, run_id = _history(file)
    expected = metrics(tmp_path)
    assert [record["step"] for record in expected] == list(range(1, 13))
    assert [{key: row[key] for key in record} for row, record in zip(rows, expected, strict=True)] == expected
    assert [row["_step"] for row in rows] == [record["window"] for record in expected]
    assert run_id == "again"
    assert "config" in keys


def test_a_collapse_of_the_loss_scale_is_an_alert(tmp_path: Path) -> None:
    scaler = {"initial_scale_power": 40, "min_scale": 2.0**39, "max_scale": 2.0**40}  # far beyond what fp16 can hold
    settings = [f"precision.scaler.{key}={value}" for key, value in scaler.items()]
    finished = run(*SETTINGS, "precision=fp16", *settings, f"hydra.run.dir={tmp_path}", world=2)
    assert finished.returncode == 1
    assert finished.stdout.count("the loss scale has collapsed") == 1
    records = metrics(tmp_path)
    assert [record["loss_scale"] for record in records] == [2.0**40, *[2.0**39] * 10]
    assert not any(record["applied"] for record in records)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    alerts = []
    for content in _records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "alert":
            alerts.append((record.alert.title, record.alert.level))
    assert alerts == [("the loss scale has collapsed", "WARN")]
    assert len(_history(file)[0]) == len(records)
