"""The benchmark's counts, which do not depend on the machine, hold the limits; its times are printed, not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import ROOT, succeed


@pytest.mark.parametrize("world", [1, 2])
def test_a_window_costs_what_a_hand_written_one_does(tmp_path: Path, world: int) -> None:
    finished = succeed(
        "bench.windows=10", "bench.pairs=1", f"batch.global_size={32 * world}", f"hydra.run.dir={tmp_path}",
        script=ROOT / "launch" / "bench.py", world=world,
    )  # fmt: skip
    figures = json.loads((tmp_path / "bench.json").read_text())
    hand, ours = figures["hand-written"], figures["Trainer"]
    assert f"accumulation 8, {world} ranks" in finished.stdout
    assert ours["aten ops"] <= 1.02 * hand["aten ops"]
    assert ours["Python calls"] <= 1.15 * hand["Python calls"]
    assert ours["device reads"] <= hand["device reads"]
    assert ours["gradient reductions"] == hand["gradient reductions"]
    assert ours["gradient bytes"] == hand["gradient bytes"]
    assert figures["accumulate()"]["Python calls"] <= 1.25 * hand["Python calls"]
    memory = "peak gradient memory / parameters"
    assert ours[memory] <= 0.65 * hand[memory]


def test_gradients_beside_other_frameworks(tmp_path: Path) -> None:
    finished = succeed(
        "exactness=true", f"hydra.run.dir={tmp_path}", script=ROOT / "launch" / "bench.py", world=2
    )  # fmt: skip
    figures = json.loads((tmp_path / "bench.json").read_text())
    for window in ("full window", "ragged window"):
        assert figures["distaccum"][window] <= 1e-6
        assert figures["DDP, hand-written"][window] > 0.1
    for name, row in figures.items():
        assert name in finished.stdout
        assert (row["version"] is None) == ("full window" not in row)
