"""A real all-reduce between the ranks: how long each size takes, and the bandwidth next to what the link is sold as."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.config.checks import size_of
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world
from distaccum.tools.doctor.facts import Look, rate, seconds
from distaccum.tools.plan.collectives import ring_bytes

SIZES = tuple(2**power for power in (10, 14, 18, 22, 26))  # 1 KiB to 64 MiB, each 16 times the one before
_BUDGET_S, _A_SIZE_S, _MOST = 6.0, 0.5, 20
_OPEN_S = 30.0
_BITS = 8
# Of the nominal rate. A healthy TCP connection reaches 0.9 and more; what shares the link takes a part of it; half is
# what one of two bonded links that is down leaves, or a link that has fallen back.
_SHARE_WANTED = 0.5
# What gloo can be expected to move on a link that is faster: one connection to each rank, and a core that copies.
_GLOO_MOST = 10e9


def all_reduce(ranks: LaunchEnvironment, name: str) -> Look:
    """Opens a process group of all ranks as a run does, and times sums in it. A collective; only rank 0's look counts.

    Raises:
        Exception: whatever keeps the ranks from connecting.
    """
    limit = timedelta(seconds=_OPEN_S)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A connection of this process's own: the one that was inherited is its parent's.
    store = TCPStore(address, port, None, is_master=False, timeout=limit, wait_for_workers=False)
    device = ranks.device()
    with open_world(ranks, PrefixStore(f"distaccum-doctor/{name}", store), device, limit) as world:
        found = Look()
        found.tell("backend", f"{world.backend} between {ranks.size} ranks, on {device.type}", world.backend)
        measured = _sweep(world, device)
        for count, took in measured.items():
            bits = _BITS * ring_bytes("all-reduce", count, world.size) / took
            value = {"bytes": count, "seconds": took, "bus_bits_per_s": bits}
            found.tell(f"all-reduce of {size_of(count)}", f"{seconds(took)}, bus {rate(bits)}", value)
        if left_out := [count for count in SIZES if count not in measured]:
            found.tell("left out", f"{size_of(left_out[0])} and more: it would take longer than {_BUDGET_S:.0f} s")
        if device.type != "cpu":
            host = _sweep(world, torch.device("cpu"), SIZES[:1])[SIZES[0]]
            found.tell(
                f"all-reduce of {size_of(SIZES[0])}, host", f"{seconds(host)} (gloo; the count of a window)", host
            )
        return found


def _sweep(world: World, device: torch.device, sizes: tuple[int, ...] = SIZES) -> dict[int, float]:
    """Median seconds of an all-reduce of each size, of the slowest rank; the same on every rank."""
    began, measured, expected = perf_counter(), dict[int, float](), 0.0
    for count in sizes:
        (spent,) = world.all_reduce_max_host([int(1e6 * (perf_counter() - began))])
        if measured and spent / 1e6 + 3 * expected > _BUDGET_S:
            break
        tensor = torch.ones(count // 4, device=device)
        _timed(tensor, device, world)  # connections are opened, buffers are registered
        first = _slowest(world, _timed(tensor, device, world))
        times = [_timed(tensor, device, world) for _ in range(max(1, min(_MOST, int(_A_SIZE_S / first))))]
        measured[count] = _slowest(world, median(times))
        expected = 16 * measured[count]
    return measured


def _slowest(world: World, took: float) -> float:
    return max(1, world.all_reduce_max_host([int(1e9 * took)])[0]) / 1e9


def _timed(tensor: torch.Tensor, device: torch.device, world: World) -> float:
    world.barrier()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    tensor.fill_(1.0)
    began = perf_counter()
    if device.type == world.device.type:
        world.all_reduce_(tensor)
    else:
        torch.distributed.all_reduce(tensor, group=world.host_group)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    took = perf_counter() - began
    if tensor[-1].item() != world.size:
        raise RuntimeError(f"an all-reduce of ones gave {tensor[-1].item():g} on rank {world.rank}, not {world.size}")
    return took


def judge_rate(found: Look, links: Mapping[str, Mapping[str, Any] | None], *, nodes: int) -> None:
    """Puts the bandwidth of the largest size next to the nominal rate of the slowest link between nodes.

    Args:
        found: of :func:`all_reduce`; gets the rows and findings.
        links: by node, the interface that the backend takes: ``name``, ``bits`` a second or None, ``virtual``.
        nodes: how many there are; within one there is no link that is sold by its rate.
    """
    rows = [fact.value for fact in found.facts if isinstance(fact.value, dict) and "bus_bits_per_s" in fact.value]
    if not rows:
        return
    best = max(rows, key=lambda row: row["bytes"])["bus_bits_per_s"]  # of smaller ones much may leave at once
    if nodes == 1:
        found.tell("nominal", "none: the ranks share one machine", 0)
        return
    told = {node: link for node, link in links.items() if link and link.get("bits")}
    if not told:
        found.tell("nominal", "not told by the interfaces", 0)
        return
    node, slowest = min(told.items(), key=lambda item: item[1]["bits"])
    nominal = float(slowest["bits"])
    share = best / nominal
    found.tell("nominal", f"{rate(nominal)} ({slowest['name']} of {node}); measured {share:.0%} of it", nominal)
    gloo = found.value("backend") == "gloo"
    if best < _SHARE_WANTED * (min(nominal, _GLOO_MOST) if gloo else nominal):
        what = (
            f"between the nodes {rate(best)} are moved, of {rate(nominal)} that {slowest['name']} of {node} is sold as"
        )
        if slowest.get("virtual"):
            what += " (virtual: its rate is the driver's word)"
        variable = "GLOO_SOCKET_IFNAME" if gloo else "NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME"
        mend = f"export {variable}={slowest['name']}    # is it the fast one? then ask iperf3 -s there, iperf3 -c here"
        found.find(what, mend, wrong=not slowest.get("virtual"))
