"""What an agent is told: its own flags, and the words of the configuration that it reads as well as the workers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distaccum.config.checks import seconds_of
from distaccum.errors import ConfigError, near_misses

_GRACE = "SHUTDOWN_TIMEOUT"
TOKEN = "DISTACCUM_TOKEN"  # noqa: S105  the variable's name
"""The variable with what all processes of a job know, and no stranger: processes of another user cannot read it."""
_FLAGS = ("--nproc", "--nnodes", "--node-rank", "--rdzv")
_SWEEPS = re.compile(r"-m|--multirun|hydra\.mode=(?i:multirun)")
_REJOIN, _LEAST, _EXPEL = "elastic.rejoin", "elastic.min_ranks", "elastic.expel_after"
_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One agent's part of a job.

    Args:
        nproc: workers of this node, as many as of every other; 0 for one for each GPU, or two on the CPU.
        nnodes: how many nodes make the job.
        node: this one, from 0.
        host: where the store is; empty for a port that is free on this machine, for a job of one node.
        port: 0 where ``host`` is empty.
        rejoin: whether a worker that has ended is followed by another.
        least: the fewest ranks that may go on.
        expel_after_s: how long the workers wait for one of theirs that does not answer.
        grace_s: how long they have to save and leave, once told to: ``SHUTDOWN_TIMEOUT`` of the environment.
        overrides: the workers' command line.
    """

    nproc: int = 0
    nnodes: int = 1
    node: int = 0
    host: str = ""
    port: int = 0
    rejoin: bool = True
    least: int = 1
    expel_after_s: float = 30.0
    grace_s: float = 120.0
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
        """Reads the command line; ``NPROC`` stands for ``--nproc``, as for ``launch/train.sh``.

        Raises:
            ConfigError: a flag, a variable or one of the words ``elastic.*`` cannot be; it is a sweep.
        """
        flags, overrides = _split(arguments)
        for word in overrides:
            if _SWEEPS.fullmatch(word):
                remedy = "Start one run, or sweep with launch/train.sh"
                raise ConfigError(word, None, "an elastic job is one run, and no sweep", remedy)
        key = "--nproc" if "--nproc" in flags else "NPROC"
        nproc = flags.get("--nproc", environment.get("NPROC", ""))
        words = _words(overrides)
        nnodes = _number("--nnodes", flags.get("--nnodes", "1"), "a number of nodes")
        host, port = _address(flags["--rdzv"]) if "--rdzv" in flags else ("", 0)
        if nnodes > 1 and not host:
            remedy = "Give --rdzv=HOST:PORT: the host with --node-rank=0, and a port that is free there"
            raise ConfigError("--rdzv", None, f"not given, and {nnodes} nodes have nowhere to meet", remedy)
        return cls(
            nproc=_number(key, nproc, "a number of processes") if nproc else 0,
            nnodes=nnodes,
            node=_node(flags.get("--node-rank", "" if nnodes > 1 else "0"), nnodes),
            host=host,
            port=port,
            rejoin=_choice(_REJOIN, words.get(_REJOIN, "true")),
            least=_number(_LEAST, words.get(_LEAST, "1"), "a number of ranks"),
            expel_after_s=_seconds(words.get(_EXPEL, "30")),
            grace_s=_grace(environment.get(_GRACE, "120")),
            overrides=overrides,
        )


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The flags' values, and all other words."""
    flags, others, rest = dict[str, str](), list[str](), list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _FLAGS:
            if not equals and not rest:
                raise ConfigError(name, None, "no value follows it", f"Write {name}=VALUE")
            flags[name] = value if equals else rest.pop(0)
        elif name.startswith("--") and (near := near_misses(name, _FLAGS)):
            raise ConfigError(word, None, f"no such flag{near}", "`python -m distaccum.elastic --help` lists them")
        else:
            others.append(word)
    return flags, tuple(others)


def _words(overrides: Sequence[str]) -> dict[str, str]:
    """The last value of every ``elastic.*`` among the overrides."""
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    return {key: value.strip("'\" ") for key, _, value in pairs if key in (_REJOIN, _LEAST, _EXPEL)}


def _number(key: str, value: str, what: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(key, value, f"not {what}", "Give a whole number from 1")
    return int(value)


def _node(value: str, nnodes: int) -> int:
    if not value.isdecimal() or int(value) >= nnodes:
        remedy = f"Give each its own, 0 to {nnodes - 1}"
        raise ConfigError("--node-rank", value, f"not one of {nnodes} nodes", remedy)
    return int(value)


def _address(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
        raise ConfigError("--rdzv", value, "not HOST:PORT", "Name the host with --node-rank=0 and a port, as n1:29500")
    return host.strip("[]"), int(port)


def _choice(key: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(key, value, "neither true nor false", "Say which; the agent reads no interpolation")
    return value.lower() == "true"


def _grace(value: str) -> float:
    if not value.replace(".", "", 1).isdecimal():
        raise ConfigError(_GRACE, value, "is no number of seconds", "Give seconds, as 120")
    return float(value)


def _seconds(value: str) -> float:
    try:
        return seconds_of(_EXPEL, float(value))
    except ConfigError:
        raise
    except ValueError:
        return seconds_of(_EXPEL, value)
