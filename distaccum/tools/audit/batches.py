"""Which batch a forward took: the loader's, if one holds the forward's inputs, else the inputs themselves."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.data.batches import map_tensors
from distaccum.tools.audit.records import tensors_of

_REMEMBERED = 64  # batches of loaders, which may fetch ahead
_OF_THE_LOOP = ("num_items_in_batch",)  # arguments that transformers' Trainer adds to the batch
FORWARD, LOADER, GIVEN = "the forward's inputs", "the DataLoader's", "those given"


class BatchPool:
    """The batches that forwards may be about, and the choice of one.

    Args:
        given: all of a rank's micro-batches, in any order; None: those that a ``DataLoader`` has yielded lately.
    """

    def __init__(self, given: Iterable[Any] | None) -> None:
        self._given = None if given is None else [to_host(batch) for batch in given]
        self._loaded: deque[Any] = deque(maxlen=_REMEMBERED)
        self._announced: list[Any] = []

    def announce(self, batch: Any) -> None:
        """The forwards up to the next backward take ``batch``."""
        self._announced = [to_host(batch)]

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Remembers what a loader yields."""
        for batch in batches:
            if self._given is None:
                self._loaded.append(batch)
            yield batch

    def choose(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str, object | None]:
        """The batch, on the host; where it is from; and what is the same for all forwards on one batch, if anything."""
        if self._announced:
            return self._announced[0], GIVEN, self._announced
        inputs = [tensor.detach().cpu() for tensor in tensors_of([args, kwargs]) if _tells(tensor)]
        pool = list(self._loaded if self._given is None else self._given)
        held = [sum(any(_equal(one, seen) for one in tensors_of(batch)) for seen in inputs) for batch in pool]
        if any(held):
            found = pool[held.index(max(held))]
            return to_host(found), LOADER if self._given is None else GIVEN, found
        return to_host(_as_batch(module, args, kwargs)), FORWARD, None

    def forget(self) -> None:
        """A backward has begun: what was announced is used."""
        self._announced = []


def to_host(batch: Any) -> Any:
    """A copy on the host, which in-place changes of the loop do not reach."""

    def opened(value: Any) -> Any:  # transformers' BatchEncoding, which has a method to move itself
        return {key: to_host(part) for key, part in value.items()} if isinstance(value, Mapping) else value

    return map_tensors(batch, lambda tensor: tensor.detach().to("cpu", copy=True), opened)


def _tells(tensor: Tensor) -> bool:
    """Whether it tells one batch from another; a mask of ones does not."""
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


def _equal(held: Tensor, seen: Tensor) -> bool:
    if held.shape != seen.shape:
        return False
    held = held.detach().cpu()  # wrappers move inputs, and cast them to 16 bits
    return torch.equal(held if held.dtype == seen.dtype else held.to(seen.dtype), seen)


def _as_batch(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One argument as it is, several as a tuple; as soon as one is named, all of them by their names."""
    named = {name: value for name, value in kwargs.items() if name not in _OF_THE_LOOP}
    if not named:
        return args[0] if len(args) == 1 else args
    names = list(inspect.signature(module.forward).parameters)
    return dict(zip(names, args, strict=False)) | named
