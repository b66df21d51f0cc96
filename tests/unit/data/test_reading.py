"""What is to be known of samples beside the training is read where they are loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.data.loading_processes import reading
from distaccum.data.spec import WorkerOptions
from distaccum.distributed.world import World
from tests.support.runs import settings

SAMPLES = 12


class OpensItsFile:
    """With the first sample, as datasets do for loading processes: those that are forked later would share it."""

    def __init__(self, path: Path) -> None:
        self.file: Any = None
        self.path, self.readers = path, path.with_suffix(".readers")
        path.write_bytes(bytes(range(SAMPLES)))

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
            with self.readers.open("a") as readers:
                readers.write(f"{os.getpid()}\n")
        self.file.seek(index)
        value = float(self.file.read(1)[0])
        return torch.tensor([value, 1.0]), torch.tensor(index % 2)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class Named:
    """Without scores: it is asked for the count of a held-out sample, as losses with names may differ."""

    def __init__(self) -> None:
        self.of = CrossEntropy()

    def count(self, batch: Any) -> dict[str, int]:
        return {"classes": self.of.count(batch)}

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"classes": self.of(model, batch)}


def test_no_file_is_opened_where_processes_are_forked(gloo_world: World, tmp_path: Path) -> None:
    data = OpensItsFile(tmp_path / "data")
    trainer = {"num_workers": 1, "eval_every": 1, "host_memory": "1GiB", "max_steps": 1}
    config = settings((5, 3), trainer, save=1, checkpoint={"best": "eval_classes", "mode": "min"}, schedule={})
    spec = DataSpec(train=data, eval_dataset=data, ignored={1: -100}, pad_rows=True)
    Trainer(Line(), Named(), spec, config=config, run_dir=tmp_path / "run").fit()
    readers = set(data.readers.read_text().split())
    assert data.file is None
    assert readers
    assert str(os.getpid()) not in readers


def test_a_sample_that_cannot_be_read_does_not_end_the_reading() -> None:
    for workers in (0, 1):
        found = reading(["a", "b"], [[0], [7], [1]], "".join, WorkerOptions(num_workers=workers))
        assert next(found) == "a"
        with pytest.raises(IndexError):
            next(found)
        assert next(found) == "b"


def test_no_file_is_opened_where_the_dataset_will_be_pickled(tmp_path: Path) -> None:
    data = OpensItsFile(tmp_path / "data")
    found = reading(data, [[3]], len, WorkerOptions(num_workers=2, multiprocessing_context="spawn"))
    assert next(found) == 1
    assert data.file is None
