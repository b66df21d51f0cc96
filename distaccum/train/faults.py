"""Errors in words: memory that is over, and another rank that has gone."""

from __future__ import annotations

import re
import traceback

import torch

from distaccum.distributed.activity import Phase
from distaccum.distributed.processes import is_of_library
from distaccum.distributed.world import World
from distaccum.errors import DistaccumError, ResourceError

_HOST_MEMORY = "can't allocate memory"
_OF_A_MICRO_BATCH = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCTION)
# How the libraries that join the ranks say that another one is gone: gloo, NCCL, torch's store.
_LOST = re.compile(
    r"connection (closed|reset|refused|was)|closed by (remote )?peer|reset by peer|broken pipe|socket closed|gloo|nccl|"
    r"timed? ?out|remote process exited|failed to (recv|send)|EnforceNotMet",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the host, or of a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _HOST_MEMORY in str(error)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective has failed, as it does when another rank is gone."""
    if isinstance(error, DistaccumError):  # whose words may name the group's timeout
        return False
    return isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)) is not None


def innermost(error: BaseException) -> str:
    """Where an error comes from, in code that is not a library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_of_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown line"


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
