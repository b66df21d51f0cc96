"""W&B, the real one, offline: what it stores is what metrics.jsonl says, and its troubles are not ours."""

import base64
import hashlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import IMAGES, ROOT, TINY, environment, in_memory, metrics, run, succeed
from tests.support.optional import Library

messages = Library("wandb.proto.wandb_internal_pb2")
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


def _protos(path: Path) -> Iterator[Any]:
    for content in _records(path):
        record = messages.Record()
        record.ParseFromString(content)
        yield record


def _config_of(run: Any) -> dict[str, Any]:
    """The configuration of a run's record, as W&B keeps it."""
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def _history(path: Path) -> tuple[list[dict[str, Any]], set[str], str]:
    """Logged rows, configuration keys, and the run's id."""
    rows, keys, run_id = [], set(), ""
    for record in _protos(path):
        match record.WhichOneof("record_type"):
            case "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                rows.append(row)
            case "run":
                run_id = record.run.run_id
                keys |= set(_config_of(record.run))
    return rows, keys, run_id


def _summary(path: Path) -> dict[str, Any]:
    """The last state of what W&B's table of runs shows."""
    found: dict[str, Any] = {}
    for record in _protos(path):
        for item in record.summary.update if record.WhichOneof("record_type") == "summary" else ():
            found["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return found


# What a user's shell, or the environment of a job, says where the configuration is silent.
VARIABLES = {
    "WANDB_PROJECT": "project of the shell",
    "WANDB_ENTITY": "team",
    "WANDB_NAME": "not this one",
    "WANDB_TAGS": "one,two",
    "WANDB_RUN_GROUP": "group",
    "WANDB_JOB_TYPE": "pretrain",
    "WANDB_NOTES": "why it was run",
    "WANDB_SAVE_CODE": "true",
}


@pytest.mark.slow
def test_the_offline_file_holds_what_the_metrics_file_says(tmp_path: Path) -> None:
    asked = ["metrics.wandb.name=mine", "metrics.wandb.log_checkpoints=all", "checkpoint.best=eval_loss"]
    project = tmp_path / "project"
    for file in ("mine.py", "package/part.py", ".venv/hidden.py", "lib/site-packages/installed.py", "runs/old/copy.py"):
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).write_text("")
    asked += ["optim.lr=0.25", f"hydra.run.dir={tmp_path}"]
    succeed(*SETTINGS, *asked, world=2, cwd=project, **VARIABLES)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, keys, run_id = _history(file)
    expected = metrics(tmp_path)
    assert len(expected) == 6
    assert [{key: row[key] for key in record} for row, record in zip(rows, expected, strict=True)] == expected
    assert {"optim", "batch", "plan", "git_commit"} <= keys
    saved = json.loads((tmp_path / "checkpoints" / "step-6" / "state.json").read_text())
    assert saved["wandb_id"] == run_id
    (run,) = (record.run for record in _protos(file) if record.WhichOneof("record_type") == "run")
    assert _config_of(run)["optim"]["lr"] == 0.25  # W&B's table names it optim.lr
    assert (run.project, run.entity, run.display_name) == (VARIABLES["WANDB_PROJECT"], "team", "mine")
    assert (list(run.tags), run.run_group, run.job_type) == (["one", "two"], "group", "pretrain")
    assert run.notes == VARIABLES["WANDB_NOTES"]
    losses = [record["loss"] for record in expected]
    evaluated = [record for record in expected if "eval_loss" in record]
    summary = _summary(file)
    assert summary["loss"] == {"min": min(losses), "last": losses[-1]}
    assert summary["eval_accuracy"]["max"] == max(record["eval_accuracy"] for record in evaluated)
    assert summary["eval_loss"]["min"] == min(record["eval_loss"] for record in evaluated)
    assert summary["grad_norm"] == expected[-1]["grad_norm"]
    (code,) = (record.artifact for record in _protos(file) if record.artifact.type == "code")
    assert {content.path for content in code.manifest.contents} == {"mine.py", "package/part.py"}
    _are_artifacts(file, tmp_path / "checkpoints", best=min(evaluated, key=lambda record: record["eval_loss"])["step"])


