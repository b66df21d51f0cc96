"""Functions of torch's that a loss calls with the shards of a model: they are refused before they communicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from distaccum.errors import MisuseError

# Attributes, what else says how a tensor lies, and ``autograd.grad``, of which torch complains itself.
_LOOKS = re.compile(
    "__(get|set|delete|len)__|size|stride|n?dim(ension)?|numel|nelement|element_size|data_ptr|storage_offset|"
    "untyped_storage|get_device|is_contiguous|is_floating_point|is_complex|requires_grad_|register_hook|detach|grad"
)


class ShardFunctions(TorchFunctionMode):
    """Raises where a function of torch's computes with a shard that needs a gradient, outside of backwards.

    Of ranks that have different numbers of micro-steps the others would not communicate.

    Args:
        names: of the shards, by ``id``.
        in_backward: whether the engine's own backward runs, or a replay's.
        error: of the shard that is named, or of some.
    """

    def __init__(
        self, names: Mapping[int, str], in_backward: Callable[[], bool], error: Callable[[str], MisuseError]
    ) -> None:
        super().__init__()
        self._names, self._in_backward, self._error = names, in_backward, error

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The function, unless it is refused."""
        if torch.is_grad_enabled() and not (_LOOKS.fullmatch(getattr(func, "__name__", "")) or self._in_backward()):
            for one in chain(args, (kwargs or {}).values()):
                for part in one if isinstance(one, list | tuple) else (one,):
                    if isinstance(part, DTensor) and part.requires_grad:
                        raise self._error(self._names.get(id(part), ""))
        return func(*args, **kwargs or {})
