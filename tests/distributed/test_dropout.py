"""Random numbers of a micro-step belong to its micro-batch: neither the rank nor what was drawn before matters."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, succeed

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "workers" / "dropout.py"
ENGINES = ("ddp", "zero1", "fsdp2")


MORE = [pytest.param(world, marks=pytest.mark.heavy) for world in (3, 4)]


class _Worlds(dict[int, Any]):
    """What each world has trained, by its size: it trains when it is asked for first."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, world: int) -> Any:
        result = self._folder / f"result-{world}.json"
        succeed(result, *ENGINES, world=world, script=WORKER, timeout=120, PYTHONPATH=str(ROOT))
        self[world] = json.loads(result.read_text())
        return self[world]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return _Worlds(tmp_path_factory.mktemp("dropout"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", [2, *MORE])
def test_dropout_does_not_depend_on_the_world(found: dict[int, Any], engine: str, world: int) -> None:
    assert found[world][engine]["whole"] == pytest.approx(found[1]["ddp"]["whole"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", [1, 2, *MORE])
def test_a_resume_needs_no_generators_state(found: dict[int, Any], engine: str, world: int) -> None:
    assert found[world][engine]["resumed"] == found[world][engine]["whole"]


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_dropout_on_deepspeed_is_that_of_one_rank(found: dict[int, Any], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    succeed(result, "deepspeed", world=2, script=WORKER, timeout=120, warm="deepspeed", PYTHONPATH=str(ROOT))
    other = json.loads(result.read_text())
    assert other["deepspeed"]["whole"] == pytest.approx(found[1]["ddp"]["whole"], rel=1e-6, abs=1e-6)
