"""Streams of which the ranks hold different and unknown amounts: all of it once, exactly, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.workers import stream as stream_worker
from tests.support.answers import WORKERS, answer
from tests.support.commands import ROOT, metrics, succeed


@pytest.fixture(scope="module")
def results() -> Any:
    return answer("stream", timeout=40)  # 20 s for each case


@pytest.mark.parametrize("way", ["accumulator", "counted afterwards", "trainer"])
@pytest.mark.parametrize("case", stream_worker.BATCHES)
def test_all_samples_once_an_epoch_in_exact_windows(results: dict[str, Any], case: str, way: str) -> None:
    windows = results[case][way]
    streams = [stream_worker.Stream(size, rank) for rank, size in enumerate(stream_worker.BATCHES[case])]
    held = [number for stream in streams for number in stream.numbers]
    half = len(windows) // 2
    for epoch in (windows[:half], windows[half:]):
        assert sorted(n for window in epoch for share in window["samples"] for n in share) == sorted(held)
        sizes = [sum(map(len, window["samples"])) for window in epoch]
        # Samples fill every window but the last; whole micro-batches leave out at most what one more would exceed.
        missing = 0 if way == "trainer" else stream_worker.MICRO_SIZE - 1
        assert all(stream_worker.GLOBAL_SIZE - missing <= size <= stream_worker.GLOBAL_SIZE for size in sizes[:-1])
        for window in epoch:
            expected = _truth([n for share in window["samples"] for n in share])
            found = torch.tensor(window["gradient"], dtype=torch.float64)
            assert float((found - expected).norm() / expected.norm()) <= 1e-6
    assert windows[:half] == windows[half:]  # the next epoch starts afresh


def _truth(numbers: list[int]) -> torch.Tensor:
    """The gradient of the window's mean: fp64, one process, the whole batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(stream_worker.WIDTH, 1).double()
    x = torch.stack([stream_worker.sample(n)["x"] for n in numbers]).double()
    loss = model(x).square().sum() / sum(n % 3 + 1 for n in numbers)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


KINDS = ("torchdata", "workers", "datasets", "datasets-shuffled", "loader", "bare")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs of 12 updates over 34 samples, two epochs and more: at once, and in two parts that meet inside an epoch."""
    whole, parts = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("parts")
    worker, kinds = WORKERS / "stateful.py", ",".join(KINDS)
    for folder, steps, resume in ((whole, 12, "never"), (parts, 7, "never"), (parts, 12, "auto")):
        succeed(folder, kinds, steps, resume, world=2, script=worker, PYTHONPATH=str(ROOT))
    return whole, parts


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_stream_goes_on_bitwise(folders: tuple[Path, Path], kind: str) -> None:
    whole, parts = (metrics(folder / kind) for folder in folders)
    assert [record["step"] for record in parts] == list(range(1, 13))
    for name in ("loss", "grad_norm", "samples", "epoch"):
        assert [record[name] for record in parts] == [record[name] for record in whole], name
    assert whole[-1]["epoch"] >= 2
