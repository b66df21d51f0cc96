"""`--check`: what processes will do, found out by one; and how ranks agree on a job, or learn who does not come."""

import json
import logging
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest
from omegaconf import OmegaConf
from torch.distributed import HashStore

from distaccum.config.instantiate import build
from distaccum.config.schema import conf_dir
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.errors import PeerError
from distaccum.train import coordination
from distaccum.train.cli import main
from distaccum.train.coordination import Job, JobCoordinator, JobRejectedError


def _check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str, run_dir: str = "") -> int:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0"))
    root = logging.getLogger()  # to which Hydra adds a handler of the stdout that pytest closes
    monkeypatch.setattr(root, "handlers", [*root.handlers])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, run_dir or f"hydra.run.dir={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_check_knows_the_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = ("engine=fsdp2", "engine.replicas=2")
    assert _check(monkeypatch, tmp_path, *halves, "--check=2") == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    files = {
        name: OmegaConf.load(conf_dir() / name / file) for name, file in (("model", "gpt.yaml"), ("data", "docs.yaml"))
    }
    model = OmegaConf.to_container(OmegaConf.create(files), resolve=True)["model"]  # type: ignore[index,call-overload]
    size = sum(parameter.numel() for parameter in build("model", model).parameters())  # type: ignore[arg-type]
    head = f"check passed: GPT with {size:,} parameters; fsdp2, fp32; global batch 32 samples = 2 ranks x"
    assert printed.startswith(head)
    assert printed.endswith(" x 2 micro-steps of at most 8; 300 updates\n")
    assert _check(monkeypatch, tmp_path, "engine=fsdp2", "engine.replicas=auto", "--check=3") == 0
    assert "engine.replicas=auto: checked as 1, as the nodes are not known" in capsys.readouterr().err
    assert _check(monkeypatch, tmp_path, *halves, "--check=3") == 2
    assert "engine.replicas=2: does not divide 3 processes" in capsys.readouterr().err
    assert _check(monkeypatch, tmp_path, "--check=many") == 2
    assert "--check=many: not a number of processes" in capsys.readouterr().err
    assert _check(monkeypatch, tmp_path, "engine=deepspeed", "--check") == 2  # this process is not launched
    assert "Start with torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+engine.sink=1"], "engine.sink=1: no such setting of engine=ddp. It takes activation_checkpoint, blocks, b"),
        (["engine.bucket_cap_mbb=1"], "no such setting of engine=ddp; did you mean bucket_cap_mb?"),
        (["engine.stage=3"], "engine.stage=3: a setting of engine=deepspeed, not of engine=ddp. Use engine=deepspeed,"),
        (["+engine.sync=every"], "engine.sync=every: a setting of engine=fsdp2, not of engine=ddp. Use engine=fsdp2,"),
        (["engine=zero1", "engine.stage=3"], "a setting of engine=deepspeed, not of engine=zero1"),
        (["engine=fsdp2", "engine.bucket_cap_mb=3"], "a setting of engine=ddp or zero1, not of engine=fsdp2"),
        (["engine.name=fsdp2"], "engine.name=fsdp2: engine=... chooses its settings too. Write engine=fsdp2"),
        (["engine=deepspeed", "engine.json.fp16=1"], "engine.json.fp16=1: engine.json is one value. Give all of it as"),
    ],
)
def test_a_setting_of_another_engine_is_refused_by_name(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _check(monkeypatch, tmp_path, *arguments, "--check=2") == 2
    assert message in capsys.readouterr().err


def test_a_check_leaves_no_folder_whether_it_passes_or_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.chdir(tmp_path)
    bad = ("--check", "batch.global_size=4", "batch.micro_size=8")
    kept = f"hydra.run.dir={tmp_path}/kept/one"
    assert _check(monkeypatch, tmp_path, "--check", "batch.global_size=4", run_dir=kept) == 0
    assert "1 rank x 1 micro-step of at most 4;" in capsys.readouterr().out
    assert _check(monkeypatch, tmp_path, *bad, run_dir="seed=1") == 2  # in a new folder below runs/
    assert "batch.micro_size=8: larger than batch.global_size=4" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
    assert _check(monkeypatch, tmp_path, *bad) == 2  # a folder that is named says so, for whoever starts the job
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "config_error"


@pytest.mark.slow
def test_a_flag_of_a_sweeps_agent_is_a_setting_and_another_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(monkeypatch, tmp_path, "--trainer.max_steps=7", "--precision", "32", "--check") == 0
    assert "; 7 updates\n" in capsys.readouterr().out
    assert _check(monkeypatch, tmp_path, "--trainer.max_stepps=7") == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "distaccum: configuration error: --trainer.max_stepps=7: no such setting; did you mean trainer.max"
    )
    assert said.count("\n") == 1
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "config_error"


