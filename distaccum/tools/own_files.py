"""What a message says of somebody's own files and data: a Python file for a choice, data that the model is not for."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distaccum.config.schema import conf_dir
from distaccum.errors import ConfigError, kinds_of, shorten

_FILE = re.compile(r"([\w./~-]+\.py)(?::(\w+))?")
_CALLBACKS = ("callbacks", "callback")
_MOST = 3  # classes that a remedy writes down


def of_a_python_file(key: str, value: str) -> ConfigError | None:
    """The error that says how the classes of a Python file are named, where ``callbacks=mine.py`` names the file.

    None where the key is no group's, or the value no Python file. The file is parsed, and not imported.

    Args:
        key: as it was written.
        value: as it was written, a list of several too.
    """
    group = key.lstrip("+-").rpartition(".")[2]
    found = _FILE.search(value)
    if found is None or not (group in _CALLBACKS or (conf_dir() / group).is_dir()):
        return None
    path, name = Path(found[1]).expanduser(), found[2]
    if not path.is_file():
        return ConfigError(key, value, "no such file", "Name a class that Python can import, by _target_")
    try:
        defined = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        return ConfigError(key, value, f"cannot be parsed ({error})", "Correct the file")
    kinds = ast.ClassDef if group in _CALLBACKS else (ast.ClassDef, ast.FunctionDef)
    names = [one.name for one in defined if isinstance(one, kinds) and not one.name.startswith("_")]
    if group in _CALLBACKS:
        bases = {one.name: " ".join(map(ast.unparse, one.bases)) for one in defined if isinstance(one, ast.ClassDef)}
        names = [one for one in names if "Callback" in bases[one]] or names
    if not names:
        remedy = "Write one in it that inherits from distaccum.Callback" if group in _CALLBACKS else "Write one in it"
        return ConfigError(key, value, "is a Python file without a class", remedy)
    module, at = _module_of(path)
    chosen = [name] if name in names else names
    problem = f"is a Python file, with {shorten(names)}"
    if group in _CALLBACKS:
        words = " ".join(f"+callbacks.{_snake(one)}._target_={module}.{one}" for one in chosen[:_MOST])
        return ConfigError(key, value, problem, f"Write {words}{at}")
    file, target = f"conf/{group}/{_snake(chosen[0])}.yaml", f"{module}.{chosen[0]}"
    remedy = f"Write _target_: {target} into {file}, and --config-dir conf {group}={_snake(chosen[0])}{at}"
    return ConfigError(key, value, problem, remedy)


def _module_of(path: Path) -> tuple[str, str]:
    """The name by which a file's module is imported, and what makes Python find it, in words."""
    whole, here = path.resolve(), Path.cwd()
    parts = whole.relative_to(here).with_suffix("").parts if whole.is_relative_to(here) else ()
    if not parts or not all(part.isidentifier() for part in parts):
        return whole.stem, f", with PYTHONPATH={whole.parent}"
    there = any(Path(one or ".").resolve() == here for one in sys.path)
    return ".".join(parts), "" if there else ", with PYTHONPATH=."


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def of_model_and_data(error: ConfigError, node: DictConfig) -> ConfigError:
    """The error for a model's setting that was to be the data's, with what these give: their samples are looked at.

    Args:
        error: for the setting.
        node: the whole configuration.
    """
    missing = re.search(r"'data\.(\w+)'", error.problem)
    if missing is None or not error.key.startswith("model."):
        return error
    from distaccum.train.components import build_data  # noqa: PLC0415  torch, where a run ends

    data = OmegaConf.to_container(node.data, resolve=True)
    assert isinstance(data, dict)
    try:
        gives = kinds_of(_first(build_data({str(name): value for name, value in data.items()}).train))
    except ConfigError as own:
        return own
    except Exception:  # the data's own: said where they are read
        return error
    name = node.model._target_.rpartition(".")[2] if "_target_" in node.model else "the model"
    problem = f"{name} takes data.{missing[1]}, which data of {_target(data)} do not state; their samples are {gives}"
    remedy = (
        "Choose groups that go together: model=cnn for images (1, H, W), one of your own by model._target_ in a file "
        f"conf/model/NAME.yaml, or state {error.key} where samples are token ids"
    )
    return ConfigError(error.key, None, problem, remedy)


def _target(data: Any) -> str:
    return str(data.get("_target_", "no _target_"))


def _first(dataset: Any) -> Any:
    return dataset[0] if isinstance(dataset, Sequence) or hasattr(dataset, "__getitem__") else next(iter(dataset))
