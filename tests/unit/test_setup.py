"""What is installed: the lock files, the lines that install what they leave out, and the table of versions."""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from distaccum.config import extras
from distaccum.config.extras import install_command
from distaccum.engines.deepspeed.internals import WORKING
from distaccum.engines.fsdp2.internals import NEWEST, OLDEST
from distaccum.tools.command_line import from_hydra
from tests.support.commands import ROOT
from tests.support.versions import DOCUMENT, ENGINES, STAGES, rows_of, written

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE = sysconfig.get_path("purelib")  # setuptools, once imported, shows copies of packages that it carries
CUDA = re.compile("nvidia-|cuda-|triton$")  # torch pins these itself, where its wheel is one for GPUs


def _pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line[0] not in "#-"]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    return {canonicalize_name(name): number for name, number in pins.items()}


@pytest.mark.parametrize("name", ["requirements", "requirements-dev"])
def test_each_version_of_a_lock_file_has_hashes(name: str) -> None:
    """``pip install --require-hashes`` takes nothing without; other systems' packages lie beside the lock file's."""
    hashes = r"(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+"
    entries = re.findall(rf"^([\w.-]+)==(\S+)(?: ;.*?)? \\{hashes}$", _text(name), re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[\w.-]+==", _text(name), re.MULTILINE))
    found, pins = {canonicalize_name(package): number for package, number in entries}, _pins(f"{name}.lock")
    assert {package: found.get(package) for package in pins} == pins
    others = {package for package in found.keys() - pins.keys() if not CUDA.match(package)}
    assert others <= {"appnope", "httpx2-jsfetch", "setuptools"}
    if name != "requirements":
        assert "-r requirements-hashed.lock" in _text(name).splitlines()


def _text(name: str) -> str:
    return (ROOT / f"{name}-hashed.lock").read_text()


@pytest.fixture
def locked() -> None:
    """Skips in an environment of other versions: what they need is not what the lock files list."""
    pins = _pins("requirements.lock") | _pins("requirements-dev.lock")
    installed = {canonicalize_name(one.name): one.version.partition("+")[0] for one in distributions(path=[SITE])}
    other = sorted(name for name, number in pins.items() if installed.get(name) != number)
    if other:
        pytest.skip(f"not the locked versions: {', '.join(other)}")


def _closure(requirements: list[str]) -> set[str]:
    """The packages that these need on this machine, themselves included, but for CUDA's libraries."""
    found, open_ = set[tuple[str, str]](), [(Requirement(one), "") for one in requirements]
    while open_:
        requirement, extra = open_.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if CUDA.match(name):
            continue
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                open_ += [(Requirement(one), wanted) for one in requires(name) or []]
    return {name for name, _ in found} - {"distaccum", "setuptools"}


def _own(*names: str) -> list[str]:
    """The packages of these extras; an extra of distaccum itself stands for its packages."""
    listed = [Requirement(one) for name in names for one in PROJECT["optional-dependencies"][name]]
    inner = [extra for one in listed if one.name == "distaccum" for extra in one.extras]
    return [str(one) for one in listed if one.name != "distaccum"] + (_own(*inner) if inner else [])


@pytest.mark.usefixtures("locked")
def test_the_runtime_lock_holds_what_the_main_job_needs_and_no_more() -> None:
    assert set(_pins("requirements.lock")) == _closure(PROJECT["dependencies"])


@pytest.mark.usefixtures("locked")
def test_the_development_lock_adds_every_extra() -> None:
    runtime, development = _pins("requirements.lock"), _pins("requirements-dev.lock")
    assert not set(runtime) & set(development)
    assert set(runtime) | set(development) == _closure(
        PROJECT["dependencies"] + _own(*PROJECT["optional-dependencies"])
    )
    assert "-c requirements.lock" in (ROOT / "requirements-dev.lock").read_text().splitlines()


@pytest.mark.parametrize(
    ("argument", "installed"), [("engine=deepspeed", 1), ("engine=ddp", 0), ("+x=engine=deepspeed2", 0)]
)
def test_deepspeed_is_installed_once_where_a_run_names_it(argument: str, installed: int, tmp_path: Path) -> None:
    """With a python that notes what it is asked to do."""
    kept = [tmp_path / ".venv" / "installed", tmp_path / ".venv" / "bin", tmp_path / "launch"]
    for folder in kept:
        folder.mkdir(parents=True)
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
        shutil.copy(ROOT / name, kept[0])
    shutil.copy(ROOT / "launch" / "setup.sh", kept[2])
    python = kept[1] / "python"
    look = '[ "$1" != -c ] || exec test -e "$0.has"'
    python.write_text(f'#!/bin/bash\n{look}\ntouch "$0.has"\necho "$@" >> "$0.log"\n')
    python.chmod(0o755)
    for _ in range(2):
        subprocess.run(["/bin/bash", "-c", f"set -eu; source {kept[2] / 'setup.sh'}", "train.sh", argument], check=True)
    log = kept[1] / "python.log"
    asked = log.read_text().splitlines() if log.exists() else []
    assert [f"-e {tmp_path}[deepspeed]" in line for line in asked] == [True] * installed


def test_a_missing_extra_is_answered_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [sys.executable, "-m", "pip", "install", "-c", str(ROOT / "requirements-dev.lock"), "distaccum[hf]"]
    assert shlex.split(install_command("hf")) == line
    monkeypatch.setattr(extras, "_LOCK", tmp_path / "none")  # a wheel has no lock
    assert shlex.split(install_command("hf")) == [*line[:4], "distaccum[hf]"]


def test_every_extra_that_is_named_exists() -> None:
    named = {
        extra
        for path in (ROOT / "distaccum").rglob("*.py")
        for extra in re.findall(r"install_command\([\"'](\w+)", path.read_text())
    }
    assert named == {"adapters", "deepspeed", "digits", "fp8", "hf", "parquet", "plot", "slurm", "sweep"}
    assert named <= set(PROJECT["optional-dependencies"])


def test_without_submitit_its_launcher_names_the_extra() -> None:
    error = MissingConfigException(
        "In 'hydra/launcher/slurm': ...", "hydra/launcher/submitit_slurm", ["basic", "slurm"]
    )
    assert "'distaccum[slurm]'" in str(from_hydra(error, ["-m", "hydra/launcher=slurm"]))


def test_without_its_sweeper_optuna_names_the_extra() -> None:
    error = MissingConfigException("Could not find 'hydra/sweeper/optuna' ...", "hydra/sweeper/optuna", ["basic"])
    assert "'distaccum[sweep]'" in str(from_hydra(error, ["-m", "hydra/sweeper=optuna"]))


TEXT = DOCUMENT.read_text()
ROWS = rows_of(TEXT)


def test_the_script_would_write_the_table_as_it_stands_and_every_cell_is_exact_or_refused() -> None:
    assert written(TEXT, ROWS) == TEXT
    assert {cell for cells in ROWS.values() for cell in cells} <= {"exact", "refused"}


@pytest.mark.parametrize("torch", [f"{OLDEST}.0", "2.10.0", "2.13.0", f"{NEWEST}.0"])
def test_the_oldest_and_the_newest_that_are_said_to_work_were_run(torch: str) -> None:
    assert all(ROWS[torch, "", engine] == ("exact",) * 4 for engine in ENGINES)
    assert all(ROWS[torch, WORKING[1], stage] == ("exact",) * 4 for stage in STAGES)


@pytest.mark.parametrize("torch", [OLDEST, NEWEST])
def test_the_oldest_deepspeed_was_run_with_both_ends(torch: str) -> None:
    assert {(f"{torch}.0", WORKING[0], stage) for stage in STAGES} <= ROWS.keys()
