"""The command's arguments, streams and exit codes; in the test's process, whose probes are processes of their own."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import distaccum
from distaccum.tools.doctor.command import main
from distaccum.tools.doctor.software import PYTHON, TORCH
from tests.support.commands import ROOT


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["distaccum doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_json_and_the_table_of_the_parts_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _main(monkeypatch, "--json", "--only", "software,job") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["right"] is True
    assert [section["title"] for section in told["sections"]] == ["Software", "Job", "Between the ranks"]
    (software,) = told["sections"][0]["nodes"].values()
    values = {fact["name"]: fact["value"] for fact in software}
    assert values["distaccum"] == distaccum.__version__
    assert values["Python"] == ".".join(map(str, sys.version_info[:3]))
    monkeypatch.setattr("distaccum.tools.doctor.disk._MOST", 2**22)
    _main(monkeypatch, "--json", "--only", "host,disk", "--folder", str(tmp_path))
    parts = {section["title"]: section["nodes"] for section in json.loads(capsys.readouterr().out)["sections"]}
    assert set(parts) == {"Machine", "Disk", "Between the ranks"}
    (machine,) = parts["Machine"].values()
    (disk,) = parts["Disk"].values()
    assert {fact["name"]: fact["value"] for fact in machine}["memory"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    assert {fact["name"]: fact["value"] for fact in disk}["folder"] == str(tmp_path)
    assert _main(monkeypatch, "--only", "job") == 0
    text = capsys.readouterr().out
    assert "\nJob\n" in text
    assert "Software" not in text
    assert "\x1b" not in text


@pytest.mark.slow
def test_everything_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Every part, as the command alone does; nothing is left in the folder that it was started in."""
    monkeypatch.chdir(tmp_path)
    code = _main(monkeypatch)
    text = capsys.readouterr().out
    assert re.findall(r"^[A-Z]\w+$", text, re.MULTILINE) == [
        "Software",
        "DeepSpeed",
        "GPUs",
        "Machine",
        "Network",
        "Disk",
        "Job",
    ]
    assert text.endswith("Nothing that was looked at is wrong.\n") is (code == 0)
    assert list(tmp_path.iterdir()) == []


def test_something_wrong_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert _main(monkeypatch, "--only", "job") == 1
    assert "\n1 wrong.\n" in capsys.readouterr().out


def test_half_a_launcher_is_wrong_and_the_rest_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _main(monkeypatch, "--only", "job") == 1
    text = capsys.readouterr().out
    assert "LOCAL_RANK: not set, while RANK, WORLD_SIZE are" in text
    assert "RANK=0, WORLD_SIZE=2" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jsn"], "--jsn: no such flag; did you mean --json?"),
        (["--only", "dsk"], "dsk: no such part; did you mean disk?; there are software, kernels, gpus"),
        (["--only", ""], "no part; there are"),
        (["--folder"], "expected one argument"),
    ],
)
def test_bad_arguments_are_exit_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(monkeypatch, *arguments) == 2
    assert said in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert _main(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err == ""  # one rank says it for all


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert _main(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert "exit codes: 0 nothing is wrong" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_oldest_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={PYTHON[0]}.{PYTHON[1]}"' in text
    assert f'"torch>={TORCH[0]}.{TORCH[1]}"' in text
