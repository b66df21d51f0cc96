"""Which parameters an interrupted backward has added to: compared with the gradients themselves."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from distaccum.engines.reached_leaves import ReachedLeaves


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize(("leaf", "kind", "early"), list(product(range(4), ("tensor", "post"), (True, False))))
def test_the_leaves_that_were_reached_are_those_whose_gradient_has_changed(leaf: int, kind: str, early: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    armed = True

    def stop(_: Any) -> None:
        if armed:
            raise _StoppedError

    def place() -> None:
        if kind == "tensor":
            parameters[leaf].register_hook(stop)
        else:
            parameters[leaf].register_post_accumulate_grad_hook(stop)

    if early:
        place()
    leaves = ReachedLeaves(parameters)
    if not early:
        place()
    with pytest.raises(_StoppedError):
        model(torch.randn(5, 3)).sum().backward()
    changed = [id(p) for p in parameters if p.grad is not None and p.grad.abs().sum() > 0]
    assert sorted(map(id, leaves.reached_in_backward)) == sorted(changed)
    assert list(map(id, leaves.missing)) == [id(p) for p in parameters if id(p) not in changed]
    armed = False
    leaves.begun = len(leaves.reached)
    model(torch.randn(5, 3)).sum().backward()
    assert len(leaves.reached_in_backward) == len(parameters)
    assert not leaves.missing
    leaves.reached.clear()
    assert len(leaves.missing) == len(parameters)
    leaves.close()
    model(torch.randn(5, 3)).sum().backward()
    assert len(leaves.missing) == len(parameters)
