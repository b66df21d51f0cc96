"""Every setting given in Python with a value of another type: refused by its key and value."""

from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from distaccum.config.engine import ENGINES
from distaccum.config.schema import RunConfig
from distaccum.errors import ConfigError
from distaccum.tools.plan.cluster import Cluster

NOTHING = object()
VALUES = ("no such", b"x", 2, -1, 10**400, 2.5, float("nan"), True, (), [3], ["x"], [NOTHING], {"x": 1}, {1: 2}, None)
REQUIRED = {Cluster: {"micro_step_ms": 1.0}}


class Field(NamedTuple):
    schema: type
    name: str
    hint: Any
    key: str


def _fields(schema: type, group: str) -> dict[str, Field]:
    """Those of a dataclass, and of the dataclasses in it."""
    found: dict[str, Field] = {}
    hints = get_type_hints(schema)
    for one in fields(schema):
        field = Field(schema, one.name, hints[one.name], f"{group}{one.name}")
        found[f"{schema.__name__}.{one.name}"] = field
        if is_dataclass(field.hint):
            assert isinstance(field.hint, type)
            found |= _fields(field.hint, f"{field.key}.")
    return found


FIELDS = _fields(RunConfig, "") | _fields(Cluster, "cluster.")
for kind in ENGINES.values():
    FIELDS |= _fields(kind, "engine.")


def _allowed(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Union:
        return any(_allowed(one, value) for one in get_args(hint))
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    simple: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), NoneType: (NoneType,)}
    if hint in simple:
        return isinstance(value, simple[hint])
    if get_origin(hint) is list:  # of texts, or of mappings
        inner = str if get_args(hint) == (str,) else dict
        return isinstance(value, list | tuple) and all(isinstance(one, inner) for one in value)
    return get_origin(hint) is dict and isinstance(value, dict) and all(isinstance(one, str) for one in value)


def _error(field: Field, value: object) -> ConfigError | None:
    """What is said of the value; None where it is taken."""
    try:
        field.schema(**REQUIRED.get(field.schema, {}) | {field.name: value})
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_a_value_of_another_type_is_refused_by_its_key_and_value(field: Field) -> None:
    default = getattr(field.schema(**REQUIRED.get(field.schema, {})), field.name)
    assert _error(field, default) is None
    for value in (NOTHING, np.zeros(2), *VALUES):
        error, key = _error(field, value), field.key
        if _allowed(field.hint, value):
            continue  # a value of the type may be out of range
        if error is None:
            assert field.hint is Any, f"{key}={value!r} is taken"
            assert type(value) not in (object, np.ndarray), f"{key}={value!r} is taken"
        elif value is None:
            assert str(error).startswith((f"{key}: ", f"{key}=null: "))
        else:
            first = [f"{key}.0={one}: " for one in value[:1]] if isinstance(value, list) else []
            assert str(error).startswith((f"{key}={value}: ", *first))


def test_every_dataclass_is_looked_at() -> None:
    schemas = {
        "RunConfig",
        "BatchConfig",
        "LoaderConfig",
        "ScalerConfig",
        "CompileConfig",
        "WandbConfig",
        "FSDP2Config",
    }
    assert schemas <= {name.partition(".")[0] for name in FIELDS}
