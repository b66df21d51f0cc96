"""Which optimizers' rules survive DeepSpeed's flat partitions: found by trial, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.engines.deepspeed.optimizer_state import check_rule, leaves_alone
from distaccum.engines.modules import trained
from distaccum.errors import ConfigError

Make = Callable[[Any], Optimizer]
BY_ELEMENT: tuple[Make, ...] = (
    torch.optim.AdamW,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True),
)


class ByNorm(Optimizer):
    """Its step depends on a whole parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm())


@pytest.mark.parametrize("make", BY_ELEMENT)
def test_rules_by_element_pass_and_are_not_touched(make: Make) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    weights, state = [p.detach().clone() for p in model.parameters()], list(optimizer.state)  # Adagrad begins with one
    check_rule(optimizer, trained(model))
    assert list(map(id, optimizer.state)) == list(map(id, state))
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("make", [torch.optim.Adafactor, ByNorm, getattr(torch.optim, "Muon", ByNorm)])
def test_rules_that_look_at_whole_parameters_are_refused(make: Make) -> None:
    model = nn.Linear(3, 2, bias=False)
    with pytest.raises(ConfigError, match="looks at more than one element") as caught:
        check_rule(make(model.parameters()), trained(model))
    assert "engine.stage=0" in str(caught.value)


def test_what_is_trained_must_be_stepped() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="steps none of bias"):
        check_rule(torch.optim.SGD([model.weight]), trained(model))
    model.bias.requires_grad_(False)
    check_rule(torch.optim.SGD([model.weight]), trained(model))


def test_only_plain_sgd_leaves_alone_what_has_a_gradient_of_zeros() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    assert leaves_alone(torch.optim.SGD(weights, lr=0.1))
    assert not leaves_alone(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    assert not leaves_alone(torch.optim.SGD(weights, lr=0.1, weight_decay=0.1))
    assert not leaves_alone(torch.optim.AdamW(weights))
