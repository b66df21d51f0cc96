"""One state: what a loop saves on any of the engines, at any world size, goes on under any other."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, succeed

WORKER = Path(__file__).parent / "workers" / "interchange.py"
ENGINES = ("ddp", "zero1", "fsdp2")
STAGES = ("deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install 'distaccum[deepspeed]'")


def _run(mode: str, folder: Path, world: int, precision: str, engines: tuple[str, ...] = ()) -> Any:
    result = folder / f"{mode}-{world}.json"
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    options: dict[str, Any] = {"world": world, "script": WORKER, "timeout": 280, "PYTHONPATH": str(ROOT)}
    if any(engine in STAGES for engine in engines):
        options |= {"warm": "deepspeed"} | ({"LOCAL_RANK": "0"} if world == 1 else {})  # which it asks for
    succeed(mode, saved, result, precision, *engines, **options)
    return json.loads(result.read_text())


def _hold(
    folder: Path,
    worlds: tuple[int, ...],
    precision: str,
    tolerance: float,
    *,
    engines: tuple[str, ...] = ENGINES,
    resumed_on: tuple[int, ...] = (),
) -> None:
    whole = {world: _run("save", folder, world, precision, engines) for world in worlds}
    truth = whole[worlds[0]][engines[0]]
    for world in worlds:
        for engine in engines:
            assert whole[world][engine]["losses"] == pytest.approx(truth["losses"], rel=tolerance)
            assert whole[world][engine]["scaler"] == truth["scaler"]
            assert whole[world][engine]["names"] == truth["names"]
    for world in resumed_on or worlds:
        resumed = _run("resume", folder, world, precision, engines)
        assert len(resumed) == len(worlds) * len(engines) ** 2
        for name, found in resumed.items():
            engine = name.partition(" -> ")[2]
            assert found["losses"] == pytest.approx(truth["losses"], rel=tolerance), (name, world)
            assert found["clocks"] == truth["clocks"], (name, world)
            assert found["scaler"] == truth["scaler"], (name, world)
            if name == f"{engine}-{world} -> {engine}":
                assert found == whole[world][engine], "not bitwise"


@pytest.mark.slow
def test_engines_and_two_world_sizes_go_on_from_each_other(tmp_path: Path) -> None:
    _hold(tmp_path, (1, 2), "fp32", 1e-6)


@pytest.mark.heavy
def test_the_loss_scale_goes_along(tmp_path: Path) -> None:
    _hold(tmp_path, (2,), "fp16", 5e-3)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_engines_and_four_world_sizes_go_on_from_each_other(tmp_path: Path) -> None:
    _hold(tmp_path, (1, 2, 3, 4), "fp32", 1e-6)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@needs_deepspeed
def test_deepspeeds_state_goes_from_two_ranks_to_one_to_three(tmp_path: Path) -> None:
    _hold(tmp_path, (1, 2, 3), "fp32", 1e-6, engines=("ddp", "fsdp2", *STAGES))


@pytest.mark.heavy
@needs_deepspeed
@pytest.mark.timeout(600)
def test_deepspeeds_state_goes_on_in_bf16(tmp_path: Path) -> None:
    _hold(tmp_path, (2,), "bf16", 1e-2, engines=STAGES, resumed_on=(1, 2))
