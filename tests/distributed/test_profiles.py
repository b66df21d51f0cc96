"""The profile of several ranks: on every engine, with a rank that others wait for, and when a signal stops the run."""

import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from distaccum.tools.profiling import ROWS
from tests.support.commands import NO_TEXT, ROOT, TINY, metrics, status, succeed

pytestmark = pytest.mark.slow
SETTINGS = (*TINY, "trainer.log_every=1", "trainer.eval_every=0", "metrics=jsonl", "checkpoint.every=0")
EXACT = ("step", "loss", "grad_norm", "samples")
PAUSE_S = 0.3


class Slow:
    """Data whose samples take their time on the rank that ``SLOW_RANK`` names; stops itself at ``STOPS_AT`` samples."""

    def __init__(self) -> None:
        self._given = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int, /) -> Any:
        import torch  # noqa: PLC0415

        self._given += 1
        if self._given == int(os.environ.get("STOPS_AT", "-1")) and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        if os.environ.get("RANK") == os.environ.get("SLOW_RANK"):
            time.sleep(PAUSE_S / 4)
        generator = torch.Generator().manual_seed(i)
        return torch.randn(1, 8, 8, generator=generator), torch.tensor(i % 3)


OWN_DATA = (
    "model=cnn",
    "model.channels=2",
    *NO_TEXT,
    f"data._target_={__name__}.Slow",
    "model.classes=3",
    "batch.global_size=8",
    "batch.micro_size=2",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "metrics=jsonl",
)


def _table(folder: Path) -> Any:
    return json.loads((folder / "profile" / "table.json").read_text())


def _trace(folder: Path, rank: int) -> set[str]:
    with gzip.open(folder / "profile" / f"rank-{rank}.trace.json.gz", "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


@pytest.mark.parametrize(
    ("engine", "collective"),
    [
        (("engine=ddp",), "gloo:all_reduce"),
        pytest.param(("engine=zero1",), "gloo:all_reduce", marks=pytest.mark.heavy),
        pytest.param(("engine=fsdp2",), "gloo:", marks=pytest.mark.heavy),
        pytest.param(("engine=fsdp2", "engine.sync=every"), "gloo:", marks=pytest.mark.heavy),
        pytest.param(("engine=deepspeed",), "", marks=pytest.mark.heavy),
        pytest.param(("engine=ddp", "compile=blocks"), "gloo:all_reduce", marks=pytest.mark.heavy),
        pytest.param(("engine=ddp", "trainer.num_workers=1"), "gloo:all_reduce", marks=pytest.mark.heavy),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_each_engine_is_profiled_and_trains_the_same(tmp_path: Path, engine: tuple[str, ...], collective: str) -> None:
    warm = "deepspeed" if "engine=deepspeed" in engine else "distaccum"
    extra = {"DS_ACCELERATOR": "cpu"} if warm == "deepspeed" else {}
    runs = {}
    for name, profile in (("plain", ()), ("profiled", ("profile.steps=[2,3]",))):
        folder = tmp_path / name
        given = (*SETTINGS, *engine, *profile, "trainer.max_steps=4", f"hydra.run.dir={folder}")
        finished = succeed(*given, world=2, warm=warm, **extra)
        runs[name] = [[record[key] for key in EXACT] for record in metrics(folder)]
    assert runs["plain"] == runs["profiled"]
    assert "steps 2 to 3 of this process" in finished.stdout
    names = sorted(path.name for path in (tmp_path / "profiled" / "profile").iterdir())
    assert names == ["rank-0.trace.json.gz", "rank-1.trace.json.gz", "table.json", "table.md"]
    table = _table(tmp_path / "profiled")
    for rank in table["ranks"]:
        assert [window["window"] for window in rank["windows"]] == [2, 3]
        for window in rank["windows"]:
            assert sum(window[row] for row in ROWS) == pytest.approx(window["wall"], rel=1e-9)
            assert min(window[row] for row in ("loading", "forward", "backward", "reduction", "step")) > 0
    for rank in range(2):
        events = _trace(tmp_path / "profiled", rank)
        assert {"loading", "count", "forward", "backward", "backward and reduction", "step"} <= events
        assert any(event.startswith(collective) for event in events)


def test_the_rank_that_loads_slowly_is_named_and_the_other_waits_in_the_count(tmp_path: Path) -> None:
    """Four samples a window on each rank: rank 1 loads PAUSE_S a window."""
    given = (*OWN_DATA, "trainer.max_steps=3", "checkpoint.every=0", f"hydra.run.dir={tmp_path}")
    profile = ("profile.steps=[2,3]", "profile.trace=false", "trainer.log_every=10")
    finished = succeed(*given, *profile, world=2, PYTHONPATH=str(ROOT), SLOW_RANK="1")
    rows = _table(tmp_path)["rows"]
    assert rows["loading"]["slowest_rank"] == 1
    assert rows["loading"]["sum_s"][1] >= 2 * PAUSE_S
    assert rows["count"]["slowest_rank"] == 0
    assert rows["count"]["sum_s"][0] >= PAUSE_S  # of two; rank 0 may come a little later than rank 1 begins
    assert "rank 1 is waited for: loading takes it" in finished.stdout
    assert not list(tmp_path.rglob("*.trace.json.gz"))


def test_a_signal_inside_the_windows_saves_first_and_leaves_a_whole_profile(tmp_path: Path) -> None:
    given = (*OWN_DATA, "trainer.max_steps=40", f"hydra.run.dir={tmp_path}", "profile.steps=[2,30]")
    finished = succeed(*given, world=2, PYTHONPATH=str(ROOT), STOPS_AT="40")
    found, table = status(tmp_path), _table(tmp_path)
    assert found["state"] == "preempted"
    assert table["windows"] == [2, found["step"]]
    assert all(len(rank["windows"]) == found["step"] - 1 for rank in table["ranks"])
    assert "save" not in _trace(tmp_path, 0)
    assert (tmp_path / "checkpoints" / f"step-{found['step']}" / "manifest.json").is_file()
    assert f"the run has ended after window {found['step']}, and the profile ends there" in finished.stderr


@pytest.mark.heavy
def test_the_command_of_the_page(tmp_path: Path) -> None:
    given = (*TINY, "trainer.max_steps=20", "profile.steps=[10,14]", "metrics=jsonl", f"hydra.run.dir={tmp_path}")
    succeed(*given, "trainer.eval_samples=64", world=2)
    assert _table(tmp_path)["windows"] == [10, 14]
