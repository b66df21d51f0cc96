"""The machine's accelerator: NVIDIA's and AMD's cards, which torch calls ``cuda`` both, and Intel's, ``xpu``.

Torch has one set of names for them: ``torch.accelerator`` says what there is, and ``torch.get_device_module(device)``
has the streams, events, memory and generators of a kind. One whose module lacks some of these is not used.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distaccum.errors import ConfigError, shorten

if TYPE_CHECKING:
    from distaccum.distributed.world import World

_log = logging.getLogger(__name__)

_CPU, _GLOO = "cpu", "gloo"
_NEEDED = ("Stream", "Event", "default_generators", "mem_get_info", "max_memory_allocated", "set_device")


def accelerators() -> tuple[str, int]:
    """The type of this machine's accelerators, and how many this process sees: ``cpu`` and 0 where none is used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return _CPU, 0
    if problem := _lacks(found.type):
        _tell_once(f"{problem}: the {found.type} of this machine is not used, and the CPU is")
        return _CPU, 0
    return found.type, torch.accelerator.device_count()


def own_device(device: torch.device, backend: str) -> str:
    """Makes a device this process's; returns what its group is opened with, for the host's tensors and the device's.

    Raises:
        ConfigError: torch's module of this kind of device has no streams, events, or figures of memory.
    """
    if device.type == _CPU:
        return _GLOO
    if problem := _lacks(device.type):
        raise ConfigError("device", device, problem, "Use a CPU, or an accelerator that torch calls cuda or xpu")
    # Else NCCL and the random generators use the first GPU on every rank.
    torch.get_device_module(device).set_device(device)
    own = backend if backend == _GLOO else dist.Backend.default_device_backend_map.get(device.type, _GLOO)
    return f"{_CPU}:{_GLOO},{device.type}:{own}"


def tell_mixed(world: World) -> None:
    """Warns, once for all ranks, of GPUs that are not alike; a collective where there are several ranks on GPUs."""
    if world.device.type == _CPU or world.size == 1:
        return
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(world.all_gather_object(torch.get_device_module(world.device).get_device_name())):
        ranks.setdefault(name, []).append(rank)
    if len(ranks) > 1 and world.is_main:
        each = "; ".join(f"{name}: ranks {shorten(own)}" for name, own in ranks.items())
        _log.warning("the GPUs of the ranks differ, and each step lasts as long as the slowest needs (%s)", each)


def _lacks(kind: str) -> str:
    module = torch.get_device_module(kind)
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    return f"torch.{kind} has no {', '.join(missing)}" if missing else ""


@cache
def _tell_once(text: str) -> None:
    _log.warning("%s", text)
