"""The main job on two ranks that share the first GPU, over NCCL: run by torchrun, with overrides of the main job.

``FAULT=raise``: the second rank raises in its twelfth forward; ``FAULT=kill``: it dies there. On a CPU it is gloo.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.models.gpt import GPT
from distaccum.train.__main__ import main
from launch.bench.gpu.two_ranks import take_hosts_apart

TWELFTH = 12


def fail_in_a_forward(rank: str, fault: str) -> None:
    """Has the forward of a GPT on rank 1 fail when it is called for the twelfth time."""
    forward, calls = GPT.forward, [0]

    def failing(self: GPT, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if rank == "1" and calls[0] == TWELFTH:
            if fault == "raise":
                raise RuntimeError("a fault of this rank alone")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, *args, **kwargs)

    GPT.forward = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    take_hosts_apart()
    LaunchEnvironment.gpu = lambda self, gpus, *_, **__: 0 if gpus else None  # type: ignore[method-assign,assignment]
    fail_in_a_forward(os.environ.get("RANK", "0"), os.environ.get("FAULT", ""))
    main()
