"""The forecast against independent ground truth: simulated rings and queues, and the ZeRO paper's numbers."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from distaccum.config import engine as config_engine
from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config, Zero1Config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.plan.batch import BatchPlan
from distaccum.errors import ConfigError
from distaccum.tools.plan import volume
from distaccum.tools.plan.cluster import Cluster
from distaccum.tools.plan.collectives import Link, ring_bytes, ring_seconds, seconds, tree_seconds
from distaccum.tools.plan.memory import MicroStep, gathered, host, peak, state
from distaccum.tools.plan.overlap import buckets, run_pass
from distaccum.tools.plan.report import report
from distaccum.tools.plan.sharding import Formats, Sharding, formats_of, sharding_of
from distaccum.tools.plan.volume import copied, sent
from distaccum.tools.plan.window import Job, Sizes, Window, powers_of_two, scale

ENGINES: list[EngineConfig] = [
    DDPConfig(),
    Zero1Config(),
    FSDP2Config(),
    FSDP2Config(sync="every"),
    FSDP2Config(reshard_after_forward=False),
    *(DeepSpeedConfig(stage=stage) for stage in range(4)),
]
SIZES = Sizes(tensors=(4_000_000, *(1_000_000,) * 8), blocks=(2_000_000,) * 4)
CLUSTER = Cluster(nodes=4, gpus=2, link_gbps=10, local_gbps=100, latency_us=20, micro_step_ms=50, update_ms=3)
LINK = Link(latency_s=1e-4, bytes_per_s=1e8)


def _job(engine: EngineConfig, **changes: Any) -> Job:
    formats = formats_of(engine, changes.pop("precision", PrecisionConfig()))
    settings = {"sizes": SIZES, "global_batch_size": 64, "micro_batch_size": 2, **changes}
    return Job(sharding=sharding_of(engine), formats=formats, **settings)


class _Ring:
    """Ranks in a ring that hold numbers; each step every rank passes one part of them on to its neighbour."""

    def __init__(self, ranks: int, parts_of: int) -> None:
        self.held = [np.arange(ranks * parts_of, dtype=float) * (rank + 1) for rank in range(ranks)]
        self.ranks, self.sent = ranks, [0] * ranks

    def _step(self, part_of: Any, *, adds: bool) -> None:
        messages = []
        for rank in range(self.ranks):
            part = part_of(rank) % self.ranks
            messages.append((part, np.split(self.held[rank], self.ranks)[part].copy()))
            self.sent[rank] += messages[-1][1].nbytes
        for rank, (part, message) in enumerate(messages):
            theirs = np.split(self.held[(rank + 1) % self.ranks], self.ranks)[part]
            theirs[:] = theirs + message if adds else message

    def reduce_scatter(self) -> None:
        """Rank r ends with the whole sum of part r + 1."""
        for step in range(self.ranks - 1):
            self._step(lambda rank, step=step: rank - step, adds=True)

    def all_gather(self) -> None:
        """Of what a reduce-scatter has left."""
        for step in range(self.ranks - 1):
            self._step(lambda rank, step=step: rank + 1 - step, adds=False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ring_bytes_are_those_of_a_ring_that_runs(ranks: int) -> None:
    ring = _Ring(ranks, parts_of=5)
    whole, payload = sum(ring.held), ring.held[0].nbytes
    ring.reduce_scatter()
    assert ring.sent == [ring_bytes("reduce-scatter", payload, ranks)] * ranks
    ring.all_gather()
    assert ring.sent == [ring_bytes("all-reduce", payload, ranks)] * ranks
    assert [n - ring_bytes("reduce-scatter", payload, ranks) for n in ring.sent] == [
        ring_bytes("all-gather", payload, ranks)
    ] * ranks
    assert all(np.array_equal(one, whole) for one in ring.held)  # it was an all-reduce
    for kind in ("broadcast", "reduce"):
        assert ring_bytes(kind, payload, ranks) == ring_bytes("all-gather", payload, ranks)
    with pytest.raises(KeyError):
        ring_bytes("barrier", 0, 2)


def _timed_ring(costs: list[float], rounds: int) -> float:
    """When the last part of a ring has arrived; a rank sends when it has its last message, and its link is free."""
    ranks, free, arrived = len(costs), [0.0] * len(costs), [0.0] * len(costs)
    for _ in range(rounds * (ranks - 1)):
        begins = [max(free[rank], arrived[rank]) for rank in range(ranks)]
        free = [begin + cost for begin, cost in zip(begins, costs, strict=True)]
        arrived = [free[rank - 1] for rank in range(ranks)]
    return max(arrived)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_takes_what_its_messages_take_and_waits_for_the_slowest_link(ranks: int) -> None:
    payload = 1e6
    message = LINK.latency_s + payload / ranks / LINK.bytes_per_s
    for kind, rounds in (("all-reduce", 2), ("reduce-scatter", 1), ("all-gather", 1)):
        found = ring_seconds(kind, payload, ranks, LINK)
        assert found == pytest.approx(_timed_ring([message] * ranks, rounds))
        mixed = _timed_ring([message] + [message / 10] * (ranks - 1), rounds)
        assert found <= mixed + 1e-12
        assert mixed <= found + rounds * ranks * message / 10


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9])
def test_a_tree_takes_as_many_rounds_as_it_has_levels(ranks: int) -> None:
    holders, rounds = set(range(ranks)), 0
    while len(holders) > 1:  # in each round the upper half hands its sum to the lower one
        middle = (len(holders) + 1) // 2
        holders, rounds = set(range(middle)), rounds + 1
    message = LINK.latency_s + 1e6 / LINK.bytes_per_s
    assert tree_seconds(1e6, ranks, LINK) == pytest.approx(2 * rounds * message)


def test_the_faster_of_ring_and_tree_is_taken() -> None:
    assert (
        seconds("all-reduce", 8, 1024, LINK) == tree_seconds(8, 1024, LINK) < ring_seconds("all-reduce", 8, 1024, LINK)
    )
    large = 1e9
    assert seconds("all-reduce", large, 64, LINK) == ring_seconds("all-reduce", large, 64, LINK)
    assert seconds("all-reduce", large, 64, LINK) < tree_seconds(large, 64, LINK)
    assert seconds("all-gather", 8, 1024, LINK) == ring_seconds("all-gather", 8, 1024, LINK)
    assert seconds("all-reduce", large, 1, LINK) == seconds("all-reduce", 0, 8, LINK) == 0


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_memory_is_that_of_the_zero_papers_figure_1(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters on 64 ranks, in 16 bits with Adam: 2 + 2 + 12 bytes a parameter."""
    formats = Formats(parameters=2, gradients=2, copies=4, moments=8)
    sharding = Sharding(stage=stage, every=True)
    found = volume.memory(sharding, 7_500_000_000, 64, formats)
    parts = found["parameters"] + found["optimizer"] + found["gradients stepped with"]
    assert (parts + copied(sharding, 7_500_000_000, 64, formats)) / 1e9 == pytest.approx(gigabytes, rel=5e-3)


