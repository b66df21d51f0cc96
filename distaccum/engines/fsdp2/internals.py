"""Every name of FSDP2 that torch does not publish: gradients that are accumulated whole, and states after an error.

:func:`check` asks for each of them when an engine is made, so that a torch that has renamed one is refused by name, and
not in the middle of a run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distaccum.errors import ConfigError, MisuseError

OLDEST, NEWEST = "2.8", "2.15"  # the torch versions that docs/engines.md has results of
# Where torch has no reset_iter_state (before 2.13).
_OF_STATE = ("_state_ctx", "_comm_ctx", "_modules_to_run_forward", "_training_state")
_OF_GROUP = ("fsdp_params", "_partial_reduce_output", "_training_state", "_post_forward_indices", "_all_gather_result")
_MOVED = "unsharded_accumulated_grad"
_LOCAL = "_local_tensor"
_MOVES = ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed")  # where they are (before 2.15)
_WRAPPING = ("torch.distributed.", "distaccum.engines.")  # modules whose hooks gather, and tell what was gathered
_OF_PARAMETER = ("sharded_param", "_module_info", _MOVED)
_OF_EVERY_GROUP = ("post_backward", "reduce_grads")
# What a sharded module's instance has, and a copy has not: FSDP2's state, and what this package puts there.
_OF_INSTANCE = ("__composable_api_state_key", "__deepcopy__", "_apply", "zero_grad")
_OF_EVERY_STATE = ("_pre_forward", "_post_forward", "_pre_backward")


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
    yield from (f"FSDPState.{name}" for state in states for name in _OF_EVERY_STATE if not hasattr(state, name))
    for group in _groups(model):
        names = (*_OF_GROUP, *_OF_EVERY_GROUP)
        yield from (f"FSDPParamGroup.{name}" for name in names if not hasattr(group, name))
    for parameter in _parameters(model):
        yield from (f"FSDPParam.{name}" for name in _OF_PARAMETER if not hasattr(parameter, name))
        if not isinstance(getattr(type(parameter), _MOVED, None), property):
            yield from (f"FSDPParam.{name}" for name in _MOVES if not hasattr(parameter, name))
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
        of_shard = {id(parameter.sharded_param): parameter for parameter in self._parameters}
        self._places = [
            (module._parameters, key, f"{prefix}.{key}".lstrip("."), shard, of_shard[id(shard)])
            for prefix, module in model.named_modules()
            for key, shard in module._parameters.items()
            if id(shard) in of_shard
        ]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
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

    def all_replaced(self) -> list[str]:
        """The parameters whose place in the model another tensor has taken since it was wrapped."""
        return [
            name
            for held, key, name, shard, parameter in self._places
            if held.get(key) is not shard and held.get(key) is not getattr(parameter, "_unsharded_param", shard)
        ]

    def on_meta(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter, as a shard and as gathered, with an empty one of the whole's shape on the meta device."""
        for parameter in self._parameters:
            shard = parameter.sharded_param
            whole = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
            empty = nn.Parameter(whole, shard.requires_grad)
            yield shard, empty
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param, empty

    def shards(self) -> list[nn.Parameter]:
        """The parameters that optimizers hold, one for each of :meth:`whole_gradients`."""
        return [parameter.sharded_param for parameter in self._parameters]

    def leaves(self) -> list[Tensor | None]:
        """What forwards compute with in the place of each of :meth:`shards`; None where it was never gathered."""
        return [getattr(parameter, "_unsharded_param", None) for parameter in self._parameters]

    def whole_gradients(self) -> list[Tensor | None]:
        """Of each parameter the gradient that is accumulated whole and not reduced yet."""
        found = []
        for parameter in self._parameters:  # a loop: this runs in every micro-step, and a comprehension is a call
            leaf = getattr(parameter, "_unsharded_param", None)
            moved = parameter.unsharded_accumulated_grad if self._moves else None
            found.append(moved if moved is not None or leaf is None else leaf.grad)
        return found

    def fill_reductions(
        self,
        active: Callable[[], bool],
        note: Callable[[nn.Parameter], None],
        before: Callable[[Sequence[int], Sequence[Tensor]], None] | None = None,
    ) -> None:
        """Has every reduction hold all trained parameters of its group: zeros for those without a gradient.

        What FSDP2 reduces is otherwise up to each rank: ranks that have used other parameters send other sizes. Of
        several forwards in a micro-step each has its reduction, and whether a gradient is there depends on the rank.

        Args:
            active: whether a reduction is the engine's own.
            note: called before one with the shard of each parameter that has a gradient.
            before: called before one with the numbers of its parameters among :meth:`whole_gradients`, and their
                gradients in the format in which they accumulate.
        """
        for group in self._groups:
            group.post_backward = partial(self._fill_and_reduce, group, group.post_backward, active, note, before)

    def _fill_and_reduce(
        self,
        group: Any,
        reduce: Callable[..., None],
        active: Callable[[], bool],
        note: Callable[[nn.Parameter], None],
        before: Callable[[Sequence[int], Sequence[Tensor]], None] | None,
        *args: Any,
    ) -> None:
        if group.reduce_grads and active():
            empty, moved = [], False
            for parameter in group.fsdp_params:
                if not parameter.sharded_param.requires_grad or not hasattr(parameter, "_unsharded_param"):
                    continue
                if self._moves and parameter.unsharded_accumulated_grad is not None:
                    moved = True
                elif parameter._unsharded_param.grad is None:
                    empty.append(parameter)
                    continue
                note(parameter.sharded_param)
            for parameter in empty:
                leaf = parameter._unsharded_param
                leaf.grad = torch.zeros_like(leaf, dtype=getattr(leaf, "grad_dtype", None))  # wider in torch 2.15
            for parameter in group.fsdp_params if moved else ():  # a reduction is of one number format
                if parameter.unsharded_accumulated_grad is None and hasattr(parameter, "_unsharded_param"):
                    parameter.to_accumulated_grad_if_needed()
            if before is not None:
                gathered = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
                reduced = [parameter for parameter in gathered if parameter.sharded_param.requires_grad]
                if reduced:  # a block of which nothing trains reduces nothing
                    before([self._numbers[id(p)] for p in reduced], [self._accumulated(p) for p in reduced])
        reduce(*args)

    def _accumulated(self, parameter: Any) -> Tensor:
        """A parameter's gradient, in the format in which it accumulates."""
        if self._moves:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
            if parameter.unsharded_accumulated_grad is not None:
                return cast(Tensor, parameter.unsharded_accumulated_grad)
        return cast(Tensor, parameter._unsharded_param.grad)

    def shapes(self) -> list[torch.Size]:
        """The whole shapes of :meth:`shards`."""
        return [parameter.sharded_param.shape for parameter in self._parameters]

    def trains(self) -> list[bool]:
        """Whether each parameter needs a gradient, as the model holds it: gathered or as a shard."""
        return [held[key].requires_grad for held, key, *_ in self._places]

    def take_over_trains(self) -> None:
        """Lets shards need a gradient where what was gathered of them does, which is about to be freed."""
        for held, key, _, shard, _ in self._places:
            if held[key] is not shard and held[key].requires_grad != shard.requires_grad:
                shard.requires_grad_(held[key].requires_grad)

    def guard_apply(self) -> None:
        """Has ``.to()``, ``.double()`` and the like raise MisuseError where they would change a sharded tensor."""
        for unit in self._of_unit:
            vars(unit)["_apply"] = partial(_refuse_to_change, unit)

    def release(self) -> None:
        """Leaves reductions to FSDP2 alone."""
        for group in self._groups:
            vars(group).pop("post_backward", None)
        for unit in self._of_unit:
            vars(unit).pop("_apply", None)

    def drop_new_gradients(self, before: Sequence[Tensor | None]) -> None:
        """Drops those that are accumulated whole where :meth:`whole_gradients` gave none ``before``."""
        for parameter, gradient in zip(self._parameters, before, strict=True):
            if gradient is None and hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
                if self._moves:
                    parameter.unsharded_accumulated_grad = None

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


