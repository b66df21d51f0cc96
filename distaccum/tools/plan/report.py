"""The whole forecast of a job on a cluster as plain values: what ``distaccum plan`` shows and writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distaccum.config.checks import require
from distaccum.data.plan.batch import CONFIG_KEYS, check_sizes
from distaccum.tools.plan.cluster import Cluster
from distaccum.tools.plan.memory import state
from distaccum.tools.plan.window import Job, Step, Window, powers_of_two, scale

MOST_RANKS = 4096
Values = dict[str, Any]


def report(job: Job, cluster: Cluster, worlds: Iterable[int] = ()) -> Values:
    """The batch plan, memory and traffic on the cluster, and step time and efficiency over ``worlds``.

    By default ``worlds`` are 1, 2, 4 ... 4096 and the number of ranks of the cluster.

    Raises:
        ConfigError: the sizes do not fit together, or the model has no parameter to train.
    """
    check_sizes(job.global_batch_size, job.micro_batch_size, CONFIG_KEYS)
    require(job.sizes.elements > 0, "model", None, "has no parameter to train", "Unfreeze some of it")
    job.sharding.check(cluster.ranks)
    enough = job.virtual_ranks is None or cluster.ranks <= job.virtual_ranks
    problem = f"is less than the {cluster.ranks} ranks, of which some would have nothing to compute"
    require(enough, "batch.virtual_ranks", job.virtual_ranks, problem, "Give at least as many")
    step = Window(job, cluster, cluster.ranks).step()
    worlds = sorted({*worlds} or {*powers_of_two(MOST_RANKS), cluster.ranks})
    return {
        "batch": _batch(job, step),
        "memory": state(job, cluster.ranks),
        "sent": step.sent,
        "step": _times(step),
        "scaling": [
            {"ranks": one.ranks, "accumulation": one.accumulation, "idle": one.idle, **_times(one), "efficiency": share}
            for one, share in scale(job, cluster, worlds)
        ],
    }


def _batch(job: Job, step: Step) -> Values:
    return {
        "global_size": job.global_batch_size,
        "micro_size": job.micro_batch_size,
        "ranks": step.ranks,
        "accumulation": step.accumulation,
        "idle": step.idle,
        "micro_batches": job.micro_sizes(step.ranks),
    }


def _times(step: Step) -> dict[str, float]:
    return {"seconds": step.seconds, "compute": step.compute, "update": step.update, "exposed": step.exposed}
