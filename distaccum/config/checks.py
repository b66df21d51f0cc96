"""Checks of settings: each raises ConfigError with the key, the value, the problem and the remedy."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import fields
from functools import cache
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from distaccum.errors import ConfigError

Node = dict[str, Any]  # what is the user's to choose: a mapping, most often with a ``_target_``

# Durations as Slurm writes them.

_CLOCK = re.compile(r"(?:(?P<days>\d+)[-:](?=\d+:\d+:))?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def seconds_of(key: str, value: object) -> float:
    """The seconds of ``D-HH:MM:SS``, ``DD:HH:MM:SS``, ``HH:MM:SS``, ``MM:SS``, ``90s`` (or ``m``, ``h``, ``d``), or of
    a number of seconds.

    Raises:
        ConfigError: it is none of these, or not positive.
    """
    found: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        found = float(value)
    elif isinstance(value, str) and (unit := _DURATION.fullmatch(value)):
        found = float(unit[1]) * _SECONDS[unit[2]]
    elif isinstance(value, str) and (clock := _CLOCK.fullmatch(value)):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        found = days * 86400 + hours * 3600 + minutes * 60 + seconds
    if found is None or not 0 < found < float("inf"):
        remedy = "Write HH:MM:SS, D-HH:MM:SS, 90s, 30m, 12h, or seconds"
        raise ConfigError(key, value, "not a positive length of time", remedy)
    return found


# Sizes of memory, with their unit.

_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_WHOLE = 100  # from which on no decimal is shown
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_BYTES)})")


def bytes_of(key: str, value: object) -> float:
    """The bytes of ``512MiB``, ``1.5GiB``, ``64GB`` and the like.

    Raises:
        ConfigError: it is no positive size with a unit.
    """
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None or not float(found[1]):
        raise ConfigError(key, value, "no positive size with its unit", f"Write 4GiB; units are {', '.join(_BYTES)}")
    return float(found[1]) * _BYTES[found[2]]


def size_of(count: float) -> str:
    """Bytes with a unit, as ``512 B``, ``1.5 MiB``, ``93.1 GiB``, ``250 GiB``."""
    power = min(len(_BINARY) - 1, int(math.log2(max(1.0, count))) // 10)
    number = count / 1024**power
    return f"{number:.{1 if power and number < _WHOLE else 0}f} {_BINARY[power]}"


def unit_of(samples: float, counted: float) -> str:
    """What a loss counts, ``samples`` or ``tokens``: of so many samples it has counted so much.

    Neither a sum of weights, nor less than a sample each, is a number of tokens.
    """
    return "tokens" if counted > samples and float(counted).is_integer() else "samples"


_Settings = TypeVar("_Settings")

NONFINITE = ("stop", "skip")
ON_DIVERGENCE = ("stop", "warn")
ON_SPIKE = ("off", "warn", "skip")
ROLLBACK = "rollback"  # of the Trainer alone
AUTO = "auto"  # of checkpoint.background
EPOCH = "epoch"  # of trainer.eval_every and checkpoint.every
DOCUMENTS = "documents"  # of batch.packing
LASTS = ("updates", "samples", "tokens")  # of batch.schedule
VERIFY = ("first", "never")
RELATIONS = ("counts", "parts", "samples", "weights", "state", "hooks", "size")  # that docs/verification.md has
REPRODUCIBLE = "reproducible"
NUMERICS = ("fast", REPRODUCIBLE)
GLOO = "gloo"
BACKENDS = ("auto", "nccl", GLOO)


def require(holds: bool, key: str, value: object, problem: str, remedy: str) -> None:
    """Raises ConfigError unless ``holds``."""
    if not holds:
        raise ConfigError(key, value, problem, remedy)


def take_digits(settings: Any, *names: str) -> None:
    """Makes numbers of texts of digits, as ``${oc.env:...}`` gives them, in fields that take names, too."""
    for name in names:
        if isinstance(value := getattr(settings, name), str) and value.isdecimal():
            object.__setattr__(settings, name, int(value))


def require_type(key: str, value: object, hint: Any) -> None:
    """A value of this type, as an annotation has it: ``int | None``, ``list[str]``.

    A bool is no number, a whole number that fits is a float too, and a tuple is a list.
    """
    if not _is_of(value, hint):
        raise ConfigError(key, value, f"not of type {_written(hint)}", as_yaml_has_it(value))


_hints: Any = cache(get_type_hints)  # each look evaluates a class's annotations
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_SHORT_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)([kmb]?)")


def as_yaml_has_it(value: object, otherwise: str = "Give a value of the type named") -> str:
    """The remedy for a value of another type: null for none, 64000 for 64k, 1000 for 1e3."""
    text = str(value).lower()
    if text in ("none", "nil", "off"):
        return "Write null for none"
    found = _SHORT_NUMBER.fullmatch(text)
    if found and (number := float(found[1]) * _TIMES[found[2]]).is_integer():
        return f"Write {number:.0f}"
    return otherwise


def require_annotated(group: str, settings: Any) -> None:
    """Every field of a dataclass has a value of its annotated type; one that is ``Any`` needs a check of its own.

    ``group`` is empty at the top.
    """
    hints = _hints(type(settings))
    for one in fields(settings):
        require_type(f"{group}.{one.name}" if group else one.name, getattr(settings, one.name), hints[one.name])


def _is_of(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_of(value, one) for one in inner)
    if kind is Any or isinstance(value, bool):
        return kind in (Any, bool)
    if kind is list:
        return isinstance(value, list | tuple) and all(_is_of(one, inner[0]) for one in value)
    if kind is dict:
        return isinstance(value, dict) and all(_is_of(k, inner[0]) and _is_of(v, inner[1]) for k, v in value.items())
    if kind is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def _written(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_written, inner))
    of = ", ".join(_written(one) for one in inner if Any not in inner)
    return "None" if kind is NoneType else f"{kind.__name__}{of and f'[{of}]'}"


def require_count(key: str, value: int | None, *, least: int = 0, off: str = "") -> None:
    """A whole number from ``least`` on, or None; ``off`` says what 0 is for."""
    remedy = f"Use a whole number from {least}{f', or {off}' if off else ''}"
    require(value is None or value >= least, key, value, f"must be at least {least}", remedy)


def require_interval(key: str, value: object, *, off: str) -> None:
    """A number of updates, 0 for what ``off`` says, or ``epoch``."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    remedy = f"Give a whole number of updates, {EPOCH} for the end of each, or {off}"
    remedy = as_yaml_has_it(value, remedy) if str(value)[:1].isdigit() else remedy  # 0, and not null, is off
    require(whole or is_one_of((EPOCH,), value), key, value, "is no interval", remedy)


