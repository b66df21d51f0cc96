"""The engines' bench measures what it says; every engine holds and sends what it should; curves are compared."""

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distaccum.distributed.world import World
from distaccum.testing.counters import CollectiveCounter
from launch.bench.compare_engines import draw, far_off, table
from launch.bench.memory import MemoryUse, live_storages, storages
from launch.bench.tables import as_markdown, memory_rows, wire_rows
from tests.support.commands import ROOT, TINY, succeed

BENCH = ROOT / "launch" / "bench"
Figures = dict[str, Any]
PLAIN = ("ddp", "zero1", "fsdp2, sync=boundary", "fsdp2, sync=every")
DEEPSPEED = tuple(f"deepspeed, stage={stage}" for stage in range(4))
EMBEDDING = 256 * 192 + 192  # what is not in a block, with the last norm
TENSORS = 6 * 6 + 2  # of a block, and those two
CLOSE = pytest.approx(1, abs=1e-4)  # the optimizer's state has one more number a tensor, the step


@pytest.fixture(scope="module", params=[pytest.param(world, marks=pytest.mark.heavy) for world in (2, 4)])
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    folder = tmp_path_factory.mktemp("engines")
    finished = succeed(
        "engines=true", f"hydra.run.dir={folder}", script=BENCH, world=request.param, warm="deepspeed", COLUMNS="200"
    )
    found: Figures = json.loads((folder / "bench.json").read_text())
    tables = (folder / "engines.md").read_text()
    assert set(found["engines"]) == {*PLAIN, *DEEPSPEED}
    for name, row in found["engines"].items():
        assert name in finished.stdout
        assert tables.count(f"| {name} | absent |") == (2 if row["version"] is None else 0)
    assert found["ranks"] == request.param
    return found


def _row(figures: Figures, name: str) -> Figures:
    row: Figures = figures["engines"][name]
    if row["version"] is None:
        pytest.skip("DeepSpeed is not installed")
    return row


@pytest.mark.parametrize("name", PLAIN)
def test_a_rank_holds_what_the_theory_says(figures: Figures, name: str) -> None:
    """``zero1`` deals parameters out whole: the ranks' shares differ, by less than the largest of them."""
    row, ranks = _row(figures, name), figures["ranks"]
    held, theory = row["memory"], row["memory theory"]
    for key in ("parameters", "gradients at the boundary", "gradients stepped with"):
        assert [size / theory[key] for size in held[key]] == [CLOSE] * ranks, key
    assert sum(held["optimizer"]) / ranks / theory["optimizer"] == CLOSE
    if name == "zero1":
        assert min(held["optimizer"]) < max(held["optimizer"]) < 1.06 * theory["optimizer"]
    else:
        assert [size / theory["optimizer"] for size in held["optimizer"]] == [CLOSE] * ranks
    between = theory["parameters"] if name in ("ddp", "zero1") else 0  # theirs are zeroed where they lie
    assert held["gradients between windows"] == [between] * ranks
    assert max(held["copies"]) == 0


@pytest.mark.parametrize("name", [*PLAIN, *DEEPSPEED])
def test_nothing_is_held_that_was_not_found(figures: Figures, name: str) -> None:
    """What the C library gave out is the tensors, within 2 MiB; what has no role is next to nothing."""
    held = _row(figures, name)["memory"]
    if not any(held["allocated"]):
        pytest.skip("this C library does not tell what it gave out")
    for total, allocated in zip(held["total"], held["allocated"], strict=True):
        assert -(2**16) < allocated - total < 2**21
    if name != "deepspeed, stage=3":  # it keeps the memory that it reduces in, and that of reduced gradients
        assert max(held["other"]) < 2**16


def test_ddp_and_zero1_send_what_the_theory_says(figures: Figures) -> None:
    ddp, zero1 = _row(figures, "ddp")["wire"], _row(figures, "zero1")["wire"]
    whole, ranks = 4 * figures["parameters"], figures["ranks"]
    for wire in (ddp, zero1):
        assert wire["payload"]["all-reduce"] == whole
        assert wire["reductions"] == wire["calls"]["all-reduce"] == 1  # all of it fits one bucket
        assert wire["sent"]["all-reduce"] == 2 * whole * (ranks - 1) / ranks
    assert set(ddp["payload"]) == {"all-reduce", "control"}
    assert set(zero1["payload"]) == {"all-reduce", "broadcast", "control"}
    assert zero1["payload"]["broadcast"] == whole
    assert zero1["calls"]["broadcast"] == ranks


