"""What the agents of an elastic job have to have been told."""

from __future__ import annotations

from typing import Any

import pytest

from distaccum.config.trainer import ElasticConfig
from distaccum.elastic.run.checks import expect_told
from distaccum.errors import ConfigError

TOLD = {"min_ranks": 1, "rejoin": True, "expel_after": 30.0}


@pytest.mark.parametrize("settings", [{}, {"expel_after": "0.5m"}, {"expel_after": 30}])
def test_what_the_agents_go_by_is_what_is_configured(settings: dict[str, Any]) -> None:
    expect_told(ElasticConfig(**settings), TOLD)
    expect_told(ElasticConfig(min_ranks=7), {})  # a job of no agents


@pytest.mark.parametrize(("key", "value"), [("min_ranks", 3), ("rejoin", False), ("expel_after", "60s")])
def test_settings_of_a_file_that_the_agents_have_not_read_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"elastic\.{key}.*Write elastic\.{key}=\.\.\. there"):
        expect_told(ElasticConfig(**{key: value}), TOLD)