def test_memory_by_hand_for_each_engine() -> None:
    """MiB of parameters, fp32 copies, gradients and optimizer state of 2**20 parameters on 4 ranks."""
    whole = Sizes(tensors=(2**20,))
    expected = [
        (4, 0, 4, 8),
        (4, 0, 4, 2),
        (1, 0, 4, 2),
        (1, 0, 1, 2),
        (1, 0, 4, 2),
        (4, 0, 4, 8),
        (4, 1, 4, 2),
        (4, 1, 4, 2),
        (1, 1, 4, 2),
    ]
    for engine, parts in zip(ENGINES, expected, strict=True):
        *found, total = (size / 2**20 for size in state(_job(engine, sizes=whole), 4).values())
        assert (tuple(found), total) == (parts, sum(parts)), engine
    frozen = state(_job(FSDP2Config(), sizes=replace(whole, frozen=2**20)), 4)
    assert frozen["parameters"] == 2 * 2**20
    half = state(_job(DeepSpeedConfig(stage=1), sizes=whole, precision=PrecisionConfig(name="bf16")), 4)
    assert half == {
        "parameters": 2 * 2**20,
        "weight copies": 2**20,
        "gradients": 4 * 2**20,
        "optimizer state": 2 * 2**20,
        "total": 9 * 2**20,
    }


