"""Memory that is over, in words: what was done, and what needs less."""

from __future__ import annotations

import torch

from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.errors import DistaccumError, ResourceError

# What allocators and libraries say that have no error class of their own: the host's, oneDNN's, cuBLAS's, CUDA's.
_SAID = (
    "can't allocate memory",
    "std::bad_alloc",
    "could not create a memory object",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
_OF_A_MICRO_BATCH = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCTION)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the host, or of a device; not in words yet."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, DistaccumError):
        return False
    said = str(error)
    return any(words in said for words in _SAID)


def out_of_memory(error: BaseException, world: World) -> ResourceError:
    """What was done, and what needs less memory."""
    device, place = world.device.type == "cuda" and isinstance(error, torch.OutOfMemoryError), world.activity.now()
    micro = f", micro-batch {place.done + 1} of this rank" if place.phase in _OF_A_MICRO_BATCH else ""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    host = "" if device else ", or lower trainer.num_workers: this is the host's memory"
    return ResourceError(
        f"out of memory in {place}{micro}: {said}. Lower batch.micro_size (the global batch and its gradient "
        f"stay the same), use activation checkpointing, or an engine that shards the model (fsdp2, deepspeed){host}"
    )
