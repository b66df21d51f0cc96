"""An accumulator on several ranks: another global batch in an epoch, random numbers that belong to micro-batches."""

from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.answers import answer
from tests.support.resized import oracle

pytestmark = pytest.mark.slow
ENGINES = ("ddp", "zero1", "fsdp2")


@pytest.fixture(scope="module")
def found() -> Any:
    return answer("accumulator", *ENGINES, timeout=120)


@pytest.mark.parametrize("engine", ENGINES)
def test_another_global_batch_is_exact(found: Any, engine: str) -> None:
    assert found[engine]["whole"] == pytest.approx(oracle(), rel=1e-6, abs=1e-6)
    assert found[engine]["resumed"] == found[engine]["whole"]


REFUSED = {
    "sizes differ": "ConfigError: global_batch_size=4: and from 4 to 5 on other ranks",
    "one is wrong": "ConfigError: global_batch_size=4: and from 0 to 4 on other ranks",
    "metrics differ": "MisuseError: scheduler_step(0.0) where the ranks give 0.0, 1.0: reduce the metric",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_train_wrongly_is_refused(found: Any, engine: str, what: str) -> None:
    assert REFUSED[what] in found[engine][what]


def test_an_optimizer_whose_state_was_gathered_is_used_again(found: Any) -> None:
    assert found["zero1"]["used optimizer"] == "nothing"


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_another_global_batch_on_deepspeed() -> None:
    found = answer("accumulator", "deepspeed", timeout=120, warm="deepspeed")["deepspeed"]
    assert found["whole"] == pytest.approx(oracle(), rel=1e-6, abs=1e-6)


MORE = [pytest.param(world, marks=pytest.mark.heavy) for world in (3, 4)]


class _Worlds(dict[int, Any]):
    """What each world has trained, by its size: it trains when it is asked for first."""

    def __missing__(self, world: int) -> Any:
        self[world] = answer("dropout", *ENGINES, world=world, timeout=120)
        return self[world]


@pytest.fixture(scope="module")
def trained() -> dict[int, Any]:
    return _Worlds()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", [2, *MORE])
def test_dropout_does_not_depend_on_the_world(trained: dict[int, Any], engine: str, world: int) -> None:
    assert trained[world][engine]["whole"] == pytest.approx(trained[1]["ddp"]["whole"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", [1, 2, *MORE])
def test_a_resume_needs_no_generators_state(trained: dict[int, Any], engine: str, world: int) -> None:
    assert trained[world][engine]["resumed"] == trained[world][engine]["whole"]


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_dropout_on_deepspeed_is_that_of_one_rank(trained: dict[int, Any]) -> None:
    other = answer("dropout", "deepspeed", timeout=120, warm="deepspeed")
    assert other["deepspeed"]["whole"] == pytest.approx(trained[1]["ddp"]["whole"], rel=1e-6, abs=1e-6)
