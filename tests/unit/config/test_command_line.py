from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException

from distaccum.config.command_line import register_aliases, take_flag
from distaccum.config.precision import ALIASES
from distaccum.config.schema import conf_dir


@pytest.mark.parametrize(
    ("arguments", "others", "value"),
    [
        (["a=1"], ["a=1"], None),
        (["--check", "a=1"], ["a=1"], ""),
        (["a=1", "--check=2"], ["a=1"], "2"),
        (["--check=2", "--check=3"], [], "3"),
        (["--checked"], ["--checked"], None),
    ],
)
def test_a_flag_is_taken_off_the_command_line(arguments: list[str], others: list[str], value: str | None) -> None:
    assert take_flag(arguments, "--check") == (others, value)


@pytest.fixture
def composed() -> Iterator[Callable[..., Any]]:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield lambda *overrides: compose("config", register_aliases(overrides)).precision.name


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_of_a_precision_composes_the_file_of_that_name(
    composed: Callable[..., Any], alias: str, name: str
) -> None:
    assert composed(f"precision={alias}") == name
    assert composed(f"precision='{alias}'") == name


def test_a_number_in_a_sweep_is_quoted_and_nothing_else_changes() -> None:
    given = ["-m", "precision=32,bf16,32", "precision='32'", "batch.global_size=32", "precision=16-mixed"]
    expected = ["-m", "precision='32',bf16,'32'", "precision='32'", "batch.global_size=32", "precision=16-mixed"]
    assert register_aliases(given) == expected


def test_there_are_aliases_of_a_precision_and_of_nothing_else(composed: Callable[..., Any]) -> None:
    for other in ("precision=fp8", "optim=no"):
        with pytest.raises(MissingConfigException):
            composed(other)