def require_positive(key: str, value: float | None) -> None:
    """A positive finite number, or None."""
    good = value is None or (math.isfinite(value) and value > 0)
    require(good, key, value, "must be a positive finite number", "Use a value such as 1e-3")


def require_fraction(key: str, value: float) -> None:
    """A number between 0 and 1, both excluded."""
    require(0 < value < 1, key, value, "not between 0 and 1", "Give the share to hold out, such as 0.1")


def require_choice(key: str, value: object, choices: tuple[object, ...]) -> None:
    """One of ``choices``."""
    named = ", ".join(str(one) for one in choices if one is not None)
    require(is_one_of(choices, value), key, value, "no such choice", f"Use one of {named}")


def is_one_of(choices: tuple[object, ...], value: object) -> bool:
    """Whether ``value``, which may be anything, an array too, is one of ``choices``. The number 1 is not True."""
    return any(isinstance(value, type(one)) and value == one for one in choices)


def settings_by_name(kind: type[_Settings], given: object, *, key: str, names: tuple[str, ...]) -> _Settings:
    """Settings of ``kind`` that are given by one of its ``names``, or as they are.

    Raises:
        ConfigError: it is neither, or there is no such name.
    """
    if isinstance(given, str):
        named: Any = kind
        made: _Settings = named(name=given)
        return made
    problem, remedy = f"neither a name nor settings but {type(given).__name__}", f"Use one of {', '.join(names)}"
    if not isinstance(given, kind):
        raise ConfigError(key, given, problem, f"{remedy}, or a {kind.__name__}")
    return given


def whole_number(key: str, value: Any) -> int:
    """``value`` as an int: also NumPy's whole numbers, and a tensor's. A bool is none, nor is a float.

    Raises:
        ConfigError: it is no whole number.
    """
    try:
        require(not isinstance(value, bool), key, value, "is no whole number", "Give one, such as 8")
        return index(value)
    except TypeError:
        raise ConfigError(key, value, "is no whole number", "Give one, such as 8") from None


