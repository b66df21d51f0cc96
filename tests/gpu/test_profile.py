"""A profile on one GPU: the rows are the device's times, and the files are there. ``pytest -m gpu``."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from distaccum import CrossEntropy, DataSpec, RunConfig, Trainer
from distaccum.distributed.world import World
from distaccum.engines.activation_checkpoint import Checkpoints
from distaccum.tools.profiling import ROWS
from tests.unit.engines.test_activation_checkpoint import Attention, Calls

pytestmark = pytest.mark.gpu
CYCLES = 20_000_000  # of the device: some ten milliseconds


class Busy(nn.Module):
    """Keeps the device busy in its forward, and measures that by events of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.spans: list[tuple[Any, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        torch.cuda._sleep(CYCLES)
        second.record()
        self.spans.append((first, second))
        out: Tensor = self.linear(x)
        return out


def test_the_rows_are_the_devices_times_though_the_host_is_ahead(gpu_world: World, tmp_path: Path) -> None:
    samples = [(torch.full((4,), float(i)), torch.tensor(i % 3)) for i in range(40)]
    values = {
        "batch": {"global_size": 8, "micro_size": 4},
        "trainer": {"max_steps": 4, "log_every": 4, "eval_every": 0, "verify": "never"},
        "checkpoint": {"every": 0},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
        "profile": {"steps": [2, 4], "memory": True, "nvtx": True},
    }
    model = Busy()
    data = DataSpec(train=samples, description="")
    Trainer(model, CrossEntropy(), data, config=RunConfig.from_dict(values), run_dir=tmp_path).fit()
    torch.cuda.synchronize()
    folder = tmp_path / "profile"
    names = ["rank-0.memory.pickle", "rank-0.trace.json.gz", "table.json", "table.md"]
    assert sorted(path.name for path in folder.iterdir()) == names
    table = json.loads((folder / "table.json").read_text())
    assert table["clock"] == "device"
    for number, window in enumerate(table["ranks"][0]["windows"], start=1):
        spans = model.spans[2 * number : 2 * number + 2]
        busy = sum(first.elapsed_time(second) for first, second in spans) / 1e3
        assert busy > 0.001
        assert window["forward"] >= busy * (1 - 1e-3)  # events resolve half a microsecond
        assert sum(window[row] for row in ROWS) == pytest.approx(window["wall"], rel=1e-3)
    with gzip.open(folder / "rank-0.trace.json.gz", "rt") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert {"kernel", "user_annotation"} <= kinds


KERNELS = {
    SDPBackend.FLASH_ATTENTION: "_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_backward_computes_no_attention_again(kernel: SDPBackend) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    module = Attention(64, kernel).to("cuda", torch.bfloat16)
    Checkpoints(module, [module], selective=True, compiled=False)
    with Calls() as calls:
        module(torch.randn(2, 128, 128, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    assert calls.attention == [KERNELS[kernel]]
    assert calls.names.count("tanh") == 2