def test_the_peak_by_hand_for_each_engine() -> None:
    """MiB beside what is there all the time, of 2**20 parameters in 4 blocks of an eighth each, on 4 ranks."""
    sizes = Sizes(tensors=(2**19, *(2**17,) * 4), blocks=(2**17,) * 4, buffers=2**20)
    measured = MicroStep(batch=2**18, kept=2**21, peak=2**22)
    whole = {"fsdp2": 2 + 2 * 0.5, "fsdp2 held": 4.0}
    for engine in ENGINES:
        held = "fsdp2 held" if getattr(engine, "reshard_after_forward", True) is False else engine.name
        job = _job(engine, sizes=sizes, micro_batch_size=8)
        found = peak(job, 4, measured, prefetch=3)
        between = state(job, 4)["total"]
        assert between == sum(list(state(replace(job, sizes=replace(sizes, buffers=0)), 4).values())[:-1]) + 2**20
        assert (found["state"], found["micro-batches"], found["activations"]) == (between, 3 * 2**18, 2**22)
        if engine == DeepSpeedConfig(stage=3):
            assert found["gathered"] is found["total"] is None  # DeepSpeed decides while it runs
        else:
            assert found["gathered"] == whole.get(held, 0) * 2**20
            assert found["total"] == between + whole.get(held, 0) * 2**20 + 3 * 2**18 + 2**22
    sixteen = _job(FSDP2Config(), sizes=sizes, precision=PrecisionConfig(name="bf16"))
    assert gathered(sixteen) == 1.5 * 2**20
    assert gathered(_job(FSDP2Config(), sizes=replace(sizes, blocks=()))) == 4 * 2**20
    # A step of whole matrices comes when the activations are gone: only what it takes more than they did counts.
    for owned, activations, more in (
        ((), 2**10, None),
        ((2**19,) * 2, 2**22, 0.0),
        ((2**19,) * 2, 2**10, 3 * 2**20 - 2**10),
        ((2**19, 2**18), 2**10, 3 * 2**20 - 2**10),
    ):
        job, measured = _job(FSDP2Config(), sizes=replace(sizes, owned=owned)), replace(measured, peak=activations)
        plain, found = peak(_job(FSDP2Config(), sizes=sizes), 2, measured), peak(job, 2, measured)
        state_of_more = 8 * 2**17 if len(set(owned)) == 2 else 0  # one rank has 2**19 of them, not half
        assert found.get("stepped whole") == more
        assert found["total"] == plain["total"] + (more or 0.0) + state_of_more  # type: ignore[operator]
        assert peak(job, 1, measured) == peak(_job(FSDP2Config(), sizes=sizes), 1, measured)  # nobody needs an owner
    unknown = peak(_job(DDPConfig(), sizes=sizes), 4, MicroStep(batch=1, unknown="a reason"), prefetch=2)
    assert unknown["activations"] is unknown["total"] is None


