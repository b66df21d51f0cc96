"""How a unit that FSDP2 shards comes to its device: from rank 0, or from meta."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distaccum.distributed.world import World
from distaccum.engines.fsdp2 import internals
from distaccum.engines.modules import shard_like
from distaccum.engines.shard_rules import fault_on_shards
from distaccum.errors import ConfigError, MisuseError, shorten

# Hooks on parameters: ``fully_shard`` makes new parameters, and leaves the hooks on the ones that it drops.

Hook = Callable[..., Any]


@dataclass(frozen=True)
class ParameterHooks:
    """Of one parameter: what ``register_hook`` and ``register_post_accumulate_grad_hook`` were given."""

    gradient: list[Hook]
    accumulation: list[Hook]


def check_hooks(model: nn.Module, *, once_a_window: bool) -> None:
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


def take_hooks(model: nn.Module) -> dict[str, ParameterHooks]:
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


def carry_hooks_over(
    taken: Mapping[str, ParameterHooks], model: nn.Module, sharded: internals.ShardedModel, replays: Callable[[], bool]
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


def check_hooked_shards(parameters: Mapping[str, nn.Parameter]) -> None:
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


# Re-points optimizers from full parameters to their DTensor shards.


def rebind_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], names: dict[int, str], world: World
) -> dict[int, str]:
    """Replaces, in the optimizers' groups, full parameters by their shards; a collective.

    ``names`` has the full parameters' names by ``id``. A fused kernel that takes no shards (SGD's, as of torch 2.13) is
    switched off.

    Returns:
        by the number of an optimizer, why its rule does not work on shards.

    Raises:
        ConfigError: an optimizer has stepped before, or keeps lists of tensors of its own.
    """
    from distaccum.program import KEPT, load  # noqa: PLC0415  where an engine is made

    sharded = dict(model.named_parameters(remove_duplicate=False))
    faults: dict[int, str] = {}
    for number, optimizer in enumerate(optimizers):
        load(KEPT)(optimizer, "fsdp2")
        if any(float(state.get("step", 1.0)) for state in optimizer.state.values()):  # Adagrad makes it when it is made
            problem = "it has stepped, and its state is of whole parameters"
            raise ConfigError("optimizer", type(optimizer).__name__, problem, "Wrap first, then load its state")
        state = {sharded[names[id(p)]]: values for p, values in optimizer.state.items()}
        optimizer.state.clear()
        for shard, values in state.items():
            optimizer.state[shard] = {
                name: shard_like(value, shard) if isinstance(value, Tensor) else value for name, value in values.items()
            }
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[id(p)]] for p in group["params"]]
        fault = fault_on_shards(optimizer, world)
        if fault and any(group.get("fused") for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                group["fused"] = False
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # torch sets it with fused
            fault = fault_on_shards(optimizer, world)
        if fault:
            faults[number] = fault
    return faults


def move_and_sync(unit: nn.Module, device: torch.device, fill: Callable[[Tensor], None]) -> None:
    """Moves what is not sharded yet to ``device``, where ``fill`` overwrites it with rank 0's."""
    for module in unit.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and not isinstance(tensor, DTensor):
                    tensor.data = tensor.data.to(device)
                    fill(tensor.data)


def materialize(unit: nn.Module, names: dict[nn.Module, str], seed: int) -> None:
    """Gives what is on the meta device memory on the CPU, and initial weights by each module's ``reset_parameters``.

    A module that holds others is asked after these, unless some of them are sharded already. The random numbers of a
    module depend on ``seed`` and its name: every rank makes the same weights, however many there are.

    Raises:
        ConfigError: a module that has weights or buffers itself has no ``reset_parameters``.
    """
    made: dict[int, Any] = {}  # tied weights stay tied
    for module in unit.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty: Any = torch.empty_like(tensor, device="cpu")
                    trains = tensor.requires_grad
                    made[id(tensor)] = nn.Parameter(empty, trains) if isinstance(tensor, nn.Parameter) else empty
                tensors[name] = made[id(tensor)]
    fresh = set(map(id, made.values()))
    for module in reversed(list(unit.modules())):  # what is inside comes before what holds it
        own = (*module._parameters.values(), *module._buffers.values())
        inside = list(module.parameters())
        all_fresh = bool(inside) and all(id(tensor) in fresh for tensor in inside)
        if any(id(tensor) in fresh for tensor in own) or (all_fresh and hasattr(module, "reset_parameters")):
            _initialise(module, names.get(module, ""), seed)


def _initialise(module: nn.Module, name: str, seed: int) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        problem = f"{name or 'the model'} ({type(module).__name__}) has no reset_parameters() to make its weights with"
        raise ConfigError("engine.meta_init", True, problem, "Give it one, that sets its own parameters and buffers")
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest))
        reset()
