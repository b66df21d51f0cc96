"""Replicas over the nodes that a launcher tells."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import DataSpec
from distaccum.config.engine import FSDP2Config
from distaccum.distributed.world import World
from distaccum.engines.factory import create_engine
from distaccum.errors import ConfigError
from distaccum.tools.nodes import nodes_of, replicas_over
from tests.support.accumulators import Loss, over_sgd
from tests.support.threads import on_ranks, run_ranks

TORCHRUN = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environment", "nodes", "replicas"),
    [
        ({}, 1, 1),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, 2, 2),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "3"}, 3, 1),  # of 8, 4 and 4 ranks
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "4"}, 4, 4),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"} | TORCHRUN, 2, 2),  # a torchrun a task
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}, 1, 1),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 16, 1),  # a rank would hold the whole model
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "12"}, 2, 2),  # and 4: of another rank's node it says 4, which is refused
        ({"WORLD_SIZE": "32", "GROUP_WORLD_SIZE": "2"}, 1, 1),  # of another group
    ],
)
def test_nodes_are_those_of_the_launcher(environment: dict[str, str], nodes: int, replicas: int) -> None:
    assert nodes_of(environment, 16) == nodes
    assert replicas_over(nodes, 16) == replicas


def _described(world: World, replicas: Any) -> str:
    model = nn.Linear(4, 4)
    engine = create_engine(model, torch.optim.SGD(model.parameters()), world, engine=FSDP2Config(replicas=replicas))
    return engine.describe()


def test_each_node_has_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "4"), ("GROUP_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for said in on_ranks(4, lambda world: _described(world, "auto")):
        assert said.startswith("sharded over 2 ranks x 2 replicas")


def test_the_first_step_of_replicas_of_shards_is_proven() -> None:
    """Pieces of a second replica begin where those of the first one do: they were looked for behind them."""
    torch.manual_seed(0)
    model, data = nn.Linear(5, 3), DataSpec(train=list(torch.randn(8, 5)))

    def stepped(world: World, replicas: int) -> Tensor:
        own = deepcopy(model)
        engine = FSDP2Config(replicas=replicas)
        acc = over_sgd(own, 0.1, (8, 1), count=len, world=world, engine=engine, verify="first")
        for window in acc.windows(data):
            acc.step(window, Loss())
        return torch.cat([one.flatten() for one in acc.state_dict()["model"].values()])

    (alone,) = on_ranks(1, lambda world: stepped(world, 1))
    for found in on_ranks(4, lambda world: stepped(world, 2)):
        assert torch.allclose(found, alone, rtol=0, atol=1e-6)


def test_ranks_that_would_replicate_otherwise_are_refused() -> None:
    for error in run_ranks(2, lambda world: _described(world, 1 + world.rank)):
        assert isinstance(error, ConfigError)
        assert "engine.replicas" in str(error)
        assert "from 1 to 2 on other ranks" in str(error)


@pytest.mark.parametrize("replicas", ["two", 0, 1.5, True])
def test_what_is_no_number_of_replicas_is_refused(replicas: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.replicas"):
        FSDP2Config(replicas=replicas)
