"""Optimizers that keep tensors beside their state: those that pair them with parameters by place are refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Optimizer

from distaccum.errors import ConfigError
from distaccum.tools.kept_beside import check_kept, fault_of_step


class Lookahead(Optimizer):
    """Slow weights follow at every second step; they are kept as a subclass keeps them."""

    def __init__(self, parameters: Any) -> None:
        self.base, self.steps = SGD(parameters, lr=0.1, momentum=0.9), 0
        super().__init__([p for group in self.base.param_groups for p in group["params"]], {})
        self.param_groups = self.base.param_groups
        self.keep([p.detach().clone() for p in self.own()])

    def own(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def keep(self, slow: list[Tensor]) -> None:
        self.slow: Any = slow

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.slow, self.own(), strict=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.steps += 1
        for slow, p in self.kept() if self.steps % 2 == 0 else ():
            p.copy_(slow.lerp_(p, 0.5))


class InAnObject(Lookahead):
    def keep(self, slow: list[Tensor]) -> None:
        self.shadow = type("Shadow", (), {})()
        self.shadow.by_number = [dict(enumerate(slow))]

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((self.shadow.by_number[0][i], p) for i, p in enumerate(self.own()))


class InAGroup(Lookahead):
    def keep(self, slow: list[Tensor]) -> None:
        self.param_groups[0]["slow"] = slow

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.param_groups[0]["slow"], self.own(), strict=False)


class Flat(Lookahead):
    def keep(self, slow: list[Tensor]) -> None:
        self.flat = parameters_to_vector(slow)

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        slow = [torch.zeros_like(p) for p in self.own()]
        vector_to_parameters(self.flat, slow)
        yield from zip(slow, self.own(), strict=True)
        self.flat.copy_(parameters_to_vector(slow))


class InTheState(Lookahead):
    def keep(self, slow: list[Tensor]) -> None:
        self.table = torch.linspace(0, 1, 16)  # that no parameter has a place in
        for p, value in zip(self.own(), slow, strict=True):
            self.state[p]["slow"] = value

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((self.state[p]["slow"], p) for p in self.own())


class Sam(SGD):
    """Wants a closure, and says so in its own way."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "give me the loss"


class WantsTraining(SGD):
    """As schedule-free ones do, which know two kinds of weights."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.trains
        super().step()


class ByItsFirst(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["params"][0].grad is not None
        super().step()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def state_of(optimizer: Any) -> list[list[float]]:
    kept = [one for pair in optimizer.kept() for one in pair]
    return [one.detach().flatten().tolist() for one in kept]


@pytest.mark.parametrize("kind", [Lookahead, InAnObject, InAGroup, Flat])
def test_tensors_by_place_are_refused_wherever_they_are(kind: Callable[..., Any]) -> None:
    optimizer = kind(model().parameters())
    before = state_of(optimizer)
    with pytest.raises(ConfigError, match="keeps tensors of its own beside its state"):
        check_kept(optimizer, "zero1")
    assert not fault_of_step(optimizer)  # one process steps all
    assert state_of(optimizer) == before
    assert optimizer.steps == 0


def test_what_belongs_to_a_parameter_is_right() -> None:
    optimizer = InTheState(model().parameters())
    before = state_of(optimizer)
    check_kept(optimizer, "zero1")
    assert state_of(optimizer) == before
    check_kept(SGD(model().parameters(), lr=0.1), "zero1")


def test_a_step_that_raises_is_told() -> None:
    assert fault_of_step(Sam(model().parameters(), lr=0.1)) == "AssertionError: give me the loss"
    lbfgs = torch.optim.LBFGS(model().parameters())
    assert "argument: 'closure'" in fault_of_step(lbfgs)
    assert not fault_of_step(waits := WantsTraining(model().parameters(), lr=0.1))
    assert not waits.trains
    parameters = list(model().parameters())
    assert not fault_of_step(ByItsFirst(parameters, lr=0.1))
    assert all(p.grad is None for p in parameters)
