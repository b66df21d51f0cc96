"""The command's arguments, streams and exit codes, in the test's process; its table at 80 and 120 columns and piped."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import distaccum
from distaccum.tools.doctor.command import main
from distaccum.tools.doctor.facts import Look, rate, seconds
from distaccum.tools.doctor.software import PYTHON, TORCH
from distaccum.tools.doctor.table import Examination, Section, lines
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
    assert ("\nNothing that was looked at is wrong." in text) is (code == 0)  # where the machine is busy some is not
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
    assert "RANK=0, WORLD_SIZE=2" in text, text


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


LONG = "kernels that can be built: " + ", ".join(f"kernel_{number}" for number in range(30))


COMMAND = f"cp --all {' '.join(f'folder-{number}' for number in range(20))}"


def _examination() -> Examination:
    one, other, both = Look(), Look(), Look()
    for look in (one, other):
        look.tell("torch", "2.13.0")
        look.tell("kernels", LONG)
        look.find("no cable", "plug it in    # it is the red one")
    one.tell("free memory", "3.0 GiB", 3 * 2**30)
    other.tell("free memory", "1.0 GiB", 2**30)
    other.tell("disk", "could not be looked at: OSError")
    other.find("slow " * 30, "wait", wrong=False)
    both.tell("backend", "gloo")
    both.find("versions differ", f"{COMMAND}    # which is long")
    sections = [Section(title="Machine", looks={"n0": one, "n1": other}), Section(title="Together", looks={"": both})]
    return Examination(nodes={"n0": [0, 1], "n1": [2, 3]}, sections=sections)


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_terminal_and_nothing_is_lost(width: int) -> None:
    wrapped = [line for _, line in lines(_examination(), width)]
    (command,) = [line for line in wrapped if "cp --all" in line]
    assert command == f"       -> {COMMAND}"  # to be copied
    wrapped.remove(command)
    assert max(map(len, wrapped)) <= width
    piped = [line for _, line in lines(_examination(), None)]
    assert f"{command}    # which is long" in piped
    assert {"# which is long", "-> plug it in    # it is the red one"} <= {line.strip() for line in wrapped}
    said = [word for line in piped if "cp --all" not in line for word in line.split()]
    told = [word for line in wrapped if "# which is long" not in line for word in line.split()]
    assert said == told


def test_piped_each_fact_is_a_line_and_what_all_nodes_have_is_said_once() -> None:
    text = "\n".join(line for _, line in lines(_examination(), None))
    assert text.startswith("distaccum doctor: 4 ranks on 2 nodes\n\nMachine\n")
    assert text.count("2.13.0") == 1
    assert "  free memory                   n0: 3.0 GiB\n" in text
    assert "                                n1: 1.0 GiB\n" in text
    assert (
        "Wrong (2)\n  1    no cable (on n0, n1)\n       -> plug it in    # it is the red one\n  2    versions differ\n"
        in text
    )
    assert "Notes (1)\n  1    slow " in text
    assert text.endswith("\n2 wrong. 1 thing could not be looked at.")


def test_json_has_the_same_facts() -> None:
    examination = _examination()
    told = json.loads(json.dumps(examination.to_json()))
    assert told["right"] is False
    assert (told["ranks"], told["nodes"], told["unseen"]) == (4, {"n0": [0, 1], "n1": [2, 3]}, 1)
    facts = [fact for section in told["sections"] for of in section["nodes"].values() for fact in of]
    assert {"name": "free memory", "text": "1.0 GiB", "value": 2**30} in facts
    text = "\n".join(line for _, line in lines(examination, None))
    assert all(fact["text"] in text and fact["name"] in text for fact in facts)
    assert [(one["what"], one["nodes"], one["wrong"]) for one in told["findings"][:2]] == [
        ("no cable", ["n0", "n1"], True),
        ("versions differ", [], True),
    ]


def test_notes_alone_are_not_wrong() -> None:
    look = Look()
    look.find("slow", "wait", wrong=False)
    examination = Examination(nodes={"n": [0]}, sections=[Section(title="A", looks={"n": look})])
    assert examination.right
    assert [line for _, line in lines(examination, 80)][-1] == "Nothing that was looked at is wrong."


def test_numbers_as_people_read_them() -> None:
    assert [seconds(one) for one in (2.0, 0.0015, 2.5e-7)] == ["2 s", "1.5 ms", "0.25 µs"]
    assert [rate(one) for one in (1e10, 2.5e8)] == ["10 Gbit/s", "250 Mbit/s"]
