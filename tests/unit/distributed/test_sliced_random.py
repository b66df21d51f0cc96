"""Random numbers of parts: the rows of what the whole draws, operator by operator, held to the whole in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from distaccum.distributed import sliced_random
from distaccum.distributed.sliced_random import (
    CannotSliceError,
    Drawn,
    Rows,
    Slice,
    SlicedRandom,
    by_name,
    current_slices,
    draws,
    slices_of,
)

ROWS, LENGTH, WIDTH = 8, 5, 6
PARTS = ((0, 3), (3, 4), (4, 8))
Forward = Callable[[Tensor], Tensor]


class _Noted(TorchDispatchMode):
    """Notes what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Drawn] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if draws(function, by_name(function, args, kwargs or {})):
            self.drawn.append(Drawn.by(function, found))
        return found


def learned(forward: Forward, x: Tensor) -> Sequence[Slice]:
    """From the whole, and from fewer rows."""
    noted = []
    for rows in (len(x), 4, 1):
        with _Noted() as mode:
            forward(x[:rows])
        noted.append((mode.drawn, rows))
    return slices_of(*noted[0], noted[1:])


def data(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3), dtype=dtype)


def _lstm(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, dtype=x.dtype)
    torch.manual_seed(7)
    return lstm(x.transpose(0, 1))[0].transpose(0, 1)


def _attention(x: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3, is_causal=True).transpose(1, 2).flatten(2)


PROGRAMS: dict[str, Forward] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of all positions": lambda x: F.dropout(x.flatten(0, 1), 0.4).view_as(x),
    "rows in the middle": lambda x: F.dropout(x.transpose(0, 1).contiguous(), 0.4).transpose(0, 1),
    "rows first, but not in memory": lambda x: F.dropout(x.transpose(0, 1).contiguous().transpose(0, 1), 0.4),
    "channels last": lambda x: F.dropout(x.unsqueeze(-1).contiguous(memory_format=torch.channels_last), 0.4)[..., 0],
    "channels": lambda x: F.dropout2d(x.unsqueeze(-1), 0.4)[..., 0],
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "native": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "native, all": lambda x: torch.native_dropout(x, 1.0, True)[0],
    "native, off": lambda x: torch.native_dropout(x, 0.4, False)[0],
    "attention": _attention,
    "lstm": _lstm,
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a size": lambda x: x + torch.randn(x.shape, dtype=x.dtype) + torch.rand(x.shape[0], 1, 1),
    "whole numbers": lambda x: x * torch.randint(0, 3, (len(x), LENGTH, 1)) + torch.randint_like(x, 5),
    "in place": lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5) + torch.empty_like(x).exponential_(),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "depth": lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.6),
    "the same for all": lambda x: x * torch.rand(()) + torch.randn(WIDTH),
    "computed again": lambda x: checkpoint(lambda y: F.dropout(y.sin(), 0.4), x * 2, use_reentrant=False),
    "means of their own": lambda x: torch.normal(x, 1.0) + torch.normal(0.5, x.square()) + torch.normal(x, x.square()),
    "a distribution": lambda x: x + torch.distributions.Normal(0.0, 1.0).sample(x.shape[:1]).to(x)[:, None, None],
    "chances": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)) + torch.empty_like(x).bernoulli_(x.sigmoid()),
    "chances of the transposed": lambda x: x * torch.bernoulli(x.transpose(0, 1).sigmoid()).transpose(0, 1),
    "several": lambda x: F.dropout(F.dropout(x, 0.2).sin() + torch.rand_like(x), 0.5),
}


def run(forward: Forward, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output and its gradient, from the same beginning."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    found = forward(x)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    return found.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_sample_has_its_numbers_of_the_whole(name: str, dtype: torch.dtype) -> None:
    forward, x = PROGRAMS[name], data(dtype)
    slices = learned(forward, x)
    output, gradient = run(forward, x)
    ended = torch.get_rng_state()
    for start, stop in PARTS:
        with SlicedRandom(Rows(start, stop, ROWS), slices) as mode:
            assert current_slices() is mode
            part, of_part = run(forward, x[start:stop])
        bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        assert torch.allclose(part, output[start:stop], rtol=bound, atol=bound)
        assert torch.allclose(of_part, gradient[start:stop], rtol=bound, atol=bound)
        assert torch.equal(torch.get_rng_state(), ended)  # the generator goes on as in the whole
    assert current_slices() is None


def test_nothing_is_drawn_where_nothing_is_left_out() -> None:
    assert not learned(PROGRAMS["native, off"], data())


UNKNOWN: dict[str, Forward] = {
    "rates of their own": lambda x: torch.poisson(x.square()),
    "an order": lambda x: x[torch.randperm(len(x))],
    "choices": lambda x: x * x.flatten(1).softmax(1).multinomial(1)[:, :, None],
    "one by one": lambda x: torch.stack([F.dropout(row, 0.5) for row in x]),
    "pairs": lambda x: x + torch.rand(len(x), len(x), dtype=x.dtype).sum() * 0,
    "one more": lambda x: x + torch.rand(len(x) + 1, dtype=x.dtype).sum() * 0,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_nobody_can_cut_is_said(name: str) -> None:
    with pytest.raises(CannotSliceError):
        learned(UNKNOWN[name], data())


def _other(x: Tensor) -> Tensor:
    return F.dropout(x, 0.4) + torch.rand_like(x)


def test_a_forward_that_draws_something_else_is_an_error_or_goes_on_alone() -> None:
    slices, x = learned(PROGRAMS["dropout"], data()), data()[:2]
    with pytest.raises(CannotSliceError, match="rand_like draws here"), SlicedRandom(Rows(0, 2, ROWS), slices):
        run(_other, x)
    with SlicedRandom(Rows(0, 2, ROWS), slices, strict=False) as mode:
        run(_other, x)
    assert "rand_like draws here" in mode.lost
    assert torch.equal(F.dropout(x, 0.0), x)  # the mode has ended


def test_means_and_deviations_of_two_shapes_are_not_cut() -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.normal(x, torch.ones(WIDTH, dtype=x.dtype))

    slices, x = learned(forward, data()), data()[:2]
    with pytest.raises(CannotSliceError, match="is given"), SlicedRandom(Rows(0, 2, ROWS), slices):
        forward(x)


def test_another_length_is_cut_alike() -> None:
    """What was learned of some samples holds for longer ones."""
    slices = learned(PROGRAMS["dropout of all positions"], data())
    longer = torch.cat([data(), data()], 1)

    def forward(x: Tensor) -> Tensor:
        return F.dropout(x.flatten(0, 1), 0.4).view_as(x)

    output, _ = run(forward, longer)
    with SlicedRandom(Rows(2, 4, ROWS), slices):
        part, _ = run(forward, longer[2:4])
    assert torch.equal(part, output[2:4])


def test_no_memory_for_the_whole_is_no_other_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    slices, x = learned(PROGRAMS["dropout"], data()), data()[:2]
    monkeypatch.setattr(sliced_random.torch, "empty_permuted", full)
    with pytest.raises(CannotSliceError, match="no memory for what the whole"), SlicedRandom(Rows(0, 2, ROWS), slices):
        run(PROGRAMS["dropout"], x)


def test_parts_of_parts() -> None:
    assert Rows(1, 2, 4).within(Rows(4, 8, 8)) == Rows(5, 6, 8)
    assert Rows(1, 2, 4).within(None) == Rows(1, 2, 4)
