"""The help of ``distaccum train`` and ``plan`` lists what is there, at any width; and which keys choices have."""

import inspect
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from distaccum.config.schema import conf_dir, dotted
from distaccum.models import gpt
from distaccum.models.gpt import GPT
from distaccum.program import help_asked
from distaccum.tools import settings as room
from distaccum.tools.help import _OFTEN, overview, show
from distaccum.tools.settings import GROUPS, arguments
from tests.support.commands import ROOT, captured

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
    found = captured(
        [sys.executable, *start.split(), "--help", "seed"], cwd=ROOT, PYTHONPATH=f"{tmp_path}:{ROOT}", COLUMNS="80"
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "  seed  (int; default 0)\n      Random seed for initial weights, data order and dropout.\n"


FILES = [(group, path.stem) for group in GROUPS for path in sorted((conf_dir() / group).glob("*.yaml"))]


def _stated(group: str, name: str) -> dict[str, dict[str, Any]]:
    """The nodes of a file that have a ``_target_``, by their place."""
    node = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
    for base in node.pop("defaults", []):
        node |= yaml.safe_load((conf_dir() / group / f"{base}.yaml").read_text()) | node
    places = {group: node} | {f"{group}.{key}": value for key, value in node.items()}
    return {place: one for place, one in places.items() if isinstance(one, dict) and "_target_" in one}


@pytest.mark.parametrize(("group", "name"), FILES, ids=str)
def test_a_choice_takes_what_its_target_takes(group: str, name: str) -> None:
    mine = (one for one in arguments() if one.key.startswith(f"{group}."))
    described = {one.key: one for one in mine if name in one.files}
    expected = {}
    for place, node in _stated(group, name).items():
        module, _, home = node["_target_"].rpartition(".")
        parameters = inspect.signature(getattr(import_module(module), home)).parameters
        assert set(node) - {"_target_"} <= set(parameters)
        own = node["_target_"].startswith("distaccum.")
        taken = [key for key in parameters if key in node or (own and parameters[key].default is not inspect._empty)]
        expected |= {f"{place}.{key}": node.get(key, parameters[key].default) for key in taken}
    assert list(described) == [key for key in described if key in expected]
    assert set(described) == set(expected)
    for key, one in described.items():
        if one.files[0] == name:
            given, by_kind = expected[key], {bool: str(expected[key]).lower(), type(None): "null", dict: ""}
            number = isinstance(given, str) and given.replace("e", "").replace(".", "").isdigit()  # 1e4 is YAML's text
            assert one.default == by_kind.get(type(given), str(float(given)) if number else str(given)), key


def test_every_key_has_a_meaning_and_a_kernel_its_name() -> None:
    assert all(one.meaning.endswith(".") and one.type for one in arguments())
    (kernels,) = (one.choices for one in arguments() if one.key == "model.attention")
    assert kernels == tuple(gpt.KERNELS)


def test_an_argument_without_a_meaning_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text('def data(*, path: str):\n    """Mine."""\n')
    monkeypatch.setattr(room, "PACKAGE", tmp_path)
    with pytest.raises(LookupError, match=r"distaccum\.mine\.data says nothing of path under Args:"):
        room._signature("distaccum.mine.data")
