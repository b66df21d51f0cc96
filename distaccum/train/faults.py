"""Errors in words: another rank that has gone, and where this one was."""

from __future__ import annotations

import re
import traceback

from distaccum.distributed.processes import is_of_library
from distaccum.errors import DistaccumError

# How the libraries that join the ranks say that another one is gone: gloo, NCCL, torch's store.
_LOST = re.compile(
    r"connection (closed|reset|refused|was)|closed by (remote )?peer|reset by peer|broken pipe|socket closed|gloo|nccl|"
    r"timed? ?out|remote process exited|failed to (recv|send)|EnforceNotMet",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective has failed, as it does when another rank is gone."""
    if isinstance(error, DistaccumError):  # whose words may name the group's timeout
        return False
    return isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)) is not None


def innermost(error: BaseException) -> str:
    """Where an error comes from, in code that is not a library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_of_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown line"
