"""Memory that runs out in a micro-step of ddp and zero1 changes nothing of the window: held to a plain fp64 loop."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim import AdamW
from torch.utils._python_dispatch import _get_current_dispatch_mode

from distaccum import Accumulator, DataSpec, World
from distaccum.distributed.random import KeyedRandom
from distaccum.testing import single_process_world
from tests.support.commands import ROOT, succeed
from tests.support.memory_faults import (
    MICRO_STEPS,
    PLACES,
    PROGRAMS,
    Cell,
    Errors,
    Tagger,
    judge,
    make_model,
    run,
    tagged,
)
from tests.support.threads import run_ranks

WORKER = Path(__file__).parent / "workers" / "out_of_memory.py"
pytestmark = [
    pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning"),
]
ENGINES = ("ddp", "zero1")
LEAVES = 14  # of the largest of the programs; a cell takes its number modulo those that it has


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="distaccum")


def covering() -> Iterator[Cell]:
    """A cell of each kind."""
    yield Cell(places=("tensor",), leaf=3, micro=0, rank=0)
    yield Cell(places=("post",), leaf=5, micro=1, rank=1, engine="zero1")
    yield Cell(places=("post",), leaf=13, micro=-1, rank=0, windows=3)  # the first that the boundary reaches
    yield Cell(places=("tensor",), leaf=4, micro=-1, rank=1, window=1, engine="zero1")
    yield Cell(places=("forward",), micro=-1, rank=1, window=1)
    yield Cell(places=("tensor", "tensor"), leaf=6, micro=1, rank=0)  # also in the half
    yield Cell(program="tokens", places=("activation",), leaf=1, micro=0, rank=1)
    yield Cell(program="two", places=("loss",), micro=-1, rank=0)
    yield Cell(program="tied", places=("post",), leaf=4, micro=1, rank=0, early=True)
    yield Cell(program="sometimes", places=("tensor",), leaf=1, micro=-1, rank=0, unused=True)
    yield Cell(program="batch norm", places=("forward",), micro=1, rank=0, tail=0)
    yield Cell(program="batch norm", places=("tensor",), leaf=5, micro=0, rank=1, tail=0)
    yield Cell(program="contrastive", places=("tensor",), leaf=5, micro=1, rank=0, tail=0)
    yield Cell(program="net", places=("tensor",), leaf=2, rows=2, world=3, windows=1)
    yield Cell(precision="fp16", places=("tensor",), leaf=7, micro=1, rank=1)
    yield Cell(precision="bf16-weights", places=("tensor",), leaf=7, micro=-1, rank=1)
    yield Cell(places=("tensor",), leaf=3, micro=1, rank=0, verify="first")
    yield Cell(checkpoint="blocks", places=("tensor",), leaf=3, micro=1, rank=0)


def by_process() -> Iterator[Cell]:
    """Cells whose ranks cannot be threads: torch's generator and its compiler are of the process."""
    yield Cell(program="dropout", places=("tensor",), leaf=5, micro=1, rank=0)
    yield Cell(program="dropout", places=("post",), leaf=9, micro=-1, rank=1, engine="zero1", windows=3)
    yield Cell(program="dropout", places=("forward",), micro=-1, rank=0)
    yield Cell(program="dropout", places=("tensor", "tensor"), leaf=5, micro=0, rank=1)  # also in the half
    yield Cell(program="noise", places=("tensor",), leaf=5, micro=1, rank=0)
    yield Cell(program="noise", places=("forward",), micro=-1, rank=1, engine="zero1", windows=3)
    yield Cell(program="noise", places=("tensor", "tensor"), leaf=5, micro=0, rank=1)
    yield Cell(
        program="dropout", places=("tensor",), leaf=4, micro=-1, rank=1, windows=2, verify="first", checkpoint="blocks"
    )
    yield Cell(program="dropout", places=("tensor", "forward"), leaf=6, micro=1, rank=0, windows=2, precision="fp32")
    yield Cell(program="dropout, sometimes", places=("tensor",), leaf=3, micro=-1, rank=0, unused=True)
    for program, engine, place, micro in product(("net", "dropout"), ENGINES, ("tensor", "forward"), (0, -1)):
        yield Cell(program=program, engine=engine, compile="blocks", places=(place,), leaf=3, micro=micro, rank=1)


def refused() -> Iterator[Cell]:
    """Cells that no rank steps on, as memory is over for a single sample, or for what cannot be cut."""
    for engine, micro, rank in product(ENGINES, (0, 1, -1), (0, 1)):
        yield Cell(engine=engine, places=("forward",) * 4, whole=True, micro=micro, rank=rank)
    yield Cell(places=("forward",) * 4, whole=True, micro=1, rank=0, verify="first")
    yield Cell(
        engine="zero1",
        places=("forward",) * 4,
        whole=True,
        micro=-1,
        rank=1,
        verify="first",
        program="never",
        unused=True,
    )
    yield Cell(program="batch norm", places=("tensor", "loss"), leaf=3, micro=1, rank=0, tail=0)
    yield Cell(program="batch norm", places=("post", "forward"), leaf=6, micro=-1, rank=1, tail=0)


