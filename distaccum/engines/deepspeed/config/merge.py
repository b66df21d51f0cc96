"""A user's DeepSpeed JSON: read, compared with what distaccum decides, merged. Needs no DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from distaccum.config.engine import STAGES
from distaccum.engines.deepspeed.config.keys import CLOSED, HELD, KINDS, REFUSED
from distaccum.errors import ConfigError, near_misses

_KEY = "engine.json"
_ZERO = "zero_optimization"
_AGREE = 'Change one of each pair, or write "auto" in the file'
_LEAVE_OUT = "Leave out what distaccum needs otherwise"
_SHOWN = 60  # characters of a value
_FORMATS = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
# "auto" means something to DeepSpeed itself here.
_OWN_AUTO = ("replace_method", "keep_in_fp32_modules")


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A value that distaccum decides: where in the JSON, and ``by`` which setting.

    ``stated``: what a file has to say there, where that is not the value itself. ``emitted``: whether the generated
    JSON says it, too. ``remedy``: for a file that says otherwise.
    """

    path: str
    value: Any
    by: str
    stated: Any = None
    emitted: bool = True
    remedy: str = _AGREE


def needs(path: str, value: Any, why: str, *, emitted: bool = True) -> Owned:
    """A value that no setting decides."""
    by = f"distaccum needs {shown(value)}: {why}"
    return Owned(path=path, value=value, by=by, emitted=emitted, remedy=_LEAVE_OUT)


def held() -> list[Owned]:
    """The keys that may be left out of the JSON, or else must have one value."""
    return [needs(path, value, why, emitted=False) for path, (value, why) in HELD.items()]


def read(source: object) -> dict[str, Any]:
    """A DeepSpeed JSON from a file or a mapping, without the keys that say "auto" or null, and in today's spelling.

    Raises:
        ConfigError: no such file, not JSON, not a mapping, or a key stated twice.
    """
    if isinstance(source, str | PathLike):
        path = Path(fspath(source))
        try:
            node = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        except OSError as error:
            remedy = "Give an existing file, or a mapping"
            raise ConfigError(_KEY, path, f"cannot be read ({error.strerror})", remedy) from error
        except ValueError as error:
            raise ConfigError(_KEY, path, f"not JSON ({error})", "Correct the file") from error
    else:
        path, node = None, source
    if not isinstance(node, Mapping):
        problem = f"holds no mapping but {shown(node)}"
        raise ConfigError(_KEY, path, problem, 'Give DeepSpeed\'s JSON: {"key": value, ...}, or a file of it')
    return _renamed(_without_auto(node))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    node = dict(pairs)
    if len(node) != len(pairs):
        twice = sorted({key for key in node if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"stated twice: {', '.join(twice)}")
    return node


def _without_auto(node: Mapping[str, Any]) -> dict[str, Any]:
    """At every depth: "auto" asks for our value, or for DeepSpeed's default, and both mean leaving it out."""
    plain: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            plain[str(key)] = _without_auto(value)
        elif value is not None and (value != "auto" or key in _OWN_AUTO):
            plain[str(key)] = deepcopy(value)
    return plain


def _renamed(node: dict[str, Any]) -> dict[str, Any]:
    """Old spellings, which DeepSpeed ignores or refuses next to the new ones, and other names of number formats."""
    if "bfloat16" in node:
        if "bf16" in node:
            raise ConfigError(_KEY, None, "bf16 and bfloat16 are two names of one section", "Delete bfloat16")
        node["bf16"] = node.pop("bfloat16")
    zero = node.get(_ZERO)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if isinstance(zero, dict) and isinstance(zero.get(old), bool):
            if new in zero:
                raise ConfigError(_KEY, None, f"{_ZERO}.{old} is the old name of {new}", f"Delete {old}")
            if zero.pop(old):
                zero[new] = {"device": "cpu"}
    for path in ("communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype"):
        value = get(node, path)
        if isinstance(value, str):
            put(node, path, _FORMATS.get(value.lower(), value))
    return node


def check(theirs: dict[str, Any], owned: list[Owned]) -> None:
    """Raises one ConfigError of all that is wrong with a user's JSON, each with both values."""
    owners = {one.path: one for one in owned}
    faults: list[str] = []
    remedies: dict[str, None] = {}
    for section, key, value in _walk(theirs):
        fault, remedy = _fault(section, key, value, owners)
        if fault:
            faults.append(fault)
            remedies[remedy] = None
    if get(theirs, "fp16.enabled") is True and get(theirs, "bf16.enabled") is True:
        faults.append("fp16.enabled=true and bf16.enabled=true exclude each other")
        remedies["Keep that of precision=..."] = None
    if faults:
        raise ConfigError(_KEY, None, "; ".join(faults), ". ".join(remedies))


def _fault(section: str, key: str, value: Any, owners: Mapping[str, Owned]) -> tuple[str, str]:
    """What is wrong with one key of a user's JSON, and what to do; or two empty strings."""
    path = _path(section, key)
    what, owner = f"{path}={shown(value)}", owners.get(path)
    if path in REFUSED:
        return f"{what}: {REFUSED[path]}", f"Delete {path}"
    kind = KINDS.get(path)
    if section in CLOSED and (kind is None or "." in key):
        known = [name for name in KINDS if name.rpartition(".")[0] == section]
        hint = near_misses(path, known)
        return f"{what}: no such key of DeepSpeed's{hint}", "Correct or delete what it does not know"
    kind = kind or (object if owner is None else type(owner.value))
    ours = "" if owner is None else owner.by
    if not _is(value, kind):
        also = f", and {ours}" if ours else ""
        return f"{what} is not {_NAMES[kind]}{also}", "Write numbers, true and false without quotes"
    if path == f"{_ZERO}.stage" and value not in STAGES:
        return f"{what} is no stage of ZeRO, and {ours}", "Use 0, 1, 2 or 3 in both places"
    if owner is not None and value != (owner.value if owner.stated is None else owner.stated):
        return f"{what} but {ours}", owner.remedy
    return "", ""


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section"}


def _is(value: Any, kind: type) -> bool:
    if kind is object:
        return True
    if kind in (int, float):  # a whole number may be written 5e8
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind is float or float(value).is_integer())
    return isinstance(value, kind)


def _walk(node: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every key and its section, sections before what they hold; not what is below a refused one."""
    for key, value in node.items():
        yield section, key, value
        if isinstance(value, dict) and _path(section, key) not in REFUSED:
            yield from _walk(value, _path(section, key))


def _path(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def get(node: Mapping[str, Any], path: str) -> Any:
    """What lies at a dotted path, or None."""
    value: Any = node
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def put(node: dict[str, Any], path: str, value: Any) -> None:
    """Puts a value at a dotted path, and makes the sections on the way."""
    *sections, key = path.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[key] = value


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both at every depth; where they disagree, what is ``above``."""
    both = dict(below)
    for key, value in above.items():
        under = both.get(key)
        both[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else deepcopy(value)
    return both


def shown(value: object) -> str:
    """As JSON has it, cut short; text without quotes unless it looks like something else."""
    if isinstance(value, str) and value.lower() not in ("", "true", "false", "null") and value[0].isalpha():
        return value
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
