"""What metrics compute as results of an evaluation: a number, a number for each class, or a table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from glob import escape
from typing import Any

import numpy as np
from torch import Tensor, distributed, nn

from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError, MisuseError
from distaccum.tools.hugging_face import class_names

Results = dict[str, float]
Tables = dict[str, Any]
_MATRIX = 2  # dimensions
_REMEDY = "Let it give a number, a vector (a number for each class), a matrix (a table), or these by name"


class MetricResults:
    """Makes results, and their names, of what a metric computes.

    A vector is a number for each class, ``NAME/cat``, or ``NAME/0`` where there are not as many names of classes; a
    matrix is a table: ``columns`` by name, and ``rows`` that begin with a name of their own; several values by name are
    each one of these, ``NAME_KEY``.

    Args:
        data: its datasets may name the classes.
        model: so may a Hugging Face model.
    """

    def __init__(self, data: DataSpec, model: nn.Module) -> None:
        self._classes = class_names(data, model)

    def __call__(self, name: str, value: Any) -> tuple[Results, Tables]:
        """The results and the tables of a metric that computes ``value``; reads the device.

        Raises:
            MisuseError: it is none of these.
        """
        if problem := problem_of(value):
            raise MisuseError(f"the metric {name} {problem}. {_REMEDY}")
        if isinstance(value, Mapping):
            results: Results = {}
            tables: Tables = {}
            for key, part in value.items():
                found = self(f"{name}_{key}", part)
                results, tables = results | found[0], tables | found[1]
            return results, tables
        numbers = _array(value)
        assert numbers is not None
        if numbers.ndim == _MATRIX:
            names, columns = map(self._keys, numbers.shape)
            rows = [[of, *row] for of, row in zip(names, numbers.tolist(), strict=True)]
            return {}, {name: {"columns": ["class", *columns], "rows": rows}}
        if numbers.size == 1:
            return {name: float(numbers.item())}, {}
        return {f"{name}/{of}": float(one) for of, one in zip(self._keys(numbers.size), numbers, strict=True)}, {}

    def names(self, name: str, metric: Any) -> list[str]:
        """The names of a metric's results, or patterns of them, as far as they are known before it has seen anything.

        Raises:
            ConfigError: what it computes of nothing is no result.
        """
        value: Any = None
        if not (distributed.is_available() and distributed.is_initialized()):  # else it is a collective
            with warnings.catch_warnings(), suppress(Exception):  # many can compute nothing of nothing
                warnings.simplefilter("ignore")
                value = metric.compute()
        if value is not None and (problem := problem_of(value)):
            raise ConfigError(f"metrics.{name}", type(metric).__name__, problem, _REMEDY)
        found, tables = ({}, {}) if value is None else self(name, value)
        if isinstance(value, Mapping) or not (tables or len(found) > 1):
            return [name, f"{name}_*", f"{name}/*"]
        return [escape(one) for one in found]

    def _keys(self, size: int) -> Sequence[str]:
        classes = self._classes
        return classes if len(set(classes)) == len(classes) == size else [str(i) for i in range(size)]


def problem_of(value: Any) -> str:
    """In words, why what a metric computes is no result; empty where it is."""
    if isinstance(value, Mapping):
        return next(filter(None, map(problem_of, value.values())), "")
    numbers = _array(value)
    if numbers is not None and numbers.ndim <= _MATRIX:
        return ""
    shape = getattr(value, "shape", None)
    return f"computes a {type(value).__name__}" + ("" if shape is None else f" of shape {list(shape)}")


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """A value as an array; None where it is none, as several tensors in a tuple."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    try:
        found = None if isinstance(value, tuple) else np.asarray(value)
    except (TypeError, ValueError):  # lists of several lengths
        return None
    return found if found is not None and found.dtype.kind in "biuf" else None
