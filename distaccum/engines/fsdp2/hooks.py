"""Hooks on parameters: ``fully_shard`` makes new parameters, and leaves the hooks on the ones that it drops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distaccum.engines.fsdp2 import internals
from distaccum.errors import ConfigError, MisuseError, shorten

Hook = Callable[..., Any]


@dataclass(frozen=True)
class ParameterHooks:
    """Of one parameter: what ``register_hook`` and ``register_post_accumulate_grad_hook`` were given."""

    gradient: list[Hook]
    accumulation: list[Hook]


def check(model: nn.Module, *, once_a_window: bool) -> None:
    """Raises ConfigError for a post-accumulate hook that would see another gradient than in one process.

    Args:
        model: not wrapped yet.
        once_a_window: whether a shard gets its gradient once a window, as the optimizer takes it.
    """
    names = [name for name, parameter in model.named_parameters() if internals.accumulation_hooks(parameter)]
    if names and not once_a_window:
        problem = f"{shorten(names)} has a post-accumulate hook, and its gradient is summed up or scaled by then"
        remedy = "Use engine.sync=boundary and no fp16, register_hook, or engine=ddp"
        raise ConfigError("engine", "fsdp2", problem, remedy)


def take(model: nn.Module) -> dict[str, ParameterHooks]:
    """The hooks of each trained parameter that has some; closes the parameters, which wrapping replaces.

    A gradient that reaches one of them later, since something has kept it, raises MisuseError.
    """
    taken = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = ParameterHooks(internals.gradient_hooks(parameter), internals.accumulation_hooks(parameter))
            if found.gradient or found.accumulation:
                taken[name] = found
            parameter.register_hook(partial(_refuse, name))  # type: ignore[no-untyped-call]
    return taken


def carry_over(
    taken: Mapping[str, ParameterHooks],
    model: nn.Module,
    sharded: internals.ShardedModel,
    replays: Callable[[], bool],
) -> None:
    """Puts hooks on the parameters that took the places of those that had them.

    A ``register_hook`` sees each micro-batch's whole gradient, as on other engines. A post-accumulate hook sees the
    shard with the window's reduced gradient.

    Args:
        taken: by :func:`take`, before the model was wrapped.
        model: wrapped.
        sharded: its parameters.
        replays: whether a forward runs for nothing.
    """
    now = dict(model.named_parameters())
    if any(hooks.gradient for hooks in taken.values()):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()  # makes the parameters that forwards compute with
                module.reshard()
    for name, hooks in taken.items():
        for hook in hooks.accumulation:
            now[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for hook in hooks.gradient:
            leaf = sharded.gathered_leaf(now[name])
            leaf.register_hook(partial(_unless_replayed, hook, replays))  # type: ignore[no-untyped-call]


def check_shards(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises MisuseError for a ``register_hook`` on a shard, which no backward would call."""
    names = internals.with_gradient_hooks(parameters, own=1)  # ShardReads'
    if names:
        problem = f"register_hook on {shorten(names)} after wrapping: the shard that it is on is in no backward"
        raise MisuseError(f"{problem}. Register it before the model is wrapped")


def _unless_replayed(hook: Callable[[Tensor], Any], replays: Callable[[], bool], gradient: Tensor) -> Any:
    return None if replays() else hook(gradient)


def _refuse(name: str, _: Tensor) -> NoReturn:
    problem = f"a gradient reached {name} as it was before wrapping, which is in no optimizer any more"
    raise MisuseError(f"{problem}: something kept the parameter. Take it from the model in each forward")
