"""``trainer.eval_every=epoch`` and ``checkpoint.every=epoch``: at each epoch's last update, whatever that is."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distaccum import DataSpec, Trainer
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.train.callbacks import Callback, Run
from tests.support.accumulators import Of
from tests.support.runs import settings

LABELS = 8.0


# Squares of the outputs of rows with a label.
SQUARES = Of(
    lambda model, batch: (model(batch).square().sum(1) * (batch[:, 1] == LABELS)).sum(),
    count=lambda batch: int((batch[:, 1] == LABELS).sum()),
)


class Seen(Callback):
    """The steps, with the windows so far, of what it was told."""

    def __init__(self, stop_at: int = 0) -> None:
        self.evals: list[tuple[int, int]] = []
        self.saves: list[tuple[int, int]] = []
        self._stop_at = stop_at

    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        self.evals.append((run.progress.step, run.progress.window))
        if run.progress.step == self._stop_at:
            run.stop("it is enough")

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self.saves.append((run.progress.step, run.progress.window))


def _rows(size: int, **others: Any) -> list[Tensor]:
    """Those that ``bad`` numbers overflow, and those that ``unlabelled`` numbers count nothing."""
    rows = [torch.tensor([float(i), LABELS]) for i in range(size)]
    for i in others.get("bad", ()):
        rows[i] = torch.tensor([math.inf, LABELS])
    for i in others.get("unlabelled", ()):
        rows[i] = torch.tensor([1.0, 0.0])
    return rows


def _trainer(folder: Path, data: Any, *, seen: Callback, save: Any = "epoch", **given: Any) -> Trainer:
    torch.manual_seed(0)
    values = {"max_steps": None, "max_epochs": 2, "log_every": 3, "eval_every": "epoch", "nonfinite": "skip"}
    groups = {"optim": {"lr": 1e-3}} | {name: given.pop(name) for name in ("batch", "checkpoint") if name in given}
    config = settings((8, 3), values | given.pop("trainer", {}), save=save, **groups)
    return Trainer(nn.Linear(2, 1), SQUARES, data, config=config, callbacks=[seen], run_dir=folder, **given)


def _data(rows: list[Tensor], **settings: Any) -> DataSpec:
    return DataSpec(train=rows, eval_dataset=_rows(5), shuffle=False, description="rows", **settings)


GROWS = {"global_size": 8, "micro_size": 3, "schedule": [{"global_size": 4, "updates": 3}]}
TOKENS = {"tokens": 10, "global_size": None, "micro_size": 3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[int, int]]]] = {
    "a ragged epoch": ({"size": 20}, {}, [(3, 3), (6, 6)]),
    "one update an epoch": ({"size": 8}, {}, [(1, 1), (2, 2)]),
    "a batch that grows": ({"size": 20}, {"batch": GROWS}, [(4, 4), (7, 7)]),
    "windows cut by tokens": ({"size": 20}, {"batch": TOKENS}, [(7, 7), (14, 14)]),
    "its last window is skipped": ({"size": 20, "bad": [17]}, {}, [(2, 3), (4, 6)]),
    "its last window counts nothing": ({"size": 20, "unlabelled": range(16, 20)}, {}, [(2, 3), (4, 6)]),
    "another window is skipped": ({"size": 20, "bad": [2]}, {}, [(2, 3), (4, 6)]),
    "updates end first": ({"size": 20}, {"trainer": {"max_steps": 4}}, [(3, 3), (4, 4)]),
    "a record at each": ({"size": 20, "bad": [17]}, {"trainer": {"log_every": 1}}, [(2, 3), (4, 6)]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_epoch_is_evaluated_and_saved_once_after_its_last_update(
    case: str, gloo_world: World, tmp_path: Path
) -> None:
    rows, given, expected = CASES[case]
    lengths = np.full(20, 3) if given.get("batch") is TOKENS else None
    seen = Seen()
    _trainer(tmp_path, _data(_rows(**rows), lengths=lengths), seen=seen, **given).fit()
    assert seen.evals == expected
    assert seen.saves == expected
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [(one["step"], one["window"], one["epoch"]) for one in records if "eval_loss" in one]
    assert evaluated == [(step, window, i) for i, (step, window) in enumerate(expected)]


def test_a_resumed_run_evaluates_no_epoch_twice(gloo_world: World, tmp_path: Path) -> None:
    """From the end of an epoch, and from its middle."""
    for save, first in (("epoch", 3), (2, 4)):
        folder = tmp_path / str(save)
        before, after = Seen(), Seen()
        _trainer(folder, _data(_rows(20)), seen=before, save=save, max_steps=first).fit()
        _trainer(folder, _data(_rows(20)), seen=after, save=save, resume="auto", max_epochs=3).fit()
        assert before.evals == [(step, step) for step in {3, first}]
        assert after.evals == [(6, 6), (9, 9)]


def test_the_best_epoch_is_kept_and_a_callback_may_stop_there(gloo_world: World, tmp_path: Path) -> None:
    data = _data(_rows(20, bad=[17]))  # the last window of each is skipped
    seen = Seen(stop_at=4)
    best = {"best": "eval_loss", "every": 100}
    _trainer(tmp_path, data, seen=seen, checkpoint=best, trainer={"max_epochs": 5}).fit()
    assert seen.evals == [(2, 3), (4, 6)]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["checkpoint"] == "step-4"


@pytest.mark.parametrize(
    ("key", "given"),
    [("trainer.eval_every", {"eval_every": "epoch"}), ("checkpoint.every", {"checkpoint_every": "epoch"})],
)
def test_a_stream_has_no_known_epoch(key: str, given: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key}=epoch: the data is a stream, and nobody knows how long its epoch is"
    ):
        Trainer(nn.Linear(2, 1), SQUARES, iter([]), max_steps=3, **given)
