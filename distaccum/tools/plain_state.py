"""What Python holds of a program, kept and put back around what runs a forward once more."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
_LIBRARIES = ("torch", "distaccum", "builtins", "numpy")
_OF_A_MODULE = frozenset((*vars(nn.Module()), "training"))  # engines, hooks and contexts of ours have these
_OF_A_WRAPPER = ("ds_", "applied_pre_backward")  # what is counted from a forward to its backward
_MOST = 10_000  # objects, and items of a container that is looked into
_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)


class PlainState:
    """Numbers, texts, tensors, lists, sets and dictionaries that objects hold as attributes, as they are now.

    Also of objects of the user's that they hold, and of containers in containers, at any depth. Not tensors in
    containers, which may be a whole dataset, nor what functions close over.

    Args:
        owners: modules, and other objects.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
        seen: set[int] = set()
        left = list(owners)
        while left and len(seen) < _MOST:
            owner = left.pop()
            attributes = getattr(owner, "__dict__", None)
            if id(owner) in seen or not isinstance(attributes, dict):
                continue
            seen.add(id(owner))
            own = {key: value for key, value in attributes.items() if _is_own(key)}
            contents = [(value, _copy(value)) for value in _with_contents(own.values())]
            self._kept.append((attributes, own, contents))
            left += [value for value in own.values() if _is_the_users(value)]

    def changed(self) -> Iterator[str]:
        """The names of attributes that are no longer what they were; reads the device."""
        for attributes, own, contents in self._kept:
            copies = {id(value): copy for value, copy in contents}
            for key, value in own.items():
                now = attributes.get(key)
                if not is_same(now, copies.get(id(value), value)) and not isinstance(value, nn.Module):
                    yield key

    def moved(self) -> set[tuple[int, str]]:
        """Which attributes are no longer what they were, new ones too: a number for who holds them, and the name."""
        found = set[tuple[int, str]]()
        for attributes, own, contents in self._kept:
            copies = {id(value): copy for value, copy in contents}
            for key in [key for key in attributes if _is_own(key)]:
                now, before = attributes[key], own.get(key)
                if not isinstance(now, nn.Module) and not (key in own and is_same(now, copies.get(id(before), before))):
                    found.add((id(attributes), key))
        return found

    def kept(self, moved: Container[tuple[int, str]]) -> Iterator[tuple[str, object]]:
        """Names and copies of some, with what each held."""
        for attributes, own, contents in self._kept:
            copies = {id(value): copy for value, copy in contents}
            yield from ((key, copies.get(id(own[key]), own[key])) for key in own if (id(attributes), key) in moved)

    def restore_some(self, moved: Container[tuple[int, str]]) -> None:
        """Sets those of :meth:`moved` to what they were, and leaves all others."""
        for attributes, own, contents in self._kept:
            copies = {id(value): (value, copy) for value, copy in contents}
            for key in [key for key in attributes if (id(attributes), key) in moved]:
                if key not in own:
                    del attributes[key]
                    continue
                if id(own[key]) in copies:
                    _put_back(*copies[id(own[key])])
                attributes[key] = own[key]

    def restore(self) -> None:
        """Sets them to what they were; an attribute that is new, and plain, goes."""
        for attributes, own, contents in self._kept:
            for value, copy in contents:
                _put_back(value, copy)
            for key in [key for key in attributes if _is_own(key) and key not in own]:
                if isinstance(attributes[key], _IMMUTABLE) or _has_contents(attributes[key]):
                    del attributes[key]
            for key, value in own.items():
                if attributes.get(key) is not value and not isinstance(value, nn.Module):
                    attributes[key] = value


def _is_own(key: object) -> bool:
    return isinstance(key, str) and key not in _OF_A_MODULE and not key.startswith(_OF_A_WRAPPER)


def _has_contents(value: object) -> bool:
    if isinstance(value, Tensor):
        # What is sparse, quantised or without memory is compared with nothing, and seldom written in place.
        plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
        return plain and value.is_leaf and not isinstance(value, nn.Parameter) and not value.requires_grad
    return type(value) in _CONTAINERS


def _with_contents(values: Iterable[Any]) -> Iterator[Any]:
    """Each once: those of the values, and the containers within them."""
    found = {id(value): value for value in values if _has_contents(value)}
    left = list(found.values())
    while left:
        value = left.pop()
        yield value
        if isinstance(value, Tensor) or len(value) > _MOST:
            continue
        for inner in value.values() if isinstance(value, dict) else value:
            if type(inner) in _CONTAINERS and id(inner) not in found:
                found[id(inner)] = inner
                left.append(inner)


def is_of_a_library(value: object) -> bool:
    """Whether its class is torch's, Python's or ours."""
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def _is_the_users(value: object) -> bool:
    return not is_of_a_library(value) and not isinstance(value, nn.Module | type) and hasattr(value, "__dict__")


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def is_same(now: Any, before: Any) -> bool:
    """Whether a value is what it was, by its numbers and texts; of other objects whether it is the same one."""
    if isinstance(now, Tensor) and isinstance(before, Tensor) and _has_contents(before):
        return now is before or (now.shape == before.shape and torch.equal(now, before.to(now.dtype)))
    if type(now) is not type(before) or not _has_contents(now) or isinstance(now, Tensor):
        return now is before or (isinstance(now, _IMMUTABLE) and not isinstance(now, tuple) and now == before)
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _put_back(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        if value.shape != copy.shape:
            value.set_(copy)  # resized in place
        elif not torch.equal(value, copy):
            with torch.no_grad():
                value.copy_(copy)
    elif isinstance(value, dict) or len(value) != len(copy) or any(map(operator.is_not, value, copy)):
        value.clear()
        value.extend(copy) if isinstance(value, list | deque) else value.update(copy)
