from __future__ import annotations

import pytest

from distaccum.config.command_line import resolve_aliases, take_flag
from distaccum.config.precision import ALIASES


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


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_of_a_precision_becomes_the_name_of_its_file(alias: str, name: str) -> None:
    assert resolve_aliases([f"precision={alias}", "seed=1"]) == [f"precision={name}", "seed=1"]


def test_aliases_in_a_sweep_and_nowhere_else() -> None:
    assert resolve_aliases(["-m", "precision=16-mixed,bf16,no"]) == ["-m", "precision=fp16,bf16,fp32"]
    for other in ("precision=fp8", "precision.name=16-mixed", "optim=no"):
        assert resolve_aliases([other]) == [other]
