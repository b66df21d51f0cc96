"""What tests on one GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world


@pytest.fixture(scope="session")  # DeepSpeed keeps the groups that it has made of the first one
def gpu_world() -> Iterator[World]:
    """A group of one on the first GPU, NCCL for its tensors and gloo for the host's; closed after the tests."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    ranks = LaunchEnvironment()
    with open_world(ranks, ranks.store(), torch.device("cuda", 0)) as world:
        yield world
