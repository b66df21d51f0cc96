"""FSDP2: parameters, gradients and optimizer state sharded over ranks, gathered block by block for the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from distaccum.config.engine import FSDP2Config
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineState, LocalGradients, StateLayout, StepOutput, mebibytes
from distaccum.engines.comm_hooks import ReduceScatterInDtype
from distaccum.engines.context import EngineContext
from distaccum.engines.dtensor import full_tensor, is_sharded, shard_like
from distaccum.engines.fsdp2 import internals, wrap
from distaccum.engines.fsdp2.optimizers import rebind_optimizers
from distaccum.engines.fused_update import StepOptions
from distaccum.engines.modules import is_meta, trained
from distaccum.engines.optimizer_step import OptimizerStep
from distaccum.engines.state import load_model_state, model_state
from distaccum.engines.uneven_inputs import UnevenInputs
from distaccum.errors import MisuseError
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import PrecisionPolicy


class FSDP2Engine(Engine):
    """Exact accumulation on torch's ``fully_shard``: the sum over ranks, never their average.

    Args:
        model: on any device; every rank gets rank 0's weights block by block. Weights on the meta device are made here,
            block by block too.
        optimizers: over the model's parameters, and disjoint; they hold shards afterwards. None has stepped yet.
        world: this rank.
        config: how to shard, and when to reduce and gather.
        policy: what forwards compute in, and what gradients travel in between ranks. They accumulate in fp32.
        options: clipping and the loss scale.
        seed: of weights that are made here.

    Raises:
        ConfigError: an optimizer has stepped, or ``config.blocks`` match nothing. See ``checks.check`` too.
    """

    forward_communicates = True
    state_layout = StateLayout.SHARDED

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        *,
        config: FSDP2Config,
        policy: PrecisionPolicy,
        options: StepOptions,
        seed: int,
    ) -> None:
        super().__init__(optimizers, world, policy, options.scaler)
        self.gradient_divide_factor = 1
        self._every = config.sync == "every"
        self._reshards = config.reshard_after_forward
        self._zero_contribution: list[bool] = []  # not empty while a replay runs
        everywhere = policy.casts and not (policy.keep_fp32 or policy.only)
        self._gathers_compute = config.gather_dtype == "compute" and everywhere
        self._mesh = _mesh(world, config.replicas)
        before = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._shard(model, config, seed)
        rebind_optimizers(model, optimizers, before)
        apply_precision(model, policy, world.device, warn=world.is_main)
        self._model = model
        self._parameters = trained(model)
        self._optimizer_step = OptimizerStep(
            optimizers, self._parameters, (model,), options, all_reduce_shards=self._all_reduce_shards
        )
        self._uneven_inputs = UnevenInputs(model, world)
        self._window_begun = False

    def _shard(self, model: nn.Module, config: FSDP2Config, seed: int) -> None:
        """Block by block, so that one at a time is whole on the device."""
        blocks = wrap.blocks_of(model, config.blocks)
        names = {module: name for name, module in model.named_modules()}
        if config.activation_checkpoint != "none":
            wrap.checkpoint_activations(model, blocks, selective=config.activation_checkpoint == "selective")
        mixed = MixedPrecisionPolicy(
            param_dtype=self._policy.compute_dtype if self._gathers_compute else None,
            reduce_dtype=torch.float32 if self._gathers_compute else None,  # what is accumulated before, too
            cast_forward_inputs=False,  # autocast does
        )
        sixteen = self._policy.reduce_dtype if self._policy.reduce_dtype is not torch.float32 else None
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if config.offload else OffloadPolicy()
        for unit in [*blocks, model]:
            if is_meta(unit):
                wrap.materialize(unit, names, seed)
                wrap.move_and_sync(unit, self.device, fill=lambda _: None)
            else:
                wrap.move_and_sync(unit, self.device, fill=self._world.broadcast_)
            fully_shard(
                unit,
                mesh=self._mesh,
                mp_policy=mixed,
                offload_policy=offload,
                reshard_after_forward=self._reshards if unit is not model else False,
            )
            sharded = cast(FSDPModule, unit)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # else a factor is NCCL's to multiply by, and gloo has none
            if hasattr(sharded, "set_custom_reduce_scatter"):  # from torch 2.9 on
                sharded.set_custom_reduce_scatter(
                    cast(Any, ReduceScatterInDtype(sixteen, zero_contribution=self._zero_contribution))
                )

    def _all_reduce_shards(self, tensor: Tensor) -> Tensor:
        """Over the ranks that share a model: those of other replicas hold the same gradient."""
        dist.all_reduce(tensor, group=self._mesh.get_group("shard"))
        return tensor

    @property
    def model(self) -> nn.Module:
        """The user's model; ``fully_shard`` has made its class a subclass of itself and of ``FSDPModule``."""
        return self._model

    @property
    def unwrapped_model(self) -> nn.Module:
        """The same: there is no wrapper."""
        return self._model

    def describe(self) -> str:
        """See :class:`Engine`."""
        elements = sum(p.numel() for p in self._parameters.values())
        shards = self._mesh["shard"].size()
        gathered = elements * (self._policy.compute_dtype.itemsize if self._gathers_compute else 4)
        sent = mebibytes(elements * self._policy.reduce_dtype.itemsize)
        sync, other = ("every", "boundary") if self._every else ("boundary", "every")
        replicas = f" x {self._mesh['replicate'].size()} replicas" if self._replicated else ""
        costs = {
            "boundary": f"{sent} of gradients reduce-scattered a window, {mebibytes(4 * elements)} of them held whole",
            "every": f"{sent} of gradients reduce-scattered a micro-step, {mebibytes(4 * elements // shards)} held",
        }
        gathers = "twice a micro-step" if self._reshards else "once a window, and held"
        return (
            f"sharded over {shards} ranks{replicas}; sync={sync}: {costs[sync]} (sync={other}: {costs[other]}); "
            f"{mebibytes(gathered)} of parameters gathered {gathers}"
        )

    @property
    def _replicated(self) -> bool:
        return "replicate" in (self._mesh.mesh_dim_names or ())

    def begin_window(self, micro_steps: int) -> None:
        """One small host all-reduce a window; then the micro-steps that another rank has more, with a zero gradient.

        A rank without any leaves the last of them to :meth:`shadow_micro_step`.
        """
        self._window_begun = True
        missing = self._uneven_inputs.missing_steps(micro_steps)
        for _ in range(missing - (0 if micro_steps else 1)):
            self.shadow_micro_step(sync=False)
        if missing and not self._every:
            internals.drop(self._model)  # zeros, or NaN where the earlier input was beyond the number format

    def shadow_micro_step(self, *, sync: bool = True) -> None:
        """A micro-step on an earlier input, with a gradient of zero."""
        self._toggle(sync)
        self._zero_contribution.append(True)
        try:
            self._uneven_inputs.replay(self.autocast)
        finally:
            self._zero_contribution.clear()

    def micro_step(self, *, sync: bool) -> AbstractContextManager[object]:
        """Gradients are reduced with ``sync``; with ``sync=every`` in the settings after every micro-step."""
        self._uneven_inputs.begin_micro_step()
        self._toggle(sync)
        return nullcontext()

    def _toggle(self, sync: bool) -> None:
        sharded = cast(FSDPModule, self._model)
        sharded.set_requires_gradient_sync(sync or self._every)
        if not self._reshards:
            sharded.set_reshard_after_backward(sync)

    @property
    def local_gradients(self) -> LocalGradients | None:
        """See :class:`Engine`."""
        return self._local_gradients

    @contextmanager
    def _local_gradients(self) -> Iterator[Callable[[], Mapping[str, Tensor]]]:
        every, self._every = self._every, False
        try:
            yield lambda: dict(self._accumulated())
        finally:
            self._every = every

    def _accumulated(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for parameter in internals.parameters_of(self._model):
            gradient = internals.accumulated(parameter)
            if gradient is not None and id(parameter.sharded_param) in names:
                yield names[id(parameter.sharded_param)], gradient

    def backward(self, loss: Tensor) -> None:
        """Plain autograd, of the scaled loss in fp16: FSDP2 reduces in its hooks.

        Raises:
            MisuseError: :meth:`begin_window` was left out.
        """
        if not self._window_begun:
            problem = "all ranks of this engine must run the same number of micro-steps"
            raise MisuseError(f"{problem}: call engine.begin_window(len(window.micro_batches)) before a window's first")
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self, *, divisor: float = 1.0) -> StepOutput:
        """Steps on the shards; the norm, and so the decision, is that of the whole gradient."""
        self._window_begun = False
        output = self._optimizer_step.step(divisor)
        for parameter in self._parameters.values():
            parameter.grad = None
        return output

    def zero_gradients(self) -> None:
        """Frees the shards' gradients, and what an unfinished window has accumulated whole."""
        for parameter in self._parameters.values():
            parameter.grad = None
        internals.drop(self._model)

    def state(self) -> EngineState:
        """Gathers tensor by tensor; one rank keeps each, on the host."""
        model: dict[str, Tensor] = {}
        for i, (name, tensor) in enumerate(model_state(self._model).items()):
            full = full_tensor(tensor)
            if self._owns(i) if is_sharded(tensor) else self._world.is_main:  # buffers are rank 0's
                model[name] = full.cpu()
        return self._optimizer_step.state(model, owns=self._owns)

    def _owns(self, i: int) -> bool:
        return i % self._world.size == self._world.rank

    def load_state(self, state: EngineState) -> None:
        """See :class:`Engine`."""
        own = model_state(self._model)
        # One tensor is read whole at a time. Torch complains of names and shapes that differ.
        parts = {name: shard_like(state.model[name], own.get(name, state.model[name])) for name in state.model}
        load_model_state(self._model, parts)
        self._optimizer_step.load_state(state)


def create(model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> FSDP2Engine:
    """For ``engine=fsdp2``; see ``factory.EngineSpec``."""
    config = context.engine
    assert isinstance(config, FSDP2Config)
    # Shards on the CPU have their gradients there, and what decides about these.
    options = context.step_options(torch.device("cpu") if config.offload else world.device)
    return FSDP2Engine(
        model, optimizers, world, config=config, policy=context.policy, options=options, seed=context.seed
    )


def _mesh(world: World, replicas: int) -> DeviceMesh:
    kind, shards = world.device.type, world.size // replicas
    if replicas == 1:
        return init_device_mesh(kind, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicate", "shard"))
