"""DeepSpeed's files are unpickled without restriction: what could run code is refused before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distaccum.checkpoint.store import MANIFEST, _seal
from distaccum.engines.deepspeed import files
from distaccum.errors import CheckpointError
from tests.support.commands import ROOT, run
from tests.support.optional import needs

pytestmark = needs("deepspeed")

SAVED = ROOT / "tests" / "data" / "checkpoints" / "deepspeed"


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        import os  # noqa: PLC0415

        return os.mkdir, (str(self.canary),)


def _with_a_trap(folder: Path, canary: Path) -> Path:
    shutil.copytree(SAVED, folder)
    step = folder / "checkpoints" / "step-3"
    torch.save({"optimizer_state_dict": Trap(canary)}, next(step.rglob("*rank_1*optim_states.pt")))
    (step / MANIFEST).unlink()
    _seal(step)  # by whoever wrote it
    return step


def test_deepspeeds_own_files_are_read(tmp_path: Path) -> None:
    files.check_inert(SAVED)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    step = _with_a_trap(tmp_path / "run", tmp_path / "canary")
    with pytest.raises(CheckpointError, match=r"cannot load: .*rank_1.*holds more than tensors .*mkdir"):
        files.check_inert(step)
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
@pytest.mark.fault(
    "DeepSpeed's files that would run code",
    group="checkpoints",
    does="are not unpickled; the run ends, exit code 1",
    says="holds more than tensors and plain values",
)
def test_a_run_does_not_go_on_from_it(tmp_path: Path, says: Callable[[str], None]) -> None:
    from tests.distributed.test_old_checkpoints import ENGINES, SETTINGS  # noqa: PLC0415

    _with_a_trap(tmp_path / "run", tmp_path / "canary")
    resumed = run(*SETTINGS, *ENGINES["deepspeed"], f"hydra.run.dir={tmp_path / 'run'}", world=2, warm="deepspeed")
    assert resumed.returncode
    says(resumed.stderr)
    assert not (tmp_path / "canary").exists()
