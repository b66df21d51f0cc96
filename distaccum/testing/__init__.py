"""Runs distaccum inside a test process: a real gloo group of one, without a launcher or a port.

In a ``conftest.py``::

    pytest_plugins = ["distaccum.testing.fixtures"]

and then use the fixture ``gloo_world`` in a test, or the context manager anywhere::

    with single_process_world() as world:
        engine = create_engine(model, optimizer, world)

May import ``distributed`` and ``errors``; nothing in the package imports it.
Begin with this file; ``counters.py`` counts operators, collectives and their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world


@contextmanager
def single_process_world() -> Iterator[World]:
    """Opens a gloo group of one in this process: engines, ``no_sync`` and collectives run as in a larger one.

    Its store is in memory, so parallel test runs cannot clash over a port. The group is closed on failure as well.

    Raises:
        RuntimeError: a process group is open already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group is open already: close it first, or use that one")
    ranks = LaunchEnvironment()
    with open_world(ranks, ranks.store(), torch.device("cpu")) as world:
        yield world