def test_the_host_holds_windows_and_the_copy_of_a_checkpoint() -> None:
    """Of 2**20 parameters with Adam: on rank 0 of ddp all of it, of zero1 half the moments, of fsdp2 half of it all."""
    job, measured = _job(DDPConfig(), sizes=Sizes(tensors=(2**20,))), MicroStep(batch=1000)
    found = host(job, 2, measured, windows=2, copies_checkpoint=False)
    assert found == {"micro-batches": 2 * 16 * 1000, "checkpoint": 0}
    for engine, mebibytes in ((DDPConfig(), 12), (Zero1Config(), 8), (FSDP2Config(), 6)):
        job = _job(engine, sizes=Sizes(tensors=(2**20,)))
        found = host(job, 2, MicroStep(unknown="a reason"), windows=1, copies_checkpoint=True)
        assert found == {"micro-batches": None, "checkpoint": mebibytes * 2**20}, engine


def test_what_is_sent_by_hand() -> None:
    """Of 12 elements, 8 of them in blocks, in 3 micro-steps on 4 ranks: payloads in bytes, and 3/4 of them a round."""
    sixteen = PrecisionConfig(name="bf16", reduce_dtype="fp16")
    cases: list[tuple[EngineConfig, PrecisionConfig, dict[str, float]]] = [
        (DDPConfig(), PrecisionConfig(), {"all-reduce": 2 * 48}),
        (DDPConfig(), sixteen, {"all-reduce": 2 * 24}),
        (Zero1Config(), sixteen, {"all-reduce": 2 * 24, "broadcast": 48}),
        (FSDP2Config(), PrecisionConfig(), {"reduce-scatter": 48, "all-gather": 3 * (48 + 32)}),
        (FSDP2Config(sync="every"), sixteen, {"reduce-scatter": 3 * 24, "all-gather": 3 * (24 + 16)}),
        (FSDP2Config(gather_dtype="fp32"), sixteen, {"reduce-scatter": 24, "all-gather": 3 * (48 + 32)}),
        (FSDP2Config(reshard_after_forward=False), PrecisionConfig(), {"reduce-scatter": 48, "all-gather": 48}),
        (DeepSpeedConfig(stage=0), PrecisionConfig(), {"all-reduce": 2 * 48}),
        (DeepSpeedConfig(stage=2), PrecisionConfig(), {"reduce-scatter": 48, "all-gather": 48}),
        (DeepSpeedConfig(stage=3), sixteen, {"reduce-scatter": 24, "all-gather": 3 * 48}),
    ]
    for engine, precision, expected in cases:
        found = sent(sharding_of(engine), 12, 8, 3, ranks=4, formats=formats_of(engine, precision))
        assert {kind: size for kind, size in found.items() if size} == {k: v * 3 / 4 for k, v in expected.items()}, (
            engine
        )
    # In halves of two: 24 bytes of the gradient go around a half, and once a shard of 24 bytes between the halves.
    for sync, times in (("boundary", 1), ("every", 3)):
        found = sent(sharding_of(FSDP2Config(sync=sync, replicas=2)), 12, 8, 3, ranks=4)
        assert (found["reduce-scatter"], found["all-reduce"]) == (times * 48 / 2, 2 * 24 / 2)
    # Of matrices of 8 elements a rank has 8 bytes: a gradient and a weight go to the owners, and a weight comes back.
    found = sent(sharding_of(FSDP2Config()), 12, 8, 3, ranks=4, owned=8)
    assert found["all-to-all"] == 3 * 8 * 3 / 4
    window = Window(_job(FSDP2Config(), sizes=replace(SIZES, owned=(4_000_000,))), CLUSTER, 8).step()
    plain = Window(_job(FSDP2Config()), CLUSTER, 8).step()
    one = 7 * 20e-6 + 16e6 / 8 * 7 / 8 * 8 / 10e9
    assert window.exposed - plain.exposed == pytest.approx(3 * one)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_one_rank_sends_nothing_and_waits_for_nothing(engine: EngineConfig) -> None:
    step = Window(_job(engine), CLUSTER, 1).step()
    assert step.exposed == pytest.approx(0, abs=1e-12)
    assert not any(step.sent.values())
    assert step.seconds == pytest.approx(32 * 0.050 + 0.003)
    ((_, efficiency),) = scale(_job(engine), CLUSTER, [1])
    assert efficiency == pytest.approx(1)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_it_gets_no_better_with_a_worse_network_or_more_ranks(engine: EngineConfig) -> None:
    job = _job(engine)
    for ranks in (2, 4, 8, 64):
        for key, worse in (("link_gbps", (100, 10, 1)), ("local_gbps", (100, 10, 1)), ("latency_us", (0, 10, 1000))):
            times = [Window(job, replace(CLUSTER, **{key: value}), ranks).step().seconds for value in worse]
            assert times == sorted(times), (ranks, key)
    found = list(scale(job, CLUSTER, powers_of_two(4096)))
    assert [step.ranks for step, _ in found] == [2**i for i in range(13)]
    efficiencies = [efficiency for _, efficiency in found]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert 0 < efficiencies[-1] < efficiencies[3] < 1
    assert [step.idle for step, _ in found] == [max(0, 2**i - 64) for i in range(13)]


