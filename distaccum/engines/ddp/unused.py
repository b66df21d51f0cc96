"""Parameters that no rank used in a window, which then must not move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from distaccum.distributed.world import World
from distaccum.engines.ddp.reducer import set_gradient
from distaccum.errors import MisuseError


class UnusedParameters:
    """Notes which parameters were used since the last step.

    A zeroed gradient is not ``None``: momentum and weight decay would move a parameter that no rank used.

    Args:
        parameters: those that need a gradient, in the same order on every rank.
        stepped: what is stepped of each.
        looks: whether a window may leave some unused; otherwise nobody looks.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], stepped: Sequence[nn.Parameter], *, looks: bool = True
    ) -> None:
        self.looks = looks
        self._stepped = stepped if looks else []
        self.used = [0] * len(self._stepped)
        """Of each parameter 1 if it was used here since the last step, else 0."""
        self._hooks = [
            parameter.register_hook(partial(self._mark, i))  # type: ignore[no-untyped-call]
            for i, parameter in enumerate(parameters if looks else [])
        ]

    def _mark(self, i: int, gradient: Tensor | None) -> None:
        # None comes through a function of several outputs, of which the loss takes others: a post-accumulate hook is
        # called then, too, and cannot tell.
        if gradient is not None:
            self.used[i] = 1

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """Forgets what was used, after a step or a dropped window."""
        self.used = [0] * len(self._stepped)

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Within the block a backward's parameters do not count as used."""
        used = list(self.used)
        yield
        self.used = used

    @contextmanager
    def masked(self, world: World, *, needs_some: bool) -> Iterator[None]:
        """Within the block parameters that no rank used have no gradient; one small host all-reduce.

        Raises:
            MisuseError: no rank used any, and ``needs_some``.
        """
        anywhere = world.all_reduce_max_host(self.used)
        if needs_some and not any(anywhere):
            problem = "no loss of this step depends on a trained parameter, on any rank"
            raise MisuseError(f"{problem}: look for a detach(), a no_grad(), or a model that is not the accumulator's")
        unused = [(p, p.grad) for p, used in zip(self._stepped, anywhere, strict=True) if not used]
        for parameter, _ in unused:
            parameter.grad = None
        try:
            yield
            self.reset()  # a step that failed may be made again, of the same sums
        finally:
            for parameter, gradient in unused:
                set_gradient(parameter, gradient)
