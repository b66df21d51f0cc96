"""Shares of a state: the same bits, packed or dealt anew, and an error where nobody has a part."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distaccum.distributed.world import World
from distaccum.elastic.engine.shares import LostStateError, Share, dealt
from distaccum.errors import PeerError
from tests.support.threads import run_ranks

NAMES = [f"layer.{i}.weight" for i in range(7)]


def share_of(*numbers: int) -> Share:
    names = [NAMES[number] for number in numbers]
    generators = {name: torch.Generator().manual_seed(NAMES.index(name)) for name in names}
    moments = {f"state.{name}.exp_avg": torch.randn(5, 3, generator=generators[name]) for name in names}
    return Share(
        parameters=frozenset(names),
        model={name: torch.randn(4, generator=generators[name]) for name in names},
        optimizer=moments,
        values={f"state.{name}.step": NAMES.index(name) for name in names} | {"kind.0": "AdamW"},
    )


def same(one: Share, other: Share) -> bool:
    pairs = (one.model, other.model), (one.optimizer, other.optimizer)
    tensors = all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)
    return tensors and one.parameters == other.parameters and one.values == other.values


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.randn(6, 4)[:, ::2],
        torch.randn(3, 7).t(),
        torch.ones(3, 1).expand(3, 4),
        torch.randn(9).bfloat16(),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor([float("nan"), float("-inf"), -0.0]),
        torch.empty(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()}",
)
def test_a_tensor_comes_back_with_its_bits_and_its_layout(tensor: Tensor) -> None:
    values = {"state.a.k": float("inf"), "own.0.n": None, "state.b.t": "text", "state.b.f": 0.1 + 0.2}
    given = Share(
        parameters=frozenset("ab"), optimizer={"state.a.x": torch.ones(3), "state.b.y": tensor}, values=values
    )
    found = given.copy()
    assert (found.parameters, found.values) == (given.parameters, values)
    back = found.optimizer["state.b.y"]
    assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))
    assert back.data_ptr() % 64 == 0
    if tensor.is_contiguous(memory_format=torch.channels_last if tensor.ndim == 4 else torch.contiguous_format):
        assert back.stride() == tensor.stride()
    back.zero_()
    assert bool((given.optimizer["state.a.x"] == 1).all())


def test_a_part_has_what_belongs_to_its_parameters_and_to_none() -> None:
    part = share_of(0, 1, 2).of([NAMES[1], "of nobody"], weights=[NAMES[2]])
    assert part.parameters == {NAMES[1]}
    assert [*part.optimizer] == [f"state.{NAMES[1]}.exp_avg"]
    assert [*part.model] == [NAMES[2]]
    assert part.values == {f"state.{NAMES[1]}.step": 1, "kind.0": "AdamW"}


HELD = [(0, 1), (1, 2, 3), (4, 5, 6, 0), ()]
WANTED = [(0, 6), (6, 1, 5), (2, 3), (3, 4)]


@pytest.mark.parametrize("weights", [True, False])
def test_each_rank_gets_what_it_is_to_have(weights: bool) -> None:
    wanted = [[NAMES[number] for number in numbers] for numbers in WANTED]
    found: list[Any] = run_ranks(4, lambda world: dealt(share_of(*HELD[world.rank]), wanted, world, weights=weights))
    for rank, one in enumerate(found):
        everything = share_of(*range(7))
        assert same(one, everything.of(wanted[rank], weights=NAMES if weights else ()))


def test_a_part_that_nobody_has_is_named_on_every_rank() -> None:
    found = run_ranks(3, lambda world: dealt(share_of(*range(6)), [[NAMES[6]], [], NAMES], world, weights=False))
    for error in found:
        assert isinstance(error, LostStateError)
        assert NAMES[6] in str(error)
        assert NAMES[0] not in str(error)


def test_what_comes_damaged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.broadcast

    def damaging(tensor: Tensor, src: int) -> None:
        real(tensor, src=src)
        if dist.get_rank() == 1:
            tensor[-64] ^= 1

    monkeypatch.setattr("distaccum.elastic.engine.shares.dist.broadcast", damaging)

    def get(world: World) -> Share:
        return dealt(share_of(0) if world.rank == 0 else Share(), [(), [NAMES[0]]], world, weights=False)

    first, second = run_ranks(2, get)
    assert isinstance(first, Share)
    assert isinstance(second, PeerError)
    assert "rank 0 sent has come damaged" in str(second)
