"""The machines for which a job is planned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from distaccum.config.checks import require, require_annotated, require_count, require_positive
from distaccum.tools.plan.collectives import Link

BITS, GIGA, MILLI = 8, 1e9, 1e-3


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with GPUs, and the links between them.

    Args:
        nodes: number of machines.
        gpus: of a node; each is one rank.
        link_gbps: Gbit/s one way between a node and the others.
        local_gbps: Gbit/s one way between a rank and the others of its node.
        latency_us: microseconds of a message.
        micro_step_ms: milliseconds of forward and backward of a full micro-batch; None: to be measured.
        update_ms: milliseconds of the optimizer's update.
        measure: whether ``micro_step_ms`` may be None.
        memory_gib: GiB of one GPU; None: not compared with what a rank takes.

    Raises:
        ConfigError: a value is not such a number.
    """

    nodes: int = 1
    gpus: int = 1
    link_gbps: float = 100.0
    local_gbps: float = 2400.0
    latency_us: float = 10.0
    micro_step_ms: Optional[float] = None  # noqa: UP045
    update_ms: float = 0.0
    measure: bool = False
    memory_gib: Optional[float] = None  # noqa: UP045

    def __post_init__(self) -> None:
        require_annotated("cluster", self)
        require_count("cluster.nodes", self.nodes, least=1)
        require_count("cluster.gpus", self.gpus, least=1)
        require_positive("cluster.link_gbps", self.link_gbps)
        require_positive("cluster.local_gbps", self.local_gbps)
        require_positive("cluster.micro_step_ms", self.micro_step_ms)
        require_positive("cluster.memory_gib", self.memory_gib)
        for key, value in (("latency_us", self.latency_us), ("update_ms", self.update_ms)):
            good, remedy = math.isfinite(value) and value >= 0, "Use a finite number from 0 on"
            require(good, f"cluster.{key}", value, "must not be negative", remedy)
        known = self.micro_step_ms is not None or self.measure
        remedy = "State it in milliseconds, or measure it on this machine with cluster.measure=true"
        require(known, "cluster.micro_step_ms", None, "is not given", remedy)

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.gpus

    @property
    def latency_s(self) -> float:
        """The latency in seconds."""
        return self.latency_us / 1e6

    def link(self, ranks: int, *, rings: int = 1) -> Link:
        """The slowest link of a ring of ``ranks``, where ``rings`` like it leave the node at the same time."""
        if ranks <= self.gpus:
            return Link(latency_s=self.latency_s, bytes_per_s=self.local_gbps * GIGA / BITS)
        slowest = min(self.link_gbps / rings, self.local_gbps)
        return Link(latency_s=self.latency_s, bytes_per_s=slowest * GIGA / BITS)
