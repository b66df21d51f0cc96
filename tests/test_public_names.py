"""The front door: about 40 names, lazy; everything else is internal."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import distaccum


def test_every_public_name_is_where_it_says() -> None:
    assert 30 <= len(distaccum.__all__) <= 50
    assert len(set(distaccum.__all__)) == len(distaccum.__all__)
    for name in distaccum.__all__:
        found = getattr(distaccum, name)
        home = "distaccum.functional" if name == "functional" else distaccum._HOMES[name]
        assert (found.__name__ if name == "functional" else found.__module__) == home
    assert set(dir(distaccum)) == {*distaccum.__all__, "__version__"}


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(distaccum.__file__).with_suffix(".pyi").read_text())
    shown = {a.asname: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert shown.pop("functional") == "distaccum"
    assert shown == distaccum._HOMES


def test_what_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'distaccum' has no attribute 'nothing'"):
        _ = distaccum.nothing


def test_the_package_alone_imports_nothing() -> None:
    program = "import sys, distaccum; print(*(name for name in sys.modules if 'distaccum.' in name or name == 'torch'))"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == []
