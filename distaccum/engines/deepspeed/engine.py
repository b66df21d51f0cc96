"""DeepSpeed's ZeRO: its wrappers, collectives and files; distaccum's windows, loss scale and decision to step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import nan, sqrt
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.data.plan.units import UnitAssignment
from distaccum.distributed.world import World
from distaccum.engines import optimizer_state
from distaccum.engines.base import Engine, EngineFacts, EngineState, StateLayout, StepOutput, forward_past_engine
from distaccum.engines.context import EngineContext
from distaccum.engines.deepspeed import internals
from distaccum.engines.deepspeed import optimizer_state as flat_state
from distaccum.engines.deepspeed.compat import EngineLock, compute_in, load_deepspeed, suppress_output
from distaccum.engines.deepspeed.optimizer_state import EditedWeights, MasterWeights, check_rule, leaves_alone
from distaccum.engines.gradient_watch import GradientWatch
from distaccum.engines.group_settings import OTHER_SETTINGS, WholeGroups, differ, fingerprint
from distaccum.engines.modules import HostCopy, clean, from_host, trained
from distaccum.engines.optimizer_state import by_entry
from distaccum.engines.optimizer_step import StepGuard
from distaccum.engines.probe import GradientProbe
from distaccum.engines.rules import check_hooks, expect_no_hooks
from distaccum.engines.state import names_set_aside
from distaccum.engines.uneven_inputs import UnevenInputs
from distaccum.errors import ConfigError, MisuseError, shorten
from distaccum.precision.policy import PrecisionPolicy

_FIRST_THAT_SHARDS_PARAMETERS = 3  # a stage
_SHARDED = (
    "nothing sharded",
    "optimizer state sharded",
    "optimizer state and reduced gradients sharded",
    "optimizer state, reduced gradients and parameters sharded",
)


_OF_NOTHING = re.compile(r"[(\[]0[)\]]|\b0x\d|\dx0\b")  # how torch's errors give the shape of an empty tensor
_OUT_OF_ITS_MODULE = (
    "a tensor of no elements was computed with: at engine.stage=3 a weight is whole in the forward of its own module "
    "alone. Read it there, or use engine.stage=2"
)
_DIFFERENT_MODULES = (
    "ranks ran different modules in this step, or in another order: at engine.stage=3 each module's forward is a "
    "collective, and parts of two modules may have been put together. Run the same on every rank, or use engine=ddp"
)


def _check(model: nn.Module, optimizers: Sequence[Optimizer], settings: Mapping[str, Any]) -> None:
    if len(optimizers) != 1:
        raise ConfigError("engine", "deepspeed", f"steps one optimizer, not {len(optimizers)}", "Join them in one")
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if bad := [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()]:
        problem = f"cannot flatten this model: {shorten(bad)} is not contiguous in memory"
        remedy = "Use engine=zero1, or make it so (channels_last and transposed weights are not: .contiguous())"
        raise ConfigError("engine", "deepspeed", problem, remedy)
    if stage >= _FIRST_THAT_SHARDS_PARAMETERS and names_set_aside(model):
        problem = "with adapters, whose frozen base checkpoints leave out, it was not tried"
        raise ConfigError("engine.stage", stage, problem, "Use engine.stage=2, or engine=fsdp2 to shard the base")


@contextmanager
def _weights_in_place(*, sharded: bool) -> Iterator[None]:
    """Says what is wrong where a forward computes with a weight that no rank holds then."""
    try:
        yield
    except RuntimeError as error:
        if not sharded or not _OF_NOTHING.search(str(error)):
            raise
        raise MisuseError(_OUT_OF_ITS_MODULE) from error


class DeepSpeedEngine(Engine):
    """Exact accumulation on DeepSpeed's engine, at any ZeRO stage, with one reduction a window.

    The window's gradient accumulates on each rank, in fp32, and is reduced once, at the boundary. The loss scale is
    distaccum's: DeepSpeed 0.19.8 leaves it out at stage 0, and elsewhere moves it between measuring a gradient and
    unscaling it, so that it halves the gradient of every window at whose end the scale grows.

    Args:
        model: on ``world.device`` already; every rank's copy is set to rank 0's. In bf16 and fp16 DeepSpeed casts all
            of it; its inputs are then cast as well, and its outputs are fp32.
        optimizers: one, over the model's parameters.
        world: this rank; its process group is DeepSpeed's.
        context: the checked settings; DeepSpeed's JSON among them, ``context.generated``, says the same.

    Raises:
        ConfigError: DeepSpeed is not installed, or cannot do what the arguments ask for.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> None:
        settings, policy, scaler = context.generated, context.policy, context.loss_scale(world.device)
        _check(model, optimizers, settings)
        stage = int(settings.get("zero_optimization", {}).get("stage", 0))
        facts = EngineFacts(
            gradient_divide_factor=1,  # DeepSpeed averages, which the step undoes: backwards see the window's gradient
            forward_communicates=stage >= _FIRST_THAT_SHARDS_PARAMETERS,
            steps_parts=policy.casts or bool(stage),
            state_layout=StateLayout.SHARDED,
            gives_optimizers_back=False,
            artifacts={"deepspeed.json": settings},
        )
        super().__init__(model, optimizers, world, policy, scaler=scaler, facts=facts)
        parameters = trained(model)
        self._names, self._trained = list(parameters), list(parameters.values())
        self._names_by_id = {id(parameter): name for name, parameter in parameters.items()}
        self._needs_gradient = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
        if stage:
            check_rule(optimizers[0], parameters)
        if facts.steps_parts:
            check_hooks(optimizers[0])
        if policy.casts:
            compute_in(policy.compute_dtype, model)
        deepspeed = load_deepspeed(world.device)
        internals.forget_left_group(deepspeed)
        self._weights = MasterWeights(deepspeed, model, casts=policy.casts)
        self._groups = WholeGroups(optimizers, drops_empty=True)
        with suppress_output():
            self._engine: Any = deepspeed.initialize(
                model=model, optimizer=optimizers[0], config=dict(settings), dist_init_required=False
            )[0]
        self._weights.restore(self._engine)
        self._stage = stage
        self._gradients = internals.gradients_of(self._engine, parameters, deepspeed.__version__)
        self._edited = EditedWeights(self._engine, self._gradients, self._trained)
        self._groups.show(state_is_whole=not facts.steps_parts, copies=facts.steps_parts)
        for parameter in self._trained:
            internals.accumulate_in_fp32(parameter)
        gathers = facts.forward_communicates
        self._uneven_inputs = UnevenInputs(self._engine, world, self._meet_others) if gathers else None
        self._hold: AbstractContextManager[object] | None = None
        self._called, self._due, self._left = False, False, 0
        self._engine.register_forward_pre_hook(self._note_call)
        self._lock = EngineLock(
            self._engine, StepGuard(optimizers, (model,), lambda: self.window_open), lambda: self.window_open
        )
        self._backwards = internals.Backwards(self._engine)
        self._trace = internals.Trace(self._engine, world.size) if gathers else None
        self._lost_edits = internals.LostEdits(parameters) if gathers else None
        self._watch = GradientWatch(partial(internals.accumulated, self._engine.optimizer, self._trained))
        self._fault = ""
        self._news = self._tell([True] * len(self._trained))
        self._left_out: list[Tensor] = []  # what the next step leaves out
        self._step_hook = optimizers[0].register_step_pre_hook(self._leave_out)
        if not self._gradients.sharded:
            internals.send_along(self._engine, lambda: self._news)
        internals.own_loss_scale(self._engine.optimizer)
        self.probe = DeepSpeedProbe(
            self, policy, deepspeed=self._engine, edited=self._edited, groups=self._groups, reduced=self._reduced
        )
        self._drop()
        self._hold_back()
        self.sync_buffers()

    def _note_call(self, *_: object) -> None:
        self._called = True

    @property
    def model(self) -> nn.Module:
        """DeepSpeed's engine."""
        return cast(nn.Module, self._engine)

    def describe(self) -> str:
        """The stage, what it shards, and what a window sends."""
        held = "gradients whole and fp32 until the boundary; one reduction per step"
        if self._policy.casts and not hasattr(self._trained[0], "grad_dtype"):
            held = held.replace("fp32", f"in {self._policy.name}, for want of torch 2.10,")
        return f"ZeRO-{self._stage}: {_SHARDED[self._stage]}; {held}"

    def begin_window(self, micro_steps: int, assignment: UnitAssignment | None = None) -> None:
        """At stage 3 replays an earlier micro-step for each that another rank has more."""
        self._open_window()
        self._take_assignment(assignment)
        self._left = micro_steps
        if self._uneven_inputs is not None:
            for _ in range(self._uneven_inputs.missing_steps(micro_steps)):
                self._replay()
            internals.forget_accumulated(self._trained)  # zeros, or NaN where the earlier input overflows
            self._watch.note()

    def _replay(self) -> None:
        assert self._uneven_inputs is not None
        with self._backwards.of_replay(), _weights_in_place(sharded=True):
            self._uneven_inputs.replay(self.autocast)

    def _drop_stray_gradients(self) -> None:
        if not self._watch.unchanged:
            self._drop()
        self._fault = ""
        if self._trace is not None:
            self._trace.number = 0
        changed = next((name for name, p, needed in self._needs_gradient if p.requires_grad is not needed), None)
        if changed is not None:
            self._fault = (
                f"requires_grad of {changed} was changed after the model was wrapped, and DeepSpeed steps what it was "
                "given: freeze or unfreeze before, or make a new model and Accumulator"
            )
        lost = "" if self._lost_edits is None else self._lost_edits.find()
        if lost:
            self._fault = (
                f"{lost} was changed outside of a window, which changes nothing at engine.stage=3, where no rank holds "
                "it whole: do it within `with deepspeed.zero.GatheredParameters([p], modifier_rank=0):`, load weights "
                "with acc.load_state_dict(), or use engine.stage=2"
            )

    def _hold_back(self) -> None:
        """From here on a backward reduces nothing, a window's or any other; :meth:`_reduce` ends it."""
        if self._hold is None:
            # The wrappers of stage 0, and of stage 1 in bf16, reduce all at once on request.
            coalesces = self._gradients.sharded
            self._hold = self._engine.coalesce_grad_reduction() if coalesces else self._engine.no_sync()
            self._hold.__enter__()

    @contextmanager
    def micro_step(self, *, sync: bool) -> Iterator[None]:
        """Accumulates on this rank. What the boundary (``sync``) completes is reduced by :meth:`step`.

        Until then nothing has been sent, so a window can be dropped at any point, whatever other ranks have reached.
        """
        self._open_window()
        self._called = False
        self._left -= 1
        if self._uneven_inputs:
            self._uneven_inputs.begin_micro_step()
        with _weights_in_place(sharded=self._uneven_inputs is not None):
            yield
        if self._uneven_inputs:
            self._uneven_inputs.end_micro_step()
        self._due = self._due or sync

    def _reduce(self) -> None:
        hold, self._hold = self._hold, None
        assert hold is not None
        self._look_for_changes()
        self._watch.forget()  # or it would hold the whole gradients through the step
        self._news = self._tell(internals.complete(self._engine.optimizer, self._trained))
        hold.__exit__(None, None, None)
        if not self._gradients.sharded:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()

    def _tell(self, used: Sequence[bool]) -> Tensor:
        """What ranks add up with a window's gradient or its norm: their faults, and who used each parameter."""
        numbers = [float(bool(self._fault)), *map(float, used)]
        held = next((g for g in internals.accumulated(self._engine.optimizer, self._trained) if g is not None), None)
        dtype = torch.float64 if self._gradients.sharded or held is None else held.dtype
        return from_host(numbers, torch.empty(0, device=self.device, dtype=dtype))

    def shadow_micro_step(self, *, sync: bool = True) -> None:
        """Joins the reduction with zeros; no forward runs but those of :meth:`begin_window`."""
        self._open_window()
        self._due = self._due or sync

    def autocast(self) -> AbstractContextManager[object]:
        """An empty context: the model itself is in the format that it computes in."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed's, of the scaled loss; nothing is divided by accumulation steps.

        Raises:
            MisuseError: the forward went past the engine.
        """
        if not self._called:
            raise forward_past_engine()
        self._look_for_changes()
        scaled = self._scaler.scale(loss) if self._scaler else loss
        recorded = self._uneven_inputs.backward(scaled) if self._uneven_inputs else nullcontext()
        with self._lock, self._backwards.of_window(), recorded:
            if scaled.requires_grad:
                self._engine.backward(scaled, scale_wrt_gas=False)
            elif self._uneven_inputs and (through := self._uneven_inputs.unreached())[0]:
                torch.autograd.backward(*through)  # of a constant: others communicate
        self._watch.note()

    def _look_for_changes(self) -> None:
        """Of gradients, by hand. Said at the step, on all ranks alike: others may be waiting for this one."""
        try:
            self._watch.check()
        except MisuseError as error:
            self._fault = self._fault or str(error)

    def _complete(self) -> None:
        """Reduces the window, also one whose micro-steps were not all run: others may reduce, and all are told."""
        if self._left > 0 or not self._due:
            left = f"with {self._left} micro-steps of the window left: run them all before"
            unreduced = "before the gradients are reduced: give the window's last micro-step sync=True"
            self._fault = self._fault or f"step() {left if self._left > 0 else unreduced}"
        if self._hold is not None:
            self._reduce()
        else:
            self._look_for_changes()

    def _step(self, divisor: float) -> StepOutput:
        """See :class:`Engine`; DeepSpeed is asked to step only where the norm over all ranks is finite.

        Raises:
            MisuseError: on all ranks alike, before a weight moves: gradients or ``requires_grad`` were changed by hand
                on some rank, ranks ran different modules (stage 3), or parameters without a gradient would be moved.
        """
        try:
            self._groups.check()
            if self.facts.steps_parts:
                expect_no_hooks(self._optimizers)
        except MisuseError as error:
            self._fault = self._fault or str(error)
        self._complete()
        scale = self._scaler.current.clone() if self._scaler else torch.ones((), device=self.device)
        factor = float(scale) * divisor / self._world.size
        squares = self._norms().double().square()
        square = squares.sum().reshape(1)
        trace = 0 if self._trace is None else self._trace.number
        settings = fingerprint(self._optimizers, world_size=self._world.size)
        numbers = [trace, trace**2, settings, settings**2]
        found = torch.cat((square, from_host(numbers, square), self._news.double().flatten(), squares))
        if self._gradients.sharded:
            self._world.all_reduce_(found.unsqueeze(1))
        # Host read: DeepSpeed's own steps read the device as well.
        total, traced, traced_squares, *of_settings = (told := found.tolist())[:5]
        faults, *used = told[5 : len(told) - len(squares)]
        norms = found[len(told) - len(squares) :].sqrt().float()
        norm = (found[0].sqrt() / factor).float()
        if self._gradients.sharded and traced**2 != self._world.size * traced_squares:
            self._fault = self._fault or _DIFFERENT_MODULES
            faults = 1.0
        if self._gradients.sharded and differ(of_settings, self._world.size):
            self._fault = self._fault or OTHER_SETTINGS
            faults = 1.0
        self._refuse(faults=bool(faults), used=used)
        applied = False
        finite = total**0.5 / factor <= torch.finfo(torch.float32).max  # NaN is not less
        spikes = finite and float(np.float32(sqrt(total) / factor)) >= self.norm_bound  # the same number as norm
        if finite and not spikes:
            self._edited.take_in()
            self._gradients.divide(factor)
            with self._lock, self._groups:
                self._engine.set_gradient_accumulation_boundary(True)
                self._engine.step()
            applied = bool(self._engine.was_step_applied())
        self.zero_gradients()
        on_device = torch.full_like(norm, float(applied))
        known = norm if applied or spikes else torch.full_like(norm, nan)  # also where DeepSpeed itself has not stepped
        decision = HostCopy(torch.stack((on_device, scale, known)))
        if self._scaler:
            self._scaler.advance(torch.zeros_like(on_device) if spikes else 1.0 - on_device)
        return StepOutput(grad_norm=norm, decision=decision, names=self._names, norms=norms, norms_scale=factor)

    def _refuse(self, *, faults: bool, used: Sequence[float]) -> None:
        """Raises MisuseError for faults of any rank, and for parameters that no rank used and the step would move."""
        if faults:
            raise MisuseError(self._fault or "another rank did what would train wrongly, and says what in its error")
        unused = [name for name, one in zip(self._names, used, strict=True) if not one]
        if not unused:
            return
        if len(unused) == len(used):
            raise MisuseError(
                "no parameter got a gradient in this step on any rank, though the loss has one: the forward takes "
                "its weights past autograd (detach(), .data, no_grad), or from another model"
            )
        if self._gradients.flat and not leaves_alone(self._optimizers[0]):
            problem = f"no rank used {shorten(unused)} in this step, and DeepSpeed steps what was not used on zeros"
            raise MisuseError(
                f"{problem}, which decays it and moves it by its momentum: requires_grad_(False) before the model is "
                "wrapped, or engine=ddp with engine.find_unused_parameters=true, or engine.stage=0"
            )
        self._left_out = [p for name, p in self._stepped().items() if name in set(unused)]

    def _leave_out(self, *_: object) -> None:
        """Before the optimizer's step, at stage 0: what no rank used has no gradient, as in plain torch."""
        for parameter in self._left_out:
            parameter.grad = None
        self._left_out = []

    def _reduced(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of the open window; what the boundary completed is reduced here, which is a collective."""
        if self._due and self._hold is not None:
            self._reduce()
            self._watch.note()
        yield from self._gradients.held()

    def _norms(self) -> Tensor:
        """Of this rank's part of each parameter's gradient; 0 where it has none."""
        held, zero = dict(self._gradients.held()), torch.zeros((), device=self.device)
        norms = dict(zip(held, torch._foreach_norm([*held.values()], 2, torch.float32) if held else (), strict=True))
        return torch.stack([norms.get(name, zero).to(self.device) for name in self._names])

    def zero_gradients(self) -> None:
        """Drops a window's gradient, also one that is not reduced yet; no collective but at stage 3.

        There others may wait in a micro-step that this rank has not run: it runs the rest with a gradient of zero.

        Raises:
            MisuseError: a rank waits that cannot be released.
        """
        inputs = self._uneven_inputs
        if inputs is not None and inputs.left:
            inputs.check_release()
            with self._backwards.of_replay():
                inputs.finish_micro_step(self.autocast)
            while inputs.left:
                self._replay()
        self._drop()
        self._close_window()
        self._hold_back()

    def _drop(self) -> None:
        internals.forget_accumulated(self._trained)
        self._gradients.drop()
        self._gradients.divide_by_nothing()
        self._watch.note()
        self._due, self._left = False, 0

    def whole_model(self) -> dict[str, Tensor]:
        """Rank 0's: the fp32 weights and the buffers by name, on the host; empty elsewhere. A collective."""
        self._edited.take_in()
        return self._weights.whole(self._engine, keep=self._world.is_main)

    def state(self) -> EngineState:
        """Rank 0's weights, and this rank's share of the optimizer's state, whole by parameter; a collective."""
        scaler = self._scaler.state_dict() if self._scaler else {}
        tensors, values = self._optimizer_state()
        values |= self._settings.changed()
        return EngineState(model=self.whole_model(), optimizer=tensors, optimizer_values=values, scaler=scaler)

    def _optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        owners = {name: n % self._world.size for n, name in enumerate(self._names)}
        if not self._gradients.flat:
            return optimizer_state.collect(
                self._optimizers, self._stepped(), owns=lambda n: owners[self._names[n]] == self._world.rank
            )
        return flat_state.collect(
            self._optimizers[0],
            self._gradients.flats(),
            self._names_by_id,
            owns=lambda name: owners[name] == self._world.rank,
        )

    def _stepped(self) -> dict[str, nn.Parameter]:
        """By name what the optimizer steps at stage 0."""
        copies: Mapping[int, Any] = internals.fp32_copies(self._engine.optimizer)
        return {name: copies.get(id(p), p) for name, p in zip(self._names, self._trained, strict=True)}

    def load_state(self, state: EngineState) -> None:
        """Restores weights, the optimizer's state and the loss scale, whichever engine saved them.

        Raises:
            CheckpointError: parameters that are stepped as one have different states.
            MisuseError: it is the state of an optimizer of another class.
            RuntimeError, KeyError, ValueError: the tensors belong to another model.
        """
        if state.model:
            self._weights.load(self._engine, state.model)
            self._own_edits()
        if state.optimizer:
            self._load_optimizer(state)
        self._settings.restore(state.optimizer_values)
        if self._scaler and state.scaler:
            self._scaler.load_state_dict(dict(state.scaler))

    def _load_optimizer(self, state: EngineState) -> None:
        with self._groups:
            if not self._gradients.flat:
                optimizer_state.load(
                    self._optimizers, self._stepped(), state.optimizer, state.optimizer_values, model=state.model
                )
                return
            flats, names = self._gradients.flats(), self._names_by_id
            optimizer, tensors, values = self._optimizers[0], state.optimizer, state.optimizer_values
            flat_state.load(optimizer, flats, names, tensors, values, model=state.model)

    def _own_edits(self) -> None:
        """What has changed weights so far was no user."""
        if self._lost_edits is not None:
            self._lost_edits.note()

    def close(self) -> None:
        """See :class:`Engine`; DeepSpeed's own hooks are removed as well. In 16 bits the model stays so."""
        super().close()
        if self._uneven_inputs is not None:
            self._uneven_inputs.remove()
        internals.forget_accumulated(self._trained)
        hold, self._hold = self._hold, None
        if hold is not None:
            internals.end_without_reducing(self._engine, hold)
        self._step_hook.remove()
        self._lock.release()
        with self._groups:
            self._engine.destroy()
        self._groups.release()


class DeepSpeedProbe(GradientProbe):
    """See :class:`GradientProbe`.

    Args:
        engine, policy: as there.
        deepspeed: DeepSpeed's own engine.
        edited: takes over what users have written into weights.
        groups: what the optimizer steps; at most stages flat fp32 weights of this rank.
        reduced: gives the reduced gradients.
    """

    walks_twice = False  # DeepSpeed watches backwards of its model's output

    def __init__(
        self,
        engine: Engine,
        policy: PrecisionPolicy,
        *,
        deepspeed: Any,
        edited: EditedWeights,
        groups: WholeGroups,
        reduced: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        super().__init__(engine, policy)
        self._deepspeed, self._edited, self._groups, self._reduced = deepspeed, edited, groups, reduced

    def reduced_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`GradientProbe`; a collective, as what the boundary completed is reduced here."""
        return self._reduced()

    @property
    def stepped_groups(self) -> AbstractContextManager[object]:
        """See :class:`GradientProbe`."""
        return self._groups

    def replicated_state(self) -> tuple[int, dict[str, Tensor]]:
        """All at stage 0; at the others each rank keeps a part."""
        if self._deepspeed.zero_optimization_stage():
            return 0, {}
        copies = internals.fp32_copies(self._deepspeed.optimizer)
        named = trained(self._engine.unwrapped_model)
        return 0, by_entry(self._engine.optimizers, {name: copies.get(id(p), p) for name, p in named.items()})

    def _parts(self, direction: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """At stage 3 this rank's part of each parameter."""
        self._edited.take_into_shards()
        weights: Iterator[tuple[str, Any]] = self._engine.unwrapped_model.named_parameters()
        shards = {clean(name): parameter.ds_tensor for name, parameter in weights}
        return {name: shards[name].data.flatten()[: direction[name].numel()] for name in direction}

    def _parts_changed(self) -> None:
        internals.gather_persistent(self._deepspeed.optimizer)
