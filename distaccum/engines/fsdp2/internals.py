"""Every name of FSDP2 that torch does not publish: gradients that are accumulated whole, and states after an error.

:func:`check` asks for each of them when an engine is made, so that a torch that has renamed one is refused by name, and
not in the middle of a run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distaccum.errors import ConfigError

OLDEST, NEWEST = "2.8", "2.15"  # the torch versions that docs/versions.md has results of
# Where torch has no reset_iter_state (before 2.13).
_OF_STATE = ("_state_ctx", "_comm_ctx", "_modules_to_run_forward", "_training_state")
_OF_GROUP = ("fsdp_params", "_partial_reduce_output", "_training_state", "_post_forward_indices", "_all_gather_result")
_MOVED = "unsharded_accumulated_grad"
_LOCAL = "_local_tensor"
_WRAPPING = ("torch.distributed.", "distaccum.engines.")  # modules whose hooks gather, and tell what was gathered
_OF_PARAMETER = ("sharded_param", "_module_info", _MOVED)


def check(model: nn.Module) -> None:
    """Checks, of a wrapped model, that this torch has every private name that is used here.

    Raises:
        ConfigError: it has not; the message names them, and the versions that do.
    """
    missing = sorted(set(_missing(model)))
    if missing:
        problem = f"torch {torch.__version__} has no {', '.join(missing)}, which exact accumulation needs"
        remedy = f"Use torch {OLDEST} to {NEWEST}, or engine=zero1"
        raise ConfigError("engine", "fsdp2", problem, remedy)


def _missing(model: nn.Module) -> Iterator[str]:
    if not hasattr(FSDPModule, "_get_fsdp_state"):
        yield "FSDPModule._get_fsdp_state"
        return
    states = list(_states(model))
    if not any(hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group") for state in states):
        yield "FSDPState._fsdp_param_groups"
    resets = hasattr(FSDPModule, "reset_iter_state")
    yield from (f"FSDPState.{name}" for state in states if not resets for name in _OF_STATE if not hasattr(state, name))
    for group in _groups(model):
        yield from (f"FSDPParamGroup.{name}" for name in _OF_GROUP if not hasattr(group, name))
    for parameter in _parameters(model):
        yield from (f"FSDPParam.{name}" for name in _OF_PARAMETER if not hasattr(parameter, name))
        if not hasattr(getattr(parameter, "sharded_param", None), _LOCAL):
            yield f"DTensor.{_LOCAL}"
        if "_unsharded_param" not in type(parameter).__annotations__:  # made by the first forward
            yield "FSDPParam._unsharded_param"


class ShardedModel:
    """FSDP2's own objects of a wrapped model: one for each parameter, and one for those that are gathered together."""

    def __init__(self, model: nn.Module) -> None:
        self._root: Any = model
        self._groups, self._parameters = list(_groups(model)), list(_parameters(model))
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._of_unit: dict[nn.Module, list[Any]] = {unit: list(_parameters_of(unit)) for unit in units}
        # Torch 2.15 accumulates in the gathered parameter's own gradient. Older ones move it where it is not fp32.
        kinds = {type(parameter) for parameter in self._parameters}
        self._moves = not any(isinstance(getattr(kind, _MOVED, None), property) for kind in kinds)

    def replaced(self, unit: nn.Module) -> str:
        """The name of a parameter that ``unit`` gathers and whose place another tensor has taken; empty: none."""
        for parameter in self._of_unit.get(unit, ()):
            info = parameter._module_info
            held = info.module._parameters.get(info.param_name)
            if held is not parameter.sharded_param and held is not getattr(parameter, "_unsharded_param", None):
                return str(info.param_name)
        return ""

    def shards(self) -> list[nn.Parameter]:
        """The parameters that optimizers hold, one for each of :meth:`whole_gradients`."""
        return [parameter.sharded_param for parameter in self._parameters]

    def whole_gradients(self) -> list[Tensor | None]:
        """Of each parameter the gradient that is accumulated whole and not reduced yet."""
        leaves = [getattr(parameter, "_unsharded_param", None) for parameter in self._parameters]
        found = [None if leaf is None else leaf.grad for leaf in leaves]
        if self._moves:
            moved = [parameter.unsharded_accumulated_grad for parameter in self._parameters]
            found = [own if other is None else other for own, other in zip(found, moved, strict=True)]
        return found

    def zero_gradients(self) -> None:
        """Zeroes in place what is accumulated whole: where there is a gradient decides when FSDP2 reduces."""
        gradients = [gradient for gradient in self.whole_gradients() if gradient is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def drop_gradients(self) -> None:
        """Drops what is accumulated whole and not reduced yet."""
        for group in self._groups:
            group._partial_reduce_output = None
            if hasattr(group, "_post_backward_pending"):  # torch 2.15
                group._post_backward_pending = False
                group._partial_reduce_output_layout.clear()
        for parameter in self._parameters:
            if self._moves:
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    def reset(self) -> None:
        """Makes the model ready for a forward, whatever an error has ended; parameters are sharded afterwards."""
        if hasattr(FSDPModule, "reset_iter_state"):  # from torch 2.13 on
            self._root.reset_iter_state()
            return
        idle = None
        for state in _states(self._root):
            context, streams = state._state_ctx, state._comm_ctx
            idle = type(state._training_state).IDLE
            context.iter_forward_root, context.post_backward_final_callback_queued = None, False
            streams.all_gather_state = None
            streams.post_forward_order.clear()
            state._modules_to_run_forward.clear()
            state._training_state = idle
        for group in self._groups:
            pending = group._all_gather_result
            if pending is not None and hasattr(pending.all_gather_work, "wait"):
                pending.all_gather_work.wait()
            group._all_gather_result = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group.reshard()

    def gathered_leaf(self, shard: nn.Parameter) -> nn.Parameter:
        """The parameter that forwards compute with in place of ``shard``, gathered once before."""
        (found,) = (parameter for parameter in self._parameters if parameter.sharded_param is shard)
        leaf: nn.Parameter = found._unsharded_param
        return leaf

    def hooks_of(self, shard: Tensor) -> list[Callable[..., Any]]:
        """What ``register_hook`` was given for the parameter that forwards compute with in place of ``shard``."""
        leaves = [
            getattr(found, "_unsharded_param", None) for found in self._parameters if found.sharded_param is shard
        ]
        return [hook for leaf in leaves if leaf is not None for hook in gradient_hooks(leaf)]


@contextmanager
def computing_with(model: nn.Module, weights: Mapping[int, Tensor]) -> Iterator[None]:
    """Within the block forwards gather nothing: other tensors are in the places of the parameters.

    Hooks of FSDP2 and of the engine are away; those of the user, and of the precision policy, run.

    Args:
        model: wrapped, and not gathered.
        weights: by the ``id`` of the parameter whose place they take.
    """
    before = [
        (module, module._forward_pre_hooks, module._forward_hooks, dict(module._parameters))
        for module in model.modules()
    ]
    try:
        for module, earlier, later, parameters in before:
            module._forward_pre_hooks, module._forward_hooks = _of_others(earlier), _of_others(later)
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = cast(nn.Parameter, weights[id(parameter)])
        yield
    finally:
        for module, earlier, later, parameters in before:
            module._forward_pre_hooks, module._forward_hooks = earlier, later
            module._parameters.update(parameters)


def _of_others(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    return OrderedDict((key, hook) for key, hook in hooks.items() if not _origin(hook).startswith(_WRAPPING))


def _origin(hook: Any) -> str:
    """The module that a hook's function is from."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def is_compiled(model: nn.Module) -> bool:
    """Whether a module of it was given to ``torch.compile``, or compiled in place."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def local_shards(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    """This rank's parts of sharded gradients, as they lie in memory; ``to_local`` would make a view of each."""
    parts = [getattr(gradient, _LOCAL) for gradient in gradients if gradient is not None]
    return [part for part in parts if part.numel()]


def with_gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Those that ``register_hook`` was called on."""
    return [name for name, parameter in parameters.items() if parameter._backward_hooks]


def gradient_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """What ``register_hook`` was given, in order."""
    return list((parameter._backward_hooks or {}).values())


def accumulation_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """What ``register_post_accumulate_grad_hook`` was given, in order."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def _parameters(model: nn.Module) -> Iterator[Any]:
    for group in _groups(model):
        yield from group.fsdp_params


def _groups(model: nn.Module) -> Iterator[Any]:
    for state in _states(model):
        yield from _groups_of(state)


def _groups_of(state: Any) -> Iterator[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    yield from filter(None, [state._fsdp_param_group] if groups is None else groups)


def _parameters_of(unit: FSDPModule) -> Iterator[Any]:
    """Those that are gathered with ``unit`` itself."""
    state: Any = unit._get_fsdp_state()
    for group in _groups_of(state):
        yield from group.fsdp_params


def _states(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module._get_fsdp_state()
