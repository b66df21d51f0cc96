"""Copies micro-batches to the device ahead of the compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from distaccum.data.batches import map_tensors, moved_object, to_device

FEWEST = 2  # micro-batches on the device at once: one is computed while the next is copied


def on_device(batches: Iterable[Any], device: torch.device, limit: int) -> Iterator[Any]:
    """The batches on ``device``, at most ``limit`` of them at a time, the caller's current one included.

    On a GPU the copies run on a separate stream, concurrently with the compute; the host does not wait for them.
    """
    move = partial(partial, to_device, device=device) if device.type == "cpu" else _on_copy_stream(device)
    ahead: deque[Callable[[], Any]] = deque()
    for batch in batches:
        ahead.append(move(batch))
        if len(ahead) >= limit - 1:  # the caller still holds the previous one
            yield ahead.popleft()()
    while ahead:
        yield ahead.popleft()()


@cache
def _on_copy_stream(device: torch.device) -> Callable[[Any], Callable[[], Any]]:
    own = torch.get_device_module(device)
    copies = own.Stream(device)

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True) if _dense(tensor) else tensor

    def move(batch: Any) -> Callable[[], Any]:
        pinned = map_tensors(batch, _pinned)
        with own.stream(copies):
            moved = map_tensors(pinned, copy)
            arrived = copies.record_event()

        def use() -> Any:
            compute = own.current_stream(device)
            compute.wait_event(arrived)

            def settle(tensor: Tensor) -> Tensor:
                if not _dense(tensor):
                    return tensor.to(device)
                tensor.record_stream(compute)  # else the allocator reuses its memory too soon
                return tensor

            # Objects move themselves here, on the stream that computes: nobody can record their tensors.
            return map_tensors(moved, settle, lambda value: moved_object(value, device))

        return use

    return move


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor is one block of memory, which can be pinned and recorded: not sparse, not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not _dense(tensor) or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
