"""The bound of host memory: fewer micro-batches ahead, and then a refusal with both numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distaccum import CrossEntropy, DataSpec, PadCollator, RunConfig
from distaccum.config.checks import bytes_of
from distaccum.data.factory import build_loader
from distaccum.data.loading_processes import prefetch_factor
from distaccum.data.plan.batch import BatchPlan
from distaccum.data.spec import WorkerOptions
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.tools.host_memory import WindowMemory, window_memory
from distaccum.tools.plan.command import plan as forecast
from distaccum.train.checks import loading_of
from distaccum.train.components import TrainingComponents, build_components
from distaccum.train.summary import _loading
from tests.tools.plan.test_plan import GPT

KIB, MIB = 2**10, 2**20
SAMPLE = 64 * KIB  # bytes: 8192 inputs of 4, and as many labels of 4
DATA = DataSpec(train=[(torch.zeros(8192), torch.zeros(8192, dtype=torch.int32))] * 64)
SIZES: dict[str, Any] = {"global_size": 32, "micro_size": 4}  # on 2 ranks a window of 4 micro-batches, and 1 MiB


class Broken:
    """A dataset whose samples cannot be read here."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(index)


def _components(host_memory: str | None, workers: int = 0, data: DataSpec = DATA, **trainer: Any) -> TrainingComponents:
    settings = {"num_workers": workers, "host_memory": host_memory, **trainer}
    config = RunConfig.from_dict({"batch": SIZES, "trainer": settings})
    return build_components(config, data, nn.Linear(1, 1), CrossEntropy(), world_size=2, device=torch.device("cpu"))


def _factor(components: TrainingComponents) -> int:
    world = World(rank=0, size=2, device=torch.device("cpu"))
    workers = loading_of(components.data, components.config, components.most_ahead)
    loader: Any = build_loader(components.data, components.plan, world, workers=workers)
    return int(loader._loader.prefetch_factor)


@pytest.mark.parametrize(
    ("stated", "workers", "factor"),
    [
        (None, 2, 2),
        ("2MiB", 2, 2),  # the window, and as much ahead
        ("1.9MiB", 2, 1),  # 3 micro-batches ahead are 1 in each of 2 processes
        ("1.5MiB", 2, 1),
        ("1GiB", 1, 4),
        ("1.8MiB", 1, 3),
    ],
)
def test_prefetching_goes_down_first(stated: str | None, workers: int, factor: int) -> None:
    components = _components(stated, workers)
    assert _factor(components) == factor
    assert f"up to {workers * factor} micro-batches ahead" in _loading(components)["loading"]


@pytest.mark.parametrize(
    ("stated", "workers", "said"),
    [
        ("1000MB", 0, None),
        ("1MiB", 0, None),
        ("1023.5KiB", 0, "a rank's window takes 1.0 MiB (4 micro-batches of 0.2 MiB). Raise it, use more ranks"),
        ("1.04MB", 0, "a rank's window takes 1.0 MiB (4 micro-batches of 0.2 MiB). Raise it, use more ranks"),
        ("1.25MiB", 1, None),
        ("1.25MiB", 2, "and 2 loading processes at least 0.5 MiB more. Raise it, or lower trainer.num_workers to 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(stated: str, workers: int, said: str | None) -> None:
    if said is None:
        assert _components(stated, workers).most_ahead is not None
        return
    with pytest.raises(ConfigError) as error:
        _components(stated, workers)
    assert str(error.value).startswith(f"trainer.host_memory={stated}: ")
    assert said in str(error.value)


def test_a_stream_and_what_has_no_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.host_memory=1GiB: the data is a stream"):
        _components("1GiB", data=DataSpec(train=iter([])), max_steps=3)
    with pytest.raises(ConfigError, match=r"trainer\.host_memory=1GiB: the first sample holds no tensor or array"):
        _components("1GiB", data=DataSpec(train=["text"] * 64, collate=list))


def test_the_longest_sample_is_what_counts_with_its_padding() -> None:
    lengths = np.array([3, 9, 5])
    samples = [([1] * n, [1] * n) for n in lengths]
    plan = BatchPlan(samples=3, global_batch_size=3, micro_batch_size=2, world_size=1)
    source = DataSpec(train=samples, lengths=lengths, collate=PadCollator((0, -100), pad_to_multiple_of=4))
    assert window_memory(source, plan) == WindowMemory(micro_batch=2 * 2 * 12 * 8, micro_batches=2)


@pytest.mark.parametrize("value", ["4", 4, "-1GiB", "0GiB", "4 gigabytes", True])
def test_a_size_has_a_unit(value: object) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.host_memory="):
        bytes_of("trainer.host_memory", value)


def test_sizes() -> None:
    assert bytes_of("", "1.5GiB") == 1.5 * 2**30
    assert bytes_of("", "64 MB") == 64e6
    assert bytes_of("", "1KiB") == 1024
    assert bytes_of("", "1.5 KB") == 1500


def test_the_plan_tells_the_bytes_of_a_window() -> None:
    cluster = {"nodes": 1, "gpus": 2, "micro_step_ms": 1.0}
    config: dict[str, Any] = {
        "model": GPT | {"vocab_size": 256, "seq_len": 16, "n_layer": 1, "n_head": 2, "n_embd": 8},
        "data": {"_target_": "distaccum.data.datasets.text.docs", "seq_len": 16, "held_out": 0.1},
        "loss": {"_target_": "distaccum.losses.cross_entropy.CrossEntropy"},
        "batch": SIZES,
    }
    found = forecast({**config, "cluster": cluster})["host"]
    assert found["micro-batches"] == 16 * 2 * 16 * 8
    elsewhere = {"_target_": "distaccum.data.datasets.tokens.tokens", "path": "/nowhere/*.bin", "vocab_size": 2}
    for data in (elsewhere | {"seq_len": 16}, {"_target_": "tests.tools.test_host_memory.Broken"}):
        assert forecast({**config, "data": data, "cluster": cluster})["host"]["micro-batches"] is None


def test_no_more_is_ahead_than_fits() -> None:
    assert prefetch_factor(WorkerOptions(num_workers=4, prefetch_factor=9, most_ahead=11), 64) == 2
