"""How many nodes a job has, as its launcher says, for one replica of the model on each: ``engine.replicas=auto``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from distaccum.config.engine import FSDP2Config
from distaccum.errors import ON_ALL_RANKS

if TYPE_CHECKING:
    from distaccum.engines.context import EngineContext

_log = logging.getLogger(__name__)


def nodes_of(environment: Mapping[str, str], ranks: int) -> int:
    """The nodes that so many ranks lie on: as torchrun says, or Slurm, or whoever says how many ranks a node has; or 1.

    torchrun and Slurm say the same to every rank; what the third says is of the rank's own node.
    """

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else 0

    if number("WORLD_SIZE") == ranks and number("GROUP_WORLD_SIZE"):
        return number("GROUP_WORLD_SIZE")
    if number("SLURM_STEP_NUM_TASKS") == ranks and number("SLURM_STEP_NUM_NODES"):
        return number("SLURM_STEP_NUM_NODES")
    on_node = number("LOCAL_WORLD_SIZE")
    return -(-ranks // on_node) if number("WORLD_SIZE") == ranks and on_node else 1


def replicas_over(nodes: int, ranks: int) -> int:
    """One replica a node; one in all where a node's only rank would hold the whole model, or nodes are unlike."""
    return nodes if ranks > nodes and ranks % nodes == 0 else 1


def with_replicas(context: EngineContext) -> FSDP2Config:
    """The engine's settings with the number of replicas that ``auto`` stands for."""
    engine, ranks = context.engine, context.world_size
    assert isinstance(engine, FSDP2Config)
    if context.planned:
        text = "engine.replicas=auto: checked as 1, as the nodes are not known before the ranks are started"
        _log.warning(text, extra=ON_ALL_RANKS)
        return replace(engine, replicas=1)
    nodes = nodes_of(os.environ, ranks)
    replicas = replicas_over(nodes, ranks)
    if replicas != nodes:
        text = "engine.replicas=auto: 1, as %d ranks on %d nodes have one of them each, or not all as many"
        _log.warning(text, ranks, nodes)
    return replace(engine, replicas=replicas)
