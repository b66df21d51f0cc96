"""An accumulator on several ranks: another global batch in the middle of an epoch, and what is refused there."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, succeed
from tests.support.resized import oracle

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "workers" / "accumulator.py"
ENGINES = ("ddp", "zero1", "fsdp2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    result = tmp_path_factory.mktemp("accumulator") / "result.json"
    succeed(result, *ENGINES, world=2, script=WORKER, timeout=120, PYTHONPATH=str(ROOT))
    return json.loads(result.read_text())


@pytest.mark.parametrize("engine", ENGINES)
def test_another_global_batch_is_exact(found: Any, engine: str) -> None:
    assert found[engine]["whole"] == pytest.approx(oracle(), rel=1e-6, abs=1e-6)
    assert found[engine]["resumed"] == found[engine]["whole"]


REFUSED = {
    "same optimizer": "MisuseError: the optimizer SGD is in another Accumulator",
    "same model": "MisuseError: the model Sequential is in another Accumulator",
    "sizes differ": "ConfigError: global_batch_size=4: and from 4 to 5 on other ranks",
    "one is wrong": "ConfigError: global_batch_size=4: and from 0 to 4 on other ranks",
    "metrics differ": "MisuseError: scheduler_step(0.0) where the ranks give 0.0, 1.0: reduce the metric",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_train_wrongly_is_refused(found: Any, engine: str, what: str) -> None:
    expected = REFUSED[what]
    if engine == "fsdp2" and what.startswith("same"):  # it is seen first that the model is sharded
        expected = "it is in FSDPModule already"
    assert expected in found[engine][what]


def test_an_optimizer_whose_state_was_gathered_is_used_again(found: Any) -> None:
    assert found["zero1"]["used optimizer"] == "nothing"


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_another_global_batch_on_deepspeed(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    succeed(result, "deepspeed", world=2, script=WORKER, timeout=120, warm="deepspeed", PYTHONPATH=str(ROOT))
    found = json.loads(result.read_text())["deepspeed"]
    assert found["whole"] == pytest.approx(oracle(), rel=1e-6, abs=1e-6)
    assert found["same optimizer"].startswith(REFUSED["same optimizer"])
    assert found["same model"].startswith(REFUSED["same model"])
