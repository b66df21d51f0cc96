"""``batch.micro_tokens``: what it takes, and what becomes of ``batch.micro_size`` beside it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from distaccum.config.batch import BatchConfig
from distaccum.config.schema import RunConfig
from distaccum.errors import ConfigError


@pytest.mark.parametrize(
    ("batch", "limits", "size", "evaluated"),
    [
        ({}, True, 8, 8),
        ({"micro_tokens": 100}, False, None, 8),
        ({"micro_tokens": 100, "micro_size": "auto"}, False, None, 8),
        ({"micro_tokens": 100, "global_size": 4}, False, None, 4),
        ({"micro_tokens": 100, "micro_size": 3}, True, 3, 3),
        ({"micro_tokens": 100, "micro_size": "3"}, True, 3, 3),
        (
            {"micro_tokens": "100", "global_size": None, "tokens": 200},
            False,
            None,
            8,
        ),  # of ${oc.env:...}
    ],
)
def test_samples_are_limited_too_where_their_number_is_stated(
    batch: dict[str, Any], limits: bool, size: int | None, evaluated: int
) -> None:
    made = RunConfig.from_dict({"batch": batch}).batch
    for found in (made, replace(made), RunConfig.from_dict({"batch": asdict(made)}).batch):
        assert (found.limits_samples, found.micro_size, found.first_micro_size) == (limits, size, evaluated)
        assert found.micro_tokens == (100 if batch else None)
        assert not found.rehearses


@pytest.mark.parametrize("size", [None, "auto", 3])
def test_it_is_rehearsed(size: int | str | None) -> None:
    made = RunConfig.from_dict({"batch": {"micro_tokens": "auto", "micro_size": size}}).batch
    for found in (made, replace(made), RunConfig.from_dict({"batch": asdict(made)}).batch):
        assert found.rehearses
        assert (found.micro_tokens, found.micro_size) == ("auto", 3 if size == 3 else None)
        assert found.first_micro_size == (3 if size == 3 else 8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"micro_tokens": 0}, "=0: must be at least 1"),
        ({"micro_tokens": "many"}, "=many: not of type int"),
        ({"micro_tokens": True}, "=True: not of type int"),
        ({"micro_tokens": 9.5}, "=9.5: not of type int"),
        ({"micro_tokens": 9, "packing": "documents"}, "=9: and batch.packing=documents packs a number of samples"),
        ({"micro_tokens": 9, "pad_rows": True}, "=9: and batch.pad_rows=true fills micro-batches up"),
    ],
)
def test_what_it_does_not_take(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^batch\.micro_tokens{message}"):
        BatchConfig(**batch)
    with pytest.raises(ConfigError, match=r"^batch\.micro_size=many: not of type int"):
        BatchConfig(micro_tokens=9, micro_size="many")
