"""Buffers that a forward changes depend on the micro-batches that their rank has seen, and so on the ranks."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.errors import MisuseError, shorten


class ConstantBuffers:
    """Looks, for ``numerics=reproducible``, whether forwards have changed the model's buffers.

    By their values: a version tells neither of a buffer that was assigned anew nor of one changed by way of ``.data``.

    Args:
        model: whose buffers they are.
        world: this rank.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world
        self._names = {name for name, _ in model.named_buffers()}
        self._kept: dict[str, Tensor] = {}
        self._digest: int | None = None  # of them

    def begin(self) -> None:
        """Before forwards: what somebody has set by now is as good as what was there."""
        for name, buffer in self._model.named_buffers():
            known = self._kept.get(name)
            if known is None or not _same(buffer, known):
                self._kept[name], self._digest = buffer.detach().clone(), None

    def check(self) -> None:
        """After forwards; a collective.

        Raises:
            MisuseError: a buffer has another value, or was not there when the model was wrapped, on any rank, or ranks
                had others; on all of them.
        """
        if self._digest is None:
            self._digest = crc32(b"".join(_bytes_of(kept) for _, kept in sorted(self._kept.items())))
        now = dict(self._model.named_buffers())
        changed = [
            name
            for name, buffer in now.items()
            if name not in self._names or name not in self._kept or not _same(buffer, self._kept[name])
        ]
        anywhere, most, least = self._world.all_reduce_max_host([bool(changed), self._digest, -self._digest])
        if most != -least:
            problem = "ranks have other values in the model's buffers, as if each had made them of its own samples"
            raise MisuseError(f"{problem}: numerics=reproducible needs the same ones on all of them")
        if not anywhere:
            return
        names = shorten(self._world.all_gather_names(changed))
        problem = f"a forward has changed the buffer {names}, which each rank changes by its own units"
        raise MisuseError(f"{problem}: numerics=reproducible needs a model without such, or use numerics=fast")


def _bytes_of(tensor: Tensor) -> bytes:
    content: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content


def _same(buffer: Tensor, known: Tensor) -> bool:
    """Whether they are equal, NaN included; waits for the device."""
    if buffer.shape != known.shape or buffer.dtype != known.dtype or buffer.device != known.device:
        return False
    return torch.equal(buffer, known) or torch.equal(
        torch.nan_to_num(buffer.double()) if buffer.is_floating_point() else buffer,
        torch.nan_to_num(known.double()) if known.is_floating_point() else known,
    )
