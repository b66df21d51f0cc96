"""What the choices of a group take: the arguments of the classes and functions that ``conf/`` names by ``_target_``.

A value is that of the group's file; type and meaning are read from the target's source, which is not imported. Of a
target outside of distaccum only what the file states is known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from distaccum.config.describe import Setting, documented, groups, words, written
from distaccum.config.schema import conf_dir

GROUPS = ("model", "data", "loss", "optim", "schedule", "callbacks")
PACKAGE = Path(__file__).parents[1]
_PLAIN = {"None": "null", "Path": "path"}


class _Argument(NamedTuple):
    type: str
    default: str | None
    meaning: str


@cache
def arguments() -> tuple[Setting, ...]:
    """The keys of every choice of ``GROUPS``: those of one target with one key are one setting, whose ``files`` it has.

    The default is that of the first of these files, or the target's own; ``???`` where it has to be given. A key that
    a file does not state is added with a plus on the command line (``+model.bias=true``).

    Raises:
        LookupError: a target's argument without a meaning in its docstring.
    """
    found: dict[tuple[str, str], Setting] = {}
    for group in (one for one in groups() if one.key in GROUPS):
        for name in group.choices:
            for prefix, stated in _targets(_node(group.key, name), group.key):
                target = stated.pop("_target_")
                for argument, (kind, default, meaning) in _arguments_of(target, stated).items():
                    key = f"{prefix}.{argument}"
                    known = found.get((key, target))
                    found[key, target] = Setting(
                        key=key,
                        type=kind,
                        default=known.default if known else default or "",
                        meaning=meaning,
                        choices=words(kind),
                        files=(*(known.files if known else ()), name),
                    )
    return tuple(sorted(found.values(), key=lambda one: GROUPS.index(one.key.split(".")[0])))


def _node(group: str, name: str) -> dict[str, Any]:
    """A group's file, after those of the same group that it begins with."""
    node = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    assert isinstance(node, dict)
    bases = [base for base in node.pop("defaults", []) if isinstance(base, str) and base != "_self_"]
    merged: dict[str, Any] = {}
    for base in bases:
        merged |= _node(group, base)
    return merged | {str(key): value for key, value in node.items()}


def _targets(node: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings in a group's file that name a ``_target_``, and their keys."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield prefix, dict(node)
        for key, value in node.items():
            yield from _targets(value, f"{prefix}.{key}")


def _arguments_of(target: str, stated: dict[str, Any]) -> dict[str, _Argument]:
    if not target.startswith("distaccum."):
        return {
            name: _Argument(type(value).__name__, written(value), f"of `{target}`.") for name, value in stated.items()
        }
    found = {}
    for name, (kind, default, meaning) in _signature(target).items():
        given = written(stated[name]) if name in stated else default
        if given is not None:  # else the run itself gives it, as a schedule's total_steps
            found[name] = _Argument(kind, given, meaning)
    return found


@cache
def _signature(target: str) -> dict[str, _Argument]:
    """The keyword arguments of a class or function of distaccum, by its source."""
    module, name = target.rsplit(".", 1)
    path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text())
    (home,) = (one for one in tree.body if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name)
    said = documented(ast.get_docstring(home) or "", name)
    made = home
    if isinstance(home, ast.ClassDef):
        (made,) = (one for one in home.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    assert isinstance(made, ast.FunctionDef)
    constants = {
        ast.unparse(one.targets[0]): one.value
        for one in tree.body
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)
    }
    found = {}
    for argument, default in zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True):
        if argument.arg not in said:
            raise LookupError(f"{target} says nothing of {argument.arg} under Args: in its docstring")
        kind, meaning = said[argument.arg]
        assert argument.annotation is not None
        value = constants.get(ast.unparse(default), default) if default is not None else None
        shown = None if value is None else written(ast.literal_eval(value))
        found[argument.arg] = _Argument(kind or _plain(argument.annotation), shown, meaning)
    return found


def _plain(annotation: ast.expr) -> str:
    """An annotation as a reader of YAML writes it."""
    kinds = [_PLAIN.get(one, one) for one in ast.unparse(annotation).split(" | ")]
    return " | ".join("mapping" if one.startswith("Mapping") else one for one in kinds)
