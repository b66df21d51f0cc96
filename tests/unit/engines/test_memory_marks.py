"""Which shapes of micro-batches fit."""

import json

import pytest

from distaccum.data.cutting import Shape
from distaccum.engines.memory_marks import MemoryMarks


def test_a_shape_is_proven_by_one_that_is_no_smaller_in_either_direction() -> None:
    marks = MemoryMarks()
    assert not marks.is_proven(Shape(1, 1))
    marks.prove(Shape(4, 100))
    marks.prove(Shape(2, 300))
    proven = {(4, 100): True, (3, 80): True, (2, 300): True, (1, 200): True, (3, 200): False, (5, 10): False}
    assert {shape: marks.is_proven(Shape(*shape)) for shape in proven} == proven


def test_a_failure_takes_the_proof_of_what_is_no_smaller_and_what_runs_after_all_is_not_too_large() -> None:
    marks = MemoryMarks()
    marks.prove(Shape(8, 100))
    marks.prove(Shape(1, 500))
    marks.fail(Shape(4, 100))
    large = {(4, 100): True, (5, 700): True, (3, 100): False, (8, 99): False}
    assert {shape: marks.is_too_large(Shape(*shape)) for shape in large} == large
    assert [marks.is_proven(Shape(*shape)) for shape in ((8, 100), (1, 500))] == [False, True]
    marks.prove(Shape(6, 100))
    assert marks.is_proven(Shape(4, 100))
    assert not marks.failed


@pytest.mark.parametrize(
    ("failed", "shape", "parts"),
    [
        ([], (8, 10), 1),
        ([(8, 10)], (8, 10), 2),
        ([(8, 10)], (7, 10), 1),
        ([(8, 10)], (16, 10), 4),
        ([(8, 10)], (8, 9), 1),
        ([(2, 10)], (8, 10), 8),
        ([(2, 10)], (5, 10), 5),  # a part has at least one row
        ([(8, 10), (2, 50)], (8, 50), 8),
    ],
)
def test_parts_are_a_power_of_two_until_none_is_too_large(
    failed: list[tuple[int, int]], shape: tuple[int, int], parts: int
) -> None:
    marks = MemoryMarks()
    for one in failed:
        marks.fail(Shape(*one))
    assert marks.parts(Shape(*shape)) == parts


def test_a_single_row_cannot_be_cut_and_is_not_noted() -> None:
    marks = MemoryMarks()
    marks.prove(Shape(4, 100))
    marks.fail(Shape(1, 100))
    assert not marks.failed
    assert not marks.is_proven(Shape(1, 100))


def test_marks_outlive_the_process_as_json() -> None:
    marks, again = MemoryMarks(), MemoryMarks()
    marks.prove(Shape(2, 3))
    marks.fail(Shape(4, 5))
    again.load_state_dict(json.loads(json.dumps(marks.state_dict())))
    assert again.state_dict() == marks.state_dict()
    assert again.is_proven(Shape(2, 3))
    assert again.is_too_large(Shape(4, 5))
    again.load_state_dict({})  # of an older checkpoint
    assert not again.failed
