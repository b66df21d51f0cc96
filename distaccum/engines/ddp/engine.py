"""DistributedDataParallel: parameters replicated, gradients added up in buckets at the boundary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import nan
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.config.checks import size_of
from distaccum.config.engine import DDPConfig
from distaccum.config.precision import PrecisionConfig
from distaccum.data.plan.units import UnitAssignment
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineFacts, EngineState, Restart, StepOutput, forward_past_engine
from distaccum.engines.context import EngineContext
from distaccum.engines.ddp.communicating import Communicating, uncounted
from distaccum.engines.ddp.reducer import BucketReducer, Reduction, set_gradient, wrap
from distaccum.engines.ddp.stepper import DDPProbe, WholeStepper
from distaccum.engines.ddp.tree import TreeReducer
from distaccum.engines.ddp.unused import UnusedParameters
from distaccum.engines.ddp.zero1 import ZeRO1
from distaccum.engines.gradient_watch import GradientWatch
from distaccum.engines.modules import trained
from distaccum.engines.optimizer_step import FusedUpdate, OptimizerStep, zero_in_place
from distaccum.engines.state import load_model_state, model_state
from distaccum.errors import ConfigError, MisuseError, shorten
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import PrecisionPolicy

_NOTHING = nullcontext()
_UNREDUCED = "step() before the gradients are reduced: give the window's last micro-step sync=True"


class DDPEngine(Engine):
    """Exact accumulation on torch's DDP, with gradients held once: in the buckets that are reduced.

    By default DDP keeps gradients and buckets. Here gradients *are* views of the buckets from the first
    backward on, and are zeroed in place, so the window accumulates where the reduction reads.

    Args:
        model: moved to ``world.device``; every rank's copy is set to rank 0's.
        optimizers: over disjoint sets of the model's parameters.
        world: this rank.
        context: the checked settings.
        reducer: of the buckets, at the window's last micro-step; the others are local, as in DDP's ``no_sync``.
        stepper: which rank steps which parameters, and what of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        context: EngineContext,
        *,
        reducer: BucketReducer,
        stepper: WholeStepper,
    ) -> None:
        config, policy, options = context.engine, context.policy, context.step_options(world.device)
        assert isinstance(config, DDPConfig)  # zero1's settings are some, too
        facts = EngineFacts(
            gradient_divide_factor=1,
            numerics=context.numerics,
            steps_parts=stepper.steps_parts,
            rounds_weights=policy.keeps_masters,
            state_layout=stepper.layout,
        )
        super().__init__(model, optimizers, world, policy, scaler=options.scaler, facts=facts)
        self._reducer, self._stepper = reducer, stepper
        apply_precision(model.to(world.device), policy, world.device, warn=world.is_main)
        stepper.start(model, optimizers, world, policy)
        self._weights = stepper.weights
        self._ddp = wrap(model, world, config, policy)
        reducer.attach(self._ddp)
        self.sync_buffers()
        self._named = trained(model)
        self._parameters = list(self._named.values())
        self._reduction = Reduction(self._ddp, self._parameters)
        self._reduction.place_gradients(in_fp32=policy.keeps_masters)
        self._views = [p.grad for p in self._parameters]
        reducer.placed(self._views)
        self._reduction.ended = reducer.finish
        self._stepped = {name: self._weights.of(p) for name, p in self._named.items()}
        self._copies = [
            (master, p) for master, p in zip(self._stepped.values(), self._parameters, strict=True) if master is not p
        ]
        for master, parameter in self._copies:
            master.grad = parameter.grad
        self._watch = GradientWatch(partial(map, attrgetter("grad"), self._parameters))
        self._watch.note()
        update = FusedUpdate(optimizers, self._stepped, options, reduced=self._parameters)
        modules = (model, self._ddp)
        self._optimizer_step = OptimizerStep(update, modules, self._settings, window_open=lambda: self.window_open)
        stepped = list(self._stepped.values())
        finds = config.find_unused_parameters
        changed = self._gradients_changed
        self.probe = DDPProbe(self, policy, stepper, self._stepped, leaves_out_unused=finds, changed=changed)
        self._unused = UnusedParameters(self._parameters, stepped, looks=finds)
        self._ran = self._syncs = self._reduced = False
        self._missing: list[nn.Parameter] = []  # that a boundary did not reach whose reduction follows it
        self._fault = ""  # why this rank's gradient is NaN
        self._communicating = Communicating(model, world, dropped=self._close_window)

    @property
    def model(self) -> nn.Module:
        """The DDP wrapper."""
        return self._ddp

    def describe(self) -> str:
        """See :class:`Engine`."""
        elements = sum(p.numel() for p in self._parameters)
        sent = size_of(elements * self._policy.reduce_dtype.itemsize)
        how = "summed in a fixed order" if self.facts.numerics.fixed_order else "all-reduced"
        line = f"parameters and gradients whole on every rank; {sent} of gradients {how} per step"
        return line + self._stepper.describe(spread=size_of(sum(p.nbytes for p in self._parameters)))

    def begin_window(self, micro_steps: int, assignment: UnitAssignment | None = None) -> None:
        """Opens the window; where forwards were seen to communicate it is a collective too.

        Raises:
            MisuseError: they do, and ranks have different numbers of micro-steps; on every rank.
        """
        self._open_window()
        self._take_assignment(assignment)
        self._reducer.begin(assignment)
        self._communicating.window_begins(micro_steps)

    def micro_step(self, *, sync: bool) -> AbstractContextManager[object]:
        """Local, as in DDP's ``no_sync``, but for the :meth:`backward` of one with ``sync``.

        Raises:
            MisuseError: the window is reduced already.
        """
        if not self._window_open:
            self._open_window()
        if self._reduced:
            raise MisuseError("a micro-step after the window's last, the one with sync: call engine.step() before")
        self._communicating.begun += 1
        if sync and (left := self._communicating.micro_steps_left):
            self._join_with_nan()
            problem = f"micro_step(sync=True) with {left} micro-steps of the window left"
            raise MisuseError(f"{problem}: give it to the last one; no rank steps")
        if not self._ran or self._communicating.synchronized:
            self._communicating.micro_step_begins(first=not self._ran)
        vars(self._ddp)["called"] = False  # by no way round: once a micro-step
        self._ran, self._syncs = True, sync
        if self.compiled is not None:
            self.compiled.micro_step_began()
        return _NOTHING

    def backward(self, loss: Tensor) -> None:
        """Plain autograd, of the scaled loss in fp16: DDP reduces in its hooks where the micro-step syncs.

        A loss that needs no gradient, as of a micro-batch without labels may, adds nothing.

        Raises:
            MisuseError: see :class:`Engine`; or gradients were changed by hand; or the window is reduced already.
        """
        if not self._ddp.called:
            raise forward_past_engine()
        if self._reduced:
            raise MisuseError("backward() after the window's reduction: add up a micro-step's losses before backward()")
        self._watch.check()
        if self._communicating.collectives.watching:
            self._communicating.forward_ended()
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        if not self._syncs:
            if loss.requires_grad:
                scaled.backward()  # type: ignore[no-untyped-call]
            self._reducer.micro_step_ended()
        else:
            self._boundary(scaled)
        if self.compiled is not None:
            self.compiled.backward_ended()
        self._watch.note()

    def _boundary(self, loss: Tensor) -> None:
        """The backward of the micro-step that reduces, and the reduction."""
        if self.defer_reduction:
            self._backward_alone(loss)
            self._reduce_late()
            return
        self._reducer.expect_assignment()
        with uncounted():
            self._reduce(loss)

    def _backward_alone(self, loss: Tensor) -> None:
        """The boundary's backward, whose reduction comes after it."""
        self._missing = self._backward_missing(loss)
        self._watch.note()

    def _backward_missing(self, loss: Tensor) -> list[nn.Parameter]:
        """A backward that does not reduce; gives the parameters that it did not reach."""
        if self._unused.looks:
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            return []
        reached: list[Tensor] = []
        note: Any = reached.append  # views of one bucket share a version, which cannot tell them apart
        parameters: Sequence[Any] = self._parameters
        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in parameters]
        try:
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()
        known = set(map(id, reached))
        return [parameter for parameter in self._parameters if id(parameter) not in known]

    def _reduce(self, loss: Tensor) -> None:
        """The boundary's backward, which has to reach every parameter, unless unused ones are looked for.

        What it leaves out this rank sends as NaN: no rank then waits for it, and none steps.
        """
        if self._unused.looks:
            if loss.requires_grad:
                self._reduction.backward(loss)
                self._end_reduction()
            else:
                self.shadow_micro_step()
            return
        if loss.requires_grad:
            self._reduction.backward(loss)
        if not loss.requires_grad or self._watch.unchanged:
            self._fault = self._unused_message(list(self._parameters))
            self._reduction.join(nan)
        elif unreached := self._reduction.unreached():
            self._fault = self._unused_message([self._parameters[number] for number in unreached])
            self._reduction.complete(unreached, nan)
        self._reduced = True

    def _end_reduction(self) -> None:
        """With ``find_unused_parameters`` DDP reduces for the parameters that the loss does not depend on."""
        if self._watch.unchanged:  # it depends on none, and DDP has not begun
            with self._unused.ignoring():
                self._reduction.join(0.0)
        elif unreached := self._reduction.unreached():  # part of the loss, and the backward stopped before
            with self._unused.ignoring():
                self._reduction.complete(unreached, 0.0)
        self._reduced = True

    def _unused_message(self, unreached: Sequence[nn.Parameter]) -> str:
        left = set(map(id, unreached))
        names = [name for name, parameter in self._named.items() if id(parameter) in left]
        where = f"rank {self._world.rank}: the loss of a step's last micro-batch"
        if len(names) == len(self._named):
            problem = f"{where} depends on no trained parameter (was it detached, or computed under no_grad?)"
        else:
            problem = f"{where} does not depend on {shorten(names)}"
        frozen = [name for name in names if not self._named[name].requires_grad]
        if frozen:
            remedy = f"freeze {shorten(frozen)} before the model is wrapped"
        else:
            remedy = "if that is meant, set engine.find_unused_parameters=true"
        return f"{problem}, so gradients would not be reduced: {remedy}"

    @property
    def restart(self) -> Restart:
        """See :class:`Engine`; on one rank nobody has a part of the gradient."""
        if self.facts.numerics.fixed_order or self._communicating.suspected:
            return Restart.REFUSED
        begun = self._world.size > 1 and (self._reduced or self._reduction.running)
        return Restart.TOO_LATE if begun else Restart.POSSIBLE

    def _reduce_late(self) -> None:
        """The reduction after the last backward. Adds minus zero, which changes no number, and no zero's sign."""
        self._watch.check()
        if self._missing:
            self._fault = self._unused_message(self._missing)
        with self._unused.ignoring(), uncounted():
            self._reduction.join(nan if self._missing else -0.0)
        self._reduced = True
        self._watch.note()

    def shadow_micro_step(self, *, sync: bool = True) -> None:
        """A backward from a constant: its hooks fire, the user's forward does not run."""
        self._open_window()
        if sync:
            self._watch.check()
            self._reducer.expect_assignment()
            self._join_with_zeros()
            self._reduced = True
            self._watch.note()

    def _join_with_zeros(self) -> None:
        with self._unused.ignoring():
            self._reduction.join(0.0)

    def _step(self, divisor: float) -> StepOutput:
        """Steps on the reduced gradients: every rank holds the same ones, bit by bit, so all take one decision.

        Raises:
            MisuseError: gradients were changed by hand, or no micro-step was one with ``sync``.
        """
        if not self._reduced:
            self._join_with_nan()
            raise MisuseError(_UNREDUCED)
        self._watch.check()
        self.buffers.check()
        among = self._unused.masked(self._world, needs_some=self._ran) if self._unused.looks else None
        self._stepper.before_step(self._optimizers, self._optimizer_step)
        with self._stepper.groups:
            output = self._optimizer_step.step(divisor / self._reducer.divisor, self.norm_bound, among=among)
        if self._fault:
            output = replace(output, fault=self._fault)
        self._stepper.after_step()
        self.zero_gradients()
        return output

    def give_up(self, assignment: UnitAssignment | None = None) -> bool | None:
        """See :class:`Engine`. What was sent before becomes NaN here alone. Not where others may wait in a forward."""
        # One reproducible rank, too, so that a loss scale does not depend on their number.
        if (self._world.size == 1 and not self.facts.numerics.fixed_order) or self._communicating.what:
            return None
        if not self._window_open:
            self.begin_window(0, assignment)
        sends = not self._reduced
        self._reducer.give_up()
        with self._unused.ignoring():
            if self._reduction.running:
                sends = self._end_interrupted()
            else:
                self._drop_gradients()
                if sends:
                    self._reduction.join(nan)
        if not sends:
            torch._foreach_add_([view for view in self._views if view is not None], nan)
        self._reduced = True
        self._watch.note()
        return sends

    def _end_interrupted(self) -> bool:
        """Ends a reduction in whose backward an error was raised: the other ranks wait for the rest, and get NaN.

        Returns:
            Whether there was a rest: of a signal's handler an error comes when the backward has waited for them.
        """
        told = self._watch.writes > 1  # DDP divides what a backward has written, once it knows of it
        unreached = self._reduction.unreached()
        if unreached:
            self._reduction.complete(unreached, nan)
        elif not told:  # the error came before DDP knew of a parameter
            self._reduction.join(nan)
        return bool(unreached) or not told

    def zero_gradients(self) -> None:
        """In place: the gradients stay views of the buckets. Ends a reduction that an error has interrupted."""
        if self._reduction.running:
            self._end_interrupted()
        self._drop_gradients()
        self._ran = self._reduced = False
        self._fault, self._missing = "", []
        self._communicating.window_ends()
        self._reducer.begin(None)
        self._close_window()

    def finishing(self) -> AbstractContextManager[None]:
        """See :class:`Engine`; where this rank has not reduced, others may have."""
        if self._ran and not self._reduced:
            self._fault = _UNREDUCED
            self._join_with_nan()
        return uncounted()

    def _join_with_nan(self) -> None:
        """Takes part in the others' reduction, so that no rank waits for this one, and none steps."""
        with self._unused.ignoring(), uncounted():
            self._reduction.join(nan)
        self._reduced = True
        self._watch.note()

    def _gradients_changed(self) -> bool:
        """Whether the gradients are others, or have other versions, than this engine left."""
        return self._window_open and not self._watch.unchanged

    def _drop_stray_gradients(self) -> None:
        if not self._watch.unchanged:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for i, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.grad is not view:
                set_gradient(parameter, view)
                self._views[i] = parameter.grad
        for master, parameter in self._copies:
            if master.grad is not parameter.grad:
                master.grad = parameter.grad
        zero_in_place(self._parameters)
        self._watch.note()
        self._unused.reset()

    def close(self) -> None:
        """See :class:`Engine`; a collective where optimizer state is sharded, which every rank then has whole."""
        super().close()
        self._optimizer_step.release()
        self._reduction.close()
        self._communicating.close()
        self._watch.forget()
        for master, _ in self._copies:
            master.grad = None
        self._stepper.give_back(self._optimizers)
        self._unused.close()
        model = self.unwrapped_model
        apply_precision(model, PrecisionPolicy.of(PrecisionConfig()), self.device)
        for parameter in self._parameters:
            parameter.grad = None
        self._views = []

    def state(self) -> EngineState:
        """Each rank gives the model, and the optimizer state that it holds."""
        model = self._weights.in_place_of_weights(model_state(self.unwrapped_model))
        return self._optimizer_step.state(model, owns=lambda _: True)

    def load_state(self, state: EngineState) -> None:
        """See :class:`Engine`."""
        load_model_state(self.unwrapped_model, state.model)
        self._weights.load(state.model)
        with self._stepper.groups:
            self._optimizer_step.load_state(state)


def check(model: nn.Module, context: EngineContext) -> None:
    """Raises ConfigError for what ``create`` would fail on; see ``factory.EngineSpec``."""
    if context.policy.keeps_masters and context.compile.compiles:  # by torch 2.13: Dynamo runs it as it is
        problem = "torch.compile leaves out parameters whose gradients have another format, as bf16 weights have here"
        remedy = "Use compile=none, precision=bf16, or engine=fsdp2"
        raise ConfigError("compile", context.compile.name, problem, remedy)


def create(model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> DDPEngine:
    """For ``engine=ddp``; see ``factory.EngineSpec``."""
    return DDPEngine(model, optimizers, world, context, reducer=_reducer(world, context), stepper=WholeStepper())


def create_zero1(model: nn.Module, optimizers: Sequence[Optimizer], world: World, context: EngineContext) -> DDPEngine:
    """For ``engine=zero1``."""
    return DDPEngine(model, optimizers, world, context, reducer=_reducer(world, context), stepper=ZeRO1(world))


def _reducer(world: World, context: EngineContext) -> BucketReducer:
    return TreeReducer(world) if context.numerics.fixed_order else BucketReducer(world, context.policy.reduce_dtype)
