"""Saves in the background on several ranks: every engine's checkpoints are those of a run that waits for them."""

from pathlib import Path

import pytest

from distaccum.checkpoint.store import CheckpointStore, verify
from tests.support.commands import ROOT, TINY, run, status, succeed

pytestmark = pytest.mark.slow
SETTINGS = (
    *TINY,
    "batch.global_size=8",
    "batch.micro_size=2",
    "trainer.max_steps=6",
    "trainer.eval_every=0",
    "trainer.log_every=1",
    "trainer.verify=never",
    "metrics=jsonl",
    "checkpoint.every=2",
    "checkpoint.keep=0",
    "resume=auto",
)


def _content(folder: Path) -> dict[str, bytes]:
    steps = CheckpointStore(folder / "checkpoints", keep=0).steps()
    for step in steps:
        verify(step)
        assert not list(step.glob(".*"))
    return {f"{step.name}/{file.name}": file.read_bytes() for step in steps for file in step.glob("*.safetensors")}


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["zero1", "fsdp2"])
def test_each_engine_saves_the_same(tmp_path: Path, engine: str) -> None:
    for name, background in (("waits", "false"), ("goes", "true")):
        settings = (*SETTINGS, f"engine={engine}", f"checkpoint.background={background}")
        succeed(*settings, f"hydra.run.dir={tmp_path / name}", world=2)
    found = _content(tmp_path / "goes")
    assert len({name.split("/")[0] for name in found}) == 3
    assert found == _content(tmp_path / "waits")


def test_an_error_on_one_rank_waits_for_what_is_being_saved(tmp_path: Path) -> None:
    """Without a collective, as the ranks have lost each other by then."""
    settings = [*SETTINGS, "checkpoint.background=true", f"hydra.run.dir={tmp_path}"]
    settings.append("+callbacks.dies._target_=tests.support.deaths.Dies")
    failed = run(*settings, world=2, timeout=90, PYTHONPATH=str(ROOT), HOW="raise", WHO="1", AT="5")
    assert failed.returncode == 1
    assert status(tmp_path)["reason"].startswith("rank 1: OSError")
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-4\n"
    assert {name.split("/")[0] for name in _content(tmp_path)} == {"step-2", "step-4"}
    succeed(*settings, world=2, PYTHONPATH=str(ROOT), HOW="")
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-6\n"


@pytest.mark.heavy
def test_deepspeed_saves_in_the_background(tmp_path: Path) -> None:
    settings = (*SETTINGS, "engine=deepspeed", "checkpoint.background=true", "trainer.max_steps=2")
    finished = succeed(*settings, f"hydra.run.dir={tmp_path}", world=2)
    assert "training waits" not in finished.stderr
    verify(tmp_path / "checkpoints" / "step-2")
    names = {file.name for file in (tmp_path / "checkpoints" / "step-2").iterdir()}
    assert "deepspeed" not in names
    assert {"optimizer-0.safetensors", "optimizer-1.safetensors"} <= names
