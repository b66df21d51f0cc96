"""What tests on one GPU share."""

from collections.abc import Iterator

import pytest
import torch

from distaccum.distributed.environment import LaunchEnvironment, accelerators
from distaccum.distributed.world import World, open_world


def pytest_itemcollected(item: pytest.Item) -> None:
    """What a new driver or torch warns of on a card is shown, and turns no right test red."""
    item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")  # DeepSpeed keeps the groups that it has made of the first one
def gpu_world() -> Iterator[World]:
    """A group of one on the first GPU, NCCL for its tensors and gloo for the host's; closed after the tests."""
    kind, number = accelerators()
    if not number:
        pytest.skip("no GPU")
    ranks = LaunchEnvironment()
    with open_world(ranks, ranks.store(), torch.device(kind, 0)) as world:
        yield world
