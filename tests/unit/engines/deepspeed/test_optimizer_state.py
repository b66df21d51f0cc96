"""State by the names of parameters, of flat tensors that hold pieces of them: on one process, which has all pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.engines import optimizer_state
from distaccum.engines.deepspeed import optimizer_state as flat_state
from distaccum.engines.deepspeed.internals import Flat, Piece
from distaccum.errors import CheckpointError, MisuseError

SHAPES = ((3, 4), (5,), ())


class Stepped:
    """Parameters in one flat tensor with padding, and an optimizer of it."""

    def __init__(self, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        self.parameters = {f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(SHAPES)}
        pieces, start = [], 0
        for parameter in self.parameters.values():
            pieces.append(Piece(parameter, start, 0, parameter.numel()))
            start += parameter.numel()
        self.flat = nn.Parameter(torch.zeros(start + 3))
        self.flats = [Flat(self.flat, pieces)]
        self.optimizer = kind([self.flat], lr=0.1, **options)
        self.names = {id(p): name for name, p in self.parameters.items()}

    def step(self, gradient: Tensor) -> None:
        self.flat.grad = gradient
        self.optimizer.step()

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return flat_state.collect(self.optimizer, self.flats, self.names, owns=lambda _: True)

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        flat_state.load(self.optimizer, self.flats, self.names, tensors, values)


def plain(kind: Any, gradients: list[Tensor], **options: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    """The same steps by the parameters themselves."""
    parameters = {f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(SHAPES)}
    optimizer = kind(parameters.values(), lr=0.1, **options)
    for gradient in gradients:
        sizes = [p.numel() for p in parameters.values()]
        for parameter, part in zip(parameters.values(), gradient[: sum(sizes)].split(sizes), strict=True):
            parameter.grad = part.view(parameter.shape).clone()
        optimizer.step()
    return optimizer, parameters


CASES = [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_state_is_that_of_plain_parameters_and_goes_both_ways(
    gloo_world: World, kind: Any, options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(21, generator=generator) for _ in range(3)]
    stepped = Stepped(kind, **options)
    for gradient in gradients:
        stepped.step(gradient)
    optimizer, parameters = plain(kind, gradients, **options)
    expected = optimizer_state.collect([optimizer], parameters, owns=lambda _: True)

    tensors, values = stepped.collect()
    assert values == expected[1]
    assert tensors.keys() == expected[0].keys()
    assert all(torch.equal(tensors[name], expected[0][name]) for name in tensors)

    other = Stepped(kind, **options)
    with torch.no_grad():
        other.flat.copy_(stepped.flat)
    other.load(*expected)
    for one in (stepped, other):
        one.step(gradients[0])
    assert torch.equal(stepped.flat[:18], other.flat[:18])


def test_what_lies_in_the_optimizers_memory_is_written_there(gloo_world: World) -> None:
    stepped = Stepped()
    stepped.step(torch.ones(21))
    place, saved = stepped.optimizer.state[stepped.flat]["exp_avg"], stepped.collect()
    stepped.step(torch.ones(21))
    stepped.load(*saved)
    assert stepped.optimizer.state[stepped.flat]["exp_avg"] is place
    assert place[0] == pytest.approx(0.1)


def test_parameters_that_were_stepped_differently_are_refused(gloo_world: World) -> None:
    stepped = Stepped()
    stepped.step(torch.ones(21))
    tensors, values = stepped.collect()
    before = {key: value.clone() for key, value in stepped.optimizer.state[stepped.flat].items()}
    with pytest.raises(CheckpointError, match=r"different values of step \(1\.0, 7\.0\)"):
        stepped.load(tensors | {"state.p1.step": torch.tensor(7.0)}, values)
    unused = {name: tensor for name, tensor in tensors.items() if ".p1." not in name}
    with pytest.raises(CheckpointError, match="state of p1 has other entries than that of p0"):
        stepped.load(unused, values)
    with pytest.raises(RuntimeError, match="another shape"):
        stepped.load(tensors | {"state.p1.exp_avg": torch.ones(4)}, values)
    with pytest.raises(KeyError, match="'p9', which is no trained parameter"):
        stepped.load(tensors | {"state.p9.step": torch.tensor(1.0)}, values)
    with pytest.raises(MisuseError, match="that of SGD"):
        stepped.load(tensors, {"kind.0": "SGD"})
    after = stepped.optimizer.state[stepped.flat]
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_no_state_is_no_state(gloo_world: World) -> None:
    fresh, stepped = Stepped(), Stepped()
    stepped.step(torch.ones(21))
    stepped.load(*fresh.collect())
    assert not stepped.optimizer.state


def test_what_is_no_element_is_refused(gloo_world: World) -> None:
    stepped = Stepped()
    stepped.optimizer.state[stepped.flat] = {"rows": torch.ones(3)}
    with pytest.raises(MisuseError, match="AdamW keeps rows, which is neither"):
        stepped.collect()
