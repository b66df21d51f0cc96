"""A window that runs out of memory begins again, and its gradient is the same: held to a plain fp64 loop."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest

from tests.support.answers import answer
from tests.support.memory_faults import Cell, judge, make_model, run
from tests.support.threads import run_ranks

ENGINES, PLACES, LEAVES = ("ddp", "zero1"), ("forward", "backward", "after"), 10
pytestmark = [
    pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning"),
]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="distaccum")


def places() -> Iterator[Cell]:
    """Where memory runs out, on each engine, of one rank and of two; shapes are not known to fit yet.

    The first micro-batch, the second and the last take turns: each meets each engine, place and world.
    """
    for number, (engine, world, place) in enumerate(product(ENGINES, (1, 2), PLACES)):
        micro = (0, 1, -1)[(number + number // len(PLACES)) % 3]
        yield Cell(engine=engine, world=world, place=place, micro=micro, rank=world - 1, leaf=4, windows=2)


FEW = [
    Cell(rank=-1, micro=-1, rows=1),  # on both ranks, down to single samples
    Cell(window=1, micro=0),  # of shapes that have run before
    Cell(program="two", micro=-1),
    Cell(program="sometimes", unused=True, place="after", leaf=8),
    Cell(precision="fp16", micro=1, rank=1),
    Cell(verify="first", micro=1, place="after", leaf=7, engine="zero1"),
]
OTHERS = [
    Cell(rows=1, micro=1),
    Cell(window=1, micro=-1, place="forward"),
    Cell(world=3, micro=-1, engine="zero1"),
    Cell(program="tied", place="after", leaf=3),
    Cell(program="sometimes", unused=True, micro=-1, leaf=1),
    *(Cell(precision=precision, micro=1, rank=1) for precision in ("fp32", "bf16")),
    Cell(verify="first", micro=-1),
]


def hold(cells: Iterable[Cell]) -> None:
    """Runs cells on ranks that are threads; every window of theirs is stepped on."""
    for cell in cells:
        found = _run(cell)
        assert sum(rank.struck for rank in found) >= 1, cell
        assert all(judge(cell, found)), cell
        if cell.verify == "first":
            assert all("agrees with plain autograd" in rank.verified for rank in found), (cell, found[0].verified)


def _run(cell: Cell) -> Sequence[Any]:
    models = [make_model(cell) for _ in range(cell.world)]
    found: Sequence[Any] = run_ranks(cell.world, lambda world: run(cell, world, models[world.rank]))
    assert not any(isinstance(one, BaseException) for one in found), (cell, found)
    return found


def test_a_window_stays_the_same_wherever_memory_runs_out_in_it() -> None:
    hold(places())


@pytest.mark.parametrize("cells", [FEW, pytest.param(OTHERS, marks=pytest.mark.heavy)], ids=["few", "others"])
def test_whatever_runs_out_of_memory_gives_the_same_gradient(cells: Sequence[Cell]) -> None:
    """Other programs, formats and sizes."""
    hold(cells)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_the_whole_matrix() -> None:
    hold(
        Cell(program=program, engine=engine, world=world, place=place, micro=micro, rank=world - 1, leaf=leaf, window=w)
        for program, engine, world, place, micro, leaf, w in product(
            ("net", "tied", "two"), ENGINES, (1, 2), PLACES, (0, 1, -1), range(LEAVES), (0, 1)
        )
        if not (w == 1 and micro == -1 and world == 2 and place != "forward")
        if place != "forward" or leaf == 0
    )


@pytest.mark.parametrize(
    ("engine", "place", "leaf"), [("ddp", "backward", 4), ("zero1", "after", 0), ("ddp", "after", 9)]
)
def test_a_boundary_that_has_begun_to_reduce_is_given_up_on_all_ranks(engine: str, place: str, leaf: int) -> None:
    """Its shape had fitted before; the windows after it are exact, and the one after runs in parts of it."""
    cell = Cell(engine=engine, place=place, leaf=leaf, window=1, micro=-1, rank=1)
    found = _run(cell)
    assert found[1].struck == 1
    assert judge(cell, found) == [True, False, True, True]


def test_what_fails_once_is_cut_from_then_on() -> None:
    found = _run(Cell(world=1, windows=3))
    assert [len(batches) for batches in found[0].batches] == [1 + 6, 6, 6, 1]  # the last one is of fewer samples


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        (Cell(program="uncuttable"), "it cannot be cut in halves: it has 4 samples, and a tensor of shape [7]"),
        (Cell(rows=0), "it is a single sample"),
        (Cell(program="contrastive"), "its loss is no sum over samples"),
        (Cell(program="batch norm"), "its batch normalization is over the micro-batch, and parts of it have other st"),
    ],
    ids=["uncuttable", "single", "contrastive", "statistics"],
)
@pytest.mark.parametrize(("world", "micro"), [(1, 1), (2, -1)])
def test_what_cannot_be_cut_is_refused_before_a_weight_moves(cell: Cell, why: str, micro: int, world: int) -> None:
    cell = Cell(**{**asdict(cell), "world": world, "micro": micro, "rank": world - 1, "windows": 1})
    found = _run(cell)
    assert judge(cell, found)[0] is False
    said = found[-1].said
    assert f"micro-batch {(micro % 3) + 1 if cell.rows else ''}" in said
    assert f"cannot be finished in parts: {why}" in said


@pytest.mark.slow
def test_parts_with_dropout_draw_as_micro_batches_of_their_own() -> None:
    cells = [
        Cell(program="dropout", engine=engine, place=place, micro=micro, rank=1)
        for engine, places in zip(ENGINES, (("forward", "after"), ("after", "forward")), strict=True)
        for place, micro in zip(places, (0, -1), strict=True)
    ]
    found = answer("out_of_memory", asked=[asdict(cell) for cell in cells], timeout=200)
    assert found == [[True] * 4] * len(cells)


@pytest.mark.slow
def test_a_real_limit_of_the_address_space_is_survived() -> None:
    """The allocator gives large tensors back at once, so that what is allocated is what is used."""
    found = answer("memory_limit", world=1, torchrun=True, MALLOC_MMAP_THRESHOLD_="65536")
    assert found["failed"] == [[128, 8]], found  # from then on such micro-batches are run in parts
    for errors in found["errors"]:
        assert errors["own"] <= 4 * errors["plain"], found
