"""Adapters on every engine, over gloo: exact, and they alone are on the wire."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

import pytest

from distaccum.errors import ConfigError
from tests.support import lora
from tests.support.answers import answer
from tests.support.engine_matrix import ENGINES
from tests.support.lora import Cell, Found
from tests.support.optional import needs
from tests.support.threads import run_ranks

pytestmark = needs("peft")

CONTROL = 512  # bytes of counts and norms; the base has some 4,400
COVERING = [Cell("ddp", 2, "unequal"), Cell("fsdp2 boundary", 2, "ragged")]
OVER_BF16 = [Cell(engine, 2, "ragged", "bfloat16") for engine in ENGINES if engine != "deepspeed 3"]


def _found(cells: Sequence[Cell], timeout: float = 150) -> dict[Cell, list[Found]]:
    (world,) = {cell.world for cell in cells}
    asked = [asdict(cell) for cell in cells]
    warm = "deepspeed" if any(cell.engine.startswith("deepspeed") for cell in cells) else "distaccum"
    ranks = answer("lora", asked=asked, world=world, timeout=timeout, warm=warm, imports=["peft"])
    return {cell: [Found(**rank[i]) for rank in ranks] for i, cell in enumerate(cells)}


def _check(found: dict[Cell, list[Found]]) -> None:
    wrong = {}
    for cell, ranks in found.items():
        names = list(lora.trained(lora.make_model(cell.base)))
        print(cell, ranks[0])
        wrong[cell] = [fault for one in ranks if (fault := one.fault(names))]
        rows = cell.world if cell.engine.startswith("fsdp2") else 1  # torch fills shards up
        trained = lora.trained(lora.make_model(cell.base)).values()
        sent = sum(math.ceil(p.shape[0] / rows) * rows * p[0].numel() * 4 for p in trained)
        reduced = sum(ranks[0].payload.get(kind, 0) for kind in ("gradients", "reduce-scatter", "reduce"))
        if cell.world > 1 and cell.engine != "fsdp2 every" and reduced > sent + CONTROL:
            wrong[cell].append(f"{reduced} bytes were reduced, of {sent} of adapters")
    assert not {cell: faults for cell, faults in wrong.items() if faults}


@pytest.mark.slow
def test_a_covering_set_is_exact_and_reduces_adapters_alone() -> None:
    found = _found(COVERING)
    _check(found)
    sent = found[COVERING[0]][0].payload["gradients"]
    assert 0 <= sent - 4 * (256 + 9) <= 8  # elements of adapters and of the head, and a number or two beside them


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_stage_3_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # DeepSpeed asks for it
    pytest.importorskip("deepspeed")
    model = lora.make_model()
    (found,) = run_ranks(1, lambda world: lora.run(Cell("deepspeed 3", 1, "full"), world, model, [{}] * 4))
    assert isinstance(found, ConfigError)
    assert "engine.stage" in str(found)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_cell_is_exact(world: int) -> None:
    engines = [engine for engine in ENGINES if engine != "deepspeed 3"]
    _check(_found([Cell(engine, world, data) for engine, data in product(engines, lora.DATA)], timeout=1100))


@pytest.mark.heavy
def test_over_a_base_in_bf16_every_engine_is_as_near_as_a_plain_loop() -> None:
    """With DeepSpeed too, which reduced in the format of the optimizer's first parameter: a frozen one in bf16."""
    _check(_found(OVER_BF16, timeout=300))
