"""Batches on their way to the device: every tensor, in containers of the same types; nothing stays in silence."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding

from distaccum.data.batches import map_tensors, to_device
from distaccum.errors import DataError

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
    "BatchEncoding": BatchEncoding({"a": torch.ones(2)}),
    "read-only mapping": MappingProxyType({"a": torch.ones(2)}),
    "list": [torch.ones(2), "text", None],
    "list of a kind": Special([torch.ones(2)]),
    "namedtuple": Pair(torch.ones(2), 3),
    "frozen dataclass": Frozen("wiki", torch.ones(2)),
    "nested": ({"a": [Pair(torch.ones(1), {"b": Frozen("wiki", torch.ones(2))})]},),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_keep_their_types(kind: str) -> None:
    batch = CONTAINERS[kind]
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
    zone = Zone()
    assert to_device([zone], META) == [zone]


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    moved = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta
    assert moved.batch_sizes.tolist() == [2, 2, 1]
    assert not moved.batch_sizes.is_meta


def test_objects_move_themselves() -> None:
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
