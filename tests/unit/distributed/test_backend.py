"""What carries device tensors between ranks: ranks share a GPU over gloo alone, and what cannot work is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.testing._internal.distributed import fake_pg  # noqa: F401  it registers the backend "fake"

from distaccum import DeepSpeedConfig, RunConfig, Trainer
from distaccum.config import checks
from distaccum.config.engine import ENGINES
from distaccum.distributed.environment import BACKENDS, LaunchEnvironment, check_backend
from distaccum.distributed.world import World, open_world
from distaccum.engines.factory import refuse_gloo
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.testing import single_process_world
from distaccum.train.components import build_components
from tests.support.runs import settings
from tests.unit.train.test_trainer import SOURCE

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _rank(local_rank: int) -> LaunchEnvironment:
    return LaunchEnvironment(rank=local_rank, size=8, local_rank=local_rank, local_size=8, launched=True)


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_each_rank_has_a_gpu_of_its_own_over_nccl(backend: str) -> None:
    assert [_rank(i).gpu(4, backend) for i in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=4: this machine has 4 GPUs\. .*trainer\.backend=gloo"):
        _rank(4).gpu(4, backend)


def test_ranks_share_the_gpus_in_turn_over_gloo_which_the_settings_know() -> None:
    assert BACKENDS == checks.BACKENDS
    assert [_rank(i).gpu(1, "gloo") for i in range(3)] == [0, 0, 0]
    assert [_rank(i).gpu(3, "gloo") for i in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_without_a_gpu_every_rank_computes_on_the_cpu(backend: str) -> None:
    assert _rank(5).gpu(0, backend) is None


def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend=nccl: NCCL carries tensors of GPUs alone"):
        _rank(0).gpu(0, "nccl")
    with (
        pytest.raises(ConfigError, match="backend=nccl: NCCL carries tensors of GPUs alone"),
        open_world(LaunchEnvironment(), HashStore(), CPU, backend="nccl"),
    ):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_backend_that_there_is_not_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"backend=mpi: no such choice\. Use one of auto, nccl, gloo"):
        check_backend("mpi", device)
    with pytest.raises(ConfigError, match=r"trainer\.backend=mpi: no such choice"):
        RunConfig.from_dict({"trainer": {"backend": "mpi"}})


def test_a_group_over_gloo_carries_the_tensors_of_gpus_too() -> None:
    with open_world(LaunchEnvironment(), HashStore(), CPU, backend="gloo") as world:
        serves = dict(item.split(":") for item in dist.get_backend_config().split(","))
        assert (serves["cpu"], serves["cuda"]) == ("gloo", "gloo")
        assert world.backend == "gloo"
        assert World.join(backend="gloo").device == CPU


def test_an_open_group_with_another_backend_is_refused() -> None:
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"backend=gloo: and the process group .* has fake for cpu tensors"):
            World.join(backend="gloo")
    finally:
        dist.destroy_process_group()
    with single_process_world(), pytest.raises(ConfigError, match="backend=nccl: NCCL carries tensors of GPUs alone"):
        World.join(backend="nccl")


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_which_engines_send_a_gpus_tensors_over_gloo(engine: str) -> None:
    settings = ENGINES[engine]()
    refuse_gloo(settings, CPU, key="backend")
    if engine != "deepspeed":
        refuse_gloo(settings, CUDA, key="backend")
        return
    with pytest.raises(ConfigError, match=r"NCCL alone\. Use one GPU a rank .*, or engine=ddp, zero1, fsdp2"):
        refuse_gloo(settings, CUDA, key="backend")


def test_deepspeed_on_a_gpu_over_gloo_is_refused_before_there_is_a_group() -> None:
    config = RunConfig.from_dict({"trainer": {"backend": "gloo"}, "engine": "deepspeed"})
    assert isinstance(config.engine, DeepSpeedConfig)
    with pytest.raises(ConfigError, match=r"trainer\.backend=gloo: engine=deepspeed sends a GPU's tensors over NCCL"):
        build_components(config, SOURCE, nn.Linear(4, 3), CrossEntropy(), world_size=2, device=CUDA)
    assert not dist.is_initialized()


def test_the_trainer_takes_it_from_its_configuration(gloo_world: World, tmp_path) -> None:  # type: ignore[no-untyped-def]
    def trainer(backend: str) -> Trainer:
        config = settings((8, 4), {"max_steps": 1, "backend": backend}, schedule={})
        return Trainer(nn.Linear(4, 3), CrossEntropy(), SOURCE, config=config, run_dir=tmp_path)

    assert trainer("gloo").fit()["eval_loss"] > 0
    said = r"^trainer\.backend=nccl: NCCL carries tensors of GPUs alone, and here is none\. Use trainer\.backend=auto"
    with pytest.raises(ConfigError, match=said):
        trainer("nccl")
