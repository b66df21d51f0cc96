"""The bench's counts, which do not depend on the machine, hold the limits; its times are printed, not tested."""

import json
from pathlib import Path

import pytest

from launch.bench.checkpoints import COMPARED
from tests.support.commands import ROOT, succeed

BENCH = ROOT / "launch" / "bench"


@pytest.mark.parametrize(
    ("world", "precision"),
    [
        pytest.param(1, "fp32", marks=pytest.mark.slow),
        pytest.param(2, "fp32", marks=pytest.mark.heavy),
        pytest.param(1, "fp16", marks=pytest.mark.heavy),
    ],
)
def test_a_window_costs_what_a_hand_written_one_does(tmp_path: Path, world: int, precision: str) -> None:
    finished = succeed(
        "bench.windows=10",
        "bench.pairs=1",
        f"batch.global_size={32 * world}",
        f"precision={precision}",
        f"hydra.run.dir={tmp_path}",
        script=BENCH,
        world=world,
    )
    figures = json.loads((tmp_path / "bench.json").read_text())
    hand, ours = figures["hand-written"], figures["Trainer"]
    assert f"accumulation 8, {world} ranks" in finished.stdout
    assert ours["aten ops"] <= 1.02 * hand["aten ops"]
    assert ours["Python calls"] <= hand["Python calls"]
    assert ours["late reads"] <= 1.0
    assert ours["checksum reads"] <= (0.0 if world == 1 else 0.5)  # in every second window's count at most
    assert ours["device reads"] <= hand["device reads"]
    assert ours["gradient reductions"] == hand["gradient reductions"]
    assert ours["gradient bytes"] == hand["gradient bytes"]
    assert figures["accumulate()"]["Python calls"] <= hand["Python calls"]
    memory = "peak gradient memory / parameters"
    assert ours[memory] <= 0.65 * hand[memory]


def test_the_boundary_moves_half_the_bytes_of_the_textbook_sequence(tmp_path: Path) -> None:
    """The weights come out the same; a fused kernel's traffic is measured, not taken from its schema."""
    finished = succeed(
        "boundary=true",
        "bench.boundary_sizes=[10000,100000]",
        "bench.pairs=1",
        f"hydra.run.dir={tmp_path}",
        script=BENCH,
    )
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert set(figures) == {"10000", "100000"}
    for row in figures.values():
        textbook, fused, ours, unfused = (
            row[way] for way in ("textbook", "textbook, fused", "distaccum", "distaccum, not fused")
        )
        key = "gradient bytes / parameters"
        assert f"boundary of {row['parameters']:,} parameters" in finished.stdout
        assert fused[key] == 6.0  # unscaling and clipping read and write, norm and step read
        assert textbook[key] == 7.0  # whose step is two operators
        assert ours[key] == 3.0  # the norm reads; the step reads, and writes what it has divided
        assert unfused[key] == 5.0
        assert row["zeroing in place"][key] == 1.0
        assert ours["aten ops"] <= fused["aten ops"] + 15
        assert unfused["aten ops"] <= 1.02 * textbook["aten ops"]
        assert max(way["weights off"] for way in (fused, ours, unfused)) <= 1e-6


@pytest.mark.heavy
@pytest.mark.parametrize("world", [1, 2])
def test_saves_are_compared_with_what_the_disk_and_memory_do(tmp_path: Path, world: int) -> None:
    """Every way has times, and a ratio to each that it is compared with; what was written is removed, and no more."""
    kept = tmp_path / "checkpoints" / "step-1" / "model.safetensors"
    kept.parent.mkdir(parents=True)
    kept.touch()
    finished = succeed(
        "saves=true",
        "bench.saved_sizes=[100000,600000]",
        "bench.pairs=2",
        f"hydra.run.dir={tmp_path}",
        script=BENCH,
        world=world,
    )
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert set(figures) == {"100000", "600000"}
    for size, row in figures.items():
        assert row["tensor bytes"] >= 12 * int(size) * 0.8
        assert row["tensor bytes"] < row["bytes"] < 1.1 * row["tensor bytes"]  # headers and JSON beside them
        assert f"a checkpoint of {row['bytes'] / 2**20:,.0f} MiB in {4 + world} files" in finished.stdout
        for name, bases in COMPARED.items():
            assert all(row[name][f"time / {base}"]["min"] > 0 for base in bases)
            assert all(row[base]["s"]["min"] > 0 for base in bases)
    assert list(tmp_path.rglob("*.safetensors")) == [kept]


@pytest.mark.heavy
def test_loading_is_measured_next_to_a_hand_written_loop(tmp_path: Path) -> None:
    """Nothing is faster than what it is made of: a ratio has the machine's noise in it, and a sleep has none."""
    given = ("accumulations=[2]", "workers=[1]", "loading_ms=20", "windows=2", "pairs=1")
    settings = [f"bench.loading.{setting}" for setting in given]
    finished = succeed("loading=true", *settings, f"hydra.run.dir={tmp_path}", script=BENCH, COLUMNS="200")
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (row["accumulation"], row["workers"], row["loading_s"]) == (2, 1, 0.04)
    assert row["computing_s"] >= 0.04
    assert set(row["loops"]) == {"hand-written", "prefetch_windows=0", "prefetch_windows=1"}
    for name, loop in row["loops"].items():
        assert name in finished.stdout
        assert loop["seconds"] >= 0.04
        assert 0 < loop["min"] <= loop["median"]


@pytest.mark.heavy
def test_the_rehearsed_micro_batch_is_put_beside_all_others(tmp_path: Path) -> None:
    settings = ("micro=true", "bench.micro.global_size=4", "bench.micro.rounds=1")
    finished = succeed(*settings, f"hydra.run.dir={tmp_path}", script=BENCH, COLUMNS="200")
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert len(figures) == 2
    for name, row in figures.items():
        assert name in finished.stdout
        assert list(row["seconds"]) == ["1", "2", "4"]
        assert row["found"]["micro_size"] in (1, 2, 4)
        assert row["found"]["reason"] in " ".join(finished.stdout.split())
        assert all(0 < ratio <= 1 for ratio in row["rate over the best one's"].values())


@pytest.mark.heavy
def test_gradients_of_other_frameworks(tmp_path: Path) -> None:
    finished = succeed("exactness=true", f"hydra.run.dir={tmp_path}", script=BENCH, world=2)
    figures = json.loads((tmp_path / "bench.json").read_text())
    for window in ("full window", "ragged window"):
        assert figures["distaccum"][window] <= 1e-6
        assert figures["DDP, hand-written"][window] > 0.1
    for name, row in figures.items():
        assert name in finished.stdout
        assert (row["version"] is None) == ("full window" not in row)
