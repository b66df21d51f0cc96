"""Tells whether anybody but the engine has written into reduced gradients that are shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.engines.fsdp2 import internals
from distaccum.engines.gradient_watch import CHANGED_BY_HAND
from distaccum.engines.modules import HostCopy, from_host
from distaccum.errors import MisuseError
from distaccum.program import SHARD_FUNCTIONS, load

# Losses that read the shards themselves: their gradient goes past the reduction, and what they gather past its order.
#
# In torch a shard is a ``DTensor``, which computes: ``full_tensor()``, ``to_local()`` or a plain sum of squares over
# ``model.parameters()``.


class ShardReads:
    """Notices a gradient that reaches a shard in a backward, and a shard that is gathered by hand in a micro-step.

    Args:
        parameters: the shards, by name.
        in_micro_step: whether one of the user's runs.
        in_backward: whether the engine's own backward runs.
        note: called with what is wrong: ranks may be at different places, so that it is told with the step.
        error: of a function that computes with the shard that is named.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        in_micro_step: Callable[[], bool],
        in_backward: Callable[[], bool],
        note: Callable[[str], None],
        error: Callable[[str], MisuseError],
    ) -> None:
        self._in_micro_step, self._in_backward, self._note = in_micro_step, in_backward, note
        self._shards = list(parameters.values())
        names = {id(shard): name for name, shard in parameters.items()}
        self._functions: Any = load(SHARD_FUNCTIONS)(names, in_backward, error)
        self._hooks = []
        for name, shard in parameters.items():
            hook = partial(self._reached, name, shard)
            self._hooks.append(shard.register_hook(hook))  # type: ignore[no-untyped-call]
            vars(shard)["full_tensor"] = partial(self._gather, name, shard)

    def watching(self, *, where: Callable[[], bool]) -> AbstractContextManager[object]:
        """Around a micro-step; in the first window, ``where`` that holds, torch's functions are looked at."""
        return nullcontext() if self._functions is None or not where() else self._functions

    def window_ended(self) -> None:
        """Called when a step was made."""
        self._functions = None

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


# Which sharded parameters a rank has used in a window: one that no rank has used must not move.


class UsedParameters:
    """Marks parameters that got a gradient, to be summed over the ranks with the norms of a step.

    A reduction holds zeros for a parameter that a rank has not used, and a gradient of zero is not none: momentum and
    weight decay would move it. Only a rank that has used less than all has to ask the device whether others have.

    Args:
        shards: all of the model's, in the same order on every rank.
    """

    def __init__(self, shards: Sequence[nn.Parameter]) -> None:
        self._shards = shards
        self._numbers = {id(shard): number for number, shard in enumerate(shards)}
        self._used: set[int] = set()
        self._sent: tuple[frozenset[int], Tensor] | None = None  # the last window's marks, usually this one's too

    def add(self, shard: nn.Parameter) -> None:
        """Marks a parameter."""
        self._used.add(self._numbers[id(shard)])

    def forget(self) -> None:
        """Called after a step or a dropped window."""
        self._used.clear()

    def marks(self, like: Tensor) -> Tensor:
        """1.0 for each parameter that this rank has used, else 0.0; of the type and on the device of ``like``."""
        if self._sent is None or self._sent[0] != self._used or self._sent[1].device != like.device:
            marks = [float(number in self._used) for number in range(len(self._shards))]
            self._sent = frozenset(self._used), from_host(marks, like)
        return self._sent[1]

    def drop_unused(self, sums: Tensor) -> bool:
        """Drops the zeros of parameters that no rank has used, given the sums of :meth:`marks` over the ranks.

        Returns:
            whether some rank has used some parameter.
        """
        unsure = [
            number for number, shard in enumerate(self._shards) if shard.grad is not None and number not in self._used
        ]
        if not unsure:
            return True
        found = sums.tolist()  # waits for the device
        for number in unsure:
            if not found[number]:
                self._shards[number].grad = None
        return any(found)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ShardWatch:
    """Compares the shards' norms: operators on many shards at once, as ``clip_grad_norm_``'s, leave versions alone.

    The device compares, and nothing is read back: where a shard has changed the gradient becomes NaN, so that no rank
    steps. This costs two more reads of this rank's part of the gradient.

    Args:
        gradients: those of the shards, reduced; None for one that has none.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor | None]]) -> None:
        self._gradients = gradients
        self._norms: Tensor | None = None
        self._changed: Tensor | None = None

    def note(self) -> None:
        """Called by the engine after it has changed gradients."""
        self._norms = self._measure()

    def look(self) -> None:
        """Called by the engine in an open window before it changes gradients itself."""
        norms = self._measure()
        if norms is None or self._norms is None:
            return
        kind = _BITS[norms.element_size()]  # NaN is not equal to itself
        changed = (norms.view(kind) != self._norms.view(kind)).any()
        self._changed = changed if self._changed is None else self._changed | changed

    def spoil(self) -> list[tuple[HostCopy, str]]:
        """Makes a gradient NaN that has been changed; see ``StepOutput.late_faults``."""
        changed, self._changed = self._changed, None
        if changed is None:
            return []
        shards = internals.local_shards(self._gradients())
        shards[0].mul_(torch.where(changed, torch.nan, 1.0).to(shards[0].dtype))
        return [(HostCopy(changed.reshape(1).float()), CHANGED_BY_HAND)]

    def forget(self) -> None:
        """Called when the gradients are dropped."""
        self._norms = self._changed = None

    def _measure(self) -> Tensor | None:
        shards = internals.local_shards(self._gradients())
        return torch.stack(torch._foreach_norm(shards)) if shards else None