def matrix() -> Iterator[Cell]:
    """Every leaf, place, micro-step, rank and engine."""
    for program, engine, place, micro, rank, leaf in product(
        ("net", "tied", "tokens", "two", "batch norm"), ENGINES, PLACES, (0, 1, -1), (0, 1), range(LEAVES)
    ):
        if leaf < 2 or place in ("tensor", "post"):
            tail = 0 if program == "batch norm" else 3
            yield Cell(program=program, engine=engine, places=(place,), micro=micro, rank=rank, leaf=leaf, tail=tail)


def drawn(number: int, seed: int) -> Iterator[Cell]:
    """Cells at random."""
    draw = random.Random(seed)  # noqa: S311  a seed, so that a cell can be had again
    for _ in range(number):
        unused = draw.random() < 0.3
        program = "sometimes" if unused else draw.choice(("net", "tied", "tokens", "two", "batch norm"))
        yield Cell(
            engine=draw.choice(ENGINES),
            world=draw.choice((1, 2, 3)),
            program=program,
            precision=draw.choice(("fp64", "fp64", "fp32", "bf16", "fp16")),
            checkpoint="none" if program in ("tied", "batch norm") else draw.choice(("none", "none", "blocks")),
            unused=unused,
            places=tuple(draw.choice(PLACES) for _ in range(1 if program == "batch norm" else draw.choice((1, 1, 2)))),
            leaf=draw.randrange(LEAVES),
            early=draw.random() < 0.3,
            window=draw.choice((-1, 0)),
            micro=draw.choice((0, 1, -1)),
            rank=draw.choice((-1, 0)),
            last=draw.random() < 0.5,
            verify=draw.choice(("never", "never", "first")),
            windows=draw.choice((1, 2, 3)),
            tail=0 if program == "batch norm" else draw.choice((0, 1, 3, 7)),  # it takes no single sample
        )


def drawing(number: int, seed: int) -> Iterator[Cell]:
    """Cells at random of programs that draw."""
    draw = random.Random(seed)  # noqa: S311
    for _ in range(number):
        unused = draw.random() < 0.2
        program = "dropout, sometimes" if unused else draw.choice(("dropout", "tokens, dropout", "noise"))
        # The truth pads parts that draw by themselves to their own longest sample.
        compiled = "none" if program == "tokens, dropout" else draw.choice(("none", "none", "blocks"))
        yield Cell(
            engine=draw.choice(ENGINES),
            program=program,
            precision=draw.choice(("fp64", "fp64", "fp32", "bf16")),
            compile=compiled,
            checkpoint=draw.choice(("none", "none", "blocks")),
            unused=unused,
            places=tuple(draw.choice(PLACES) for _ in range(draw.choice((1, 1, 2)))),
            leaf=draw.randrange(LEAVES),
            window=draw.choice((-1, 0)),
            micro=draw.choice((0, 1, -1)),
            rank=draw.choice((-1, 0)),
            last=draw.random() < 0.5,
            verify=draw.choice(("never", "never", "first")),
            windows=draw.choice((1, 2, 3)),
            tail=draw.choice((0, 1, 3, 7)),
        )


def hold(cells: Iterable[Cell]) -> None:
    """Runs cells on ranks that are threads, and holds each to the truth.

    Threads have one generator between them: what one seeds, another would take for drawn. None of these models draws.
    """
    wrong: list[Any] = []
    for cell in cells:
        models = [make_model(cell) for _ in range(cell.world)]
        with patch.object(KeyedRandom, "has_drawn", lambda *_: False) if cell.world > 1 else nullcontext():
            found: Sequence[Any] = run_ranks(cell.world, lambda world, c=cell, m=models: run(c, world, m[world.rank]))
        raised = [one for one in found if isinstance(one, BaseException)]
        if raised:
            wrong.append((cell, raised))
            continue
        errors = judge(cell, found)
        if errors.wrong(cell) or errors.refused or not errors.struck:
            wrong.append((cell, errors.wrong(cell), errors))
    assert not wrong, "\n".join(map(str, wrong[:5]))


def test_a_window_stays_the_same_wherever_memory_runs_out_in_it() -> None:
    hold(covering())


def test_what_fails_once_is_cut_from_then_on() -> None:
    cell = Cell(world=1, places=("tensor",), leaf=2, rows=2, windows=3, tail=0)
    found: Sequence[Any] = run_ranks(1, lambda world: run(cell, world, make_model(cell)))
    errors = judge(cell, found)
    assert not errors.wrong(cell)
    assert errors.struck == 1
    assert [len(batches) for batches in found[0].batches] == [7, 6, 6]


