"""The machines that a job is planned for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from distaccum.config.checks import require, require_count, require_positive, require_types
from distaccum.forecast.collectives import Link

BITS, GIGA, MILLI = 8, 1e9, 1e-3


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """``nodes`` of ``gpus`` ranks each.

    ``link_gbps`` joins a node to the others, ``local_gbps`` a rank to the others of its node, both in Gbit/s one way;
    ``latency_us`` (microseconds) is that of a message. ``micro_step_ms`` (milliseconds): forward and backward of a full
    micro-batch, None where it is yet to be measured, which ``measure`` allows; ``update_ms``: the optimizer's update.

    Raises:
        ConfigError: one of them is no such number.
    """

    nodes: int = 1
    gpus: int = 1
    link_gbps: float = 100.0
    local_gbps: float = 2400.0
    latency_us: float = 10.0
    micro_step_ms: Optional[float] = None  # noqa: UP045
    update_ms: float = 0.0
    measure: bool = False

    def __post_init__(self) -> None:
        numbers = dict.fromkeys(("link_gbps", "local_gbps", "latency_us", "update_ms"), float)
        require_types("cluster", self, nodes=int, gpus=int, measure=bool, micro_step_ms=(float, type(None)), **numbers)
        require_count("cluster.nodes", self.nodes, least=1)
        require_count("cluster.gpus", self.gpus, least=1)
        require_positive("cluster.link_gbps", self.link_gbps)
        require_positive("cluster.local_gbps", self.local_gbps)
        require_positive("cluster.micro_step_ms", self.micro_step_ms)
        for key, value in (("latency_us", self.latency_us), ("update_ms", self.update_ms)):
            good, remedy = math.isfinite(value) and value >= 0, "Use a finite number from 0 on"
            require(good, f"cluster.{key}", value, "must not be negative", remedy)
        known = self.micro_step_ms is not None or self.measure
        remedy = "State it in milliseconds, or measure it on this machine with cluster.measure=true"
        require(known, "cluster.micro_step_ms", None, "is not given", remedy)

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus

    @property
    def latency_s(self) -> float:
        """In seconds."""
        return self.latency_us / 1e6

    def link(self, ranks: int, *, rings: int = 1) -> Link:
        """The slowest link of a ring among ``ranks`` neighbours; ``rings`` like it leave the node side by side."""
        if ranks <= self.gpus:
            return Link(latency_s=self.latency_s, bytes_per_s=self.local_gbps * GIGA / BITS)
        slowest = min(self.link_gbps / rings, self.local_gbps)
        return Link(latency_s=self.latency_s, bytes_per_s=slowest * GIGA / BITS)