def _refuse_to_change(unit: nn.Module, change: Callable[[Tensor], Tensor], *_: Any, **__: Any) -> nn.Module:
    """In place of a wrapped module's ``_apply``, which makes other parameters of shards."""
    with torch.no_grad():
        for name, tensor in (*unit.named_parameters(), *unit.named_buffers()):
            new = change(tensor)
            if new is not tensor and (new.dtype, new.device) != (tensor.dtype, tensor.device):
                problem = f"{name} of a sharded model would become {new.dtype} on {new.device} (.to(), .double(), ...)"
                raise MisuseError(f"{problem}, and optimizers hold it as it is: do it before the model is wrapped")
    return unit


@contextmanager
def gathered(block: nn.Module) -> Iterator[None]:
    """Around nothing, in the place of a block's forward: what that communicates."""
    state: Any = block._get_fsdp_state()  # type: ignore[operator]
    state._pre_forward(block, (), {})
    yield
    state._post_forward(block, (), ())


def begin_backward(block: nn.Module) -> None:
    """What a block communicates when a gradient reaches its output, unless that has come to pass."""
    block._get_fsdp_state()._pre_backward(None)  # type: ignore[operator]


def end_backward(block: nn.Module) -> None:
    """What a block communicates when its gradients are there, unless that has come to pass."""
    for group in _groups_of(block._get_fsdp_state()):  # type: ignore[operator]
        if group._training_state.name != "POST_BACKWARD":
            group.post_backward()


