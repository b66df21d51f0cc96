"""What there is to set: every key with its type, default, meaning and choices, read from the dataclasses.

The meaning of a setting is stated once, in its dataclass's docstring under ``Args:``, as ``name: meaning`` or, where
the annotation does not say what may be given, ``name (type): meaning``. docs/reference.md and the command line's help
are both made of it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from distaccum.config.engine import ENGINES
from distaccum.config.schema import RunConfig, conf_dir

KINDS = ("int", "float", "str", "duration", "size", "path", "mapping")
"""What a type may name that is no word to type: ``duration`` as ``90s`` or ``12:00:00``, ``size`` as ``4GiB``."""
EXPERIMENT = "experiment"
_NO_FIELD = {
    EXPERIMENT: "A whole run by name; it may choose and change any other setting.",
    "hydra/launcher": "Launcher for the runs of a sweep (`-m`). null: Hydra, one after the other.",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of a run's configuration.

    Args:
        key: as on the command line: ``batch.global_size``, ``engine.stage``.
        type: what may be given, alternatives between bars: ``int``, ``float | null``, ``list[str]``, ``mapping``,
            ``first | never | int``, ``duration | null``.
        default: as on the command line: ``32``, ``null``, ``true``, ``[]``; of a group its choice: ``ddp``. Of a
            mapping, whose defaults are in ``conf/``, empty.
        meaning: one line of plain text, code between backticks.
        choices: the words among what may be given, in the order to show: ``("stop", "skip")``, ``("true", "false")``;
            of a group the names in ``conf/``. Empty where there are none.
        group: whether the key chooses a file of ``conf/KEY/``.
        engines: those that have the setting, of ``engine.*``; empty: all.
        files: of ``arguments()``: the group's choices that have it.
    """

    key: str
    type: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    group: bool = False
    engines: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting, in the order of ``RunConfig``: a group before what is in it, the engines' own after ``engine``.

    Raises:
        LookupError: a setting whose dataclass does not say what it means.
    """
    return tuple(_of(RunConfig, ""))


@cache
def groups() -> tuple[Setting, ...]:
    """The settings that choose a file of ``conf/``: those of ``settings()``, ``experiment`` and ``hydra/launcher``."""
    others = (_group(name, meaning) for name, meaning in _NO_FIELD.items())
    return (*(one for one in settings() if one.group), *others)


def _of(schema: type, prefix: str) -> Iterator[Setting]:
    hints, values, said = get_type_hints(schema), schema(), meanings(schema)
    for one in fields(schema):
        key, hint = f"{prefix}{one.name}", hints[one.name]
        if one.name == "name" and prefix in ("engine.", "precision.", "compile."):
            continue  # the group's own choice
        if one.name not in said:
            raise LookupError(f"{schema.__name__} says nothing of {one.name} under Args: in its docstring")
        kind, meaning = said[one.name]
        if (conf_dir() / key).is_dir() and _chosen(key) != "default":
            yield _group(key, meaning)
        elif hint is dict or get_origin(hint) is dict:
            yield Setting(key=key, type="mapping", default="", meaning=meaning)
        if key == "engine":
            yield from _of_engines()
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _of(hint, f"{key}.")
        elif get_origin(hint) is not dict:
            kind = kind or _annotated(hint)
            default = written(getattr(values, one.name))
            yield Setting(key=key, type=kind, default=default, meaning=meaning, choices=words(kind))


def _of_engines() -> Iterator[Setting]:
    """The settings of every engine; those that several have alike are one."""
    owners: dict[Setting, tuple[str, ...]] = {}
    for name, kind in ENGINES.items():
        for one in _of(kind, "engine."):
            owners[one] = (*owners.get(one, ()), name)
    for one, engines in owners.items():
        yield Setting(**{each.name: getattr(one, each.name) for each in fields(one)} | {"engines": engines})


def _group(key: str, meaning: str) -> Setting:
    names = sorted(path.stem for path in (conf_dir() / key).glob("*.yaml"))
    default = _chosen(key)
    names.sort(key=lambda name: name != default)
    return Setting(key=key, type="group", default=default, meaning=meaning, choices=tuple(names), group=True)


@cache
def _defaults() -> dict[str, str]:
    """The choices of ``conf/config.yaml``, by group."""
    listed = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    assert isinstance(listed, dict)
    return {str(k): written(v) for one in listed["defaults"] if isinstance(one, dict) for k, v in one.items()}


def _chosen(group: str) -> str:
    return _defaults().get(group, "null")


def meanings(schema: type) -> dict[str, tuple[str, str]]:
    """What a dataclass's docstring, and those of its bases, say of its fields: ``{name: (type or "", meaning)}``."""
    found: dict[str, tuple[str, str]] = {}
    for kind in reversed(schema.__mro__):
        found |= documented(inspect.cleandoc(kind.__dict__.get("__doc__") or ""), kind.__name__)
    return found


def documented(docstring: str, owner: str) -> dict[str, tuple[str, str]]:
    """What a docstring says under ``Args:``, ``name: meaning`` or ``name (type): meaning``.

    Raises:
        LookupError: an entry of another form.
    """
    found: dict[str, tuple[str, str]] = {}
    _, _, args = docstring.partition("\nArgs:\n")
    section = re.split(r"^\S", args, maxsplit=1, flags=re.MULTILINE)[0]
    for entry in re.split(r"^ {4}(?=\S)", section, flags=re.MULTILINE)[1:]:
        said = re.fullmatch(r"(\w+)(?: \((.*?)\))?: (.*)", " ".join(entry.split()))
        if said is None:
            raise LookupError(f"{owner}: {entry.strip()!r} is not of the form name (type): meaning")
        found[said[1]] = (said[2] or "", said[3].replace("``", "`"))
    return found


def _annotated(hint: Any) -> str:
    """A type as a reader of YAML writes it."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_annotated(one) for one in get_args(hint))
    if hint is NoneType:
        return "null"
    if hint is Any:
        raise LookupError("a setting whose annotation is Any states its type in the docstring: name (type): meaning")
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def words(kind: str) -> tuple[str, ...]:
    """The words to type among a type's alternatives."""
    given = [one for one in kind.split(" | ") if re.fullmatch(r"[\w-]+", one) and one not in (*KINDS, "null")]
    return tuple(word for one in given for word in (("true", "false") if one == "bool" else (one,)))


def written(value: object) -> str:
    """A value as on the command line; a mapping is empty."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "" if isinstance(value, dict) else str(value)


# What the choices of a group take: the arguments of the classes and functions that ``conf/`` names by ``_target_``.
#
# A value is that of the group's file; type and meaning are read from the target's source, which is not imported. Of a
# target outside of distaccum only what the file states is known.

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
            name: _Argument(type(value).__name__, written(value), f"Argument of `{target}`.")
            for name, value in stated.items()
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
