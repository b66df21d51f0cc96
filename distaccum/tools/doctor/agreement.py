"""Who the ranks are, and what differs between them that must not."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import distaccum
from distaccum.engines.deepspeed.compat import PACKAGE
from distaccum.errors import shorten
from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.job import settings

# Libraries whose versions change what is sent or computed; by the names that pip knows.
_PACKAGES = {"torch": "torch", "numpy": "numpy", "DeepSpeed": PACKAGE}
_PLACES = ("_IFNAME", "_HCA")  # a node's own names, as long as they lead to the others
_OWN = ("OMP_", "TORCHINDUCTOR_CACHE")  # settings that a rank or a node may have of its own


@dataclass(frozen=True, kw_only=True)
class About:
    """One rank: where it runs, and with what."""

    rank: int
    local_rank: int
    host: str
    pid: int
    versions: dict[str, str]
    settings: dict[str, str]

    @classmethod
    def here(cls, rank: int, local_rank: int) -> About:
        """Of this process."""
        import torch  # noqa: PLC0415  it may be what is wrong

        versions = {"distaccum": distaccum.__version__, "Python": platform.python_version()}
        for name, package in _PACKAGES.items():
            try:
                versions[name] = version(package)
            except PackageNotFoundError:
                versions[name] = ""
        versions["CUDA"] = torch.version.cuda or ""
        versions["NCCL"] = ""
        if torch.version.cuda:
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return cls(
            rank=rank,
            local_rank=local_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            versions=versions,
            settings=settings(),
        )

    def to_json(self) -> dict[str, Any]:
        """Of JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> About:
        """The inverse of :meth:`to_json`."""
        return cls(**given)


def nodes(ranks: Sequence[About]) -> dict[str, list[int]]:
    """The ranks of each node, by its name. A launcher numbers a node's ranks one after the other.

    Two nodes of one name (containers, namespaces) are told apart by their first rank.
    """
    first = {one.rank: one.rank - one.local_rank for one in ranks}
    of = {one.rank: one.host for one in ranks}
    groups: dict[int, list[int]] = {}
    for rank, start in first.items():
        groups.setdefault(start, []).append(rank)
    names = [of[members[0]] for members in groups.values()]
    found = {}
    for start, members in groups.items():
        name = of[members[0]]
        found[name if names.count(name) == 1 else f"{name} (rank {start})"] = members
    return found


def agreement(ranks: Sequence[About]) -> Look:
    """Where the ranks are, and in which versions and settings they differ."""
    found = Look()
    by_rank = {one.rank: one for one in ranks}
    for name, members in nodes(ranks).items():
        pids = shorten([by_rank[rank].pid for rank in members], 8)
        found.tell(name, f"{listed(members)} (process{'es'[: 2 * (len(members) > 1)]} {pids})", members)
    for name in ranks[0].versions:
        held = _held([(one.rank, one.versions.get(name, "")) for one in ranks])
        if len(held) > 1:
            found.find(f"{name} differs: {_told(held)}", _mend(name, next(iter(held))))
    every = sorted({name for one in ranks for name in one.settings if not name.startswith(_OWN)})
    for name in every:
        held = _held([(one.rank, one.settings.get(name, "")) for one in ranks])
        if len(held) > 1:
            first = next(iter(held))
            mend = f"export {name}={first}    # on every node" if first else f"unset {name}    # on every node"
            choice = name.startswith("NCCL_") and not name.endswith(_PLACES)  # the ranks would wait for each other
            found.find(f"{name} differs: {_told(held)}", mend, wrong=choice)
    return found


def _held(values: Sequence[tuple[int, str]]) -> dict[str, list[int]]:
    """The ranks that hold each value; the value of most ranks first."""
    held: dict[str, list[int]] = {}
    for rank, value in values:
        held.setdefault(value, []).append(rank)
    return dict(sorted(held.items(), key=lambda item: -len(item[1])))


def _told(held: Mapping[str, list[int]]) -> str:
    return "; ".join(f"{value or 'none'} on {listed(ranks)}" for value, ranks in held.items())


def listed(ranks: Sequence[int]) -> str:
    """``"rank 3"``, ``"ranks 0 and 1"``, ``"ranks 0 to 7"``, ``"ranks 0, 2, 5"``."""
    if len(ranks) <= 2:  # noqa: PLR2004
        return f"rank{'s'[: len(ranks) - 1]} {' and '.join(map(str, ranks))}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {shorten(ranks, 8)}"


def _mend(name: str, wanted: str) -> str:
    if name == "Python":
        return f"start every rank with the same interpreter: Python {wanted}"
    if name in ("CUDA", "NCCL"):
        return "python -m pip install --force-reinstall torch==VERSION    # the same build of it on every node"
    package = _PACKAGES.get(name, name)
    return (
        f"python -m pip install '{package}=={wanted}'    # on every node"
        if wanted
        else f"python -m pip uninstall {package}"
    )
