"""The most bytes that a rank holds at once, on its card and on the host.

What lies there between two micro-steps is by the ZeRO paper (see ``volume.py``). A micro-step adds its activations,
which somebody has measured, the micro-batches that are on the device, and of a model in shards what is whole of it: the
part that is in no block all the time, and two blocks, the one that is computed and the one that is gathered meanwhile.
That is a bound: the most activations need not be there while two blocks are.
"""

from __future__ import annotations

from dataclasses import dataclass

from distaccum.tools.plan import volume
from distaccum.tools.plan.sharding import FULL, PARAMETER_STAGE
from distaccum.tools.plan.window import Job

WHOLE_BLOCKS = 2


@dataclass(frozen=True, kw_only=True)
class MicroStep:
    """Bytes of one full micro-step; None: not known, and ``unknown`` says why.

    Args:
        device: the kind whose operators they are of: ``cuda`` or ``cpu``.
        batch: of the micro-batch.
        kept: of activations, from the forward to the backward.
        peak: the most beside weights, gradients and the micro-batch.
        unknown: why one of them is not known.
    """

    device: str = "cpu"

    batch: int | None = None
    kept: int | None = None
    peak: int | None = None
    unknown: str = ""


def state(job: Job, ranks: int) -> dict[str, float]:
    """Bytes on a rank, by part: what it holds between two micro-steps, once the optimizer has stepped."""
    sharding, formats, elements = job.sharding, job.formats, job.sizes.elements
    parts = volume.memory(sharding, elements, ranks, formats)
    frozen = formats.frozen * job.sizes.frozen / sharding.parts(PARAMETER_STAGE, ranks) + job.sizes.buffers
    found = {
        "parameters": parts["parameters"] + frozen,
        "weight copies": volume.copied(sharding, elements, ranks, formats),
        "gradients": max(parts["gradients at the boundary"], parts["gradients stepped with"]),
        "optimizer state": parts["optimizer"],
    }
    if most := job.most_owned(ranks):  # of the rank that has most of them whole
        more = most - sum(job.sizes.owned) / sharding.parts(PARAMETER_STAGE, ranks)
        found["optimizer state"] += job.sizes.owned_moments * more
    if job.virtual_ranks is not None:
        found["sums of blocks"] = formats.gradients * elements * job.sums(ranks)[1]
    return found | {"total": sum(found.values())}


def peak(job: Job, ranks: int, micro_step: MicroStep, *, prefetch: int = 2) -> dict[str, float | None]:
    """The most bytes on a rank's card at once, by part; a part that is not known is None, and so is the total.

    Args:
        job: what is trained, and how.
        ranks: of the run.
        micro_step: measured.
        prefetch: micro-batches on the device at once.
    """
    found: dict[str, float | None] = {
        "state": state(job, ranks)["total"],
        "gathered": gathered(job),
        "micro-batches": None if micro_step.batch is None else prefetch * micro_step.batch,
        "activations": micro_step.peak,
    }
    known = [size for size in found.values() if size is not None]
    if len(known) == len(found) and job.most_owned(ranks):
        # A step's own, while nothing is gathered and no activations are there: gradients and weights, and what travels.
        whole = volume.THERE_AND_BACK * FULL * job.most_owned(ranks)
        _, gathered_then, _, activations = known
        known.append(max(0.0, whole - gathered_then - activations))
        found["stepped whole"] = known[-1]
    return found | {"total": sum(known) if len(known) == len(found) else None}


def gathered(job: Job) -> float | None:
    """Bytes of parameters that a rank has whole, beside its shards of them; None: what it keeps is not known."""
    sharding, sizes = job.sharding, job.sizes
    if sharding.stage < PARAMETER_STAGE:
        return 0.0
    if sharding.whole_again:  # by an algorithm of DeepSpeed's own, which looks at what is used next
        return None
    blocks = sum(sizes.blocks) if sharding.held else WHOLE_BLOCKS * max(sizes.blocks, default=0)
    return job.formats.gathered * (sizes.rest + min(blocks, sum(sizes.blocks)))


def host(
    job: Job, ranks: int, micro_step: MicroStep, *, windows: int, copies_checkpoint: bool
) -> dict[str, float | None]:
    """Bytes of a rank's host memory: micro-batches of whole windows, and the copy that a save in the background writes.

    Args:
        job: what is trained, and how.
        ranks: of the run.
        micro_step: measured.
        windows: on the host at once.
        copies_checkpoint: whether checkpoints are written from a copy.
    """
    parts = state(job, ranks)
    batches = None if micro_step.batch is None else windows * job.accumulation(ranks) * micro_step.batch
    copied = parts["parameters"] + parts["optimizer state"] if copies_checkpoint else 0.0
    return {"micro-batches": batches, "checkpoint": copied}
