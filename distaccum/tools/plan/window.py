"""How long a window takes, and what it is made of.

A micro-step of t seconds is a forward of t/3 and a backward of 2t/3, spread over the parameters by their number. A
micro-step of fewer samples takes proportionally less. A window is A micro-steps, one small all-reduce (the count), and
the optimizer's update, or a rank's share of it. Efficiency on N ranks is T(1) / (N T(N)) at the same global batch:
strong scaling.

The model leaves out stragglers, contention with other jobs and between a node's own rings and PCIe, collectives that
work in several layers, small micro-batches that use a GPU less well, and the loading of data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from distaccum.data.plan.batch import micro_steps_of
from distaccum.data.plan.units import UnitAssignment, joined
from distaccum.engines.modules import owners_by_size
from distaccum.tools.plan.cluster import MILLI, Cluster
from distaccum.tools.plan.collectives import seconds
from distaccum.tools.plan.overlap import buckets, run_pass, shares
from distaccum.tools.plan.sharding import ADAM, FULL, OPTIMIZER_STAGE, PARAMETER_STAGE, Formats, Sharding
from distaccum.tools.plan.volume import THERE_AND_BACK, sent

FORWARD = 1 / 3  # of a micro-step
COUNT_BYTES = 8  # what the count's all-reduce carries


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model: elements of each trained parameter in order, and of each block that is sharded by itself.

    ``frozen``: elements that are not trained; they take memory, and are never sent. ``buffers``: their bytes.
    ``owned``: elements of each trained tensor that one rank steps whole, with ``owned_moments`` bytes of state each.
    """

    tensors: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    frozen: int = 0
    buffers: int = 0
    owned: tuple[int, ...] = ()
    owned_moments: float = ADAM

    @property
    def elements(self) -> int:
        """Elements of all trained parameters."""
        return sum(self.tensors)

    @property
    def rest(self) -> int:
        """Elements that are in no block."""
        return self.elements - sum(self.blocks)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and how. ``first_bucket_mb``: of DDP where no cap is given; None: as the other buckets.

    ``virtual_ranks``: the blocks in which ``numerics=reproducible`` sums a window; None: with ``numerics=fast``.
    """

    sizes: Sizes
    sharding: Sharding
    global_batch_size: int
    micro_batch_size: int
    formats: Formats = field(default_factory=Formats)
    first_bucket_mb: float | None = None
    virtual_ranks: int | None = None

    def assignment(self, ranks: int) -> UnitAssignment | None:
        """Of a full window's units over ``ranks``; None where micro-batches are none."""
        if self.virtual_ranks is None:
            return None
        units = -(-self.global_batch_size // self.micro_batch_size)
        return UnitAssignment(units, min(units, self.virtual_ranks), ranks)

    def sums(self, ranks: int) -> tuple[int, int]:
        """Of the rank with most: sums of blocks that it gives to the reduction, and keeps beside the gradient."""
        assignment, given, kept = self.assignment(ranks), 1, 0
        for own in () if assignment is None else map(assignment.blocks_of, range(ranks)):
            held = 0
            for others in joined(assignment.blocks, (), own)[1]:  # type: ignore[union-attr]
                kept, held = max(kept, held), held + 1 - len(others)
            given = max(given, held)
        return given, kept

    def most_owned(self, ranks: int) -> int:
        """Elements that the rank with most of them steps whole; none where every rank has all."""
        owned, parts = self.sizes.owned, self.sharding.parts(PARAMETER_STAGE, ranks)
        loads = [0] * parts
        for size, owner in zip(owned, owners_by_size(owned, parts), strict=True):
            loads[owner] += size
        return max(loads) if parts > 1 else 0

    def accumulation(self, ranks: int) -> int:
        """Micro-steps of a full window on ``ranks``."""
        if (assignment := self.assignment(ranks)) is not None:
            return max(len(assignment.units_of(rank)) for rank in range(ranks))
        return micro_steps_of(range(self.global_batch_size), ranks, self.micro_batch_size)

    def micro_sizes(self, ranks: int) -> list[int]:
        """Samples in each micro-step of a full window, on the rank that has most."""
        if self.virtual_ranks is not None:
            return [self.micro_batch_size] * self.accumulation(ranks)
        share = -(-self.global_batch_size // ranks)
        return [min(self.micro_batch_size, share - done) for done in range(0, share, self.micro_batch_size)]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One window on ``ranks`` ranks, of which ``idle`` have no sample. Times in seconds, ``sent`` in bytes by kind.

    ``exposed``: communication during which nothing is computed.
    """

    ranks: int
    accumulation: int
    idle: int
    compute: float
    update: float
    exposed: float
    sent: dict[str, float]

    @property
    def seconds(self) -> float:
        """Duration of the window."""
        return self.compute + self.update + self.exposed


class Window:
    """One window of a job on some ranks of a cluster whose micro-step time is known."""

    def __init__(self, job: Job, cluster: Cluster, ranks: int) -> None:
        assert cluster.micro_step_ms is not None
        self._job, self._sharding, self._ranks = job, job.sharding, ranks
        self._micro_step, self._update = cluster.micro_step_ms * MILLI, cluster.update_ms * MILLI
        self._within = ranks // job.sharding.replicas
        self._ring = cluster.link(self._within)
        # Of the rings among replicas, as many leave a node as it has ranks of one replica.
        self._across = cluster.link(ranks, rings=min(cluster.gpus, self._within))
        self._all = cluster.link(ranks)

    def step(self) -> Step:
        """Times and bytes of the window."""
        job, ranks = self._job, self._ranks
        compute = exposed = 0.0
        sizes = job.micro_sizes(ranks)
        for i, samples in enumerate(sizes):
            busy = self._micro_step * samples / job.micro_batch_size
            boundary = i == len(sizes) - 1
            ends = self._micro_step_ends(
                busy,
                reduces=boundary or self._sharding.every,
                boundary=boundary,
                gathers=i == 0 or not self._sharding.held,
            )
            compute, exposed = compute + busy, exposed + max(0.0, ends - busy)
        exposed += seconds("all-reduce", COUNT_BYTES, ranks, self._all) + self._spread()
        in_blocks = sum(job.sizes.blocks)
        return Step(
            ranks=ranks,
            accumulation=len(sizes),
            idle=max(0, ranks - job.global_batch_size),
            compute=compute,
            update=self._update / self._sharding.parts(OPTIMIZER_STAGE, ranks),
            exposed=exposed,
            sent=sent(
                self._sharding,
                job.sizes.elements,
                in_blocks,
                len(sizes),
                ranks=ranks,
                formats=job.formats,
                sums=None if job.virtual_ranks is None else job.sums(ranks)[0],
                owned=sum(job.sizes.owned),
            ),
        )

    def _micro_step_ends(self, busy: float, *, reduces: bool, boundary: bool, gathers: bool) -> float:
        """Seconds of a micro-step that computes for ``busy`` seconds, with its communication."""
        forward, backward = FORWARD * busy, (1 - FORWARD) * busy
        sizes, sharded = self._job.sizes, self._sharding.stage >= PARAMETER_STAGE
        units = (sizes.rest, *sizes.blocks) if sharded else (sizes.elements,)
        fetch = [self._gather(unit) if gathers and sharded else 0.0 for unit in units]
        now, link = run_pass(shares(units, forward), fetch, [0.0] * len(units))
        if sharded:
            again = [0.0 if self._sharding.held else cost for cost in fetch]
            again[0] = again[0] if self._sharding.whole_again else 0.0
            messages, fetch = units[::-1], again[::-1]
        else:
            messages = self._buckets()
            fetch = [0.0] * len(messages)
        overlaps = reduces and self._sharding.overlaps
        costs = [self._reduction(message, boundary=boundary) if overlaps else 0.0 for message in messages]
        spent, link = run_pass(shares(messages, backward), fetch, costs, link_free=max(0.0, link - now))
        if reduces and not overlaps:
            link = max(link, spent) + self._reduction(sizes.elements, boundary=boundary)
        return now + max(spent, link)

    def _buckets(self) -> tuple[int, ...]:
        cap = self._sharding.bucket_cap_mb
        tensors = self._job.sizes.tensors
        return (sum(tensors),) if cap is None else buckets(tensors, cap, self._job.first_bucket_mb)

    def _gather(self, elements: int) -> float:
        return seconds("all-gather", self._job.formats.gathered * elements, self._within, self._ring)

    def _reduction(self, elements: int, *, boundary: bool) -> float:
        """Seconds; replicas take part in the window's last alone."""
        kind = "reduce-scatter" if self._sharding.scatters else "all-reduce"
        if self._job.virtual_ranks is not None:
            payload, (sums, _) = self._job.formats.reduced * elements, self._job.sums(self._ranks)
            scattered = sums * seconds("reduce-scatter", payload, self._within, self._ring)
            spread = 0.0 if self._sharding.scatters else seconds("all-gather", payload, self._within, self._ring)
            return scattered + spread
        within = seconds(kind, self._job.formats.reduced * elements, self._within, self._ring)
        if not boundary:
            return within
        shard = FULL * elements / self._within
        return within + seconds("all-reduce", shard, self._sharding.replicas, self._across)

    def _spread(self) -> float:
        """Seconds of giving all ranks the stepped parameters, after the update; and owners what they step."""
        if self._sharding.spread is None:
            owned = FULL * sum(self._job.sizes.owned)
            return THERE_AND_BACK * seconds("all-to-all", owned, self._within, self._ring)
        payload = self._job.formats.gathered * self._job.sizes.elements
        return seconds(self._sharding.spread, payload, self._ranks, self._all)


def powers_of_two(greatest: int) -> list[int]:
    """The powers of two from 1 to ``greatest``."""
    return [2**i for i in range(greatest.bit_length())]


def scale(job: Job, cluster: Cluster, worlds: Iterable[int]) -> Iterator[tuple[Step, float]]:
    """A step on each number of ranks, and its efficiency.

    Numbers that are no multiple of the replicas are left out, and those above ``job.virtual_ranks``.
    """
    replicas = job.sharding.replicas
    alone = _alone(job, cluster)
    for ranks in worlds:
        if ranks % replicas == 0 and (job.virtual_ranks is None or ranks <= job.virtual_ranks):
            step = Window(job, cluster, ranks).step()
            yield step, alone / (ranks * step.seconds)


def _alone(job: Job, cluster: Cluster) -> float:
    """Seconds on one rank, which sends nothing."""
    assert cluster.micro_step_ms is not None
    return (job.global_batch_size / job.micro_batch_size * cluster.micro_step_ms + cluster.update_ms) * MILLI
