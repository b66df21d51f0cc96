"""How many samples a stream's batch holds: counted right, or asked for."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from distaccum.data.batch_size import BatchSize
from distaccum.errors import DataError

FULL = 16
X = torch.zeros(5, 3)  # fewer than a full micro-batch, so that nothing but the batch itself can say so
Pair = namedtuple("Pair", ["name", "x"])


@dataclass
class Fields:
    name: str
    x: torch.Tensor


class Graphs:
    num_graphs = 5


class TensorDict:
    batch_size = torch.Size([5])


MEASURED: dict[str, tuple[Any, int]] = {
    "text first": ({"source": "wiki", "x": X}, 5),
    "number first": ({"epoch": 3, "x": X}, 5),
    "None first": ((None, X), 5),
    "array": (np.zeros((5, 2)), 5),
    "arrays of numpy": ({"x": np.zeros((5, 2)), "scale": np.float32(2)}, 5),
    "packed": (pack_sequence([torch.ones(3), torch.ones(2)]), 2),
    "dataclass": (Fields("wiki", X), 5),
    "namedtuple": (Pair("wiki", X), 5),
    "BatchEncoding": (BatchEncoding({"input_ids": X}), 5),
    "graphs": (Graphs(), 5),
    "TensorDict": ({"td": TensorDict(), "x": X}, 5),
    "nested": ({"a": {"b": [{"c": X}]}, "names": list("abcde")}, 5),
    "ragged lists": ({"ids": [[1], [1, 2], [3], [4], [5]]}, 5),
    "texts": (["a", "bc", "d"], 3),
    "jagged": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 2),
    "sparse": (torch.eye(5).to_sparse(), 5),
    "pair of one kind": ([X, X], 5),
    "fields of lists": (([X[0]] * 5, [{"boxes": X}] * 5), 5),
    "images and labels": ((list(X), torch.zeros(5)), 5),
    "columns of a list": ({"words": [torch.zeros(5)] * 4, "label": torch.zeros(5)}, 5),
    "empty": ({"x": X[:0]}, 0),
    "empty list": ([], 0),
    "empty extra": ({"x": X, "extra": []}, 5),
    "list of full size": ([torch.zeros(3, 4)] * FULL, FULL),
    "too many rows to be fields": ([torch.zeros(40, 4)] * 5, 5),
}


@pytest.mark.parametrize("kind", MEASURED)
def test_batches_are_measured_by_all_of_their_parts(kind: str) -> None:
    batch, size = MEASURED[kind]
    assert BatchSize(FULL)(batch) == size


ASKED: dict[str, tuple[Any, str]] = {
    "disagree": ({"x": X, "meta": {"boxes": torch.zeros(7, 4)}}, r"\['x'\] has 5 and \['meta'\]\['boxes'\] has 7"),
    "lengths of a packing": ((torch.zeros(1, 9), torch.zeros(1, 9), torch.zeros(4)), r"\[0\] has 1 and \[2\] has 4"),
    "list that disagrees": ((torch.zeros(5, 3), ["a", "b"]), r"\[0\] has 5 and \[1\] has 2"),
    "nothing": (torch.tensor(3.0), "does not say how many samples"),
    "text": ("a line of text", "does not say how many samples"),
    "object": (object(), r"\(object\) does not say how many samples"),
    "fields or samples": ([torch.zeros(3, 4)] * 5, "may hold 3 or 5 samples"),
    "a sample of a tuple": ((torch.zeros(3, 4), 7), "may be a batch of 3, or one sample"),
    "a sample of a dict": ({"x": torch.zeros(3), "label": torch.tensor(1)}, "may be a batch of 3, or one sample"),
}


@pytest.mark.parametrize("kind", ASKED)
def test_what_does_not_say_it_is_asked_for(kind: str) -> None:
    batch, message = ASKED[kind]
    with pytest.raises(DataError, match=f"{message}.*: state it, as in DataSpec"):
        BatchSize(FULL)(batch)


def test_a_full_batch_shows_how_later_ones_are_read() -> None:
    size = BatchSize(4)
    assert size([torch.zeros(3, 4)] * 4) == 4  # samples of 3 rows, not 4 fields of 3 samples
    assert size([torch.zeros(3, 4)] * 2) == 2
    size = BatchSize(4)
    assert size((torch.zeros(4, 2), torch.tensor(1.0))) == 4
    assert size((torch.zeros(3, 2), torch.tensor(1.0))) == 3


def test_a_function_of_the_users_is_believed_where_it_gives_a_number() -> None:
    assert BatchSize(4, lambda batch: len(batch["boxes"]))({"x": X, "boxes": [1, 2]}) == 2
    assert BatchSize(4, lambda _: torch.tensor(3))(None) == 3
    for wrong in (2.5, None, -1, True):
        with pytest.raises(DataError, match=r"batch_size\(\) of the DataSpec gives"):
            BatchSize(4, lambda _, wrong=wrong: wrong)({})  # type: ignore[misc]
