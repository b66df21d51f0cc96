"""Buffers that a forward changes depend on the micro-batches that their rank has seen, and so on the ranks."""

from __future__ import annotations

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
        self._kept: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Before forwards: what somebody has set by now is as good as what was there."""
        for name, buffer in self._model.named_buffers():
            known = self._kept.get(name)
            if known is None or not _same(buffer, known):
                self._kept[name] = buffer.detach().clone()

    def check(self) -> None:
        """After forwards; a collective.

        Raises:
            MisuseError: a buffer has another value, or was not there, on any rank; on all of them.
        """
        now = dict(self._model.named_buffers())
        changed = [
            name for name, buffer in now.items() if name not in self._kept or not _same(buffer, self._kept[name])
        ]
        if not self._world.all_reduce_max_host([bool(changed)])[0]:
            return
        names = shorten(self._world.all_gather_names(changed))
        problem = f"a forward has changed the buffer {names}, which each rank changes by its own units"
        raise MisuseError(f"{problem}: numerics=reproducible needs a model without such, or use numerics=fast")


def _same(buffer: Tensor, known: Tensor) -> bool:
    """Whether they are equal, NaN included; waits for the device."""
    if buffer.shape != known.shape or buffer.dtype != known.dtype or buffer.device != known.device:
        return False
    return torch.equal(buffer, known) or torch.equal(
        torch.nan_to_num(buffer.double()) if buffer.is_floating_point() else buffer,
        torch.nan_to_num(known.double()) if known.is_floating_point() else known,
    )
