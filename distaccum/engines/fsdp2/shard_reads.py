"""Losses that read the shards themselves: their gradient goes past the reduction, and what they gather past its order.

In torch a shard is a ``DTensor``, which computes: ``full_tensor()``, ``to_local()`` or a plain sum of squares over
``model.parameters()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.errors import MisuseError


class ShardReads:
    """Notices a gradient that reaches a shard in a backward, and a shard that is gathered by hand in a micro-step.

    Args:
        parameters: the shards, by name.
        in_micro_step: whether one of the user's runs.
        in_backward: whether the engine's own backward runs.
        note: called with what is wrong: ranks may be at different places, so that it is told with the step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        in_micro_step: Callable[[], bool],
        in_backward: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        self._in_micro_step, self._in_backward, self._note = in_micro_step, in_backward, note
        self._shards = list(parameters.values())
        self._hooks = []
        for name, shard in parameters.items():
            hook = partial(self._reached, name, shard)
            self._hooks.append(shard.register_hook(hook))  # type: ignore[no-untyped-call]
            vars(shard)["full_tensor"] = partial(self._gather, name, shard)

    def remove(self) -> None:
        """Leaves the shards as they were."""
        for hook in self._hooks:
            hook.remove()
        for shard in self._shards:
            vars(shard).pop("full_tensor", None)

    def _reached(self, name: str, shard: nn.Parameter, _: Tensor) -> Tensor | None:
        if not self._in_backward():
            return None
        self._note(str(reads_shards(name)))
        return torch.zeros_like(shard)  # in the shard's own layout, which FSDP2 adds to

    def _gather(self, name: str, shard: nn.Parameter, **options: Any) -> Tensor:
        if self._in_micro_step():
            raise reads_shards(name)
        full: Tensor = type(shard).full_tensor(shard, **options)  # type: ignore[attr-defined]
        return full


def reads_shards(name: str = "") -> MisuseError:
    """For a loss that reads shards, of the parameter ``name`` or of some."""
    problem = f"the loss reads {name or 'a parameter'} itself, which is sharded (full_tensor(), to_local(), DTensor)"
    remedy = "weight_decay= of the optimizer, or an engine that holds whole parameters (ddp, zero1)"
    return MisuseError(f"{problem}, so that its gradient would not be reduced: use {remedy}")