def test_a_window_of_ddp_by_hand() -> None:
    """Two hosts, one bucket of 48 MB: 8 micro-steps, then a ring of two messages of half of it each, the update."""
    job = _job(DDPConfig(bucket_cap_mb=100), global_batch_size=32)
    cluster = Cluster(nodes=2, gpus=1, link_gbps=0.2, latency_us=100, micro_step_ms=50, update_ms=3)
    step = Window(job, cluster, 2).step()
    all_reduce = 2 * (100e-6 + 24e6 / 25e6)
    count = 2 * (100e-6 + 4 / 25e6)
    assert step.accumulation == 8
    assert step.seconds == pytest.approx(8 * 0.050 + all_reduce + count + 0.003)
    every = Window(replace(job, sharding=replace(job.sharding, every=True)), cluster, 2).step()
    assert every.exposed == pytest.approx(8 * all_reduce + count)
    assert every.sent["all-reduce"] == 8 * step.sent["all-reduce"] == 8 * 48e6
    zero1 = Window(_job(Zero1Config(bucket_cap_mb=100), global_batch_size=32), cluster, 2).step()
    assert zero1.update == step.update / 2
    assert zero1.exposed - step.exposed == pytest.approx(all_reduce / 2)


def test_buckets_hide_behind_the_backward_what_fits_there() -> None:
    """All but the last bucket's reduction is hidden by a fast link, none by a slow one."""
    job = _job(DDPConfig(bucket_cap_mb=4))  # a bucket a tensor
    fast = Window(job, replace(CLUSTER, link_gbps=100, latency_us=0), 8).step()
    last = seconds("all-reduce", 16e6, 8, Link(latency_s=0, bytes_per_s=100e9 / 8))
    assert fast.exposed == pytest.approx(last, rel=1e-3)  # the rest is the count's
    whole = seconds("all-reduce", 48e6, 8, Link(latency_s=0, bytes_per_s=100e9 / 8))
    assert last < whole / 2
    behind = Window(_job(DeepSpeedConfig(stage=0)), replace(CLUSTER, link_gbps=100, latency_us=0), 8).step()
    assert behind.exposed == pytest.approx(whole, rel=1e-3)


def test_micro_steps_of_fewer_samples_take_as_much_less() -> None:
    job = _job(DDPConfig(), global_batch_size=22, micro_batch_size=4)  # 5 or 6 samples each on 4 ranks: 4 and 2
    assert job.micro_sizes(4) == [4, 2]
    assert Window(job, CLUSTER, 4).step().compute == pytest.approx(0.050 * 6 / 4)


