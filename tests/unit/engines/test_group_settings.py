"""Settings of the optimizers' groups: what has changed since the start goes through JSON and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

from distaccum.engines.group_settings import GroupSettings


def _adam(**options: Any) -> tuple[Optimizer, GroupSettings]:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "lr": torch.tensor(0.25)}]
    optimizer = Adam(groups, **{"lr": 0.1, **options})
    return optimizer, GroupSettings([optimizer])


def test_nothing_is_state_before_it_changes() -> None:
    assert _adam()[1].changed() == {}


def test_what_changed_is_restored_and_the_rest_is_the_programs() -> None:
    optimizer, settings = _adam(weight_decay=0.0)
    first, second = optimizer.param_groups
    first.update(lr=0.05, betas=(0.5, 0.75), k=3, fused=True, seen=torch.tensor([1, 2]))
    second["lr"].fill_(0.125)
    saved = json.loads(json.dumps(settings.changed()))
    assert {name.split(".", 3)[3] for name in saved} == {"lr", "betas", "k", "seen"}

    optimizer, settings = _adam(weight_decay=0.5)
    first, second = optimizer.param_groups
    rate = second["lr"]
    first["came"] = 1
    settings.restore(saved)
    assert (first["lr"], first["betas"], first["k"], first["weight_decay"]) == (0.05, (0.5, 0.75), 3, 0.5)
    assert torch.equal(first["seen"], torch.tensor([1, 2]))
    assert "came" not in first
    assert not first["fused"]
    assert second["lr"] is rate
    assert rate == 0.125


def test_rates_of_a_schedule_are_no_state() -> None:
    optimizer, settings = _adam()
    optimizer.param_groups[0]["lr"] = 0.05
    assert list(settings.changed()) == ["groups.0.0.lr"]
    settings.rates_are_scheduled = True
    assert settings.changed() == {}
    settings.restore({"groups.0.0.lr": 0.7})
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="'k' was saved of group 2 of optimizer 0, and there is no such group"):
        _adam()[1].restore({"groups.0.2.k": 1})
