"""The command ``distaccum``: its table, help, version, shell completion, and pipes whose reader is gone."""

import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import distaccum
from distaccum.config.schema import conf_dir
from distaccum.program import TABLE, Command, commands, main
from tests.support.commands import ROOT, environment

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def _call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["distaccum", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def _fresh(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, text=True, cwd=ROOT, env=environment(), **options)  # type: ignore[call-overload,no-any-return]


def test_there_is_one_script_and_each_command_of_the_table_but_none_whose_module_is_missing() -> None:
    assert all(one.is_there() for one in TABLE)
    assert SCRIPTS == {"distaccum": "distaccum.program:main"}
    assert not Command("gone", "distaccum.no_such_room.command:main", "").is_there()
    assert not Command("gone", "distaccum.no_such_file:main", "").is_there()


def test_help_and_version_load_neither_torch_nor_hydra() -> None:
    script = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from distaccum.program import main\nmain()\n"
    )
    for flag in ("--help", "--version"):
        process = _fresh("-c", script, flag, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        printed, loaded = process.communicate(timeout=60)
        assert process.returncode == 0
        assert printed
        names = set(loaded.split())
        assert "distaccum.program" in names
        assert not names & {"torch", "numpy", "hydra", "omegaconf", "rich", "wandb"}
        assert len(names) < 300  # 160 as it is written


def test_the_version_is_that_of_the_three(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"distaccum {distaccum.__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"
    for arguments in (["--version"], ["verify", "--version"], ["report", "--version"], ["audit", "--version"]):
        assert _call(monkeypatch, *arguments) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    for name in commands():
        assert re.search(rf"^  {name} +\w", printed, re.MULTILINE)


@pytest.mark.parametrize(
    "command", ["verify", "export", "predict", "report", "doctor", "audit", "wandb-upload", "launch"]
)
def test_help_of_a_command_has_usage_and_examples(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for arguments in ([command, "--help"], ["help", command]):
        assert _call(monkeypatch, *arguments) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].startswith(f"usage: distaccum {command} ")
    assert f"\n  distaccum {command} " in shown[0].partition("examples:")[2]
    assert "exit codes: 0" in shown[0]


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_is_wider_than_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in ([], ["verify", "-h"], ["export", "-h"], ["report", "-h"], ["doctor", "-h"], ["audit", "-h"]):
        assert _call(monkeypatch, *arguments) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= columns
        assert printed.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "words",
    [
        "verify --nosuch",
        "export --nosuch",
        "predict --nosuch",
        "export FOLDER --nosuch=3 FILE",
        "report --nosuch",
        "report RUN --nosuch",
        "report -oFILE --png --nosuch",
        "report --output FILE --nosuch",
        "doctor --nosuch",
        "wandb-upload --nosuch",
        "audit --nosuch",
        "audit --nosuch train.py --lr 3",
        "audit --windows 3 --nosuch",
    ],
)
def test_an_unknown_flag_is_named(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words.split(maxsplit=1)[0]
    assert _call(monkeypatch, *words.split()) == 2
    said = capsys.readouterr()
    error = f"distaccum {command}: error: --nosuch: no such flag. `distaccum {command} --help` lists those there are"
    assert said.err.splitlines()[-1] == error
    assert said.err.startswith(f"usage: distaccum {command} ")
    assert not said.out
    monkeypatch.setenv("RANK", "1")
    assert _call(monkeypatch, *words.split()) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("trian", 2, "trian: no such command; did you mean train? Use one of train, plan,"),
        ("nonsense", 2, "nonsense: no such command. Use one of train, plan,"),
        ("model=cnn", 2, "model=cnn: no command. Settings and flags follow one, as in: distaccum train model=cnn"),
        ("--check", 2, "--check: no command. Settings and flags follow one, as in: distaccum train --check"),
        ("report --outptu FILE", 2, "--outptu: no such flag; did you mean --output? `distaccum report --help` lists"),
        ("launch --nosuch train.py --lr", 2, "error: --nosuch: no such flag; did you mean --nproc? `distaccum launch"),
        ("report --out FILE RUN", 2, "--out: no such flag; did you mean --output?"),  # its beginning is not enough
        ("report --output --nosuch", 2, "argument -o/--output: expected one argument"),
        ("report", 2, "the following arguments are required: RUN"),
        ("report -- --nosuch --png", 2, "RUN=--nosuch: no such folder"),
        ("audit --windows x train.py --nosuch", 2, "argument --windows: invalid int value: 'x'"),  # the script's flag
        ("audit train.py --windows x --nosuch", 2, "argument --windows: invalid int value: 'x'"),
        ("verify NOWHERE", 2, "NOWHERE holds no run"),
        ("export NOWHERE FILE", 2, "NOWHERE: there is no such folder"),
        ("predict NOWHERE out=x.csv", 2, "NOWHERE: there is no such run"),
        ("predict NOWHERE out=x.csv data", 2, "data: is no setting. Write KEY=VALUE, as in data=held_out"),
        ("predict NOWHERE", 2, "out=: no file to write to. Use out=predictions.jsonl or .csv"),
        ("predict docs out=x.csv", 2, "docs: holds no checkpoints. Name a run directory that does"),
        ("predict NOWHERE out=NOWHERE/a.csv", 2, "out=NOWHERE/a.csv: there is no folder NOWHERE"),
        ("report NOWHERE", 2, "configuration error: RUN=NOWHERE: no such folder"),
        ("wandb-upload NOWHERE", 1, "NOWHERE: no run"),
        ("launch NOWHERE.py --nproc=2", 2, "PROGRAM=NOWHERE.py: no such file. Name a Python file, or use -m"),
        ("launch --nproc=0 -m json", 2, "--nproc=0: is no number of processes. Use 1 or more, or auto"),
    ],
)
def test_what_is_wrong_is_named_after_the_command_as_it_was_called(
    words: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(monkeypatch, *words.split()) == code
    printed, (*usage, said) = (text.splitlines() for text in capsys.readouterr())
    command = words.split(maxsplit=1)[0]
    assert said.startswith(f"distaccum {command}: " if command in commands() else f"distaccum: {command}: no ")
    assert message in said
    assert not printed
    assert not usage or usage[0].startswith("usage: distaccum ")


def test_only_rank_0_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert _call(monkeypatch, "--help") == 0
    assert _call(monkeypatch, "trian") == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def _writes(lines: int, file: Path) -> list[str]:
    script = (
        "import sys\nfrom distaccum import program\nprogram.quiet_pipes()\n"
        f"for i in range({lines}):\n"
        "    sys.stdout.write(f'line {i}\\n')\n"
        "    sys.stderr.write(f'also {i}\\n')\n"
        f"open({str(file)!r}, 'w').write('written')\n"
    )
    return ["-c", script]


@pytest.mark.parametrize("unbuffered", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_leaves_stops_the_printing_and_nothing_else(tmp_path: Path, unbuffered: Sequence[str]) -> None:
    """64 KiB is what a pipe takes unread: much more is written here."""
    process = _fresh(
        *unbuffered, *_writes(20_000, tmp_path / "file"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert os.read(process.stdout.fileno(), 4) == b"line"
    process.stdout.close()  # as head does
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "file").read_text() == "written"


@pytest.mark.parametrize("unbuffered", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("outlives", [True, False])
def test_a_full_disk_of_the_output_ends_all_but_a_run(
    tmp_path: Path, unbuffered: Sequence[str], *, outlives: bool
) -> None:
    option, script = _writes(2000, tmp_path / "file")
    script = script.replace(
        "quiet_pipes()\n", "quiet_pipes()\nprogram.outlive_output()\n" if outlives else "quiet_pipes()\n"
    )
    with Path("/dev/full").open("w") as full:
        process = _fresh(*unbuffered, option, script, stdout=full, stderr=subprocess.PIPE)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode == 0, (tmp_path / "file").exists()) == (outlives, outlives)
    assert said.count("No space left on device") == 1
    assert not outlives or "stdout: [Errno 28] No space left on device; what is printed there is lost" in said
    assert not outlives or said.count("also ") == 2000


def test_what_is_read_is_whole(tmp_path: Path) -> None:
    process = _fresh(*_writes(3, tmp_path / "file"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.communicate(timeout=60) == ("line 0\nline 1\nline 2\n", "also 0\nalso 1\nalso 2\n")


def test_a_stream_that_is_closed_is_nowhere(tmp_path: Path) -> None:
    words = [sys.executable, *_writes(3, tmp_path / "file")]
    shell = ["bash", "-c", '"$@" >&- 2>&-', "bash", *words]
    assert subprocess.run(shell, env=environment(), cwd=ROOT, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == "written"


PROMPT = r"""
eval "$(distaccum -sc install=bash)"
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE}; COMP_WORDS=($COMP_LINE); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    [[ $COMP_LINE == *" " ]] && COMP_CWORD=$((COMP_CWORD + 1))
    complete -p "${COMP_WORDS[0]}" | grep -q hydra_bash_completion && hydra_bash_completion
    echo "${COMPREPLY[*]}"
done
"""


def _ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["distaccum", "-sc", "query=bash"])
    monkeypatch.setenv("COMP_LINE", line)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    return said.out.split()


def test_the_subcommands_and_flags_are_answered_and_elsewhere_the_shell_completes_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ("distaccum ", "distaccum tr"):
        assert _ask(monkeypatch, capsys, line) == [*commands(), "--help", "--version"]
    for line in ("distaccum verify ", "distaccum verify ru", "distaccum export a b", "distaccum x y"):
        assert _ask(monkeypatch, capsys, line) == []
    assert "--check" in _ask(monkeypatch, capsys, "distaccum train seed=1 --c")


def _files(group: str) -> set[str]:
    return {f"{group}={path.stem}" for path in (conf_dir() / group).glob("*.yaml")}


@pytest.mark.slow
def test_bash_completes(tmp_path: Path) -> None:
    """The real shell with the scripts that an installation makes, asked as it asks them."""
    starts = {"distaccum": "distaccum.program"}
    for name, module in starts.items():
        script = tmp_path / name
        script.write_text(f"#!{sys.executable}\nfrom {module} import main\nmain()\n")
        script.chmod(0o755)
    trainer = OmegaConf.to_container(OmegaConf.load(conf_dir() / "trainer" / "default.yaml"))
    cluster = OmegaConf.to_container(OmegaConf.load(conf_dir() / "plan.yaml")["cluster"])  # type: ignore[index]
    assert isinstance(trainer, dict)
    assert isinstance(cluster, dict)
    expected = {
        "distaccum tr": {"train"},
        "distaccum train model=": _files("model"),
        "distaccum train --check=2 data=": _files("data"),
        "distaccum train trainer.max_": {f"trainer.{key}=" for key in trainer if key.startswith("max_")},
        "distaccum train --seed=3 model=cnn model.": {"model._target_=", "model.channels=", "model.classes="},
        "distaccum train mdoel=cnn trainer.": set(),  # what cannot be composed completes nothing, and says nothing
        "distaccum plan cluster.": {f"cluster.{key}=" for key in cluster},
        "distaccum train --c": {"--check", "--cfg", "--config-dir"},
        "distaccum verify ": starts.keys(),  # the files there
    }
    shell = subprocess.run(
        ["bash", "--norc", "-c", PROMPT],  # noqa: S607  whichever there is
        input="".join(f"{line}\n" for line in expected),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment(PATH=f"{tmp_path}:/usr/bin:/bin", PYTHONPATH=str(ROOT)),
    )
    assert not shell.stderr
    assert [set(line.split()) for line in shell.stdout.splitlines()] == list(expected.values())
