"""What ``numerics=reproducible`` sends and holds is what it says; times are printed, and not looked at."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distaccum.config.engine import settings_of
from distaccum.tools.plan.memory import state
from distaccum.tools.plan.sharding import sharding_of
from distaccum.tools.plan.volume import payloads
from distaccum.tools.plan.window import Job, Sizes
from tests.support.commands import ROOT, succeed

BENCH = ROOT / "launch" / "bench"
UNITS = 4
NEAR = pytest.approx(1, rel=0.02)  # shards are filled up to one size


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("numerics")
    given = ("bench.reproducible.pairs=1", "bench.reproducible.model={n_layer: 3, n_head: 2, n_embd: 128}")
    succeed("reproducible=true", *given, f"hydra.run.dir={folder}", script=BENCH, world=2)
    found: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    assert found["units"] == UNITS
    return found


def job(engine: str, parameters: int, virtual_ranks: int | None) -> Job:
    return Job(
        sizes=Sizes(tensors=(parameters,)),
        sharding=sharding_of(settings_of(engine)()),
        global_batch_size=2 * UNITS * 4,
        micro_batch_size=4,
        virtual_ranks=virtual_ranks,
    )


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_it_sends_and_holds_what_the_forecast_says(figures: dict[str, Any], engine: str) -> None:
    row = figures[engine]
    fast, exact, size = row["fast"]["payload"], row["reproducible"]["payload"], 4 * row["parameters"]
    blocks = job(engine, row["parameters"], 32)
    assert blocks.sums(2) == (1, 2)  # of eight blocks a rank has four neighbours, and keeps two sums beside the third
    expected = payloads(blocks.sharding, row["parameters"], 0, UNITS, sums=1)
    norms = size / 2 if engine == "fsdp2" else 0  # each shard goes to the rank that takes the whole's norm
    assert (exact["all-to-all"] - norms) / expected["reduce-scatter"] == NEAR
    if engine == "fsdp2":
        assert fast["reduce-scatter"] / size == NEAR
        assert exact["all-gather"] == fast["all-gather"]
    else:
        assert fast["all-reduce"] == size
        assert exact["all-gather"] / expected["all-gather"] == NEAR
    assert not {"all-reduce", "reduce-scatter"} & set(exact)
    more = row["reproducible"]["held at the boundary"] - row["fast"]["held at the boundary"]
    forecast = state(blocks, 2)["total"] - state(job(engine, row["parameters"], None), 2)["total"]
    before_last = size if engine == "fsdp2" else 0  # which has no gradient then, and its buckets on the others
    assert more / (forecast - before_last) == pytest.approx(1, rel=0.1)
