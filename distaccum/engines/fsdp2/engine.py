"""FSDP2: parameters, gradients and optimizer state sharded over ranks, gathered block by block for the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from distaccum.config.checks import require, size_of
from distaccum.config.engine import FSDP2Config
from distaccum.config.precision import PrecisionConfig
from distaccum.data.plan.units import UnitAssignment
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineFacts, EngineState, StateLayout, StepOutput
from distaccum.engines.blocks import blocks_of
from distaccum.engines.context import EngineContext
from distaccum.engines.fsdp2 import internals, wrap
from distaccum.engines.fsdp2.blocks import OTHER_BLOCKS, BlockOrder, SkippedBlocks, Units
from distaccum.engines.fsdp2.copies import Copies
from distaccum.engines.fsdp2.probe import FSDP2Probe
from distaccum.engines.fsdp2.shard_watch import ShardReads, ShardWatch, UsedParameters, reads_shards
from distaccum.engines.fsdp2.tree_scatter import ReduceScatterInDtype, TreeReduceScatter, TreeSums
from distaccum.engines.fsdp2.wrap import rebind_optimizers
from distaccum.engines.gradient_watch import GradientWatch
from distaccum.engines.group_settings import OTHER_SETTINGS, fingerprint
from distaccum.engines.modules import HostCopy, from_host, full_tensor, is_meta, is_sharded, shard_like, trained
from distaccum.engines.optimizer_step import FusedUpdate, OptimizerStep
from distaccum.engines.state import load_model_state, model_state
from distaccum.engines.uneven_inputs import UnevenInputs
from distaccum.errors import MisuseError, shorten
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import PrecisionPolicy
from distaccum.program import OWNERS, WHOLE_NORMS, load

_LATE = (
    "the loss reads a gathered parameter outside of its module's forward, so that a gradient came after its reduction: "
    "use weight_decay= of the optimizer, or an engine that holds whole parameters (ddp, zero1)"
)


class FSDP2Engine(Engine):
    """Exact accumulation on torch's ``fully_shard``: the sum over ranks, never their average.

    Args:
        model: on any device; every rank gets rank 0's weights block by block. Weights on the meta device are made here,
            block by block too.
        optimizers: over the model's parameters, and disjoint; they hold shards afterwards. None has stepped yet.
        world: this rank.
        context: the checked settings. Whatever gradients travel in between ranks, they accumulate in fp32.

    Raises:
        ConfigError: an optimizer has stepped, or ``engine.blocks`` match nothing. See ``checks.check`` too.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> None:
        config, policy, numerics = context.engine, context.policy, context.numerics
        assert isinstance(config, FSDP2Config)
        others = numerics.check_optimizers(optimizers, config)
        # Shards on the CPU have their gradients there, and what decides about these.
        options = context.step_options(torch.device("cpu") if config.offload else world.device)
        facts = EngineFacts(
            gradient_divide_factor=1,
            numerics=numerics,
            forward_communicates=True,
            rounds_weights=policy.keeps_masters,  # of what is gathered: the shards are the masters
            state_layout=StateLayout.SHARDED,
            gives_optimizers_back=False,
        )
        super().__init__(model, optimizers, world, policy, scaler=options.scaler, facts=facts)
        self._tree = TreeSums(world, lambda: bool(self._zero_contribution)) if numerics.fixed_order else None
        self._reshards, self._offloads = config.reshard_after_forward, config.offload
        self._zero_contribution: list[bool] = []  # not empty while a replay runs
        everywhere = policy.casts and not (policy.keep_fp32 or policy.only)
        self._gathered_dtype = policy.compute_dtype if config.gather_dtype == "compute" and everywhere else None
        self._mesh = _mesh(world, config.replicas)
        before = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        taken = wrap.take_hooks(model)
        self._shard(model, config, context.seed)
        internals.check(model)
        self._sharded = internals.ShardedModel(model)
        faults = rebind_optimizers(model, optimizers, before, world)
        apply_precision(model, policy, world.device, warn=world.is_main)
        self._parameters = trained(model)
        self._owners = load(OWNERS)(
            optimizers, self._parameters, faults=faults, others=others, mesh=self._mesh, config=config, world=world
        )
        update = FusedUpdate(
            optimizers,
            self._parameters,
            options,
            all_reduce_shards=self._all_reduce_shards,
            whole_norms=load(WHOLE_NORMS)() if numerics.fixed_order else None,
            stepped=self._owners.stepped,
        )
        self._optimizer_step = OptimizerStep(update, (model,), self._settings, window_open=lambda: self.window_open)
        self._units = Units(model, every=config.sync == "every", reshards=self._reshards)
        # After what follows, which talks to other ranks, and before FSDP2's own.
        self._hooks = [unit.register_forward_pre_hook(_gather_to_train, prepend=True) for unit in self._units.modules]
        self._uneven_inputs = inputs = UnevenInputs(model, world, self._meet_others)
        self._order = BlockOrder(in_backward=lambda: inputs.differentiates)
        wrap.carry_hooks_over(taken, model, self._sharded, replays=lambda: inputs.replays)
        self._watch = GradientWatch(self._gradients)
        self._shard_watch = ShardWatch(lambda: [p.grad for p in self._parameters.values()])
        self._sync = False
        # Before FSDP2's own, which puts its parameter where another tensor may have been put.
        self._hooks += [unit.register_forward_pre_hook(self._expect_own, prepend=True) for unit in self._units.modules]
        self._hooks += [model.register_forward_pre_hook(self._note_forward)]
        self._compares_order = False
        self._late_faults: list[tuple[HostCopy, str]] = []
        device = world.device if world.size > 1 else None
        self._skipped = SkippedBlocks(model, lambda: not inputs.differentiates, self._order.note, device)
        self._hooks += self._skipped.hooks
        self._used = UsedParameters(self._sharded.shards())
        self._sharded.fill_reductions(lambda: inputs.differentiates, self._note_used, self._before_reduction())
        self._window_begun, self._left = False, 0
        self._fault = ""  # of the window, that only this rank may know
        self._trains: list[bool] = []  # at the window's begin: which parameters need a gradient
        self._in_micro_step = self._for_nothing = False
        self._reads = ShardReads(
            self._parameters,
            in_micro_step=lambda: self._in_micro_step,
            in_backward=lambda: inputs.differentiates,
            note=self._note_fault,
            error=self._of_shard,
        )
        self._sharded.guard_apply()
        self.probe = FSDP2Probe(
            self,
            policy,
            mesh=self._mesh,
            sharded=self._sharded,
            units=self._units,
            order=self._order,
            gathered_dtype=self._gathered_dtype,
            stepped=self._owners.stepped,
        )
        owners = (self, inputs, self._skipped)
        self._copies = Copies(model, self._sharded, world, self._shard_unit, owners)

    def _shard(self, model: nn.Module, config: FSDP2Config, seed: int) -> None:
        """Block by block, so that one at a time is whole on the device."""
        blocks = blocks_of(model, config.blocks)
        names = {module: name for name, module in model.named_modules()}
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # a dense gradient has the same numbers, and can be sharded
        for unit in [*blocks, model]:
            if is_meta(unit):
                wrap.materialize(unit, names, seed)
                wrap.move_and_sync(unit, self.device, fill=lambda _: None)
            else:
                wrap.move_and_sync(unit, self.device, fill=self._world.broadcast_)
            self._shard_unit(unit, unit is model)

    def _shard_unit(self, unit: nn.Module, is_root: bool) -> None:
        """One block, or what is left of the root."""
        mixed = MixedPrecisionPolicy(
            param_dtype=self._gathered_dtype,
            reduce_dtype=torch.float32 if self._gathered_dtype else None,  # what is accumulated before, too
            cast_forward_inputs=False,  # autocast does
        )
        sixteen = self._policy.reduce_dtype if self._policy.reduce_dtype is not torch.float32 else None
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self._offloads else OffloadPolicy()
        fully_shard(
            unit,
            mesh=self._mesh,
            mp_policy=mixed,
            offload_policy=offload,
            reshard_after_forward=self._reshards and not is_root,
        )
        sharded = cast(FSDPModule, unit)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # else a factor is NCCL's to multiply by, and gloo has none
        if self._tree is not None:
            scatter = TreeReduceScatter(self._tree, self._zero_contribution)
            sharded.set_custom_reduce_scatter(cast(Any, scatter))
        elif hasattr(sharded, "set_custom_reduce_scatter"):  # from torch 2.9 on
            sharded.set_custom_reduce_scatter(
                cast(Any, ReduceScatterInDtype(sixteen, zero_contribution=self._zero_contribution))
            )

    def _before_reduction(self) -> Callable[[Sequence[int], Sequence[Tensor]], None] | None:
        """Where sums have an order, called before each reduction."""
        tree = self._tree
        if tree is None:
            return None
        tree.shapes = self._sharded.shapes()
        return tree.end_last_block

    def _all_reduce_shards(self, tensor: Tensor) -> Tensor:
        """Over the ranks that share a model: those of other replicas hold the same gradient.

        With the norms of a step travel the order in which this rank's forwards ran the blocks, a number for its
        optimizers' settings, and their squares: where ranks differ the norms become NaN, and no rank steps. So do the
        marks of the parameters that this rank has used: one that no rank has used has no gradient.

        Raises:
            MisuseError: no rank has used any.
        """
        if not self._compares_order:
            dist.all_reduce(tensor, group=self._mesh.get_group("shard"))
            return tensor
        self._compares_order = False
        if self._fault:
            tensor = tensor + torch.nan
        if self._replicated and self._mesh["replicate"].get_local_rank():
            tensor = torch.full_like(tensor, torch.nan if self._fault else 0.0)  # the first replica gives the norms
        settings = fingerprint(self._optimizers, world_size=self._world.size)
        own = from_host([float(self._order.checksum), settings], tensor)
        sums = torch.cat((tensor, own, own.square(), self._used.marks(tensor)))
        dist.all_reduce(sums)
        length, both = len(tensor), len(own)
        norms, total, squares, used = sums.tensor_split((length, length + both, length + 2 * both))
        differ = squares * self._world.size != total.square()  # of whole numbers below 2**53
        self._late_faults += [
            (HostCopy(differ[:1].float()), OTHER_BLOCKS),
            (HostCopy(differ[1:].float()), OTHER_SETTINGS),
        ]
        if not self._used.drop_unused(used):
            raise _no_gradient(self._parameters)
        return norms + torch.where(differ.any(), torch.nan, 0.0).to(tensor.dtype)

    @property
    def model(self) -> nn.Module:
        """The user's own; ``fully_shard`` has made its class a subclass of itself and of ``FSDPModule``."""
        return self._model

    def describe(self) -> str:
        """See :class:`Engine`."""
        elements = sum(p.numel() for p in self._parameters.values())
        shards = self._mesh["shard"].size()
        every = self._model.parameters()  # what is frozen is sharded and gathered too
        cast = self._gathered_dtype.itemsize if self._gathered_dtype else 0
        gathered = sum(p.numel() * (cast if cast and p.is_floating_point() else p.itemsize) for p in every)
        sent = size_of(elements * self._policy.reduce_dtype.itemsize)
        sync, other = ("every", "boundary") if self._units.every else ("boundary", "every")
        replicas = f" x {self._mesh['replicate'].size()} replicas" if self._replicated else ""
        costs = {
            "boundary": f"{sent} of gradients reduce-scattered per step, {size_of(4 * elements)} of them held whole",
            "every": f"{sent} of gradients reduce-scattered a micro-step, {size_of(4 * elements // shards)} held",
        }
        gathers = "twice a micro-step" if self._reshards else "once per step, and held"
        return (
            f"sharded over {shards} ranks{replicas}; sync={sync}: {costs[sync]} (sync={other}: {costs[other]}); "
            f"{size_of(gathered)} of parameters gathered {gathers}{self._owners.says}"
        )

    @property
    def _replicated(self) -> bool:
        return "replicate" in (self._mesh.mesh_dim_names or ())

    def begin_window(self, micro_steps: int, assignment: UnitAssignment | None = None) -> None:
        """One small host all-reduce a window; then the micro-steps that another rank has more, with a zero gradient.

        A rank without any leaves the last of them to :meth:`shadow_micro_step`.
        """
        self._open_window()
        self._take_assignment(assignment)
        self._window_begun, self._left = True, micro_steps
        missing = self._uneven_inputs.missing_steps(micro_steps, like=self._skipped.proposal)
        self._skipped.begin_window(agreed=self._uneven_inputs.alike)
        for _ in range(missing - (0 if micro_steps else 1)):
            if self._uneven_inputs.left:  # it may be given up
                self.shadow_micro_step(sync=False)
        if missing and not self._units.every:
            self._sharded.drop_gradients()  # zeros, or NaN where the earlier input was beyond the number format
            self._note_gradients()
        if self._tree is not None:
            self._tree.begin(assignment)

    def _drop_stray_gradients(self) -> None:
        """Also frees what an evaluation has gathered: a rank that replays must gather where the others do.

        Raises:
            MisuseError: parameters are not those that were wrapped.
        """
        replaced = self._sharded.all_replaced()
        if replaced:
            problem = f"{shorten(replaced)} was replaced after wrapping (tied, assigned, or by .to() or .double())"
            raise MisuseError(f"{problem}, and what is sharded and stepped is the former one: do it before")
        self._sharded.take_over_trains()
        self._units.free()
        self._drop_gradients()
        self._order.checksum, self._fault = 0, ""
        self._trains = self._sharded.trains()
        wrap.check_hooked_shards(self._parameters)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        self._sharded.drop_gradients()
        self._used.forget()
        self._watch.note()
        self._shard_watch.forget()

    def _note_forward(self, *_: object) -> None:
        self._units.gathered = True
        self._order.forward_begins()

    def _expect_own(self, unit: nn.Module, _: object) -> None:
        """Raises MisuseError where a forward is to compute with other tensors than the parameters: FSDP2 would not."""
        name = self._sharded.replaced(unit)
        if name:
            problem = f"{name} of {type(unit).__name__} was replaced, as torch.func.functional_call does"
            remedy = "call the module itself, or use an engine that holds whole parameters (ddp, zero1)"
            raise MisuseError(f"{problem}, and a forward would gather the parameter all the same: {remedy}")

    def _note_fault(self, fault: str) -> None:
        self._fault = self._fault or fault

    def _note_used(self, shard: nn.Parameter) -> None:
        if not (self._uneven_inputs.replays or self._for_nothing):
            self._used.add(shard)

    def weights_changed(self) -> None:
        """See :class:`Engine`."""
        self._units.free()

    def shadow_micro_step(self, *, sync: bool = True) -> None:
        """A micro-step on an earlier input, with a gradient of zero."""
        self._open_window()
        self._units.reduce(sync=sync)
        self._expect_untouched()
        self._zero_contribution.append(True)
        try:
            self._uneven_inputs.replay(self.autocast)
        finally:
            self._zero_contribution.clear()
        self._note_gradients()

    @contextmanager
    def micro_step(self, *, sync: bool) -> Iterator[None]:
        """Gradients are reduced with ``sync``; with ``sync=every`` in the settings after every micro-step."""
        self._open_window()
        self._left -= 1
        self._uneven_inputs.begin_micro_step()
        if self._left > 0 and sync:
            problem = f"micro_step(sync=True) with {self._left} micro-steps of the window left"
            early = MisuseError(f"{problem}: give it to the last one, or reduce in each by engine.sync=every")
            self._uneven_inputs.fail(early)  # others may wait for what this one runs
            raise early
        self._units.reduce(sync=False)
        self._sync, self._in_micro_step = sync, True
        plain = lambda: self.compiled is None and not internals.is_compiled(self._model)  # noqa: E731
        try:
            with self._reads.watching(where=plain):
                yield
        except Exception as error:
            meant = self._meant(error)
            self._uneven_inputs.fail(meant)
            if meant is error:
                raise
            raise meant from error
        finally:
            self._in_micro_step = False
        self._uneven_inputs.end_micro_step()

    def _of_shard(self, name: str = "") -> MisuseError:
        return reads_shards(name) if self._uneven_inputs.called else _forward_past_model()

    def _meant(self, error: Exception) -> Exception:
        """One of distaccum's in place of torch's own, where that says nothing of shards."""
        text = "" if isinstance(error, MisuseError) else str(error)
        if "DTensor" in text:  # of a shard in a plain forward, or next to an output
            return self._of_shard()
        if "to not have been used in the graph" in text:
            problem = "autograd.grad by a tensor that is in no forward, as the parameters of a sharded model"
            return MisuseError(f"{problem} are: use an engine that holds whole parameters (ddp, zero1)")
        if "functorch transform" in text:
            problem = "the model was called in a transform of torch.func (vmap, grad), which a sharded model cannot be"
            return MisuseError(f"{problem}: call it on the whole batch, or use ddp or zero1")
        return error

    def backward(self, loss: Tensor) -> None:
        """Plain autograd, of the scaled loss in fp16: FSDP2 reduces in its hooks.

        Raises:
            MisuseError: :meth:`begin_window` was left out.
        """
        if not self._window_begun:
            problem = "all ranks of this engine must run the same number of micro-steps"
            raise MisuseError(f"{problem}: call engine.begin_window(len(window.micro_batches)) before a window's first")
        if not self._uneven_inputs.called:
            raise _forward_past_model()
        self._expect_untouched()
        self._units.reduce(sync=self._sync)
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        with self._uneven_inputs.backward(scaled):
            if scaled.requires_grad:  # else it is a constant, of a micro-batch that counts nothing
                scaled.backward()  # type: ignore[no-untyped-call]
            self._join_backward()
        self._units.gathered = not self._reshards
        if (self._sync or self._units.every) and any(
            gradient is not None for gradient in self._sharded.whole_gradients()
        ):
            self._note_fault(_LATE)
        if self._tree is not None and not self._sync:
            used = self._tree.micro_step_ended(self._sharded)
            for shard in compress(self._sharded.shards(), used):
                self._used.add(shard)
        self._note_gradients()

    def _join_backward(self) -> None:
        """Where the loss of this micro-batch does not depend on the model: with zeros through what others' ones do."""
        ends, zeros = self._uneven_inputs.unreached()
        if not ends:
            return
        before = self._sharded.whole_gradients()
        for shard, gradient in zip(self._sharded.shards(), before, strict=True):
            if gradient is not None:
                self._used.add(shard)
        self._for_nothing = True
        try:
            torch.autograd.backward(ends, zeros)
        finally:
            self._for_nothing = False
        self._sharded.drop_new_gradients(before)

    def _gradients(self) -> list[Tensor | None]:
        """All that a window accumulates: whole, and reduced."""
        return self._sharded.whole_gradients() + [p.grad for p in self._parameters.values()]

    def _note_gradients(self) -> None:
        self._watch.note()
        self._shard_watch.note()

    def _expect_untouched(self) -> None:
        self._sharded.take_over_trains()  # PEFT has adapters off in a reference's forward, and on while gathered
        if self._trains != self._sharded.trains():
            self._note_fault("requires_grad was changed in the middle of a window: change it between two windows")
        self._watch.check()
        self._shard_watch.look()
        self._watch.forget()  # or what the next backward reduces stays in memory until its end

    def _step(self, divisor: float) -> StepOutput:
        """Steps on the shards; the norm, and so the decision, is that of the whole gradient."""
        if self._left > 0:
            left = MisuseError(f"step() with {self._left} micro-steps of the window left: run them all before")
            self._uneven_inputs.fail(left)
            raise left
        self._window_begun = False
        self._expect_untouched()
        self._units.free()
        if all(parameter.grad is None for parameter in self._parameters.values()):
            raise _no_gradient(self._parameters)
        self.buffers.check()
        self._late_faults = self._shard_watch.spoil()
        self._compares_order = True
        output = self._optimizer_step.step(divisor, self.norm_bound, among=self._owners)
        output = replace(output, fault=self._fault, late_faults=self._late_faults)
        for parameter in self._parameters.values():
            parameter.grad = None
        self._shard_watch.forget()
        self._used.forget()
        self._reads.window_ended()
        if self._tree is not None:
            self._tree.begin(None)
        self._close_window()
        return output

    def zero_gradients(self) -> None:
        """Frees the shards' gradients, and what an unfinished window has accumulated whole.

        Where ranks have different numbers of micro-steps, others may wait in one that this rank has not run: it runs
        the rest with a gradient of zero.

        Raises:
            MisuseError: a rank waits that cannot be released.
        """
        inputs = self._uneven_inputs
        self._sharded.take_over_trains()  # what a forward that ends here has set on gathered weights
        if inputs.left:
            inputs.check_release()
            self._units.reduce(sync=self._sync)
            inputs.finish_micro_step(self.autocast)
            self._note_gradients()
        while inputs.left:
            self.shadow_micro_step(sync=inputs.left == 1)
        if self._units.gathered:  # a forward that no backward has ended
            self._sharded.reset()
        self._units.gathered = self._window_begun = False
        self._drop_gradients()
        self._close_window()

    def close(self) -> None:
        """See :class:`Engine`; parameters stay shards."""
        super().close()
        if self._units.gathered:
            self._sharded.reset()
        self._drop_gradients()
        for hook in self._hooks:
            hook.remove()
        self._uneven_inputs.remove()
        self._sharded.release()
        self._reads.remove()
        self._optimizer_step.release()
        self._owners.groups.release()
        apply_precision(self._model, PrecisionPolicy.of(PrecisionConfig()), self.device)

    def state(self) -> EngineState:
        """Gathers tensor by tensor; one rank keeps each, on the host."""
        model: dict[str, Tensor] = {}
        for i, (name, tensor) in enumerate(model_state(self._model).items()):
            full = full_tensor(tensor)
            if self._owns(i) if is_sharded(tensor) else self._world.is_main:  # buffers are rank 0's
                model[name] = full.cpu()
        with self._owners.groups:
            return self._optimizer_step.state(model, owns=lambda i: self._owns(i) or i in self._owners.own)

    def _owns(self, i: int) -> bool:
        return i % self._world.size == self._world.rank

    def load_state(self, state: EngineState) -> None:
        """See :class:`Engine`."""
        self._units.free()
        own = model_state(self._model)
        # One tensor is read whole at a time. Torch complains of names and shapes that differ.
        parts = {name: shard_like(state.model[name], own.get(name, state.model[name])) for name in state.model}
        load_model_state(self._model, parts)
        with self._owners.groups:
            self._optimizer_step.load_state(state)


