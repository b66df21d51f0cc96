"""Sweeps: Hydra's own and Optuna's, on one rank and on two, and what W&B's agent would type."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from distaccum.train.metrics.loggers import OF_RECORDS
from tests.support.commands import ROOT, TINY, metrics, run, status, succeed
from tests.support.optional import needs

pytestmark = [pytest.mark.slow, needs("optuna")]
SHORT = (
    *TINY,
    "trainer.max_steps=3",
    "trainer.log_every=1",
    "checkpoint.every=0",
    "metrics=jsonl",
    "trainer.eval_samples=64",
)
OPTUNA = ("--multirun", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
SEEDED = "hydra.sweeper.sampler.seed=1"


def _found(sweep: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(sweep / "optimization_results.yaml"))


def _last(folder: Path, name: str) -> float:
    values = [record[name] for record in metrics(folder) if name in record]
    return float(values[-1])


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_optuna_finds_the_best_of_what_the_runs_recorded(tmp_path: Path, world: int) -> None:
    sweep = tmp_path / "sweep"
    interval = "optim.lr=tag(log, interval(1e-4, 1e-1))"
    finished = succeed(*OPTUNA, *SHORT, SEEDED, interval, f"hydra.sweep.dir={sweep}", world=world)
    assert finished.stderr.count("A new study created") == 1  # and not once more with each job
    losses = {number: _last(sweep / str(number), "eval_loss") for number in range(3)}
    best = min(losses, key=lambda number: losses[number])
    found = _found(sweep)
    assert len(set(losses.values())) == 3
    assert found["best_value"] == losses[best]
    overrides = OmegaConf.load(sweep / str(best) / ".hydra" / "overrides.yaml")
    assert f"optim.lr={found['best_params']['optim.lr']}" in overrides
    for record in metrics(sweep / "0"):
        assert all(name.startswith("eval_") or any(fnmatchcase(name, one) for one in OF_RECORDS) for name in record)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_a_run_that_diverges_is_a_failed_trial_and_the_sweep_goes_on(tmp_path: Path, world: int) -> None:
    """A rate of 1e30 gives NaN in the second update; the other ranks wait for the next trial."""
    sweep, rates = tmp_path / "sweep", "optim.lr=choice(1e-3,1e30)"
    going_on = ("hydra.sweeper.sampler.seed=1", "hydra.sweeper.max_failure_rate=1.0")
    settings = (*OPTUNA, *SHORT, *going_on, rates, "objective=loss", "optim.clip_norm=null", f"hydra.sweep.dir={sweep}")
    finished = succeed(*settings, "schedule=constant", world=world)
    states = list(map(_rate_and_state, sorted(sweep.glob("[0-9]"))))
    assert len(states) == 3
    assert set(states) == {(1e-3, "done"), (1e30, "failed")}
    assert states[-1] == (1e-3, "done")
    assert float(_found(sweep)["best_params"]["optim.lr"]) == 1e-3
    assert "NaN" in finished.stderr


@pytest.mark.heavy
def test_a_sweep_takes_no_result_of_another_choice_for_its_own(tmp_path: Path) -> None:
    """Without a fixed seed Optuna chooses other rates for the same folders."""
    sweep, interval = tmp_path / "sweep", "optim.lr=tag(log, interval(1e-4, 1e-1))"
    short = (*SHORT, "checkpoint.every=3", "resume=auto", "hydra.sweeper.n_trials=2")
    settings = (*OPTUNA, *short, interval, f"hydra.sweep.dir={sweep}")
    succeed(*settings, SEEDED, world=2)
    first = _found(sweep)
    other = run(*settings, "hydra.sweeper.sampler.seed=2", world=2)
    assert other.returncode == 2
    (said,) = [line for line in other.stderr.splitlines() if line.startswith("distaccum: ")]
    assert re.search(r"optim\.lr=\S+: the run in \S+/sweep/0 was made with \S+, and resume=auto would take its", said)
    assert (_found(sweep), status(sweep / "0")["state"]) == (first, "done")
    succeed(*settings, SEEDED, "trainer.log_every=2", world=2)  # what is not swept may change
    assert _found(sweep) == first


def _rate_and_state(folder: Path) -> tuple[float, str]:
    overrides = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
    rate = next(one for one in overrides if one.startswith("optim.lr="))
    return float(rate.partition("=")[2]), status(folder)["state"]


def test_a_sweeper_without_an_evaluation_is_told_before_it_trains(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    finished = run(*OPTUNA, *SHORT, "trainer.eval_every=0", "optim.lr=interval(0.1,1)", f"hydra.sweep.dir={sweep}")
    assert finished.returncode == 2
    assert "objective=eval_loss: the run has no evaluation. Hold data out and set eval_every" in finished.stderr
    assert not list(sweep.rglob("metrics.jsonl"))
    two = ("objective=[eval_loss,samples_per_s]", "hydra.sweeper.direction=[minimize,maximize]")
    succeed(*OPTUNA, *SHORT, *two, "optim.lr=interval(0.1,1)", "hydra.sweeper.n_trials=2", f"hydra.sweep.dir={sweep}")
    for solution in _found(sweep)["solutions"]:
        assert solution["values"] in [
            [_last(sweep / number, name) for name in ("eval_loss", "samples_per_s")] for number in "01"
        ]


def test_the_check_goes_through_a_sweepers_trials(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    succeed(*OPTUNA, *SHORT, "optim.lr=interval(0.1,1)", f"hydra.sweep.dir={sweep}", "--check=2")
    assert not list(sweep.rglob("metrics.jsonl"))


def test_hydras_own_sweep_runs_what_it_lists(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    succeed("-m", *SHORT, "optim.lr=1e-3,1e-2", "seed=1,2", "trainer.eval_every=0", f"hydra.sweep.dir={sweep}")
    assert sorted(path.parent.name for path in sweep.rglob("metrics.jsonl")) == list("0123")


def _experiment() -> str:
    page = (ROOT / "docs" / "trackers.md").read_text()
    found = re.search(r"`my_runs/experiment/small.yaml`:\n\n```yaml\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("given", "rates"),
    [
        (("--config-dir", "my_runs", "experiment=small"), [0.02]),
        (("hydra.searchpath=[file://my_runs]", "experiment=small", "optim.lr=0.01"), [0.01]),
        (("--config-dir", "my_runs", "-m", "experiment=small", "optim.lr=0.01,0.02"), [0.01, 0.02]),
    ],
)
def test_the_pages_experiment_by_its_commands(tmp_path: Path, given: tuple[str, ...], rates: list[float]) -> None:
    folder = tmp_path / "my_runs" / "experiment"
    folder.mkdir(parents=True)
    (folder / "small.yaml").write_text(_experiment())
    short = ("trainer.max_steps=2", "metrics=jsonl", "checkpoint.every=0")
    succeed(*given, *short, "hydra.run.dir=run", "hydra.sweep.dir=run", cwd=tmp_path)
    folders = sorted(path.parent for path in (tmp_path / "run").rglob("metrics.jsonl"))
    kept = [OmegaConf.load(one / ".hydra" / "config.yaml") for one in folders]
    assert [one.optim.lr for one in kept] == rates
    assert all((one.batch.global_size, one.data._target_.rpartition(".")[2]) == (64, "digits") for one in kept)
    assert all(metrics(one)[-1]["samples"] == 128 for one in folders)


def test_the_sweep_file_of_wandb_by_its_agents_own_functions(tmp_path: Path) -> None:
    """The agent needs a server; what it types is made here by the functions that it calls, and run offline."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = yaml.safe_load((ROOT / "conf" / "sweeps" / "lr.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file()
    metric, parameters = sweep["metric"], sweep["parameters"]
    assert fnmatchcase(metric["name"], "eval_*")
    chosen = {
        name: {"value": spec["values"][0] if "values" in spec else spec["min"]} for name, spec in parameters.items()
    }
    variables = utils.create_sweep_command_args({"args": chosen})
    variables |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
    typed = [
        part
        for word in sweep["command"]
        for part in (variables[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word])
    ]
    assert typed[:3] == ["/usr/bin/env", "python", "launch/train.py"]
    assert "metrics.wandb.mode=online" in typed
    arguments = [word for word in typed[3:] if word != "metrics.wandb.mode=online"]
    succeed(*arguments, *SHORT, f"hydra.run.dir={tmp_path}")
    kept = OmegaConf.load(tmp_path / ".hydra" / "config.yaml")
    assert {name: OmegaConf.select(kept, name) for name in chosen} == {
        name: one["value"] for name, one in chosen.items()
    }
    assert metric["name"] in metrics(tmp_path)[-1]
