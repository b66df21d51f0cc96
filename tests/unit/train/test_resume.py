"""What a run may go on from, found out before it starts, in a sweep too; and what it says about it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distaccum import DataSpec, Trainer
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.schema import RunConfig
from distaccum.data.cursor import has_grown
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.tools.sweeps import require_same_choice, swept
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
        RunConfig.from_dict(_config(**config)), SOURCE, model, CrossEntropy(), world_size=1, device=torch.device("cpu")
    )


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


@pytest.mark.fault("two resumes within one epoch")
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


def test_more_data_begin_with_the_next_epoch(
    gloo_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[list[int]] = []

    class Seen(CrossEntropy):
        def count(self, batch: Any) -> int:
            found.append((batch[0][:, 0] * 64).int().tolist())
            return len(batch[0])

    def run(samples: int, steps: int | None, epochs: int | None = None, **more: Any) -> None:
        data = DataSpec(train=[(torch.full((4,), i / 64), torch.tensor(i % 3)) for i in range(samples)])
        trainer = {"max_steps": steps, "max_epochs": epochs, "eval_every": 0, "verify": "never"}
        config = RunConfig.from_dict(_config(resume="auto", trainer=trainer, **more))
        Trainer(nn.Linear(4, 3), Seen(), data, config=config, run_dir=tmp_path).fit()

    run(40, 2)  # of five windows
    with pytest.raises(ConfigError, match=r"samples=64: but .* with samples=40\. .*; or resume_allow=\[data\] ends"):
        run(64, 10)
    found.clear()
    with pytest.raises(
        ConfigError, match=r"max_epochs=2: counts 16 updates, .* after 10\. State trainer\.max_steps=10 "
    ):
        run(64, None, 2, resume_allow=["data"])
    run(64, 10, 2, resume_allow=["data"])  # eight windows
    assert sorted(i for batch in found for i in batch) == list(range(64))
    assert "with other samples from the next epoch on" in " ".join(capsys.readouterr().out.split())


def test_the_weights_of_samples_grow_with_the_data_alone() -> None:
    before = {"samples": 40, "seed": "0, of weights 1 (a hash)"}
    others = [(64, "0, of weights 2"), (64, "1, of weights 2"), (64, "0"), (40, "0, of weights 2")]
    assert [has_grown(before, {"samples": number, "seed": seed}) for number, seed in others] == [True, *[False] * 3]


@pytest.mark.parametrize("then", ["frozen", "thawed"])
@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_layers_are_frozen_or_thawed_on_a_resume(engine: str, then: str, gloo_world: World, tmp_path: Path) -> None:
    """The layer goes on from its weights; a thawed one as a new optimizer does, a frozen one does not move."""
    for steps, frozen in ((2, then == "thawed"), (4, then == "frozen")):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        config = _config(resume="auto", trainer={"max_steps": steps, "eval_every": 0}, engine={"name": engine})
        settings: dict[str, Any] = {"config": RunConfig.from_dict(config), "optimizer": optimizer}
        Trainer(model, CrossEntropy(), SOURCE, run_dir=tmp_path, **settings).fit()
    before, after = (load_file(tmp_path / f"checkpoints/step-{n}/model.safetensors") for n in (2, 4))
    assert torch.equal(before["0.weight"], after["0.weight"]) == (then == "frozen")
    assert not torch.equal(before["1.weight"], after["1.weight"])


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


def _made_with(folder: Path, overrides: str) -> RunDir:
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text(overrides)
    (folder / "checkpoints" / "step-3").mkdir(parents=True)
    return RunDir(folder)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"optim.lr": "0.001", "model": "gpt"}, ""),
        (
            {"optim.lr": "0.002"},
            "optim.lr=0.002: the run in .* was made with 1e-3, and resume=auto would take its result",
        ),
        ({"model": "cnn"}, "model=cnn: the run in .* was made with gpt,"),
        ({"seed": "2"}, "seed=2: the run in .* was made without it,"),
    ],
)
def test_a_choice_is_the_runs_own(tmp_path: Path, chosen: dict[str, str], said: str) -> None:
    run_dir = _made_with(tmp_path, "- optim.lr=1e-3\n- model=gpt\n- trainer.max_steps=3\n")
    if not said:
        require_same_choice(chosen, run_dir)
        return
    with pytest.raises(ConfigError, match=said):
        require_same_choice(chosen, run_dir)


def test_what_is_damaged_says_no_choice(tmp_path: Path) -> None:
    require_same_choice({"optim.lr": "1"}, _made_with(tmp_path, "- 'a\n"))


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    run_dir = _made_with(tmp_path, "- optim.lr=1e-3\n")
    (tmp_path / "checkpoints" / "step-3").rmdir()
    require_same_choice({"optim.lr": "1"}, run_dir)


@pytest.mark.parametrize(
    ("arguments", "overrides", "expected"),
    [
        (["-m", "optim.lr=1e-3,1e-2", "seed=1"], ["optim.lr=1e-3", "seed=1"], {"optim.lr": "1e-3"}),
        (["optim.lr=tag(log, interval(1e-4, 1e-1))", "+a=[1, 2]"], ["optim.lr=0.5", "+a=[1,2]"], {"optim.lr": "0.5"}),
        (["--config-dir", "here", "seed=range(3)"], ["seed=2"], {"seed": "2"}),
        (["-m", "seed=1"], ["optim.lr=0.1", "seed=1"], {"optim.lr": "0.1"}),  # by hydra.sweeper.params
    ],
)
def test_what_is_swept_is_what_the_command_line_does_not_state(
    arguments: Sequence[str], overrides: Sequence[str], expected: dict[str, str]
) -> None:
    assert swept(overrides, arguments) == expected