@pytest.mark.parametrize("logging", ["hydra/job_logging", "hydra/hydra_logging"])
def test_an_error_is_said_where_hydra_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], logging: str
) -> None:
    assert _check(monkeypatch, tmp_path, f"{logging}=disabled", "batch.micro_size=0", "--check") == 2
    assert "batch.micro_size=0: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "precision", ["choice(no,bf16-mixed)", pytest.param("no, bf16-mixed", marks=pytest.mark.slow), "'16-mixed'"]
)
def test_aliases_may_be_swept_over_and_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    sweep = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    assert _check(monkeypatch, tmp_path, "-m", f"precision={precision}", sweep, "--check") == 0, capsys.readouterr().err


def test_flags_and_aliases_are_resolved_before_hydra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(monkeypatch, tmp_path, "-v", "precision=bfloat16", "--check=2") == 0, capsys.readouterr().err
    assert _check(monkeypatch, tmp_path, "precision=bfloat", "--check=2") == 2
    said = capsys.readouterr().err
    assert said.startswith("distaccum: configuration error: precision=bfloat: no such choice; did you mean bfloat16")
    assert said.count("\n") == 1


JOB = Job(number=0, run_dir="run", config={})


def _ranks(size: int) -> list[JobCoordinator]:
    store = HashStore()
    return [JobCoordinator(LaunchEnvironment(rank=rank, size=size, launched=True), store) for rank in range(size)]


def test_one_that_cannot_run_it_rejects_it_for_all() -> None:
    ranks = _ranks(3)

    def agree(rank: int) -> str:
        with pytest.raises(JobRejectedError) as rejected:
            ranks[rank].agree(JOB, "no such file" if rank == 1 else None, within_s=20)
        return str(rejected.value)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(agree, range(3))] == ["no such file"] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_one_that_does_not_come_is_named(
    late: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordination, "_FIRST_WORD_S", 0.1)
    ranks = _ranks(3)

    def agree(rank: int) -> str:
        with pytest.raises((PeerError, JobRejectedError)) as ended:
            ranks[rank].agree(JOB, None, within_s=0.5)
        return str(ended.value)

    with caplog.at_level(logging.WARNING, "distaccum"), ThreadPoolExecutor(2) as pool:
        said = [*pool.map(agree, [rank for rank in range(3) if rank != late])]
    for text in said:
        assert text.startswith(f"rank {late} (process {os.getpid()} on ")
        assert ") is not ready to train 0 s after rank " in text or ") is not ready to train 1 s after rank " in text
    assert any("after 0 s the run ends (trainer.hang_timeout)" in record.getMessage() for record in caplog.records)


def test_one_that_is_late_is_awaited_where_nothing_limits_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordination, "_FIRST_WORD_S", 0.1)
    ranks = _ranks(2)

    def agree(rank: int) -> None:
        sleep(0.4 * rank)
        ranks[rank].agree(JOB, None, within_s=math.inf)

    with caplog.at_level(logging.WARNING, "distaccum"), ThreadPoolExecutor(2) as pool:
        list(pool.map(agree, range(2)))
    assert "is not ready to train 0 s after rank 0 was; the run waits for it (trainer.hang_timeout)" in caplog.text
