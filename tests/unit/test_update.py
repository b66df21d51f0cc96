"""The boundary's arithmetic against torch's textbook sequence: clip_grad_norm_, then step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from distaccum.engines.update import clip_and_step

Make = Callable[..., Optimizer]
OPTIMIZERS = [partial(AdamW, lr=1e-2, weight_decay=0.1), partial(SGD, lr=1e-2, momentum=0.9)]


def _parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,), ())]


def _set_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 100.0])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_hundred_updates_equal_the_textbook(make: Make, clip_norm: float | None, fused: bool) -> None:
    ours, theirs = _parameters(), _parameters()
    our_optimizer, their_optimizer = make(ours, fused=fused), make(theirs, fused=fused)
    for i in range(100):
        _set_gradients(ours, i)
        _set_gradients(theirs, i)
        result = clip_and_step(our_optimizer, ours, clip_norm)
        norm = nn.utils.clip_grad_norm_(theirs, clip_norm or float("inf"))
        their_optimizer.step()
        torch.testing.assert_close(result.grad_norm, norm, rtol=0, atol=0)
        assert result.finite.item() == 1.0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_fused_optimizer_takes_nothing_from_a_gradient_that_is_not_finite(make: Make, bad: float) -> None:
    parameters = _parameters()
    optimizer = make(parameters, fused=True)
    _set_gradients(parameters, 0)
    clip_and_step(optimizer, parameters, 1.0)
    before = [parameter.detach().clone() for parameter in parameters]
    state = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}

    _set_gradients(parameters, 1)
    assert parameters[1].grad is not None
    parameters[1].grad[2] = bad
    result = clip_and_step(optimizer, parameters, 1.0)

    assert result.finite.item() == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert all(torch.equal(v, state[id(p)][k]) for p, s in optimizer.state.items() for k, v in s.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_parameters_of_other_formats_step_too(make: Make, dtype: torch.dtype) -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 8, dtype=dtype)) for _ in range(2))
    for parameter, step in ((ours, clip_and_step), (theirs, None)):
        optimizer = make([parameter], fused=True)
        parameter.grad = torch.linspace(1, 2, 8, dtype=dtype)
        if step is not None:
            step(optimizer, [parameter], 1.0)
        else:
            nn.utils.clip_grad_norm_([parameter], 1.0)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype is torch.float64 else 1e-2, atol=1e-6)
