"""The help of ``distaccum train`` and ``distaccum plan``: what it lists is there, at any width, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distaccum.config.schema import conf_dir, dotted
from distaccum.models.gpt import GPT
from distaccum.program import help_asked
from distaccum.tools.help import _OFTEN, overview, show
from tests.support.commands import ROOT, environment

KEY = re.compile(r"^  ([\w./]+)(?:  \(|=)", re.MULTILINE)
Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def call(command: str, topic: str, code: int = 0) -> str:
        assert show(command, topic) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return call


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], None),
        (["model=cnn"], None),
        (["--hydra-help"], None),
        (["--help"], ""),
        (["-h"], ""),
        (["--help", "batch"], "batch"),
        (["--help=batch"], "batch"),
        (["model=cnn", "--help", "engine=ddp"], ""),
        (["--help", "--check"], ""),
    ],
)
def test_help_is_asked_for_all_or_for_a_key(arguments: list[str], asked: str | None) -> None:
    assert help_asked(arguments) == asked


OTHERS = ("hydra", "trainer", "sweeps")  # the last has files of W&B's, not of Hydra's


def test_every_group_is_listed_with_its_choices(printed: Printed) -> None:
    """As the files of ``conf/`` are named."""
    listed = printed("train", "").partition("groups, the default first:\n")[2]
    for folder in (path for path in conf_dir().iterdir() if path.is_dir() and path.name not in OTHERS):
        names = {path.stem for path in folder.glob("*.yaml")} - {"default"}
        if names:
            found = re.search(rf"^  {folder.name} (.*\n(?: {{10}}.*\n)*)", listed, re.MULTILINE)
            assert found is not None, folder.name
            assert names <= set(re.split(r"[,\s]+", found[1]))


def test_every_key_of_the_trainer_is_told_and_no_other(printed: Printed) -> None:
    composed = OmegaConf.to_container(OmegaConf.load(conf_dir() / "trainer" / "default.yaml"))
    leaves = {f"trainer.{key}" for key in dotted(composed)} - {"trainer.loader"}
    assert set(KEY.findall(printed("train", "trainer"))) == leaves
    assert KEY.findall(printed("train", "trainer.max_steps")) == ["trainer.max_steps"]


def test_the_choices_of_a_target_are_told_with_their_keys(printed: Printed) -> None:
    said = printed("train", "model")
    assert "\nmodel=cnn" in said
    for key in dotted(OmegaConf.to_container(OmegaConf.load(conf_dir() / "model" / "gpt.yaml"))):
        assert f"\n  model.{key}=" in said
    documented = re.search(r"^ +n_layer(?: \(.*\))?: (.*)$", GPT.__doc__ or "", re.MULTILINE)
    assert documented is not None
    assert f"\n  model.n_layer=4\n      {documented[1]}\n" in said
    assert printed("train", "model.n_layer").endswith(f"\n      {documented[1]}\n")


def test_the_forecast_tells_its_own_settings_too(printed: Printed) -> None:
    own = OmegaConf.to_container(OmegaConf.load(conf_dir() / "plan.yaml"))
    assert isinstance(own, dict)
    said = printed("plan", "")
    for group in ("cluster", "plan"):
        for key in own[group]:
            assert f"\n  {group}.{key}=" in said
    assert "Gbit/s between a node and the others" in printed("plan", "cluster.link_gbps")


def test_what_is_not_there_is_named_with_a_near_miss(printed: Printed) -> None:
    said = printed("train", "trainr", 2)
    assert said.startswith("distaccum train: --help trainr: no such setting or group; did you mean trainer")
    assert said.count("\n") == 1
    assert "no such setting or group. See" in printed("plan", "quux", 2)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["train", "plan"])
def test_no_line_is_wider_than_the_terminal(
    columns: int, command: str, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for topic in ("", "all", "model", "data", "hydra/launcher"):
        said = printed(command, topic)
        assert max(map(len, said.splitlines())) <= columns
        assert said.replace("\n", "").isprintable()


def test_what_is_changed_most_is_there() -> None:
    assert set(_OFTEN) <= set(KEY.findall(overview("train")))


@pytest.mark.parametrize("start", ["-m distaccum train", "-m distaccum.train", "launch/train.py"])
def test_it_waits_for_neither_torch_nor_hydra(start: str, tmp_path: Path) -> None:
    """Folders of these names that cannot be imported stand before them."""
    for name in ("torch", "hydra"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    found = subprocess.run(
        [sys.executable, *start.split(), "--help", "seed"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}", COLUMNS="80"),
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "  seed  (int; default 0)\n      of weights, order and dropout.\n"
