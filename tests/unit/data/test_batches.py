"""Batches as they are collated, and on their way to the device: every tensor, in containers of the same types."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from distaccum.data.batches import map_tensors, to_device
from distaccum.data.collate import FilledCollator, PadCollator
from distaccum.errors import ConfigError, DataError
from tests.support.optional import Library

transformers = Library("transformers")
META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    x: Tensor
    derived: int = field(init=False, default=3)


class Moves:
    """As torch_geometric's batches."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device) -> Moves:
        self.x = self.x.to(device)
        return self


class Zone:
    """An object whose ``to`` is about something else."""

    def to(self, zone: str) -> str:
        return zone.upper()


class Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values


class Special(list[Any]):
    """A list with an attribute."""


CONTAINERS: dict[str, Any] = {
    "dict": {"a": torch.ones(2)},
    "OrderedDict": OrderedDict(a=torch.ones(2)),
    "UserDict": UserDict(a=torch.ones(2)),
    "BatchEncoding": lambda: transformers.BatchEncoding({"a": torch.ones(2)}),
    "read-only mapping": MappingProxyType({"a": torch.ones(2)}),
    "list": [torch.ones(2), "text", None],
    "list of a kind": Special([torch.ones(2)]),
    "namedtuple": Pair(torch.ones(2), 3),
    "frozen dataclass": Frozen("wiki", torch.ones(2)),
    "nested": ({"a": [Pair(torch.ones(1), {"b": Frozen("wiki", torch.ones(2))})]},),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_keep_their_types(kind: str) -> None:
    batch = CONTAINERS[kind]() if kind == "BatchEncoding" else CONTAINERS[kind]
    before: list[Tensor] = []
    after: list[Tensor] = []
    map_tensors(batch, before.append)
    moved = to_device(batch, META)
    map_tensors(moved, after.append)
    assert type(moved) is type(batch)
    assert before
    assert not any(tensor.is_meta for tensor in before)  # the batch that was given is as it was
    assert len(after) == len(before)
    assert all(tensor.is_meta for tensor in after)


def test_what_containers_hold_beside_tensors_is_kept() -> None:
    assert to_device(Frozen("wiki", torch.ones(2)), META).derived == 3
    counted = defaultdict(int, x=torch.ones(2))  # type: ignore[arg-type]
    assert to_device(counted, META)["new"] == 0
    array = np.ones(2)
    assert to_device({"array": array, "text": "a"}, META) == {"array": array, "text": "a"}
    moved = to_device({"a": [torch.ones(1), "text"], "b": Pair(torch.ones(2), 3)}, META)
    assert (moved["a"][1], moved["b"].y) == ("text", 3)
    zone = Zone()
    assert to_device([zone], META) == [zone]


def test_a_packed_sequence_keeps_its_sizes_on_the_host_and_objects_move_themselves() -> None:
    moved = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta
    assert moved.batch_sizes.tolist() == [2, 2, 1]
    assert not moved.batch_sizes.is_meta
    assert to_device({"graph": Moves()}, META)["graph"].x.is_meta


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Plain(x=torch.ones(2)), r"Plain\.x"),
        (Plain(store={"x": [torch.ones(2)]}), r"Plain\.store\['x'\]\[0\]"),
        (deque([torch.ones(2)]), r"deque\[0\]"),
        ({torch.ones(2)}, r"set\[0\]"),
    ],
)
def test_what_would_stay_on_the_host_is_named(value: Any, path: str) -> None:
    with pytest.raises(DataError, match=rf"a tensor in {path}, which would not be moved to meta: give .* to\(device\)"):
        to_device({"x": value}, META)
    assert to_device({"x": value}, torch.device("cpu"))["x"] is value  # it is there
    assert to_device([Plain(name="wiki", size=3)], META)


BYTES = torch.tensor([1], dtype=torch.uint8)


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


