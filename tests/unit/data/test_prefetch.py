from __future__ import annotations

from collections import namedtuple

import torch

from distaccum.data.batches import to_device


def test_batches_keep_their_structure_on_the_way_to_the_device() -> None:
    pair = namedtuple("pair", ["x", "y"])
    batch = {"a": [torch.ones(1), "text"], "b": pair(torch.ones(2), 3)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    assert (moved["a"][1], moved["b"].y) == ("text", 3)
