"""What one machine is asked: each part, its limit, and what helps where it does not answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.limits import Probe, look, start

BETWEEN, COUNT = "ranks", "GPUs seen"
TITLES = {
    "software": "Software",
    "kernels": "DeepSpeed",
    "gpus": "GPUs",
    "host": "Machine",
    "network": "Network",
    "disk": "Disk",
    "job": "Job",
    BETWEEN: "Between the ranks",
}
"""The parts, and what stands above their rows."""
# Seconds. The driver's program takes ten on eight GPUs without its daemon, DeepSpeed's import as long on a busy disk.
_LIMITS = {"software": 60, "kernels": 120, "gpus": 60, "host": 20, "network": 20, "disk": 60, "job": 20}
ALL_S = float(sum(_LIMITS.values()))
"""Seconds after which one machine has told everything."""
CLEAN_S = 10.0
_MENDS = {
    "gpus": "nvidia-smi    # does it answer? dmesg | grep -i nvrm; if not, restart the node",
    "disk": "dmesg | tail; mount    # is the file system's server there? or --folder on another one",
    "kernels": "rm -rf ~/.cache/torch_extensions    # a lock of a build that died",
}


def call(module: str, function: str, *arguments: Any, **named: Any) -> Callable[[], Look]:
    """A call of a function of this room, which imports it late: a module that cannot be imported is then one row."""

    def act() -> Look:
        called: Callable[..., Look] = getattr(import_module(f"distaccum.tools.doctor.{module}"), function)
        return called(*arguments, **named)

    return act


def import_all() -> None:
    """Imports what probes use before they are forked; whatever cannot be imported is told of by the probe itself."""
    for module in ("software", "gpus", "host", "network", "disk", "job", "agreement", "meeting", "collective"):
        with suppress(Exception):
            import_module(f"distaccum.tools.doctor.{module}")


def own_name() -> str:
    """A name for a file or folder that nobody else has."""
    return f".distaccum-doctor-{token_hex(6)}"


def here(chosen: Sequence[str], folder: Path, *, local_ranks: int, nodes: int) -> dict[str, Look]:
    """Looks at this machine, part by part; the disk last, when nothing else is at work.

    Args:
        chosen: the parts, of :data:`TITLES`; :data:`BETWEEN` needs the network's.
        folder: where runs will go.
        local_ranks: how many ranks are here.
        nodes: on how many machines there are ranks.
    """
    wanted = {*chosen, *(["network"] if BETWEEN in chosen else [])}
    slow = {"software": call("software", "installed"), "kernels": call("software", "kernels")}
    running = {name: start(_probe(name, act)) for name, act in slow.items() if name in wanted}
    found: dict[str, Look] = {}
    try:
        if wanted & {"gpus", "host", "network"}:
            found["gpus"] = look(_probe("gpus", call("gpus", "gpus")))
        count = found["gpus"].value(COUNT) if "gpus" in found else 0
        gpus = isinstance(count, int) and count > 0
        quick = {
            "host": call("host", "host", local_ranks=local_ranks, cpu_trains=not gpus),
            "network": call("network", "network", several_nodes=nodes > 1, gpus=gpus),
            "job": call("job", "job"),
        }
        running |= {name: start(_probe(name, act)) for name, act in quick.items() if name in wanted}
        found |= {name: one.result() for name, one in running.items()}
    except BaseException:  # Ctrl-C
        for one in running.values():
            one.end()
        raise
    if "disk" in wanted:
        work = own_name()
        try:
            found["disk"] = look(_probe("disk", call("disk", "disk", folder, work)))
        finally:
            quietly(call("disk", "clean", folder, work))
    return found


def quietly(act: Callable[[], Look]) -> None:
    """Does what leaves nothing behind, for as long as it may take, and does not mind if it fails."""
    look(Probe(name="", act=act, limit_s=CLEAN_S))


def _probe(name: str, act: Callable[[], Look]) -> Probe:
    return Probe(name=TITLES[name], act=act, limit_s=_LIMITS[name], mend=_MENDS.get(name, ""))
