"""Micro-batches in parts: the rows of the parts, end to end, are those of the whole."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from distaccum.data.cutting import CannotCutError, cut, shape_of

ROWS = 4
X, Y = torch.arange(12.0).reshape(ROWS, 3), torch.arange(ROWS)
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Held:
    x: Tensor
    name: str = "a"


def flat(batch: Any) -> list[Any]:
    """All values of a batch, in order."""
    if isinstance(batch, Tensor | np.ndarray):
        return list(batch.tolist())
    if isinstance(batch, dict | UserDict):
        return [value for part in batch.values() for value in flat(part)]
    if isinstance(batch, list | tuple):
        return [value for part in batch for value in flat(part)]
    return flat(batch.x) if isinstance(batch, Held) else [batch]


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        Pair(X, Y),
        UserDict(x=X),
        Held(X),
        X.numpy(),
        ["a", "b", "c", "d"],
        [{"boxes": torch.ones(n)} for n in range(1, ROWS + 1)],  # of different sizes: one value a sample
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_parts_end_to_end_are_the_whole_in_the_same_containers(batch: Any) -> None:
    parts = [cut(batch, start, stop, ROWS) for start, stop in ((0, 1), (1, 3), (3, 4))]
    assert all(type(part) is type(batch) for part in parts)
    by_field = [sorted(map(str, flat(part))) for part in parts]
    assert sorted(map(str, flat(batch))) == sorted(value for values in by_field for value in values)
    if isinstance(batch, tuple | list) and isinstance(batch[0], Tensor):
        assert [len(part[0]) for part in parts] == [1, 2, 1]


def test_what_is_of_no_sample_is_in_every_part() -> None:
    part = cut({"x": X, "task": "mlm", "train": True, "mask": None}, 1, 3, ROWS)
    assert (part["task"], part["train"], part["mask"], len(part["x"])) == ("mlm", True, None, 2)


def test_two_fields_of_two_samples_are_fields() -> None:
    inputs, labels = cut([X[:2], Y[:2]], 0, 1, 2)
    assert (inputs.shape, labels.shape) == ((1, 3), (1,))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": X, "table": torch.ones(7)}, "shape [7]"),
        ({"x": X, "scale": torch.tensor(2.0)}, "shape []"),
        ({"x": X, "items": 4}, "type int"),
        ({"x": X, "packed": pack_sequence([X[0], X[1]])}, "type PackedSequence"),
        ((X.T, Y), "shape [3, 4]"),
    ],
)
def test_what_may_be_of_all_samples_is_not_cut(batch: Any, said: str) -> None:
    with pytest.raises(CannotCutError, match=said.replace("[", r"\[").replace("]", r"\]")):
        cut(batch, 0, 2, ROWS)


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ((X, Y), (4, 3)),
        ({"ids": torch.ones(2, 7), "labels": torch.ones(2, 7)}, (2, 7)),
        ({"pair": (X, Y), "image": torch.ones(2, 3, 8, 8)}, (2, 192)),
        (torch.tensor(1.0), (0, 0)),
        ([], (0, 0)),
    ],
)
def test_the_shape_is_that_of_the_largest_tensor(batch: Any, shape: tuple[int, int]) -> None:
    assert shape_of(batch) == shape
