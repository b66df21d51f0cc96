"""One state: a checkpoint of any of the engines, at any world size, goes on under any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, succeed

WORKER = Path(__file__).parent / "workers" / "interchange.py"
ENGINES = ("ddp", "zero1", "fsdp2")
BEFORE = 3


def _run(mode: str, folder: Path, world: int, precision: str) -> Any:
    result = folder / f"{mode}-{world}.json"
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    succeed(mode, saved, result, precision, world=world, script=WORKER, timeout=240, PYTHONPATH=str(ROOT))
    return json.loads(result.read_text())


def _hold(folder: Path, worlds: tuple[int, ...], precision: str, tolerance: float) -> None:
    whole = {world: _run("save", folder, world, precision) for world in worlds}
    truth = whole[worlds[0]]["ddp"]
    for world in worlds:
        for engine in ENGINES:
            assert whole[world][engine]["losses"] == pytest.approx(truth["losses"], rel=tolerance)
            assert whole[world][engine]["scaler"] == truth["scaler"]
            assert whole[world][engine]["names"] == truth["names"]
    for world in worlds:
        resumed = _run("resume", folder, world, precision)
        assert len(resumed) == len(worlds) * len(ENGINES) ** 2
        for name, found in resumed.items():
            engine = name.rsplit(" ", 1)[1]
            assert found["losses"] == pytest.approx(truth["losses"][BEFORE:], rel=tolerance), (name, world)
            assert found["clocks"] == truth["clocks"], (name, world)
            assert found["scaler"] == truth["scaler"], (name, world)
            if name == f"{engine}-{world} -> {engine}":
                assert found["losses"] == whole[world][engine]["losses"][BEFORE:], "not bitwise"
                assert found["digest"] == whole[world][engine]["digest"], "not bitwise"


def test_engines_and_two_world_sizes_go_on_from_each_other(tmp_path: Path) -> None:
    _hold(tmp_path, (1, 2), "fp32", 1e-6)


@pytest.mark.heavy
def test_the_loss_scale_goes_along(tmp_path: Path) -> None:
    _hold(tmp_path, (2,), "fp16", 5e-3)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_engines_and_four_world_sizes_go_on_from_each_other(tmp_path: Path) -> None:
    _hold(tmp_path, (1, 2, 3, 4), "fp32", 1e-6)
