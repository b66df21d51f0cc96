"""The keys of a group's choices are what targets take and files state, read here by importing and parsing them."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import yaml

from distaccum.config.schema import conf_dir
from distaccum.models import gpt
from distaccum.tools import settings as room
from distaccum.tools.settings import GROUPS, Setting, arguments

FILES = [(group, path.stem) for group in GROUPS for path in sorted((conf_dir() / group).glob("*.yaml"))]


def _stated(group: str, name: str) -> dict[str, dict[str, Any]]:
    """The nodes of a file that have a ``_target_``, by their place."""
    node = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
    for base in node.pop("defaults", []):
        node |= yaml.safe_load((conf_dir() / group / f"{base}.yaml").read_text()) | node
    places = {group: node} | {f"{group}.{key}": value for key, value in node.items()}
    return {place: one for place, one in places.items() if isinstance(one, dict) and "_target_" in one}


def _of(group: str, name: str) -> dict[str, Setting]:
    return {one.key: one for one in arguments() if one.key.startswith(f"{group}.") and name in one.files}


@pytest.mark.parametrize(("group", "name"), FILES, ids=str)
def test_a_choice_takes_what_its_target_takes(group: str, name: str) -> None:
    described = _of(group, name)
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
