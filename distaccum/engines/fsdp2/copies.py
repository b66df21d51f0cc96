"""Copies of a sharded model, which torch has none of: for ``AveragedModel(acc.model)``, ``copy.deepcopy(acc.model)``.

A copy is sharded like the model, and nothing is communicated: each rank copies its shards. Its forward is a collective,
as the model's is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distaccum.distributed.world import World
from distaccum.engines.fsdp2 import internals
from distaccum.engines.uneven_inputs import UnevenInputs
from distaccum.errors import MisuseError


class Copies:
    """Gives a sharded model a ``deepcopy``, and its blocks one that says what to do instead; for good.

    Args:
        model: sharded.
        sharded: its parameters.
        world: this rank.
        shard: shards a part of a copy as the same part of the model is, given whether it is the root.
        owners: whose hooks on the model are not copied.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: internals.ShardedModel,
        world: World,
        shard: Callable[[nn.Module, bool], None],
        owners: Collection[object],
    ) -> None:
        self._model, self._sharded, self._world, self._shard, self._owners = model, sharded, world, shard, owners
        self._units: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            vars(unit)["__deepcopy__"] = self._copy if unit is model else partial(_refuse, unit)

    def _copy(self, memo: dict[int, Any]) -> nn.Module:
        for held, empty in self._sharded.on_meta():
            memo[id(held)] = empty
        twins = [self._plain(unit) for unit in self._units]
        for unit, twin in zip(self._units, twins, strict=True):
            memo[id(unit)] = twin
        for unit, twin in zip(self._units, twins, strict=True):
            own = internals.own_values(unit)
            hooks = {name: value for name, value in own.items() if name.endswith("_hooks") and isinstance(value, dict)}
            twin.__dict__.update(deepcopy({name: own[name] for name in own.keys() - hooks.keys()}, memo))
            for name, registered in hooks.items():
                kept = {key: hook for key, hook in registered.items() if not self._is_own(hook)}
                twin.__dict__[name] = type(registered)(kept)
        root = twins[0]
        made: dict[int, nn.Parameter] = {}  # tied weights stay tied
        for twin in reversed(twins):  # what is inside comes first
            for module in twin.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.is_meta:
                        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._world.device)
                        made.setdefault(id(parameter), nn.Parameter(whole, parameter.requires_grad))
                        module._parameters[name] = made[id(parameter)]
            self._shard(twin, twin is root)
        with torch.no_grad():
            for twin_shard, shard in zip(internals.ShardedModel(root).shards(), self._sharded.shards(), strict=True):
                internals.copy_shard(twin_shard, shard)
        UnevenInputs(root, self._world)  # refuses a forward that others do not join
        root.register_forward_hook(_free)
        return root

    @staticmethod
    def _plain(unit: nn.Module) -> nn.Module:
        """An empty instance of the class that it had before it was sharded."""
        kind: Any = type(unit).__mro__[2]  # after FSDP2's own two
        plain: nn.Module = kind.__new__(kind)
        return plain

    def _is_own(self, hook: Any) -> bool:
        while isinstance(hook, partial):
            hook = hook.func
        owner = getattr(hook, "__self__", None)
        return any(owner is one for one in self._owners) or internals.is_state(owner)


def _free(model: nn.Module, *_: object) -> None:
    """After a forward without gradients, so that the copy's parameters are shards again, as the model's are."""
    if not torch.is_grad_enabled():
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _refuse(unit: nn.Module, _: object) -> NoReturn:
    problem = f"a part of a sharded model ({type(unit).__name__}) cannot be copied by itself"
    raise MisuseError(f"{problem}: copy acc.model as a whole, or the part before the model is wrapped")