def _forward_past_model() -> MisuseError:
    """Where FSDP2's hooks did not run, parameters are not gathered and gradients not reduced."""
    problem = "the forward went past the engine, or there was none, so gradients would not be reduced"
    remedy = (
        "call model(...) itself, in each micro-step, also for a loss of zero (its output times 0): not model.forward, "
        "a module inside it, or a __call__ without torch's hooks (Keras 3)"
    )
    return MisuseError(f"{problem}: {remedy}")


def _no_gradient(parameters: Iterable[str]) -> MisuseError:
    problem = f"no parameter got a gradient in this step ({shorten(parameters)})"
    remedy = "the loss must depend on model(...) of this window, with gradients enabled"
    return MisuseError(f"{problem}, so a step would move nothing: {remedy}")


def _mesh(world: World, replicas: int) -> DeviceMesh:
    most, fewest = world.all_reduce_max_host([replicas, -replicas])
    problem, remedy = f"and from {-fewest} to {most} on other ranks", "State one number on all of them"
    require(most == -fewest, "engine.replicas", replicas, problem, remedy)
    kind, shards = world.device.type, world.size // replicas
    if replicas == 1:
        return init_device_mesh(kind, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def _gather_to_train(unit: nn.Module, _: object) -> None:
    """In inference mode: a training forward could not write what is gathered in it."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            unit.unshard()  # type: ignore[operator]
