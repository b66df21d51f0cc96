"""Copies micro-batches to the device ahead of the compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

FEWEST = 2  # micro-batches on the device at once: one is computed while the next is copied


def on_device(batches: Iterable[Any], device: torch.device, limit: int) -> Iterator[Any]:
    """The batches on ``device``, at most ``limit`` of them at a time, the caller's current one included.

    On a GPU the copies run on a separate stream, concurrently with the compute; the host does not wait for them.
    """
    move = _on_copy_stream(device) if device.type == "cuda" else partial(partial, to_device, device=device)
    ahead: deque[Callable[[], Any]] = deque()
    for batch in batches:
        ahead.append(move(batch))
        if len(ahead) >= limit - 1:  # the caller still holds the previous one
            yield ahead.popleft()()
    while ahead:
        yield ahead.popleft()()


@cache
def _on_copy_stream(device: torch.device) -> Callable[[Any], Callable[[], Any]]:
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def move(batch: Any) -> Callable[[], Any]:
        pinned = map_tensors(batch, _pinned)
        with torch.cuda.stream(copies):
            moved = to_device(pinned, device)
            arrived = copies.record_event()

        def use() -> Any:
            compute = torch.cuda.current_stream(device)
            compute.wait_event(arrived)
            map_tensors(
                moved, lambda tensor: tensor.record_stream(compute)
            )  # else the allocator reuses its memory too soon
            return moved

        return use

    return move


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors on ``device``; copies from pinned memory do not block the host."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """``batch`` with ``function`` applied to every tensor in mappings, lists and (named) tuples."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch
