"""FSDP2: parameters, gradients and optimizer state sharded over ranks, gathered block by block for the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distaccum.distributed.world import World
from distaccum.engines.base import NO_ARTIFACTS, EngineState, StateLayout, StepOutput
from distaccum.engines.comm_hooks import ReduceScatterInDtype
from distaccum.engines.dtensor import full_tensor, mebibytes, shard_like
from distaccum.engines.fsdp2 import internals
from distaccum.engines.fsdp2 import wrap as units
from distaccum.engines.fsdp2.optimizers import rebind_optimizers
from distaccum.engines.optimizer_step import OptimizerStep, trained
from distaccum.engines.uneven_inputs import UnevenInputs
from distaccum.errors import ConfigError, MisuseError
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import FP32, PrecisionPolicy
from distaccum.precision.scaler import LossScaler


class FSDP2Engine:
    """Exact accumulation on torch's ``fully_shard``: the sum over ranks, never their average.

    Args:
        model: on any device; every rank is given rank 0's weights block by block, or weights are made so, where they
            are on the meta device.
        optimizers: over the model's parameters, and disjoint; they go on with the shards. None has stepped yet.
        world: this rank.
        clip_norm: largest norm of the global gradient; None: no clipping by norm.
        clip_value: largest absolute value of its elements; None: no clipping by value.
        scaler: of the loss, where gradients pass through fp16.
        underflow_every: with a scaler, attempts between two samples of the share that is flushed to zero; 0: none.
        policy: what forwards compute in, and what gradients travel in between ranks. They accumulate in fp32.
        sync, reshard_after_forward, gather_dtype, activation_checkpoint, offload, replicas, blocks: see
            ``FSDP2Config``.
        seed: of weights that are made here.

    Raises:
        ConfigError: an optimizer has stepped, or ``blocks`` match nothing. See :func:`check` too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scaler: LossScaler | None = None,
        underflow_every: int = 0,
        policy: PrecisionPolicy = FP32,
        sync: str = "boundary",
        reshard_after_forward: bool = True,
        gather_dtype: str = "compute",
        activation_checkpoint: str = "none",
        offload: bool = False,
        replicas: int = 1,
        blocks: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.device, self.gradient_divide_factor = world.device, 1
        self.forward_communicates, self.artifacts, self.state_layout = True, NO_ARTIFACTS, StateLayout.SHARDED
        self._world, self._policy, self._every = world, policy, sync == "every"
        self.local_gradients = self._local_gradients
        self._zero_contribution: list[bool] = []  # not empty while a micro-step runs whose gradient counts for nothing
        self._reshards, self._offload = reshard_after_forward, offload
        self._gathers_compute = gather_dtype == "compute" and policy.casts and not (policy.keep_fp32 or policy.only)
        self._mesh = _mesh(world, replicas)
        before = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._shard(model, units.blocks_of(model, blocks), activation_checkpoint, seed)
        rebind_optimizers(model, optimizers, before)
        apply_precision(model, policy, world.device, warn=world.is_main)
        self._model = model
        self._boundary = OptimizerStep(
            optimizers,
            trained(model),
            (model,),
            clip_norm=clip_norm,
            clip_value=clip_value,
            scaler=scaler,
            underflow_every=underflow_every,
            all_reduce_shards=self._all_reduce_shards,
        )
        self.min_loss_scale = self._boundary.min_loss_scale
        self._uneven_inputs = UnevenInputs(model, world)
        self._window_begun = False

    def _shard(self, model: nn.Module, blocks: Sequence[nn.Module], activation_checkpoint: str, seed: int) -> None:
        """Block by block, so that one at a time is whole on the device."""
        names = {module: name for name, module in model.named_modules()}
        if activation_checkpoint != "none":
            units.checkpoint_activations(model, blocks, selective=activation_checkpoint == "selective")
        mixed = MixedPrecisionPolicy(
            param_dtype=self._policy.compute_dtype if self._gathers_compute else None,
            reduce_dtype=torch.float32 if self._gathers_compute else None,  # what is accumulated before, too
            cast_forward_inputs=False,  # autocast does
        )
        sixteen = self._policy.reduce_dtype if self._policy.reduce_dtype is not torch.float32 else None
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self._offload else OffloadPolicy()
        for unit in [*blocks, model]:
            if units.is_meta(unit):
                units.materialize(unit, names, seed)
                units.move_and_sync(unit, self.device, fill=lambda _: None)
            else:
                units.move_and_sync(unit, self.device, fill=self._world.broadcast_)
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
        """The user's model, whose class is now a subclass of its own and of ``FSDPModule``."""
        return self._model

    @property
    def unwrapped_model(self) -> nn.Module:
        """The same: there is no wrapper."""
        return self._model

    def describe(self) -> str:
        """See :class:`Engine`."""
        elements = sum(p.numel() for p in self._boundary.parameters.values())
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

    def sync_buffers(self) -> None:
        """One broadcast a buffer: done for evaluations, not for every window."""
        for buffer in self._model.buffers():
            self._world.broadcast_(buffer)

    def begin_window(self, micro_steps: int) -> None:
        """One small host all-reduce a window, and micro-steps for nothing where another rank has more.

        Those of a rank without any leave the last one to :meth:`shadow_micro_step`.
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
        """Gradients are reduced if ``sync``, or after every micro-step if so configured."""
        self._uneven_inputs.begin_micro_step()
        self._toggle(sync)
        return nullcontext()

    def _toggle(self, sync: bool) -> None:
        sharded = cast(FSDPModule, self._model)
        sharded.set_requires_gradient_sync(sync or self._every)
        if not self._reshards:
            sharded.set_reshard_after_backward(sync)

    @contextmanager
    def _local_gradients(self) -> Iterator[Callable[[], Mapping[str, Tensor]]]:
        every, self._every = self._every, False
        try:
            yield lambda: dict(self._accumulated())
        finally:
            self._every = every

    def _accumulated(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(parameter): name for name, parameter in self._boundary.parameters.items()}
        for parameter in internals.parameters_of(self._model):
            gradient = internals.accumulated(parameter)
            if gradient is not None and id(parameter.sharded_param) in names:
                yield names[id(parameter.sharded_param)], gradient

    def autocast(self) -> AbstractContextManager[object]:
        """The policy's."""
        return self._policy.autocast(self.device)

    def backward(self, loss: Tensor) -> None:
        """Plain autograd, of the scaled loss in fp16: FSDP2 reduces in its hooks.

        Raises:
            MisuseError: :meth:`begin_window` was left out.
        """
        self._expect_pace()
        self._boundary.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def set_lr_factor(self, factor: float) -> None:
        """Sets every group's ``lr`` to ``factor`` times its ``initial_lr``."""
        self._boundary.set_lr_factor(factor)

    def step(self, *, divisor: float = 1.0) -> StepOutput:
        """One transaction on the shards: the norm, and with it the decision, is that of all of them."""
        self._window_begun = False
        result = self._boundary.step(divisor)
        for parameter in self._boundary.parameters.values():
            parameter.grad = None
        return result

    def zero_gradients(self) -> None:
        """Frees the shards' gradients, and what a window that is not done has accumulated whole."""
        for parameter in self._boundary.parameters.values():
            parameter.grad = None
        internals.drop(self._model)

    def state(self) -> EngineState:
        """Tensors are put together one by one, each kept by one rank, on the host."""
        model: dict[str, Tensor] = {}
        found: dict[str, Any] = get_model_state_dict(self._model)
        for i, (name, tensor) in enumerate(found.items()):
            full = full_tensor(tensor)
            if self._owns(i) if isinstance(tensor, DTensor) else self._world.is_main:  # buffers are rank 0's
                model[name] = full.cpu()
        return self._boundary.state(model, owns=self._owns)

    def _owns(self, i: int) -> bool:
        return i % self._world.size == self._world.rank

    def load_state(self, state: EngineState) -> None:
        """Raises RuntimeError, KeyError or ValueError, as torch does, where the state belongs to another model."""
        own: dict[str, Any] = get_model_state_dict(self._model)
        # One tensor is read whole at a time. Names and shapes that differ are torch's to complain of.
        parts = {name: shard_like(state.model[name], own.get(name, state.model[name])) for name in state.model}
        set_model_state_dict(self._model, cast(Any, parts))
        self._boundary.load_state(state)

    def save_files(self, folder: Path) -> None:
        """Nothing."""

    def load_files(self, folder: Path) -> None:
        """Nothing."""

    def _expect_pace(self) -> None:
        if not self._window_begun:
            problem = "this engine's ranks have to run alike many micro-steps"
            raise MisuseError(f"{problem}: call engine.begin_window(len(window.micro_batches)) before a window's first")


def check(world_size: int, *, replicas: int, reduce_dtype: torch.dtype) -> None:
    """Raises ConfigError for what cannot work, before there is a process group."""
    if world_size % replicas:
        remedy = "Use a divisor of the number of processes"
        raise ConfigError("engine.replicas", replicas, f"does not divide {world_size} processes", remedy)
    if reduce_dtype is not torch.float32 and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        problem = f"torch {torch.__version__} has no way to send fp32 gradients of engine=fsdp2 in it"
        raise ConfigError("precision.reduce_dtype", reduce_dtype, problem, "Use fp32, a newer torch, or engine=ddp")


def _mesh(world: World, replicas: int) -> DeviceMesh:
    kind, shards = world.device.type, world.size // replicas
    if replicas == 1:
        return init_device_mesh(kind, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicate", "shard"))