@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 20))
def test_the_accumulation_is_that_of_the_batch_plan(world: int, global_batch_size: int, micro_batch_size: int) -> None:
    micro_batch_size = min(micro_batch_size, global_batch_size)
    planned = BatchPlan(
        samples=global_batch_size,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=world,
    )
    job = _job(DDPConfig(), global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    most = max((planned.micro_batches(0, rank) for rank in range(world)), key=lambda batches: sum(map(len, batches)))
    assert job.micro_sizes(world) == [len(batch) for batch in most]
    step = Window(job, CLUSTER, world).step()
    assert step.accumulation == planned.accumulation_steps
    assert step.idle == sum(not any(map(len, planned.micro_batches(0, rank))) for rank in range(world))


def _queue(compute: list[int], gathers: list[int], reductions: list[int]) -> tuple[int, int]:
    """Tick by tick: a processor that takes units in turn, and a link that serves requests in the order they come."""
    requests: list[tuple[str, int, int]] = [("gather", 0, gathers[0])] if gathers[0] else []
    there = {i for i, cost in enumerate(gathers) if not cost}
    unit, left, busy, idle_since, done_at = 0, -1, 0, 0, 0
    for now in itertools.count():
        if requests and busy == 0 and requests[0][2] < 0:
            raise AssertionError
        settled = False
        while not settled:  # what happens at this tick without any time passing
            settled = True
            if requests and requests[0][2] == busy:
                kind, which, _ = requests.pop(0)
                busy, idle_since, settled = 0, now, False
                if kind == "gather":
                    there.add(which)
            if left == 0:
                if reductions[unit]:
                    requests.append(("reduce", unit, reductions[unit]))
                unit, left, done_at, settled = unit + 1, -1, now, False
            if unit < len(compute) and left < 0 and unit in there:
                left, settled = compute[unit], False
                if unit + 1 < len(gathers) and gathers[unit + 1]:
                    requests.append(("gather", unit + 1, gathers[unit + 1]))
        if unit == len(compute) and not requests:
            return done_at, idle_since
        left -= left > 0
        busy += bool(requests)
    raise AssertionError


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6))
def test_a_pass_is_that_of_a_simulated_queue(units: list[tuple[int, int, int]]) -> None:
    compute, gathers, reductions = (list(column) for column in zip(*units, strict=True))
    assert run_pass(compute, gathers, reductions) == _queue(compute, gathers, reductions)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 600_000), min_size=1, max_size=30), st.sampled_from([None, 0.5, 1.0]))
def test_buckets_are_those_that_ddp_makes(elements: list[int], first: float | None) -> None:
    tensors = [torch.empty(n, device="meta") for n in reversed(elements)]
    limits = [*([] if first is None else [int(first * 2**20)]), 4 * 2**20]
    made, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    assert buckets(elements, 4, first) == tuple(sum(tensors[i].numel() for i in indices) for indices in made)


