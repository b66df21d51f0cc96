"""The command line before Hydra reads it: distaccum's own flags, and names that stand for others."""

from __future__ import annotations

from collections.abc import Sequence

from distaccum.config.precision import canonical


def take_flag(arguments: Sequence[str], *names: str) -> tuple[list[str], str | None]:
    """Takes a flag that Hydra does not know off the command line, as ``NAME`` or ``NAME=VALUE``.

    Returns:
        The other arguments, and the last value given; an empty one for the bare flag, None without it.
    """
    given = [argument for argument in arguments if argument.partition("=")[0] in names]
    others = [argument for argument in arguments if argument not in given]
    return others, given[-1].partition("=")[2] if given else None


def resolve_aliases(arguments: Sequence[str]) -> list[str]:
    """Replaces aliases in ``precision=NAME`` by the names in ``conf/``; in a sweep's ``precision=A,B`` as well."""
    return [_resolved(argument) for argument in arguments]


def _resolved(argument: str) -> str:
    key, _, value = argument.partition("=")
    if key != "precision":
        return argument
    return f"{key}={','.join(canonical(name) for name in value.split(','))}"
