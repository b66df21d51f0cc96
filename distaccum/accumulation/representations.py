"""What all ranks have represented of their batches, put together in one order on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distaccum.data.batches import map_tensors
from distaccum.distributed.world import World
from distaccum.errors import MisuseError, PeerError

_SIXTEEN = (torch.float16, torch.bfloat16)
_RETURN = "represent(model, batch) is to return a tensor, or tensors in dicts, lists and tuples"


def tensors_of(representation: Any) -> list[Tensor]:
    """The tensors of one batch's representation, in order.

    Raises:
        MisuseError: something in it is no tensor, has no leading dimension, or is complex.
    """
    found: list[Tensor] = []

    def add(tensor: Tensor) -> None:
        if tensor.ndim == 0:
            raise MisuseError(f"{_RETURN} with a leading dimension, and one has none: use tensor.reshape(1)")
        if tensor.is_complex():
            raise MisuseError(f"{_RETURN}, and one is complex: use torch.view_as_real(tensor)")
        found.append(tensor)

    map_tensors(representation, add, _refuse)
    if not found:
        raise MisuseError(f"{_RETURN}, and there is none in what it returns")
    return found


def _refuse(value: Any) -> None:
    raise MisuseError(f"{_RETURN}, and it returns a {type(value).__name__}")


def wide(tensor: Tensor) -> Tensor:
    """In fp32 where it is in 16 bits, which are too few for what a loss computes of it."""
    return tensor.float() if tensor.dtype in _SIXTEEN else tensor


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What a rank tells the others beforehand."""

    problem: str = ""
    """Why it has no representations: an error, in words."""
    key: int | None = None
    rows: Sequence[Sequence[int]] = ()
    """Of each of its batches, for each tensor: the leading dimension."""
    form: Any = None
    """A batch's representation with tensors of no rows, on the host; None where it has no batch."""


@dataclass(frozen=True)
class Representations:
    """Of all ranks' batches, the same on every rank.

    ``tensors`` are one after the other along the leading dimension, and in fp32 where they were in 16 bits.
    ``spans``: where those of this rank's batches lie, from the first row to before the last, for each batch and tensor.
    ``key``: of the first batch in the order, if it has one.
    """

    tensors: Sequence[Tensor]
    spans: Sequence[Sequence[tuple[int, int]]]
    key: int | None
    _form: Any = field(repr=False)

    def like(self, tensors: Sequence[Tensor]) -> Any:
        """``tensors`` in the containers that ``represent`` returns."""
        left = iter(tensors)
        return map_tensors(self._form, lambda _: next(left))


def gather(
    world: World,
    parts: Sequence[Any],
    *,
    error: Exception | None = None,
    key: int | None = None,
    dealt: bool = False,
) -> Representations:
    """Puts the representations of all ranks' batches together; a collective, of which a small one runs on the host.

    Args:
        world: this rank.
        parts: what was represented of each of this rank's batches; ranks may have different numbers of them, or none.
        error: what has kept this rank from it: it is raised, and the other ranks raise that it was.
        key: of the first batch.
        dealt: whether batches were dealt to the ranks in turn, one each; otherwise rank after rank has its own.

    Raises:
        PeerError: another rank has an error.
        MisuseError: a representation cannot be put together with others.
    """
    told, mine = _Told(), list[list[Tensor]]()
    try:
        if error is None:
            mine = [tensors_of(part) for part in parts]
            told = _Told(
                key=key,
                rows=[[len(tensor) for tensor in tensors] for tensors in mine],
                form=map_tensors(parts[0], lambda tensor: tensor[:0].cpu()) if parts else None,
            )
            _expect_alike([map_tensors(part, lambda tensor: tensor[:0]) for part in parts])
    except MisuseError as problem:
        error = problem
    if error is not None:
        told = _Told(problem=f"rank {world.rank}: {type(error).__name__}: {error}")
    everyone: list[_Told] = world.all_gather_object(told)
    if error is not None:
        raise error
    problems = [each.problem for each in everyone if each.problem]
    if problems:
        raise PeerError(problems[0], "in the first pass of a window's representations")
    forms = [each.form for each in everyone if each.rows]
    if not forms:
        raise MisuseError("no rank has a batch to represent")
    _expect_alike(forms)
    order = [(rank, i) for rank, each in enumerate(everyone) for i in range(len(each.rows))]
    if dealt:
        order.sort(key=lambda place: (place[1], place[0]))
    return Representations(*_put_together(world, mine, everyone, order, tensors_of(forms[0])), _form=forms[0])


def _put_together(
    world: World,
    mine: Sequence[Sequence[Tensor]],
    everyone: Sequence[_Told],
    order: Sequence[tuple[int, int]],
    form: Sequence[Tensor],
) -> tuple[list[Tensor], list[list[tuple[int, int]]], int | None]:
    tensors: list[Tensor] = []
    spans: list[list[tuple[int, int]]] = [[] for _ in mine]
    for k, empty in enumerate(form):
        own = torch.cat([each[k] for each in mine]) if mine else empty.to(world.device)
        rows = [[sizes[k] for sizes in each.rows] for each in everyone]
        gathered = world.all_gather_rows(own.detach().contiguous(), list(map(sum, rows)))
        pieces = [torch.split(each, sizes) for each, sizes in zip(gathered, rows, strict=True)]
        tensors.append(wide(torch.cat([pieces[rank][i] for rank, i in order])))
        ends = list(accumulate(rows[rank][i] for rank, i in order))
        for (rank, i), end in zip(order, ends, strict=True):
            if rank == world.rank:
                spans[i].append((end - rows[rank][i], end))
    return tensors, spans, everyone[order[0][0]].key


def _expect_alike(forms: Sequence[Any]) -> None:
    """Raises MisuseError where representations differ in more than their leading dimensions."""
    shown = [str(map_tensors(form, lambda tensor: f"{tensor.dtype} {list(tensor.shape[1:])}")) for form in forms]
    other = next((one for one in shown if one != shown[0]), None)
    if other is not None:
        problem = f"represent(model, batch) returns {shown[0]} for one batch and {other} for another"
        raise MisuseError(f"{problem}: they may differ in the leading dimension alone, as what they are joined along")
