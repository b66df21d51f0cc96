"""What a run may go on from, found out before it starts; and what it says about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distaccum import DataSpec, Trainer
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import RunConfig
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.train.components import TrainingComponents, build_components
from distaccum.train.resume import Restore, find_checkpoint
from distaccum.train.run import build_accumulator
from distaccum.train.run_dir import RunDir

SOURCE = DataSpec(train=[(torch.randn(4), torch.tensor(i % 3)) for i in range(16)], eval_dataset=None, description="")


def _config(**more: Any) -> dict[str, Any]:
    return {
        "batch": {"global_size": 8, "micro_size": 4},
        "schedule": {"_target_": "distaccum.train.schedules.Constant"},
        "trainer": {"max_steps": 2, "eval_every": 0},
        "metrics": {"wandb": {"mode": "disabled"}},
    } | more


def _saved(run_dir: Path) -> Path:
    Trainer(nn.Linear(4, 3), CrossEntropy(), SOURCE, config=RunConfig.from_dict(_config()), run_dir=run_dir).fit()
    return run_dir / "checkpoints" / "step-2"


def _components(model: nn.Module, **config: Any) -> TrainingComponents:
    return build_components(
        RunConfig.from_dict(_config(**config)),
        SOURCE,
        model,
        CrossEntropy(),
        world_size=1,
        device=torch.device("cpu"),
    )


def test_a_checkpoint_of_another_model_is_refused_before_the_run(gloo_world: World, tmp_path: Path) -> None:
    path = _saved(tmp_path / "first")
    for resume, run_dir in ((str(path), tmp_path / "second"), ("auto", tmp_path / "first")):
        with pytest.raises(ConfigError, match=r"^resume=.*step-2: has weight of shape \[3, 4\], and the model of \[5"):
            find_checkpoint(_components(nn.Linear(4, 5), resume=resume), RunDir(run_dir))


def test_state_json_is_read_once_on_each_rank(
    gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _saved(tmp_path)
    read: list[Path] = []
    read_text = Path.read_text

    def noted(file: Path, *arguments: Any, **options: Any) -> str:
        if file.name == "state.json":
            read.append(file)
        return read_text(file, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", noted)
    config = RunConfig.from_dict(_config())
    Trainer(nn.Linear(4, 3), CrossEntropy(), SOURCE, max_steps=3, resume="auto", run_dir=tmp_path, config=config).fit()
    assert read == [path / "state.json"]
    Trainer(
        nn.Linear(4, 3),
        CrossEntropy(),
        SOURCE,
        resume=str(path),
        run_dir=tmp_path / "named",
        max_steps=3,
        config=config,
    ).fit()
    assert read == [path / "state.json"] * 2
    components = _components(nn.Linear(4, 3))
    monkeypatch.setattr(World, "broadcast_str", lambda *_: str(path))  # on a rank that did not look for it
    restore = Restore(None, components, gloo_world)
    restore.after_wrap(build_accumulator(components, gloo_world), wandb_id="")
    assert read == [path / "state.json"] * 3


def test_a_resumed_run_says_what_carries_over_and_who_saved_it(
    gloo_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(tmp_path)
    config = _config(resume="auto", trainer={"max_steps": 3, "eval_every": 0})
    Trainer(nn.Linear(4, 3), CrossEntropy(), SOURCE, config=RunConfig.from_dict(config), run_dir=tmp_path).fit()
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "step-2 at step 2; everything carries over; changed since: trainer.max_steps: 2 -> 3 (saved by engine ddp"
        in said
    )


@pytest.mark.fault(
    "two resumes within one epoch",
    group="checkpoints",
    does="ends as the run that was never interrupted does, bit by bit, each record once",
    says="at step 3; everything carries over",
)
def test_two_resumes_in_an_epoch(
    gloo_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Callable[[str], None]
) -> None:
    data = DataSpec(train=[(torch.full((4,), i / 40), torch.tensor(i % 3)) for i in range(40)])  # five windows
    found = []
    for name, parts in (("whole", (7,)), ("parts", (1, 3, 7))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
        for steps in parts:
            trainer = {"max_steps": steps, "eval_every": 0, "log_every": 1}
            config = RunConfig.from_dict(_config(resume="auto", trainer=trainer))
            Trainer(model, CrossEntropy(), data, config=config, run_dir=tmp_path / name).fit()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        exact = ("step", "window", "epoch", "loss", "grad_norm", "samples")
        weights = (tmp_path / name / "checkpoints" / "step-7" / "model.safetensors").read_bytes()
        found.append(([[json.loads(line)[key] for key in exact] for line in lines], weights))
    assert found[0] == found[1]
    assert [record[2] for record in found[0][0]] == [0] * 5 + [1] * 2
    says(capsys.readouterr().out)


def test_weights_of_two_origins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"init_from=w: and resume={tmp_path} has weights too\. Leave one"):
        RunConfig.from_dict({"init_from": "w", "resume": str(tmp_path)})
    assert RunConfig.from_dict({"init_from": "w", "resume": "auto"}).init_from == "w"


def test_auto_refuses_optimizer_state_of_another_format(
    gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _saved(tmp_path)
    file = path / "state.json"
    kept = "kept by index"
    file.write_text(file.read_text().replace("kept by parameter name", kept))
    # Its sums are not those of the manifest any more.
    monkeypatch.setattr(CheckpointStore, "newest_valid", lambda _: path)
    with pytest.raises(ConfigError, match=r"is kept by index, this run's would be kept by parameter"):
        find_checkpoint(_components(nn.Linear(4, 3), resume="auto"), RunDir(tmp_path))
