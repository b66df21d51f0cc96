"""What a run has changed since the checkpoint that it resumes from: what may change, and what changes its meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from distaccum.config.instantiate import signature_of, target_of
from distaccum.errors import ConfigError

_ABSENT = "not there"
_IGNORED = ("resume", "resume_allow", "init_from", "init", "objective", "profile", "eval")
# What the saved tensors and numbers mean depends on these.
_MEANING = ("model", "loss")
_MOST_SHOWN = 6
_LONGEST = 60  # characters of a value


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting with its value in the checkpoint and in this run; ``refused`` where it changes what the state means."""

    key: str
    before: Any
    now: Any
    refused: bool

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}"


def compare(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    facts: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    data: str | None = None,
    allowed: Sequence[str] = (),
) -> list[Change]:
    """The changes of a configuration, those that are refused first.

    Args:
        before: the configuration as the checkpoint keeps it. An argument of a target that only one of the two states,
            with the value of its default, is no change: the target may have been given it since.
        now: as this run would keep it; its targets have the defaults that count.
        facts: what both say of ``model`` and ``loss``, by :func:`structure`; looked at where no setting of one differs
            but where its targets are.
        data: how the data themselves differ, in words; "" where they do not; None where nobody can tell, so that a
            changed setting of the data counts.
        allowed: keys, or the beginnings of keys, that the user answers for.
    """
    before, now = _filled(before, now, targets=now), _filled(now, before, targets=now)
    saved, given = dict(_flat(before)), dict(_flat(now))
    found, differ = [], set[str]()
    for key in sorted(saved.keys() | given.keys()):
        group, old, new = key.partition(".")[0], saved.get(key, _ABSENT), given.get(key, _ABSENT)
        if group in _IGNORED or _same(old, new):
            continue
        refused = group in _MEANING or (group == "data" and data is None)
        if key.endswith("_target_") and _name(old) == _name(new):  # it has moved
            refused = False
        else:
            differ.add(group)
        found.append(_change(key, old, new, refused, allowed))
    if data:
        found.append(_change("data", "other samples", data, True, allowed))
    for group in _MEANING:
        if group in differ:
            continue
        old, new = (each.get(group, {}) for each in facts)
        for name in sorted(old.keys() | new.keys()) if old and new else ():
            if old.get(name) != new.get(name):
                key = f"{group} ({name})" if name else group
                found.append(_change(key, old.get(name, _ABSENT), new.get(name, _ABSENT), True, allowed))
    return sorted(found, key=lambda change: not change.refused)


def shown(changes: Sequence[Change]) -> str:
    """The first few changes, and how many are left."""
    more = f"; and {len(changes) - _MOST_SHOWN} more" if len(changes) > _MOST_SHOWN else ""
    return "; ".join(map(str, changes[:_MOST_SHOWN])) + more


def structure(thing: object) -> dict[str, str]:
    """By module, its class and its settings that are plain values: what shapes do not tell, such as heads."""
    modules = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
    return {name: _described(module) for name, module in modules}


def _described(thing: object) -> str:
    values = {
        name: value
        for name, value in sorted(getattr(thing, "__dict__", {}).items())
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }
    return f"{type(thing).__qualname__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def _change(key: str, before: Any, now: Any, refused: bool, allowed: Sequence[str]) -> Change:
    plain = key.partition(" ")[0]
    answered = any(plain == one or plain.startswith(f"{one}.") for one in allowed)
    return Change(key=key, before=before, now=now, refused=refused and not answered)


def _name(target: Any) -> str:
    return str(target).rpartition(".")[2]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _same(before: Any, now: Any) -> bool:
    """Whether they are equal, and no truth value is taken for a number; NaN is as it was, too."""
    if isinstance(before, bool) != isinstance(now, bool):
        return False
    return bool(before == now) or (before != before and now != now)  # noqa: PLR0124  NaN alone differs from itself


def _filled(node: Any, other: Any, *, targets: Any) -> Any:
    """``node``, with those arguments of targets that the ``other`` alone states, if they are the targets' defaults.

    ``targets`` is the one of the two whose targets are asked: those of the run, as a checkpoint's may be gone.
    """
    if isinstance(node, list | tuple) and isinstance(other, list | tuple) and len(node) == len(other):
        asked = node if targets is node else other
        return [_filled(*each, targets=one) for *each, one in zip(node, other, asked, strict=True)]
    if not (isinstance(node, Mapping) and isinstance(other, Mapping)):
        return node
    filled = {
        name: _filled(value, other[name], targets=targets[name]) if name in other else value
        for name, value in node.items()
    }
    missing = other.keys() - node.keys()
    if missing and "_target_" in targets and _name(node.get("_target_")) == _name(other.get("_target_")):
        defaults = _defaults(targets)
        filled |= {name: other[name] for name in missing if _is_default(other[name], name, defaults)}
    return filled


def _defaults(node: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the arguments of a node's target; none where it cannot be found any more."""
    try:
        parameters = signature_of(target_of("", dict(node)))
    except ConfigError:
        return {}
    return {name: one.default for name, one in parameters.items() if one.default is not one.empty}


def _is_default(value: Any, name: str, defaults: Mapping[str, Any]) -> bool:
    if name not in defaults:
        return False
    default = defaults[name]
    plain = list(default) if isinstance(default, tuple) else default
    return _is_plain(plain) and _same(plain, value)


def _flat(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings and lists, by dotted keys."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple) and node:
        for number, value in enumerate(node):
            yield from _flat(value, f"{key}.{number}")
    else:
        yield key, list(node) if isinstance(node, tuple) else node


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
