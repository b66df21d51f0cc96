"""A callback and a loss by which a run of the main job notes its windows and micro-batches."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from distaccum.accumulation.step import Outcome
from distaccum.losses.cross_entropy import Batch, CrossEntropy
from distaccum.train.callbacks import Callback, Run
from launch.bench.elastic.notes import note_step, note_unit


class NoteSteps(Callback):
    """Notes each finished window in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_update(self, run: Run, _: Outcome) -> None:
        """Notes it, on rank 0."""
        if dist.get_rank() == 0:
            note_step(self._folder, run.progress.step, dist.get_world_size())


class NotedCrossEntropy(CrossEntropy):
    """Cross entropy that notes each micro-batch in a folder."""

    def __init__(self, folder: str, ignore_index: int = -100) -> None:
        super().__init__(ignore_index=ignore_index)
        self._folder = Path(folder)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Notes it, and goes on as the class it inherits from."""
        note_unit(self._folder, batch[0].numpy().tobytes())
        return super().__call__(model, batch)
