"""What a run finds and cannot use: one line before anything changes, or a warning."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.checkpoint.store import MANIFEST, _seal
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from tests.support.runs import settings
from tests.unit.checkpoint.test_damage import Canary, _torch

DATA = [(torch.full((4,), i / 16), torch.tensor(i % 3)) for i in range(16)]


class Counts(nn.Linear):
    """A model with extra state."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.forwards = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.forwards += self.training
        return super().forward(batch)

    def get_extra_state(self) -> Any:
        return {"forwards": self.forwards}

    def set_extra_state(self, state: Any) -> None:
        self.forwards = state["forwards"]


def _fit(folder: Path, steps: int, model: nn.Module | None = None, **groups: Any) -> None:
    trainer = {"max_steps": steps, "eval_every": 0, "log_every": 1, "verify": "never"}
    config = settings((4, 4), trainer, save=1, resume=groups.pop("resume", "auto"), **groups)
    Trainer(model or nn.Linear(4, 3), CrossEntropy(), DataSpec(train=DATA), config=config, run_dir=folder).fit()


@pytest.mark.parametrize("how", ["resume", "init_from"])
@pytest.mark.parametrize("content", ["code", "torn"])
def test_extra_state_that_is_a_pickle_is_not_read(how: str, content: str, gloo_world: World, tmp_path: Path) -> None:
    """The error was torch's own, after the process group was made."""
    _fit(tmp_path / "run", 1, Counts())
    step, canary = tmp_path / "run" / "checkpoints" / "step-1", tmp_path / "canary"
    harm = _torch(Canary(canary))
    held = load_file(step / "model.safetensors")
    held["_extra_state"] = torch.frombuffer(bytearray(harm if content == "code" else harm[:60]), dtype=torch.uint8)
    save_file(held, step / "model.safetensors")
    (step / MANIFEST).unlink()
    _seal(step)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    folder, more = (tmp_path / "run", {}) if how == "resume" else (tmp_path / "new", {"init_from": str(step)})
    with pytest.raises(ConfigError) as caught:
        _fit(folder, 2, Counts(), resume="auto" if how == "resume" else "never", **more)
    assert "has extra state of a module as _extra_state: it holds more than tensors" in str(caught.value)
    assert not canary.exists()
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    after.pop(tmp_path / "run" / "status.json", None)
    before.pop(tmp_path / "run" / "status.json", None)
    assert after == before


BROKEN = [
    "",
    '{"checkpoint": 5}',
    '{"checkpoint": "step-1"}',
    '{"checkpoint": "step-1", "metric": "eval_loss", "value": []}',
]


@pytest.mark.parametrize("content", BROKEN)
def test_a_record_of_the_best_that_is_none(content: str, gloo_world: World, tmp_path: Path) -> None:
    """Whatever `best.json` holds, a run goes on, and the best is that of its evaluations from there on."""
    held = {"eval_dataset": DATA[:4]}
    for steps in (1, 3):
        trainer = {"max_steps": steps, "eval_every": 1, "log_every": 1, "verify": "never"}
        config = settings((4, 4), trainer, save=1, resume="auto", checkpoint={"best": "eval_loss"})
        data = DataSpec(train=DATA, **held)
        torch.manual_seed(0)
        Trainer(nn.Linear(4, 3), CrossEntropy(), data, config=config, run_dir=tmp_path).fit()
        if steps == 1:
            (tmp_path / "checkpoints" / "best.json").write_text(content)
    found = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert found["checkpoint"] in ("step-2", "step-3")
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == found["checkpoint"]
