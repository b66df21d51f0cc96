"""Micro-batches on their way to the device, ahead of the compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

FEWEST = 2  # on the device at once: one computed, one on its way


def on_device(batches: Iterable[Any], device: torch.device, limit: int) -> Iterator[Any]:
    """The batches on ``device``, at most ``limit`` of them there at a time, the caller's own included.

    On a GPU the copies run on a stream beside the compute; from pinned memory the host does not wait for them.
    """
    move = _beside_the_compute(device) if device.type == "cuda" else lambda batch: lambda: to_device(batch, device)
    ahead: deque[Callable[[], Any]] = deque()
    for batch in batches:
        ahead.append(move(batch))
        if len(ahead) >= limit - 1:  # the caller still holds the one before
            yield ahead.popleft()()
    while ahead:
        yield ahead.popleft()()


def _beside_the_compute(device: torch.device) -> Callable[[Any], Callable[[], Any]]:
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def move(batch: Any) -> Callable[[], Any]:
        with torch.cuda.stream(copies):
            moved = to_device(batch, device)
            arrived = copies.record_event()

        def use() -> Any:
            compute = torch.cuda.current_stream(device)
            compute.wait_event(arrived)
            for tensor in _tensors(moved):
                tensor.record_stream(compute)  # or its memory were given away while the compute still reads it
            return moved

        return use

    return move


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor in mappings, lists and (named) tuples on ``device``; copies do not block the host."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)
