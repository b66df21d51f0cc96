"""Kernels and threads: what the bits of a micro-batch depend on beside its numbers."""

from __future__ import annotations

import torch

from distaccum.distributed.world import World
from distaccum.errors import ConfigError


def check_kernels(world: World) -> None:
    """For ``numerics=reproducible``: a collective.

    Raises:
        ConfigError: kernels may add in any order, or ranks have other numbers of threads; on all ranks.
    """
    if not torch.are_deterministic_algorithms_enabled():
        problem = "and torch may choose kernels that add in any order"
        remedy = "Call torch.use_deterministic_algorithms(True) before"
        raise ConfigError("numerics", "reproducible", problem, remedy)
    threads = world.all_gather_object(torch.get_num_threads())
    if len(set(threads)) > 1:
        each = ", ".join(map(str, threads))
        problem = f"and the ranks have {each} threads, by which kernels cut their sums"
        remedy = "Call torch.set_num_threads(n) with one n on every rank"
        raise ConfigError("numerics", "reproducible", problem, remedy)