def test_fsdp2_sends_what_the_theory_says(figures: Figures) -> None:
    """Blocks are gathered twice a micro-step, the rest once; ``every`` reduces accumulation times as often."""
    once, every = (_row(figures, f"fsdp2, sync={sync}")["wire"] for sync in ("boundary", "every"))
    whole, accumulation, units = 4 * figures["parameters"], figures["accumulation"], 6 + 1
    gathered = accumulation * (2 * whole - 4 * EMBEDDING)
    for wire, times in ((once, 1), (every, accumulation)):
        assert set(wire["payload"]) == {"reduce-scatter", "all-gather", "control"}
        assert wire["payload"]["reduce-scatter"] == wire["reduced"] == times * whole
        assert wire["reductions"] == wire["calls"]["reduce-scatter"] == times * units
        assert wire["payload"]["all-gather"] == gathered
        assert wire["calls"]["all-gather"] == accumulation * (2 * units - 1)
    for name in ("fsdp2, sync=boundary", "fsdp2, sync=every"):
        row = _row(figures, name)
        assert row["wire"]["sent"] == row["wire theory"]


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_shards_what_its_stage_does_and_reduces_once(figures: Figures, stage: int) -> None:
    """From stage 1 on it keeps a second copy of the shard's weights, also in fp32. Stage 1 reduces as stage 2 does, so
    that fewer gradients are left to step with than in the paper; stage 3 keeps small parameters whole."""
    row, ranks, whole = _row(figures, DEEPSPEED[stage]), figures["ranks"], 4 * figures["parameters"]
    held, theory = row["memory"], row["memory theory"]
    # At stage 0 ranks say with the gradient who used each tensor, and whether a rank has a fault.
    assert row["wire"]["reduced"] == whole + (0 if stage else 4 * (TENSORS + 1))
    for rank in range(ranks):
        assert held["optimizer"][rank] / theory["optimizer"] == CLOSE
        assert held["gradients at the boundary"][rank] / whole == CLOSE
        assert held["gradients between windows"][rank] == 0
        assert held["copies"][rank] == (whole / ranks if stage else 0)
        assert held["gradients stepped with"][rank] / whole == pytest.approx(1 / ranks if stage else 1, abs=1e-3)
        extra = held["parameters"][rank] / whole - (1 / ranks if stage == 3 else 1)
        assert 0 < extra < 0.11 if stage == 3 else extra == 0


def test_what_is_not_installed_is_absent() -> None:
    figures = {"parameters": 1, "engines": {"deepspeed, stage=3": {"version": None}}}
    for rows in (memory_rows(figures), wire_rows(figures)):
        head, _, line = as_markdown(rows).splitlines()
        assert line.startswith("| deepspeed, stage=3 | absent |")
        assert head.count("|") == line.count("|")


def test_a_census_tells_roles_apart() -> None:
    """One step of Adam, and another tensor; memory that two tensors share counts once."""
    gc.collect()  # tensors of tests before this one, which would be freed in between
    baseline = live_storages()
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    before = MemoryUse.of(model, optimizer, baseline)
    assert (before.parameters, before.gradients, before.optimizer, before.copies) == (4 * 36, 4 * 36, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    another = torch.zeros(100)
    view = another[:10]
    after = MemoryUse.of(model, optimizer, baseline)
    assert (after.parameters, after.gradients, after.optimizer) == (4 * 36, 0, 8 * 36 + 2 * 4)
    assert storages([another, view]) == {another.data_ptr(): 400}
    assert after.other - before.other == 400
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(50))]
    assert MemoryUse.of(model, optimizer, baseline).copies == 200


def test_collectives_are_told_apart_by_what_they_carry(gloo_world: World) -> None:
    large, small = torch.zeros(2048), torch.zeros(8)
    with CollectiveCounter() as wire:
        dist.all_reduce(large)
        dist.all_reduce(small)
        dist.broadcast(large, src=0)
        dist.reduce_scatter(torch.empty_like(large), [large])
        dist.all_gather([torch.empty_like(large)], large)
        dist.barrier()
    expected = {"all-reduce": 1, "broadcast": 1, "reduce-scatter": 1, "all-gather": 1, "control": 1, "barrier": 1}
    assert wire.calls == Counter(expected)
    assert (wire.payload["all-gather"], wire.payload["control"]) == (8192, 32)


@pytest.mark.heavy
def test_two_tiny_runs_are_compared(tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    finished = succeed(
        "compare_engines",
        "engines=[ddp,zero1]",
        "steps=3",
        f"out={tmp_path / 'runs'}",
        f"plot={plot}",
        f"overrides=[{','.join(TINY)}]",
        script=BENCH,
    )
    lines = (tmp_path / "runs" / "overlay.md").read_text().splitlines()
    assert lines[2].startswith("| ddp | 3 | ")
    assert lines[3].startswith("| zero1 | 3 | ")
    assert lines[2].split(" | ")[2] == lines[3].split(" | ")[2]  # bits per byte, to four digits
    assert lines[3] in finished.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < plot.stat().st_size < 100_000


def _run(losses: list[float], held_out: float) -> list[dict[str, Any]]:
    return [{"step": i, "loss": loss} for i, loss in enumerate(losses)] + [{"step": 2, "eval_bits_per_byte": held_out}]


def test_the_comparison_shows_who_is_off(tmp_path: Path) -> None:
    runs = {"ddp": _run([4.0, 2.0], 2.0), "near": _run([4.0, 2.0], 2.008), "far": _run([4.0, 3.0], 1.98)}
    lines = table(runs, ["gone"]).splitlines()
    assert lines[3] == "| near | 1 | 2.0080 | +4.0e-03 | 0.0e+00 |"
    assert lines[4] == "| far | 1 | 1.9800 | -1.0e-02 | 5.0e-01 |"
    assert lines[5].startswith("| gone | not installed |")
    assert far_off(runs, 0.005) == ["far"]
    assert far_off({"ddp": _run([1.0], 2.0), "broken": _run([1.0], float("nan"))}, 0.005) == ["broken"]
    assert far_off({"ddp": _run([1.0], 2.0), "unfinished": _run([1.0], 2.0)[:1]}, 0.005) == ["unfinished"]
    draw(runs, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").exists()
