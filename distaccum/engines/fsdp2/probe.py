"""A sharded model shown to verification: shards that move, whole weights beside them, gradients before a reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distaccum.engines.base import Engine
from distaccum.engines.fsdp2 import internals
from distaccum.engines.fsdp2.blocks import OTHER_BLOCKS, BlockOrder, Units
from distaccum.engines.modules import full_tensor, is_sharded, to_local, trained
from distaccum.engines.optimizer_state import by_entry
from distaccum.engines.probe import GradientProbe, LocalGradients, WholeWeights
from distaccum.precision.policy import PrecisionPolicy


class FSDP2Probe(GradientProbe):
    """See :class:`GradientProbe`.

    Args:
        engine, policy: as there.
        mesh: of shards, and of replicas where there are some.
        sharded: the model's parameters.
        units: what is gathered together.
        order: in which the window's forwards ran them.
        gathered_dtype: what weights are gathered in; None: their own.
        stepped: what the optimizers' state is of, on this rank, by the parameters' names.
    """

    def __init__(
        self,
        engine: Engine,
        policy: PrecisionPolicy,
        *,
        mesh: DeviceMesh,
        sharded: internals.ShardedModel,
        units: Units,
        order: BlockOrder,
        gathered_dtype: torch.dtype | None,
        stepped: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(engine, policy)
        self._world, self._mesh, self._gathered_dtype = engine.world, mesh, gathered_dtype
        self._sharded, self._units, self._order = sharded, units, order
        self._model = engine.unwrapped_model
        self._parameters, self._state_of = trained(self._model), stepped

    def known_fault(self) -> str:
        """See :class:`GradientProbe`."""
        same = len(set(self._world.all_gather_object(self._order.checksum))) == 1
        return "" if same else OTHER_BLOCKS

    def reduced_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`GradientProbe`; frees what a forward has left gathered: the shards are in its places again."""
        self._units.free()
        yield from super().reduced_gradients()

    def gradient_hooks(self, parameter: nn.Parameter) -> Sequence[Callable[[Tensor], Tensor | None]]:
        """See :class:`GradientProbe`."""
        return self._sharded.hooks_of(parameter)

    @property
    def leaves(self) -> Iterable[Tensor]:
        """See :class:`GradientProbe`: what was gathered."""
        return [leaf for leaf in self._sharded.leaves() if leaf is not None and leaf.requires_grad]

    @property
    def local_gradients(self) -> LocalGradients | None:
        """See :class:`GradientProbe`."""
        return self._local_gradients

    @contextmanager
    def _local_gradients(self) -> Iterator[Callable[[], Mapping[str, Tensor]]]:
        with self._units.local():
            yield lambda: dict(self._accumulated())

    def _accumulated(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for shard, gradient in zip(self._sharded.shards(), self._sharded.whole_gradients(), strict=True):
            if gradient is not None and id(shard) in names:
                yield names[id(shard)], gradient

    def replicated_state(self) -> tuple[int, dict[str, Tensor]]:
        """What is not sharded; with replicas the shards as well, those of the weights included."""
        if "replicate" not in (self._mesh.mesh_dim_names or ()):
            sharded = {name: p for name, p in self._state_of.items() if is_sharded(p)}  # not what one rank has whole
            kept = by_entry(self._engine.optimizers, sharded, others=False)
            return 0, {name: tensor for name, tensor in kept.items() if not is_sharded(tensor)}
        kept = by_entry(self._engine.optimizers, self._state_of)
        own = {**kept, **{f"the shard of {name}": p.detach() for name, p in self._parameters.items()}}
        return self._mesh["shard"].get_local_rank(), {name: to_local(tensor) for name, tensor in own.items()}

    @property
    def whole_weights(self) -> WholeWeights | None:
        """See :class:`GradientProbe`; none where code was compiled, or a hook changes what a shard was given."""
        odd = internals.is_compiled(self._model) or any(map(internals.accumulation_hooks, self._parameters.values()))
        return None if odd else self._whole_weights

    @contextmanager
    def _whole_weights(self) -> Iterator[Mapping[str, Tensor]]:
        self._units.gather_anew()
        leaves: dict[int, nn.Parameter] = {}
        for shard in self._model.parameters():
            whole = full_tensor(shard.detach()).to(self._world.device)
            leaves[id(shard)] = leaf = nn.Parameter(whole, requires_grad=shard.requires_grad)
            for hook in self._sharded.hooks_of(shard):
                leaf.register_hook(hook)  # type: ignore[no-untyped-call]
        dtype = self._gathered_dtype
        cast = {key: leaf.to(dtype) if leaf.is_floating_point() else leaf for key, leaf in leaves.items()}
        with internals.computing_with(self._model, cast):
            yield {name: leaves[id(shard)] for name, shard in self._parameters.items() if shard.requires_grad}

    def _parts(self, direction: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._world.device.type != "cpu":  # which may still read what is offloaded
            torch.get_device_module(self._world.device).synchronize(self._world.device)
        return {name: to_local(self._parameters[name].data) for name in direction}

    def _parts_changed(self) -> None:
        self._units.gather_anew()
