"""The norms of sharded gradients, each taken of the whole: the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.engines.dtensor import to_local
from distaccum.engines.fused_update import norms_of


class WholeNorms:
    """Sends the shards of each gradient to one rank, which takes the norm of the whole: a rank sends its shards once.

    Args:
        world: this rank, among those over which parameters are sharded along dimension 0.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._ranks = world.rank, world.size

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Of the parameters' gradients, shape ``(parameters,)``: 0 where another rank has the whole; a collective."""
        shards = [_real(to_local(parameter.grad)) for parameter in parameters]
        wide = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
        owners = _owners([parameter.numel() for parameter in parameters], self._ranks)
        own = [i for i, owner in enumerate(owners) if owner == self._rank]
        norms = torch.zeros(len(shards), dtype=wide, device=shards[0].device) if shards else torch.zeros(0)
        if own_wholes := self._gather(parameters, shards, owners, own, wide):
            norms[own] = norms_of(own_wholes)
        return norms

    def _gather(
        self,
        parameters: Sequence[nn.Parameter],
        shards: Sequence[Tensor],
        owners: Sequence[int],
        own: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The whole gradients that this rank takes the norms of."""
        if not shards:
            return []
        by_owner = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(self._ranks)]
        sent = torch.cat([shards[i].reshape(-1).to(dtype) for numbers in by_owner for i in numbers])
        rows = {i: [self._rows(parameters[i], rank) for rank in range(self._ranks)] for i in own}
        # The sizes of complex shards are those of their real and imaginary parts.
        widths = {i: shards[i].shape[1:].numel() for i in own}
        arriving = [sum(rows[i][rank] * widths[i] for i in own) for rank in range(self._ranks)]
        received = sent.new_empty(sum(arriving))
        sizes = [sum(shards[i].numel() for i in numbers) for numbers in by_owner]
        dist.all_to_all_single(received, sent, output_split_sizes=arriving, input_split_sizes=sizes)
        pieces: dict[int, list[Tensor]] = {i: [] for i in own}
        for rank, part in enumerate(torch.split(received, arriving)):
            lengths = [rows[i][rank] * widths[i] for i in own]
            for i, piece in zip(own, torch.split(part, lengths), strict=True):
                pieces[i].append(piece)
        return [torch.cat(pieces[i]).view(-1, *shards[i].shape[1:]) for i in own]

    def _rows(self, parameter: nn.Parameter, rank: int) -> int:
        """Of a rank's shard."""
        whole = parameter.shape[0]
        most = -(-whole // self._ranks)
        return max(0, min(most, whole - rank * most))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each size: the largest go first, each to the rank with the least so far."""
    owners, held = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = held.index(min(held))
        held[owners[i]] += sizes[i]
    return owners