class Acts(torch.autograd.Function):
    """A token whose backward calls a function, and comes to that of another and, without a gradient, of others."""

    @staticmethod
    def forward(ctx: Any, act: Callable[[], None], token: Tensor, *others: Tensor) -> Tensor:
        ctx.act, ctx.others = act, len(others)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.act()
        return None, gradient, *[None] * ctx.others


class Tie(torch.autograd.Function):
    """Tensors whose backward comes to that of a token too."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # what the loss does not read has no gradient, rather than zeros
        ctx.like = token.detach()
        owners = [id(tensor if tensor._base is None else tensor._base) for tensor in tensors]
        alone = [owners.count(owner) == 1 for owner in owners]
        # What shares its memory with none of the others may be written into by who gets it.
        own = [one.detach() if one._base is None else one.clone() for one in tensors]
        return tuple(new if free else one for new, free, one in zip(own, alone, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return torch.empty_like(ctx.like), *gradients


def copy_shard(to: Tensor, shard: Tensor) -> None:
    """Copies this rank's part."""
    getattr(to, _LOCAL).copy_(getattr(shard, _LOCAL))


def own_values(unit: nn.Module) -> dict[str, Any]:
    """What a sharded module's instance holds of its own."""
    return {name: value for name, value in vars(unit).items() if not name.startswith(_OF_INSTANCE)}


def is_state(owner: object) -> bool:
    """Whether it is FSDP2's own, of a module."""
    return all(hasattr(owner, name) for name in _OF_EVERY_STATE)


def local_shards(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    """This rank's parts of sharded gradients, as they lie in memory; ``to_local`` would make a view of each."""
    parts = [getattr(gradient, _LOCAL) for gradient in gradients if gradient is not None]
    return [part for part in parts if part.numel()]


def with_gradient_hooks(parameters: Mapping[str, nn.Parameter], own: int) -> list[str]:
    """Those that ``register_hook`` was called on more than ``own`` times."""
    return [name for name, parameter in parameters.items() if len(parameter._backward_hooks or ()) > own]


def gradient_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """What ``register_hook`` was given, in order; not by FSDP2, for a parameter that is an output of its module."""
    hooks: Mapping[int, Any] = parameter._backward_hooks or {}
    return [hook for hook in hooks.values() if not is_state(getattr(hook, "__self__", None))]


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
