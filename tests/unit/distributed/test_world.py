from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from distaccum.distributed import world as world_module
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.testing import single_process_world
from tests.support.threads import run_ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_torchruns_variables_are_read() -> None:
    ranks = LaunchEnvironment.from_environment(TORCHRUN)
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.launched) == (3, 4, 1, True)


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    assert LaunchEnvironment.from_environment({"MASTER_PORT": "1"}) == LaunchEnvironment()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher_is_refused(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing}: not set"):
        LaunchEnvironment.from_environment({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_that_are_no_ranks_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=2: .* each would train alone. Start one task a node with torchrun"):
        LaunchEnvironment.from_environment({name: "2", "SLURM_NTASKS": "2"})
    assert LaunchEnvironment.from_environment({name: "1", "SLURM_NTASKS": "2"}) == LaunchEnvironment()
    assert LaunchEnvironment.from_environment(TORCHRUN | {name: "2"}).size == 4
    with single_process_world():  # a program that makes ranks of its tasks itself
        assert LaunchEnvironment.from_environment({name: "2"}) == LaunchEnvironment()


def test_a_rank_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="RANK=x: not a number"):
        LaunchEnvironment.from_environment(TORCHRUN | {"RANK": "x"})


def test_collectives_of_one(gloo_world: World) -> None:
    assert gloo_world.all_reduce_host([3, 2**53 - 1, 0.5]) == [3, 2**53 - 1, 0.5]
    assert gloo_world.all_reduce_max_host([3, 4]) == [3, 4]
    assert gloo_world.all_gather_names(["b", "a", "b"]) == ("a", "b")
    assert gloo_world.all_reduce_(torch.tensor([1.5])).tolist() == [1.5]
    assert gloo_world.broadcast_str("a") == "a"
    assert gloo_world.is_main
    gloo_world.barrier()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.uint8])
@pytest.mark.parametrize("row", [(), (3,), (2, 0)])
@pytest.mark.parametrize("rows", [(2, 0, 3), (0, 0, 0)])
def test_rows_of_all_ranks(dtype: torch.dtype, row: tuple[int, ...], rows: tuple[int, ...]) -> None:
    given = [torch.randn(number, *row).mul(9).to(dtype) for number in rows]
    for found in run_ranks(3, lambda world: world.all_gather_rows(given[world.rank], rows)):
        assert not isinstance(found, BaseException)
        assert [one.dtype for one in found] == [dtype] * 3
        assert all(torch.equal(*pair) for pair in zip(found, given, strict=True))


def test_the_group_is_closed_on_failure_and_can_be_opened_again() -> None:
    def fail() -> None:
        with single_process_world():
            raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError, match="inside"):
            fail()
        assert not dist.is_initialized()


def test_the_groups_timeout_is_read_when_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "GROUP_TIMEOUT", timedelta(seconds=7))
    cpu = torch.device("cpu")
    with world_module.open_world(LaunchEnvironment(), HashStore(), cpu):
        group = dist.group.WORLD
        assert group is not None
        assert group._get_backend(cpu).options._timeout == timedelta(seconds=7)


def test_a_second_group_is_refused(gloo_world: World) -> None:
    with pytest.raises(RuntimeError, match="open already"), single_process_world():
        pass
    assert gloo_world.all_reduce_host([1]) == [1]