def test_the_slowest_link_of_a_ring_is_the_one_between_nodes() -> None:
    assert CLUSTER.ranks == 8
    assert CLUSTER.link(2).bytes_per_s == 100e9 / 8
    assert CLUSTER.link(4) == Link(latency_s=20e-6, bytes_per_s=10e9 / 8)
    assert CLUSTER.link(8, rings=2).bytes_per_s == 5e9 / 8
    assert replace(CLUSTER, local_gbps=1).link(8).bytes_per_s == 1e9 / 8
    # Shards within a node and replicas across: a node's two rings share its link.
    job = _job(FSDP2Config(replicas=4), sizes=Sizes(tensors=(12_000_000,)), global_batch_size=16)
    step = Window(job, replace(CLUSTER, latency_us=0), 8).step()
    pass_ = ring_seconds("all-gather", 48e6, 2, Link(latency_s=0, bytes_per_s=100e9 / 8))
    across = ring_seconds("all-reduce", 24e6, 4, Link(latency_s=0, bytes_per_s=5e9 / 8))
    assert step.exposed == pytest.approx(pass_ + pass_ + across, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "cluster.nodes=0: must be at least 1"),
        ({"gpus": -2}, "cluster.gpus=-2: must be at least 1"),
        ({"nodes": 1.5}, "cluster.nodes=1.5: not of type int"),
        ({"link_gbps": -1.0}, "cluster.link_gbps=-1.0: must be a positive finite number"),
        ({"local_gbps": float("inf")}, "cluster.local_gbps=inf: must be a positive finite number"),
        ({"latency_us": -1.0}, "cluster.latency_us=-1.0: must not be negative"),
        ({"update_ms": float("nan")}, "cluster.update_ms=nan: must not be negative"),
        ({"micro_step_ms": 0.0}, "cluster.micro_step_ms=0.0: must be a positive finite number"),
        ({"micro_step_ms": None}, "cluster.micro_step_ms: is not given. State it"),
        ({"memory_gib": 0.0}, "cluster.memory_gib=0.0: must be a positive finite number"),
        ({"measure": 1}, "cluster.measure=1: not of type bool"),
    ],
)
def test_clusters_that_there_are_not(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        replace(CLUSTER, **change)


def test_jobs_that_cannot_be_planned() -> None:
    for job, message in (
        (_job(DDPConfig(), micro_batch_size=128), "batch.micro_size=128: larger than batch.global_size=64"),
        (_job(DDPConfig(), global_batch_size=0), "batch.global_size=0"),
        (_job(DDPConfig(), sizes=Sizes(tensors=(), frozen=4)), "model: has no parameter to train"),
        (_job(FSDP2Config(replicas=3)), "engine.replicas=3: 8 ranks are not a multiple of it"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            report(job, CLUSTER)


def test_a_report_has_the_planned_world_among_the_others() -> None:
    found = report(_job(DDPConfig()), replace(CLUSTER, nodes=3))
    assert [row["ranks"] for row in found["scaling"]] == sorted([6, *(2**i for i in range(13))])
    (planned,) = (row for row in found["scaling"] if row["ranks"] == 6)
    assert {key: planned[key] for key in found["step"]} == found["step"]
    assert found["batch"] == {
        "global_size": 64,
        "micro_size": 2,
        "ranks": 6,
        "accumulation": 6,
        "idle": 0,
        "micro_batches": [2] * 5 + [1],
    }
    assert json.loads(json.dumps(found)) == found
    odd = report(_job(FSDP2Config(replicas=3)), replace(CLUSTER, nodes=3), [1, 3, 6, 8])
    assert [row["ranks"] for row in odd["scaling"]] == [3, 6]


def test_a_reproducible_run_keeps_sums_of_blocks_and_sends_as_many_as_a_rank_has_nodes() -> None:
    fast, same = _job(DDPConfig()), _job(DDPConfig(), virtual_ranks=32)
    gradient = 4 * SIZES.elements
    # 32 units: on 8 ranks 4 blocks, one node; on 3 ranks up to 11, of which the middle ones are four nodes.
    for ranks, sums, kept in ((1, 1, 5), (8, 1, 2), (32, 1, 0), (3, 4, 5), (6, 3, 3)):
        assert same.sums(ranks) == (sums, kept)
        more = state(same, ranks)["total"] - state(fast, ranks)["total"]
        assert more == pytest.approx(kept * gradient)
        moved = Window(same, CLUSTER, ranks).step().sent
        assert sum(moved.values()) == pytest.approx((sums + 1) * gradient * (ranks - 1) / ranks)
    assert same.accumulation(3) == 11
    assert [step.ranks for step, _ in scale(same, CLUSTER, (16, 32, 64))] == [16, 32]
    with pytest.raises(ConfigError, match=r"batch\.virtual_ranks=32: is less than the 64 ranks"):
        report(same, replace(CLUSTER, nodes=32))


def test_every_engine_tells_a_forecast_what_it_shards_and_in_which_formats() -> None:
    for kind in config_engine.ENGINES.values():
        assert isinstance(sharding_of(kind()), Sharding)
        assert isinstance(formats_of(kind(), PrecisionConfig()), Formats)
