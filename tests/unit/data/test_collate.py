from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from distaccum.data.collate import PadCollator
from distaccum.errors import DataError


def test_mappings_are_padded_to_the_longest_of_the_micro_batch() -> None:
    read_only = np.array([7, 8, 9])
    read_only.setflags(write=False)
    samples = [
        {"input_ids": [1, 2], "labels": torch.tensor([1, 2]), "score": 0.5, "kind": np.int64(3)},
        {"input_ids": read_only, "labels": torch.tensor([7, 8, 9]), "score": 1, "kind": torch.tensor(4)},
    ]
    batch = PadCollator({"input_ids": 0, "labels": -100})(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 0], [7, 8, 9]]
    assert batch["labels"].tolist() == [[1, 2, -100], [7, 8, 9]]
    assert batch["labels"].dtype is torch.int64
    torch.testing.assert_close(batch["score"], torch.tensor([0.5, 1.0]))
    assert batch["kind"].tolist() == [3, 4]
    assert PadCollator({"input_ids": 0, "labels": -100})(samples[:1])["input_ids"].shape == (1, 2)


def test_tuples_are_padded_by_position() -> None:
    tokens, targets, label = PadCollator((0, -100))([([1], [5], 0), ([1, 2], [5, 6], 1)])
    assert tokens.tolist() == [[1, 0], [1, 2]]
    assert targets.tolist() == [[5, -100], [5, 6]]
    assert label.tolist() == [0, 1]


def test_types_are_those_of_what_is_there() -> None:
    ids, values = PadCollator((0, 0))([([], [1, 2]), ([3], [0.5])])
    assert ids.tolist() == [[0], [3]]
    assert ids.dtype is torch.int64
    assert values.tolist() == [[1, 2], [0.5, 0]]
    half = PadCollator((0,))([(torch.ones(2, dtype=torch.bfloat16),), (torch.ones(1, dtype=torch.bfloat16),)])
    assert half[0].dtype is torch.bfloat16


def test_it_goes_to_workers() -> None:
    pad = pickle.loads(pickle.dumps(PadCollator({"x": 9})))  # noqa: S301  written a moment ago
    assert pad([{"x": [1]}, {"x": [1, 2]}])["x"].tolist() == [[1, 9], [1, 2]]


def test_a_field_of_one_length_may_be_stacked() -> None:
    assert PadCollator({"x": None})([{"x": [1, 0]}, {"x": [0, 1]}])["x"].tolist() == [[1, 0], [0, 1]]
    with pytest.raises(DataError, match="'x'"):
        PadCollator({"x": None})([{"x": [1]}, {"x": [0, 1]}])


@pytest.mark.parametrize(
    ("pad", "samples", "message"),
    [
        (PadCollator({"a": 0}), [{"a": [1], "b": [1]}], r"'b' of the samples is a sequence.*with one: 'a'"),
        (PadCollator((0,)), [([1], [1])], "field 1 of the samples is a sequence"),
        (PadCollator({}), [{"a": "text"}], "'a' of the samples cannot be made a tensor"),
        (PadCollator({"a": 0}), [{"a": [1]}, {"a": 1}], "'a' of the samples cannot be put into one batch"),
        (PadCollator({"a": 0}), [[1, 2]], "these are list"),
    ],
)
def test_what_cannot_be_padded_is_named(pad: PadCollator, samples: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pad(samples)