def test_types_are_those_of_what_is_there_also_in_workers() -> None:
    ids, values = PadCollator((0, 0))([([], [1, 2]), ([3], [0.5])])
    assert ids.tolist() == [[0], [3]]
    assert ids.dtype is torch.int64
    assert values.tolist() == [[1, 2], [0.5, 0]]
    half = PadCollator((0,))([(torch.ones(2, dtype=torch.bfloat16),), (torch.ones(1, dtype=torch.bfloat16),)])
    assert half[0].dtype is torch.bfloat16
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
        (PadCollator({"a": -100}), [{"a": BYTES}], "'a' .* is torch.uint8, which cannot hold the padding value -100"),
        (PadCollator({"a": 0.5}), [{"a": [1]}], "is torch.int64, which cannot hold the padding value 0.5"),
        (PadCollator({"a": 2}), [{"a": [True]}], "is torch.bool, which cannot hold the padding value 2"),
    ],
)
def test_what_cannot_be_padded_is_named(pad: PadCollator, samples: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pad(samples)


def test_lengths_are_fixed_or_few() -> None:
    samples = [([1, 2, 3], [4, 5, 6]), ([1], [4])]
    few, one = PadCollator((0, -100), pad_to_multiple_of=4), PadCollator((0, -100), pad_to=6)
    assert few(samples)[1].tolist() == [[4, 5, 6, -100], [4, -100, -100, -100]]
    assert few([([1] * 5, [2] * 5)])[0].shape == (1, 8)
    assert few([([1] * 4, [2] * 4)])[0].shape == (1, 4)
    assert one(samples)[0].tolist() == [[1, 2, 3, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert one([(torch.ones(2, 3), [1])])[0].shape == (1, 6, 3)
    assert PadCollator((0, -100)).bare is None
    for padding in (few, one):
        assert padding.bare is not None
        assert padding.bare(samples)[0].shape == (2, 3)
    with pytest.raises(DataError, match="field 0 of a sample has the length 7, and pad_to=6: raise it"):
        one([([1] * 7, [1] * 7)])


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({"pad_to": 0}, "pad_to=0: must be at least 1"),
        ({"pad_to_multiple_of": 2.5}, "pad_to_multiple_of=2.5: is no whole number"),
        ({"pad_to": 8, "pad_to_multiple_of": 4}, "pad_to=8: and pad_to_multiple_of=4 too"),
    ],
)
def test_lengths_that_cannot_be(lengths: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PadCollator((0, -100), **lengths)


@dataclass
class Couple:
    """A batch that is neither a mapping nor a tuple."""

    labels: torch.Tensor


class Growing(list[int]):
    """A sample that its collation changes."""


def _collate_and_change(samples: list[Growing]) -> dict[str, torch.Tensor]:
    for sample in samples:
        sample.append(0)
    return {"x": torch.tensor(samples), "labels": torch.ones(len(samples), dtype=torch.long)}


def test_rows_that_fill_a_batch_count_nothing() -> None:
    fill = FilledCollator(PadCollator((0, -100)), 3, {1: -100})
    inputs, labels = fill([([1, 2], [5, 6])])
    assert inputs.tolist() == [[1, 2]] * 3
    assert labels.tolist() == [[5, 6], [-100, -100], [-100, -100]]
    whole = [([1, 2], [5, 6])] * 3
    assert all(map(torch.equal, fill(whole), PadCollator((0, -100))(whole)))
    numbers = FilledCollator(None, 2, {"weight": 0.0})([{"x": torch.ones(2), "weight": 0.5}])
    assert numbers["weight"].tolist() == [0.5, 0.0]
    assert numbers["x"].tolist() == [[1, 1], [1, 1]]
    changed = FilledCollator(_collate_and_change, 3, {"labels": -100})([Growing([7])])
    assert changed["x"].tolist() == [[7, 0]] * 3  # each is a copy
    assert changed["labels"].tolist() == [1, -100, -100]
    pair = FilledCollator(lambda samples: Couple(torch.tensor(samples)), 2, {"labels": -100})([4])
    assert pair.labels.tolist() == [4, -100]
    assert pickle.loads(pickle.dumps(fill)).rows == 3  # noqa: S301  written a moment ago


@pytest.mark.parametrize(
    ("collate", "ignored", "said"),
    [
        (None, {"labels": -100}, "a batch of list has no part 'labels', whose rows are to be ignored"),
        (None, {2: -100}, "has no part 2"),
        (lambda samples: (torch.ones(len(samples)), "text"), {1: 0}, r"part 1 of a batch of 2 rows has type str"),
        (lambda _: (torch.ones(5), torch.ones(5)), {1: 0}, r"part 1 of a batch of 2 rows has shape \[5\]"),
        (lambda _: {"y": BYTES.repeat(2)}, {"y": -100}, "part 'y' of a batch is torch.uint8, which cannot hold -100"),
    ],
)
def test_rows_that_cannot_be_ignored(collate: Any, ignored: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        FilledCollator(collate, 2, ignored)([(1, 2)])
