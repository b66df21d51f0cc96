"""Shell completion: bash asks, and the subcommands, groups, choices and keys are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distaccum.config.schema import conf_dir
from distaccum.program import commands, main
from tests.support.commands import ROOT, environment

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


@pytest.mark.parametrize("line", ["distaccum ", "distaccum tr"])
def test_the_subcommands_are_answered(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ask(monkeypatch, capsys, line) == [*commands(), "--help", "--version"]


@pytest.mark.parametrize("line", ["distaccum verify ", "distaccum verify ru", "distaccum export a b", "distaccum x y"])
def test_elsewhere_the_shell_completes_files(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ask(monkeypatch, capsys, line) == []


def test_flags_are_answered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
