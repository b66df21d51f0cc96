"""Evaluations in one process: who loads the held-out samples, in which batches, and without a trace in the training."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console  # noqa: F401  its import draws from `random`, and the first of two runs would do it
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distaccum import CrossEntropy, DataSpec, RunConfig, Trainer
from distaccum.data.held_out import HeldOut, evaluation_workers
from distaccum.data.spec import WorkerOptions
from distaccum.distributed.world import World
from distaccum.errors import DataError


def _samples(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return [(x, x[:3].argmax()) for x in torch.randn(size, 4, generator=generator)]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def _trainer(folder: Path, data: Any, loss: Any = None, **trainer: Any) -> Trainer:
    values = {
        "batch": {"global_size": 8, "micro_size": 4},
        "schedule": {"_target_": "distaccum.train.schedules.Constant"},
        "trainer": {"max_steps": 4, "eval_every": 1, **trainer},
        "checkpoint": {"every": 0},
        "metrics": {"console": False, "wandb": {"mode": "disabled"}},
    }
    return Trainer(_model(), loss or CrossEntropy(), data, config=RunConfig.from_dict(values), run_dir=folder)


def in_fp64(model: nn.Module, samples: Any) -> dict[str, float]:
    """The mean loss and the accuracy, one process, the whole set at once."""
    x, labels = (torch.stack(parts) for parts in zip(*samples, strict=True))
    logits = model.double()(x.double())
    found = {"eval_loss": nn.functional.cross_entropy(logits, labels), "eval_accuracy": (logits.argmax(1) == labels)}
    return {name: float(value.double().mean()) for name, value in found.items()}


class Random:
    """Samples that draw from every generator of the process that loads them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x = torch.rand(4) + random.random() + float(np.random.rand())  # noqa: NPY002, S311
        return x, torch.tensor(index % 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_evaluations_ends_in_the_weights_of_one_without(
    workers: int, gloo_world: World, tmp_path: Path
) -> None:
    data = DataSpec(train=Random(40), eval_dataset=Random(7))
    weights = []
    for eval_every in (0, 1):
        trainer = _trainer(tmp_path / str(eval_every), data, eval_every=eval_every, num_workers=workers)
        trainer.fit()
        weights.append(torch.cat([p.detach().flatten() for p in trainer._components.model.parameters()]))
    assert torch.equal(*weights)


class Told:
    """Samples that say what became of the process that loads them."""

    def __init__(self, size: int) -> None:
        self.size, self.opened = size, False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        ignores = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        blocks = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return torch.tensor([info is not None, self.opened, ignores and blocks], dtype=torch.float32)


def _open(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened = True


class Sums:
    """The columns of a batch as three losses."""

    def count(self, batch: Tensor) -> dict[str, float]:
        return dict.fromkeys(("worker", "opened", "protected"), float(len(batch)))

    def __call__(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        zero = 0 * model(torch.zeros(1, 4)).sum()
        return {name: batch[:, i].sum() + zero for i, name in enumerate(("worker", "opened", "protected"))}


def test_held_out_samples_are_loaded_as_the_persons_own_loader_loads(gloo_world: World, tmp_path: Path) -> None:
    loader = DataLoader(Told(16), batch_size=4, num_workers=1, worker_init_fn=_open, prefetch_factor=3, timeout=60)  # type: ignore[arg-type]  # it has len() and [index]
    results = _trainer(tmp_path, DataSpec(train=loader, eval_dataset=Told(7)), Sums(), max_steps=1).fit()
    assert results == {"eval_loss": 3.0, "eval_worker": 1.0, "eval_opened": 1.0, "eval_protected": 1.0}


def test_of_a_streams_loader_all_is_taken_but_what_divides_the_stream() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    loader = DataLoader(Stream(), batch_size=4, num_workers=2, worker_init_fn=_open, prefetch_factor=3, timeout=9)
    expected = WorkerOptions(num_workers=2, prefetch_factor=3, timeout=9)
    assert evaluation_workers(DataSpec(train=loader), 0) == expected


class Dies(Told):
    """Its sixth sample kills the process that loads it."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_loading_process_that_dies_is_named(gloo_world: World, tmp_path: Path) -> None:
    data = DataSpec(train=Told(16), eval_dataset=Dies(9))
    with pytest.raises(DataError, match=r"the loading process \d+ was killed by SIGKILL.* while the held-out data"):
        _trainer(tmp_path, data, Sums(), max_steps=1, num_workers=1).fit()


@pytest.mark.parametrize(("samples", "size"), [(23, 4), (13, 4), (12, 4), (5, 1), (8, 2), (2, 1), (1, 1)])
def test_whole_batches_are_dealt_to_the_ranks(samples: int, size: int) -> None:
    """``size`` is 4, or less where three ranks would not all have a batch."""
    ranks = [
        HeldOut(
            range(samples),
            World(rank=rank, size=3, device=torch.device("cpu")),
            limit=None,
            micro_batch_size=4,
            collate=list,
            workers=WorkerOptions(),
            seed=0,
        )
        for rank in range(3)
    ]
    expected = [list(range(first, min(first + size, samples))) for first in range(0, samples, size)]
    found = [[batch for batch, is_own in one.batches(in_lockstep=True) if is_own] for one in ranks]
    assert found == [expected[rank::3] for rank in range(3)]
    assert {len(list(one.batches(in_lockstep=True))) for one in ranks} == {-(-len(expected) // 3)}
    assert [list(one.batches(in_lockstep=False)) for one in ranks] == [[(b, True) for b in own] for own in found]