@pytest.mark.heavy
def test_the_table_has_the_best_of_names_that_mean_more_to_it(tmp_path: Path) -> None:
    """A held-out set ``v1.5``, and a star, with which W&B would take nothing at all from then on."""
    values = [2.0, 1.0, 3.0]
    names = ("eval_v1.5_loss", "eval_a/b_loss", "eval_top*5_acc")
    records = [{"step": i, "window": i, **dict.fromkeys(names, value)} for i, value in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    file = _upload_offline(tmp_path)
    rows, *_ = _history(file)
    assert [[row[name] for name in names] for row in rows] == [[value] * 3 for value in values]
    summary = _summary(file)
    assert [summary[name] for name in names] == [{"min": 1.0, "last": 3.0}, {"min": 1.0, "last": 3.0}, 3.0]


def _are_artifacts(file: Path, checkpoints: Path, *, best: int) -> None:
    """Asserts that the run has the checkpoints, file by file, under their names."""
    found = {}
    for record in _protos(file):
        if record.artifact.type == "model":
            aliases = set(record.artifact.aliases)
            (step,) = (alias for alias in aliases if alias.startswith("step-"))
            found[step] = aliases - {step, "latest"}
            for content in record.artifact.manifest.contents:
                own = (checkpoints / step / content.path).read_bytes()
                assert content.digest == base64.b64encode(hashlib.md5(own).digest()).decode()  # noqa: S324  W&B's own
                assert Path(content.local_path).read_bytes() == own
            names = {content.path for content in record.artifact.manifest.contents}
            assert names == {path.name for path in (checkpoints / step).iterdir()}
    assert found.keys() == {path.name for path in checkpoints.glob("step-*")}
    assert [step for step, aliases in found.items() if "best" in aliases][-1] == f"step-{best}"


def _upload(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the W&B run that the command makes of ``metrics.jsonl``."""
    rows, keys, run_id = _history(_upload_offline(run_dir))
    assert (run_id, {"optim", "plan"} <= keys) == ("again", True)
    return rows


def _upload_offline(run_dir: Path) -> Path:
    """W&B's file. By a process of its own: W&B in this one would have the runs of later tests share its service."""
    uploads = [sys.executable, "-m", "distaccum.tools.wandb_upload", "--offline", "--id=again", str(run_dir)]
    subprocess.run(uploads, check=True, timeout=100, env=environment(PYTHONPATH=str(ROOT)))
    (file,) = run_dir.glob("wandb/offline-run-*-again/*.wandb")
    return file


def _are(rows: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    """Asserts that W&B has each record once, with its values."""
    assert [{key: row[key] for key in record} for row, record in zip(rows, records, strict=True)] == records
    assert [row["_step"] for row in rows] == [record["window"] for record in records]


DYING = (
    *IMAGES,
    "+callbacks.dies._target_=tests.support.deaths.Dies",
    *(setting for setting in SETTINGS if not setting.startswith(("data.", "model.", "schedule"))),
    "schedule=constant",
)


class _Server:
    """A server on this machine that answers every request with 500, or none of them."""

    def __init__(self, *, answers: bool) -> None:
        self._answers, self._socket = answers, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked = 0
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                stream, _ = self._socket.accept()
                self.asked += 1
                if self._answers:
                    with stream:
                        stream.recv(65536)
                        stream.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
                else:
                    self._open.append(stream)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # so that nothing more is accepted
        self._thread.join(timeout=10)
        for stream in (self._socket, *self._open):
            stream.close()


@pytest.fixture(params=["hangs", *(pytest.param(one, marks=pytest.mark.heavy) for one in ("refuses", "answers 500"))])
def server(request: pytest.FixtureRequest) -> Iterator[_Server | None]:
    if request.param == "refuses":
        yield None
        return
    made = _Server(answers=request.param == "answers 500")
    yield made
    made.close()
    assert made.asked


@pytest.mark.slow
@pytest.mark.fault("W&B's server refuses, hangs or answers 500")
def test_a_server_that_cannot_be_reached_costs_seconds(
    tmp_path: Path, server: _Server | None, says: Callable[[str], None]
) -> None:
    nobody = "http://127.0.0.1:9"
    extra = {"WANDB_BASE_URL": server.url if server else nobody, "WANDB_API_KEY": "0" * 40}
    began = time.monotonic()
    finished = run(*SETTINGS, "metrics.wandb.mode=online", f"hydra.run.dir={tmp_path}", **extra)
    assert finished.returncode == 0, finished.stderr
    assert time.monotonic() - began < 60  # a bound on hanging (the server's own time-out is 100 s), not a timing
    says(finished.stderr)
    assert len(finished.stderr.splitlines()) <= 2
    assert len(metrics(tmp_path)) == 6
    _are(_upload(tmp_path), metrics(tmp_path))


@pytest.mark.slow
@pytest.mark.fault("no key for W&B, or a bad one, with `metrics.wandb.mode=online`")
@pytest.mark.parametrize(
    ("key", "problem"),
    [({}, "no API key is configured"), ({"WANDB_API_KEY": "short"}, "WANDB_API_KEY invalid: API key must have 40+")],
)
def test_a_key_that_is_missing_or_bad_is_refused(
    tmp_path: Path, key: dict[str, str], problem: str, says: Callable[[str], None]
) -> None:
    online = [*SETTINGS, "metrics.wandb.mode=online", f"hydra.run.dir={tmp_path / 'run'}"]
    finished = run(*online, world=2, HOME=str(tmp_path), **key)
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    says(line)
    assert problem in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


DIED = pytest.mark.fault("kill -9 of W&B's process, or the disk of its folder is full")


@pytest.mark.slow
@DIED
def test_when_its_process_is_killed_nothing_is_lost_and_little_is_said(
    tmp_path: Path, says: Callable[[str], None]
) -> None:
    arguments = [*DYING, "resume=auto", f"hydra.run.dir={tmp_path}"]
    finished = run(*arguments, "trainer.max_steps=12", HOW="core", PYTHONPATH=str(ROOT), timeout=100)
    assert finished.returncode == 0, finished.stderr
    (said,) = finished.stderr.splitlines()
    says(said)
    assert f"distaccum wandb-upload {tmp_path} makes" in said
    expected = metrics(tmp_path)
    assert [record["step"] for record in expected] == list(range(1, 13))
    _are(_upload(tmp_path), expected)
    time.sleep(1.1)
    succeed(*arguments, "trainer.max_steps=14", PYTHONPATH=str(ROOT))  # whose W&B run has them as well
    (file,) = (file for file in tmp_path.glob("wandb/offline-run-*/*.wandb") if "again" not in file.name)
    _are(_history(file)[0], metrics(tmp_path))


@pytest.mark.heavy
@DIED
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_full_disk_of_its_folder_is_told(tmp_path: Path, when: str, says: Callable[[str], None]) -> None:
    """Before W&B has begun, and after."""
    with in_memory(tmp_path / "wandb", "2m") as folder:
        extra = {"AWAIT": str(folder / "latest-run" / "*.wandb")} if when == "after" else {"AT": "1"}
        if when == "before":
            (folder / "big").write_bytes(bytes(2**21 - 2**16))
        arguments = [
            *DYING,
            f"hydra.run.dir={tmp_path}",
            "resume=auto",
            "trainer.max_steps=100",
            "trainer.eval_every=0",
        ]
        finished = run(*arguments, HOW="fill", DISK=str(folder), PYTHONPATH=str(ROOT), timeout=100, **extra)
        assert finished.returncode == 0, finished.stderr
        says(finished.stderr)
        said = "disk of its folder is full, and W&B does not say what it loses" if when == "after" else "No space left"
        assert said in finished.stderr
        assert finished.stderr.count("Weights & Biases") <= 2
        assert len(finished.stderr.splitlines()) <= 4  # torch says of these images that they give no gradient
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 101))
    _are(_upload(tmp_path), metrics(tmp_path))


@pytest.mark.heavy
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
    found = [record.alert for record in _protos(file) if record.WhichOneof("record_type") == "alert"]
    alerts = [(alert.title, alert.level) for alert in found]
    assert alerts == [("the loss scale has collapsed", "WARN")]
    assert len(_history(file)[0]) == len(records)