def require_positive_number(key: str, value: object) -> None:
    """A positive finite number of any kind, or None."""
    holds = value is None or (isinstance(value, Real) and not isinstance(value, bool))
    require(holds, key, value, "is no number", "Use a value such as 1.0, or None for none")
    require_positive(key, value)  # type: ignore[arg-type]  # a Real


def require_seed(key: str, value: int) -> None:
    """A whole number of 63 bits."""
    require(0 <= value < 2**63, key, value, "out of range", "Use a whole number from 0 to 2**63-1")


def require_group(key: str, group: Any) -> None:
    """A parameter group: what it takes, and what it states for that. Whether its optimizer has it is seen later."""
    remedy = "Write {match: '*.bias', weight_decay: 0.0}, for example"
    require(isinstance(group, dict), key, group, "is no mapping", remedy)
    require("match" in group or "dims" in group, key, group, "says neither match nor dims", remedy)
    globs, dims = group.get("match", "*"), group.get("dims", 0)
    globs, dims = (one if isinstance(one, list) else [one] for one in (globs, dims))
    texts = bool(globs) and all(isinstance(glob, str) and glob for glob in globs)
    require(texts, f"{key}.match", globs, "not globs over the names of parameters", remedy)
    whole = bool(dims) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in dims)
    require(whole, f"{key}.dims", dims, "not numbers of dimensions", "Write 2, or [0, 1], for example")
    states = [str(name) for name in group if name not in ("match", "dims")]
    require(bool(states), key, group, "states nothing for what it takes", remedy)
    node = group.get("optimizer", {"_target_": None})
    another = "Name another optimizer as optimizer: {_target_: torch.optim.Muon}"
    require(isinstance(node, dict) and "_target_" in node, f"{key}.optimizer", node, "names no class", another)
    for name in states:
        require(not name.startswith("_"), f"{key}.{name}", group[name], "is no setting of a group", another)
        problem = f"and {key}.optimizer.{name}={node.get(name)} too"
        require(name not in node, f"{key}.{name}", group[name], problem, "State it once")
    for place, rates in ((key, group), (f"{key}.optimizer", node)):
        rate = rates.get("lr", 0.0)
        number = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate < math.inf
        require(number, f"{place}.lr", rate, "is no rate", "Give a number from 0 on, such as 0.001")


def require_named(group: str, nodes: Node) -> None:
    """Mappings by a name each, which name a class."""
    target = nodes.get("_target_")
    remedy = f"Put a name of your own above it: {{mine: {{_target_: {target}}}}}, or {group}.mine._target_={target}"
    require("_target_" not in nodes, f"{group}._target_", target, "has no name", remedy)
    for name, node in nodes.items():
        remedy = f"Write {group}.{name}._target_=package.module.Name"
        require(isinstance(node, dict) and "_target_" in node, f"{group}.{name}", node, "names no class", remedy)


def require_stage(key: str, stage: Any) -> None:
    """A stage of the global batch: its size, and how long it holds in one unit."""
    remedy = "Write {global_size: 16, updates: 100}; in place of updates, samples or tokens"
    require(isinstance(stage, dict), key, stage, "is no mapping", remedy)
    unknown = [name for name in stage if name not in ("global_size", *LASTS)]
    require(not unknown, key, stage, f"has {', '.join(map(str, unknown))}, which no stage has", remedy)
    require("global_size" in stage, key, stage, "has no global_size", remedy)
    units = [name for name in LASTS if name in stage]
    require(len(units) == 1, key, stage, f"says {' and '.join(units) or 'not'} how long it holds", remedy)
    for name in ("global_size", *units):
        whole = isinstance(stage[name], int) and not isinstance(stage[name], bool)
        require(whole and stage[name] >= 1, f"{key}.{name}", stage[name], "is no whole number from 1 on", remedy)


def require_relations(key: str, value: object) -> None:
    """A list of relations that a proof looks at."""
    named = isinstance(value, list | tuple) and all(is_one_of(RELATIONS, one) for one in value)
    require(named, key, value, "no list of relations", f"Use some of [{', '.join(RELATIONS)}]")


def require_verify(key: str, value: object) -> None:
    """``first``, ``never`` or a number of windows."""
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(
        number or is_one_of(VERIFY, value),
        key,
        value,
        "no such choice",
        "Use first, never or a number of windows from 1",
    )
