"""DeepSpeed without it: state of flat partitions by names of parameters, and which rules of optimizers survive them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.distributed.world import World
from distaccum.engines import optimizer_state
from distaccum.engines.deepspeed import optimizer_state as flat_state
from distaccum.engines.deepspeed.internals import Flat, Piece
from distaccum.engines.deepspeed.optimizer_state import check_rule, leaves_alone
from distaccum.engines.modules import trained
from distaccum.errors import CheckpointError, ConfigError, MisuseError

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


Make = Callable[[Any], Optimizer]
BY_ELEMENT: tuple[Make, ...] = (
    torch.optim.AdamW,
    torch.optim.RAdam,
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
    weights, state = [p.detach().clone() for p in model.parameters()], list(optimizer.state)
    check_rule(optimizer, trained(model))
    assert list(map(id, optimizer.state)) == list(map(id, state))
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))


def test_an_adagrad_that_deepspeed_would_make_anew_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="make an Adagrad of their own, which neither schedules"):
        check_rule(torch.optim.Adagrad(model.parameters()), trained(model))


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
