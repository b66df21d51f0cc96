"""The same bits on any number of ranks: what is logged, evaluated and left in the weights."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distaccum.config.engine import settings_of
from distaccum.tools.plan.memory import state
from distaccum.tools.plan.sharding import sharding_of
from distaccum.tools.plan.volume import payloads
from distaccum.tools.plan.window import Job, Sizes
from tests.support.commands import QUIET, ROOT, TINY, captured, environment, metrics, run, status, succeed
from tests.support.reproducible import COVERING, SAME, WORLDS, Cell, cells, differing, on_world

GONE = Path(__file__).parent / "workers" / "gone.py"
FEW = [Cell("ddp", "fp32", "drawing"), Cell("fsdp2", "fp16", "micro tokens")]
REST = [cell for cell in COVERING if cell not in FEW]
MANY = [Cell("fsdp2", "fp32", "plain"), Cell("ddp", "fp16", "few blocks"), Cell("zero1", "bf16", "tokens")]
SETTINGS = (
    *TINY,
    *QUIET,
    "numerics=reproducible",
    "batch.global_size=10",
    "batch.micro_size=2",
    "model.dropout=0.1",
    "schedule=constant",
    "metrics.windows=true",
    "resume=auto",
    "checkpoint.every=100",
)


def _expect_same(given: Sequence[Cell], worlds: Sequence[int], folder: Path) -> dict[int, list[dict[str, Any]]]:
    found = {world: on_world(world, given, folder) for world in worlds}
    assert not list(differing(given, found))
    return found


@pytest.mark.slow
def test_a_few_cells_are_the_same_on_1_and_3_ranks(tmp_path: Path) -> None:
    _expect_same(FEW, (1, 3), tmp_path)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_covering_set_is_the_same_on_1_and_3_ranks(tmp_path: Path) -> None:
    """But for the few of the test above."""
    found = _expect_same(REST, (1, 3), tmp_path)
    assert len({one["all"] for one in found[1]}) > len(REST) - 3  # the engines of one program may agree
    by_cell = dict(zip(REST, found[1], strict=True))
    assert by_cell[Cell("ddp", "fp16", "few blocks")]["skips"] > 1
    assert all(len(one["records"]) > 3 for one in found[1])


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_each_engine_is_the_same_on_2_to_8_ranks(tmp_path: Path) -> None:
    """On 8 there are as many ranks as blocks in one of them."""
    _expect_same(MANY, (1, 2, 8), tmp_path)


@pytest.mark.heavy
@pytest.mark.timeout(5400)
def test_every_cell_is_the_same_on_every_world(tmp_path: Path) -> None:
    _expect_same(cells(), WORLDS, tmp_path)


@pytest.mark.heavy
def test_without_it_a_run_is_another_on_other_ranks(tmp_path: Path) -> None:
    losses, run_dirs = [], [tmp_path / str(world) for world in (1, 2)]
    for world in (1, 2):
        settings = [one for one in SETTINGS if one != "numerics=reproducible"]
        settings += ["model.dropout=0.0"]  # else a micro-batch of another size draws other numbers
        succeed(*settings, "trainer.max_steps=8", f"hydra.run.dir={tmp_path}/{world}", world=world)
        losses.append([record["grad_norm"] for record in metrics(tmp_path / str(world))])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    code, said = _compare(*run_dirs)
    assert code == 1
    assert "window" in said


@pytest.mark.slow
def test_stopped_and_resumed_on_other_ranks_it_is_the_undisturbed_run(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    succeed(*SETTINGS, "trainer.max_steps=24", f"hydra.run.dir={whole}", world=1)
    for steps, world in ((8, 1), (16, 3), (24, 2)):
        succeed(*SETTINGS, f"trainer.max_steps={steps}", f"hydra.run.dir={tmp_path}/elastic", world=world)
    assert status(tmp_path / "elastic")["state"] == "done"
    expected, found = (
        [{key: one.get(key) for key in SAME} for one in metrics(d)] for d in (whole, tmp_path / "elastic")
    )
    assert found == expected
    assert _weights(tmp_path / "elastic") == _weights(whole)
    assert _compare(whole, tmp_path / "elastic") == (0, "")


def _compare(*run_dirs: Path) -> tuple[int, str]:
    """What ``distaccum compare`` says."""
    command = [sys.executable, "-m", "distaccum", "compare", *map(str, run_dirs)]
    done = captured(command)
    return done.returncode, done.stdout + done.stderr


def _weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints" / "step-24" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_resume_says_what_changes_its_bits(tmp_path: Path) -> None:
    given = (*SETTINGS, f"hydra.run.dir={tmp_path}", "trainer.max_steps=2")
    succeed(*given, world=1)
    refused = run(*given, "batch.micro_size=5", world=1)
    assert refused.returncode == 2
    assert "counts its windows with batch.unit_size=2" in refused.stderr
    refused = run(*given, "batch.virtual_ranks=8", world=1)
    assert refused.returncode == 2
    assert "with batch.virtual_ranks=32" in refused.stderr
    told = succeed(*given, "trainer.threads=2", "trainer.max_steps=3", world=1)
    assert "from here on bits may be others than before: threads: 1 -> 2" in told.stderr


@pytest.mark.slow
def test_a_fast_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    fast = [one for one in SETTINGS if one != "numerics=reproducible"]
    succeed(*fast, f"hydra.run.dir={tmp_path}", "trainer.max_steps=2", world=1)
    refused = run(*SETTINGS, f"hydra.run.dir={tmp_path}", "trainer.max_steps=3", world=1)
    assert refused.returncode == 2
    assert "counts its windows with batch.unit_size=None" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "fast ddp backward",
        "reproducible ddp backward",
        "fast fsdp2 forward",
        pytest.param("fast deepspeed forward", marks=pytest.mark.heavy),
    ],
)
def test_a_rank_that_is_gone_in_a_loop_is_named_as_such(setting: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(GONE), *setting.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **place),
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0].decode().split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 9]
    assert said == [["PeerError"], []]


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
