"""An asynchronous copy of a few numbers from the device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copies a small tensor to the host after the work that is queued; only reading it waits, and for that work alone.

    Args:
        numbers: on any device; not changed in place until they are read.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._copy = numbers.detach()
        if numbers.device.type == "cuda":
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._copy.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
            self._arrived.record()

    def read(self) -> Any:
        """The numbers, as ``tolist()`` gives them."""
        if self._arrived is not None:
            self._arrived.synchronize()  # of this copy: what was queued after it runs on
            self._arrived = None
        return self._copy.numpy().tolist()
