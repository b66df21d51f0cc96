"""Lengths of time, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from distaccum.config.checks import seconds_of
from distaccum.config.schema import RunConfig
from distaccum.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:01", 1),
        ("12:00:00", 43200),
        ("30:00", 1800),
        ("1-12:00:00", 129600),
        ("01:12:00:00", 129600),
        ("90s", 90),
        ("1.5m", 90),
        ("12h", 43200),
        ("2d", 172800),
        (90, 90),
        (0.5, 0.5),
        ("100:00:00", 360000),
    ],
)
def test_what_people_write(text: object, seconds: float) -> None:
    assert seconds_of("trainer.max_time", text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "12", "0s", 0, -3, "1-2", "1-30:00", "12:", "a", "1w", True, float("inf"), [1]]
)
def test_what_is_none(text: object) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_time=.*not a positive length of time.*HH:MM:SS"):
        seconds_of("trainer.max_time", text)


def test_the_setting_is_checked_before_anything_starts() -> None:
    assert RunConfig.from_dict({"trainer": {"max_time": "1-00:00:00"}}).trainer.max_time == "1-00:00:00"
    with pytest.raises(ConfigError, match=r"trainer\.max_time=soon"):
        RunConfig.from_dict({"trainer": {"max_time": "soon"}})
