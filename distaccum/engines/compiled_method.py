"""A method that runs compiled: in the place of a module's ``forward``, or of what a loss makes of an output."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from distaccum.config.compile import INDUCTOR, WITH_GRAPHS, CompileConfig
from distaccum.errors import MisuseError


class CompiledMethod:
    """In the place of a method of an object, as a module's ``forward``. A copy of the object has the plain one.

    Args:
        owner: whose method it is.
        name: of the method.
        config: says how it is compiled.
    """

    def __init__(self, owner: Any, name: str, config: CompileConfig) -> None:
        self._owner, self._name, self._own = owner, name, name in vars(owner)
        self.plain: Callable[..., Any] = getattr(owner, name)
        self._compiled = self._compile(config, config.mode)
        update_wrapper(self, self.plain)
        vars(owner)[name] = self

    def _compile(self, config: CompileConfig, mode: str) -> Callable[..., Any]:
        options: Any = {"mode": mode} if config.backend == INDUCTOR else {}
        dynamic = None if config.dynamic == "auto" else config.dynamic
        return torch.compile(self.plain, backend=config.backend, dynamic=dynamic, fullgraph=config.fullgraph, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self.plain,)

    def undo(self) -> None:
        """Gives the object its plain method back, unless somebody has put another one there."""
        if vars(self._owner).get(self._name) is self:
            del vars(self._owner)[self._name]
            if self._own:
                vars(self._owner)[self._name] = self.plain


class GraphedForward(CompiledMethod):
    """A module's ``forward``, in a micro-step as torch's tree of CUDA graphs, and otherwise as code without graphs.

    What a graph returns lies in memory that the next micro-step's graph writes, of which torch says nothing once it
    replays: what leaves the module is a copy. Gradients of parameters need none, as buckets are added to in place.

    Args:
        module: whose forward it is.
        config: says how it is compiled.
        in_micro_step: whether a forward is one of a micro-step, and its backward not over.
    """

    def __init__(self, module: nn.Module, config: CompileConfig, in_micro_step: Callable[[], bool]) -> None:
        super().__init__(module, "forward", config)
        self._in_micro_step = in_micro_step
        self._graphed = self._compile(config, WITH_GRAPHS[config.mode])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._in_micro_step() and torch.is_grad_enabled()):
            return self._compiled(*args, **kwargs)
        return copied(self._graphed(*args, **kwargs), self._owner, (args, kwargs))


def copied(output: Any, module: nn.Module, given: Any) -> Any:
    """``output`` without the memory of graphs; what shares its memory with an input is the caller's, and stays so.

    Raises:
        MisuseError: a part of it is neither a tensor nor a plain value, so that nobody knows what it holds.
    """
    inputs = {one.untyped_storage().data_ptr() for one in tree_leaves(given) if isinstance(one, Tensor)}

    def copy(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part if part.untyped_storage().data_ptr() in inputs else part.clone()
        if part is None or isinstance(part, bool | int | float | str):
            return part
        problem = (
            f"{type(module).__name__} returns a {type(part).__name__}, whose tensors the next micro-step overwrites"
        )
        raise MisuseError(f"{problem}: return tensors in tuples, lists and dictionaries, or use compile.graphs=false")

    return tree_map(copy, output)


class CompiledCriterion(CompiledMethod):
    """What a loss makes of the model's output, and of nothing else that is compiled or that an engine wraps."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, nn.Module) for one in (*args, *kwargs.values())):
            problem = f"{type(self._owner).__name__}.{self._name} is named by to_compile, and called with a module"
            raise MisuseError(
                f"{problem}: name what computes the loss of the model's output, or use compile.loss=false"
            )
        return super().__call__(*args, **kwargs)


def _plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
