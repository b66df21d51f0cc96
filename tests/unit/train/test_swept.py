"""A run of a sweep that resumes: with the values it was made with, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from distaccum.errors import ConfigError
from distaccum.train.run_dir import RunDir
from distaccum.train.sweeps import require_same_choice, swept


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