def _losses(world: World, *, errors: bool, dropout: float) -> tuple[list[float], int]:
    """Of windows whose samples are shorter in each; in each one memory runs out once, or never."""
    torch.manual_seed(4)
    model = Tagger(dropout)
    generator = torch.Generator().manual_seed(6)
    samples = []
    for length in range(26, 4, -1):
        tokens = torch.randint(1, 11, (8, length), generator=generator)
        samples += [{"tokens": row, "labels": row.flip(0)} for row in tokens]
    left, struck = 0, 0

    def strike(_: Any) -> None:
        nonlocal left, struck
        if left > 0 and errors and _get_current_dispatch_mode() is None:  # else it is only looked at
            left, struck = 0, struck + 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    list(model.parameters())[3].register_hook(strike)
    acc = Accumulator(
        model,
        AdamW(model.parameters(), lr=0.01),
        global_batch_size=8,
        micro_batch_size=4,
        count=lambda batch: batch["labels"].numel(),
        world=world,
    )
    found = []
    for window in acc.windows(DataSpec(train=samples, eval_dataset=None, description="", shuffle=False)):
        left = 1
        acc.step(window, tagged)
        found.append(acc.mean_loss())
    acc.close()
    return found, struck


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
def test_twenty_errors_change_no_loss(dropout: float) -> None:
    with single_process_world() as world:
        found, struck = _losses(world, errors=True, dropout=dropout)
        truth, _ = _losses(world, errors=False, dropout=dropout)
    assert struck == len(truth) == 22
    assert truth[-1] < truth[0]
    assert found == pytest.approx(truth, rel=1e-6)


@pytest.mark.slow
def test_random_numbers_are_those_of_one_forward(tmp_path: Path) -> None:
    _hold_processes(list(by_process()), tmp_path)


@pytest.mark.slow
def test_cells_at_random_that_draw(tmp_path: Path) -> None:
    _hold_processes(list(drawing(16, 1)), tmp_path)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_many_cells_at_random_that_draw(tmp_path: Path) -> None:
    for seed in range(8):
        _hold_processes(list(drawing(50, 10 + seed)), tmp_path)


def _hold_processes(cells: Sequence[Cell], tmp_path: Path) -> None:
    wrong = []
    for cell, found in _by_process(cells, tmp_path):
        apart = PROGRAMS[cell.program].apart or cell.compile != "none"
        if found["refused"] and apart and len(cell.places) > 1:  # nobody can have the rest of its numbers
            continue
        said = "refused" if found["refused"] else Errors(**found).wrong(cell)
        if said:
            wrong.append((cell, said, found))
    assert not wrong, "\n".join(map(str, wrong[:5]))


@pytest.mark.slow
def test_where_one_rank_cannot_finish_no_rank_steps_or_waits(tmp_path: Path) -> None:
    for cell, found in _by_process(list(refused()), tmp_path):
        assert found["refused"], (cell, found)  # the weights are as they were
        (said,) = found["said"]
        assert f"micro-batch {(cell.micro % MICRO_STEPS) + 1} of this rank" in said
        assert "cannot be finished in parts" in said


def _by_process(cells: Sequence[Cell], tmp_path: Path) -> Iterator[tuple[Cell, Any]]:
    """What two real ranks find, each of whom has seen memory run out."""
    asked, answered = tmp_path / "cells.json", tmp_path / "errors.json"
    asked.write_text(json.dumps([asdict(cell) for cell in cells]))
    succeed(answered, asked, world=2, script=WORKER, timeout=400, PYTHONPATH=str(ROOT))
    for cell, found in zip(cells, json.loads(answered.read_text()), strict=True):
        assert "struck" in found, (cell, found)
        assert found["struck"] >= 1, cell
        yield cell, found


@pytest.mark.slow
def test_a_real_limit_of_the_address_space_is_survived(tmp_path: Path) -> None:
    """The allocator gives large tensors back at once, so that what is allocated is what is used."""
    answered = tmp_path / "errors.json"
    worker = WORKER.with_name("memory_limit.py")
    succeed(answered, script=worker, torchrun=True, PYTHONPATH=str(ROOT), MALLOC_MMAP_THRESHOLD_="65536")
    found = json.loads(answered.read_text())
    assert found["repaired"] == 1, found  # from then on such micro-batches are run in parts
    for errors in found["errors"]:
        assert errors["own"] <= 4 * errors["plain"], found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_cells_at_random(seed: int) -> None:
    hold(drawn(12, seed))


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_the_whole_matrix() -> None:
    hold(matrix())


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_many_cells_at_random() -> None:
    hold(drawn(300, 99))


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        (Cell(world=1, program="uncuttable", places=("tensor",), leaf=3), "cannot be cut in halves"),
        (Cell(world=1, places=("forward",) * 4, whole=True, micro=0), "a single sample"),
        (Cell(world=1, program="contrastive", places=("tensor",) * 2, leaf=3), "no sum over samples"),
    ],
    ids=["uncuttable", "single", "contrastive"],
)
def test_what_cannot_be_finished_is_refused_before_a_weight_moves(cell: Cell, why: str) -> None:
    found: Sequence[Any] = run_ranks(1, lambda world: run(cell, world, make_model(cell)))
    assert not isinstance(found[0], BaseException), found
    errors = judge(cell, found)  # the weights are as they were
    assert errors.refused
    assert [why in said for said in errors.said] == [True], errors.said
