"""Host memory that a save copies tensors into, so that training may change them: reused by the next save."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostMemory:
    """Copies of tensors on the host, in memory that is taken once; pinned where the tensors are on a GPU.

    A copy is complete after :meth:`wait`, and stays until :meth:`reuse`.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pins = device, device.type == "cuda"
        self._taken: list[Tensor] = []
        self._next = 0

    def missing(self, sizes: Sequence[int]) -> int:
        """The bytes that copies of tensors of these sizes take, beside what is taken already.

        Torch pins memory in powers of two: https://docs.pytorch.org/docs/stable/notes/cuda.html, on its host allocator.
        """
        return max(0, sum(map(self._taken_for, sizes)) - sum(self._taken_for(tensor.nbytes) for tensor in self._taken))

    def reuse(self) -> None:
        """The next copies overwrite those of before; where they come in the same order, no memory is taken."""
        self._next = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy on the host, of the same type and shape; from a GPU it is made behind the device's work."""
        if self._next == len(self._taken):
            self._taken.append(self._take(tensor.nbytes))
        elif self._taken[self._next].nbytes != tensor.nbytes:
            self._taken[self._next] = self._take(tensor.nbytes)
        copied = self._taken[self._next].view(tensor.dtype).view(tensor.shape)
        self._next += 1
        return copied.copy_(tensor, non_blocking=self._pins)

    def wait(self) -> None:
        """Until the copies are there."""
        if self._pins:
            torch.cuda.current_stream(self._device).synchronize()

    def _take(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)

    def _taken_for(self, size: int) -> int:
        return 1 << (size - 1).bit_length() if self._pins and size else size
