"""The contract of every engine. Ask an engine what it does, never what it is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.data.hooks import Hooks
from distaccum.data.plan.units import UnitAssignment
from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.engines.group_settings import GroupSettings
from distaccum.engines.memory_marks import MemoryMarks
from distaccum.engines.modules import HostCopy
from distaccum.engines.numerics import Numerics
from distaccum.engines.probe import GradientProbe
from distaccum.errors import MisuseError
from distaccum.precision.loss_scale import LossScale
from distaccum.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from distaccum.engines.compiled import Compiled


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step found and did; the same on every rank, but for :meth:`nonfinite` where gradients are sharded.

    Args:
        grad_norm: the 2-norm of the global gradient, unscaled and before clipping: 0-dim, on the device; where the
            step was skipped, NaN or infinite, or from :attr:`Engine.norm_bound` on.
        decision: ``[applied, loss_scale, grad_norm]``, on its way to the host.
        names: of the parameters with a gradient.
        norms: the norm of each of these gradients, on the device, times :attr:`norms_scale`.
        norms_scale: the loss scale, and what else the gradients are still to be divided by.
        underflow: the fraction of gradient elements that fp16 flushed to zero: 0-dim, on the device; None: not sampled.
        fault: why this rank gave NaN in place of a gradient that it could not compute, so that no rank steps; empty
            where it gave none. Other ranks do not know.
        given_up: why this rank has given the window up, in words; empty where it has not. The window is then skipped.
        late_faults: more, that only the device can tell: whether, as ``[0.0 or 1.0]`` on its way to the host, and why.
    """

    grad_norm: Tensor
    decision: HostCopy
    names: Sequence[str]
    norms: Tensor
    norms_scale: float | Tensor = 1.0
    underflow: Tensor | None = None
    fault: str = ""
    given_up: str = ""
    late_faults: Sequence[tuple[HostCopy, str]] = ()

    @property
    def complaint(self) -> str:
        """:attr:`fault`, or a late one; waits as :attr:`applied` does. For a step that was not applied."""
        return self.fault or next((why for copy, why in self.late_faults if copy.read()[0]), "")

    @property
    def applied(self) -> bool:
        """Whether the optimizers stepped; waits until the device has decided."""
        return bool(self.decision.read()[0])

    @property
    def finite(self) -> bool:
        """Whether the gradient was neither NaN nor infinite; waits as :attr:`applied` does."""
        applied, _, norm = self.decision.read()
        return applied > 0 or math.isfinite(norm)

    @property
    def norm(self) -> float:
        """:attr:`grad_norm` on the host; waits as :attr:`applied` does."""
        return float(self.decision.read()[2])

    @property
    def loss_scale(self) -> float:
        """The scale of this window's gradients, 1.0 without a loss scaler; waits as :attr:`applied` does."""
        return float(self.decision.read()[1])

    def nonfinite(self) -> list[str]:
        """The parameters whose gradient is NaN or infinite; reads the device."""
        # A rank whose shard is empty has one norm, 0, of no parameter.
        return [name for name, norm in zip(self.names, self.norms.tolist(), strict=False) if not math.isfinite(norm)]


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What a checkpoint keeps of an engine: named tensors, and named plain values that JSON can hold."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_values: Mapping[str, Any]
    scaler: Mapping[str, Any] = field(default_factory=dict)


class StateLayout(Enum):
    """What ``Engine.state`` gives on a rank."""

    FULL = "the whole state"
    SHARDED = "its share of the state"


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What does not change while an engine runs.

    Args:
        gradient_divide_factor: the engine divides the summed gradient by it: the world size where it averages, else 1.
        min_loss_scale: the loss scale never falls below it; None: not dynamic. The engine's constructor fills it in.
        numerics: how far a window's sums may depend on the ranks.
        forward_communicates: whether a forward is a collective: all ranks must then run as many, in evaluations too.
        steps_parts: whether an optimizer's step on a rank moves a part of the parameters only, or copies of them.
        rounds_weights: whether forwards compute with roundings of what the optimizers step.
        state_layout: what :meth:`Engine.state` gives on a rank.
        gives_optimizers_back: whether optimizers are whole after :meth:`Engine.close`; else a rank keeps a share.
        artifacts: the engine's own configuration files, by name, for the run directory; written as JSON.
    """

    gradient_divide_factor: int
    min_loss_scale: float | None = None
    numerics: Numerics = field(default_factory=Numerics)
    forward_communicates: bool = False
    steps_parts: bool = False
    rounds_weights: bool = False
    state_layout: StateLayout = StateLayout.FULL
    gives_optimizers_back: bool = True
    artifacts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Restart(Enum):
    """What this rank can do about a window that an error has ended."""

    POSSIBLE = "it can begin again, after zero_gradients()"
    TOO_LATE = "the other ranks may have a part of its gradient"
    REFUSED = "the other ranks may wait in a forward, or a second run has other bits"


class Engine(ABC):
    """Owner of parameters, gradients and optimizer state on one rank.

    An engine defines the abstract members. It overrides a default where it differs.

    A window is open from its first :meth:`begin_window`, :meth:`micro_step` or :meth:`shadow_micro_step` to
    :meth:`step` or :meth:`zero_gradients`. Each of these calls :meth:`_open_window` or :meth:`_close_window`. A window
    begins without gradients, whoever has left some; while it is open the engine alone changes them.

    Args:
        model: the user's; moved and wrapped by the engine.
        optimizers: over the model's parameters, and disjoint.
        world: this rank.
        policy: what forwards compute in, and what gradients travel in between ranks.
        scaler: of the loss, where gradients pass through fp16.
        facts: of the engine.
    """

    facts: EngineFacts
    """What does not change while it runs."""
    gradient_divide_factor: int
    """That of :attr:`facts`: what ``normalize_loss`` undoes."""
    probe: GradientProbe
    """What verification asks; an engine sets its own where its answers are others."""
    defer_reduction: bool = False
    """Whether the boundary's backward ends before its reduction begins, so that it may fail as any other."""
    norm_bound: float = math.inf
    """No optimizer steps where the gradient's norm is not below this; a number of fp32, the same on every rank."""
    meet: Callable[[], object] | None = None
    """Called before a forward outside of a window where forwards communicate: a collective by which ranks that have
    gone on without it notice; None: nobody does."""
    compiled: Compiled | None = None
    """What is compiled of the model; ``factory.create`` sets it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        policy: PrecisionPolicy,
        *,
        scaler: LossScale | None,
        facts: EngineFacts,
    ) -> None:
        self.facts = replace(facts, min_loss_scale=scaler.floor) if scaler else facts
        self.gradient_divide_factor = facts.gradient_divide_factor
        self.probe = GradientProbe(self, policy)
        self.device = world.device
        self._model = model
        self._optimizers = optimizers
        self._world = world
        self.activity = world.activity
        self._policy = policy
        self._scaler = scaler
        self._window_open = self._closed = self._watches_hooks = False
        self._undo = ExitStack()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._rated = [group for group in groups if "initial_lr" not in group]
        for group in self._rated:
            group["initial_lr"] = group["lr"]
        self._settings = GroupSettings(optimizers)
        self.hooks = Hooks()
        """What looks at this engine's windows."""
        self.memory_marks = MemoryMarks()
        """Which shapes of micro-batches fit on this rank, as far as is known."""
        self.buffers = facts.numerics.buffers(model, world)
        """What looks at the model's buffers, as the numerics ask for it."""

    @property
    def world(self) -> World:
        """This rank, among those that share the window."""
        return self._world

    @property
    def window_open(self) -> bool:
        """Whether gradients of a window may lie there, which nobody but the engine may change."""
        return self._window_open

    def _take_assignment(self, assignment: UnitAssignment | None) -> None:
        """Where a window begins; raises MisuseError where its units are dealt, and this engine adds up as it likes."""
        self.facts.numerics.take_assignment(assignment)
        self.buffers.begin()

    def _open_window(self) -> None:
        """Opens a window unless one is open: what was accumulated before is none of it, and is dropped.

        Raises:
            MisuseError: after :meth:`close`.
        """
        if self._closed:
            raise MisuseError("a window after close(): make a new engine (Accumulator)")
        if not self._window_open:
            self._drop_stray_gradients()
            self._watch_hooks()
            torch.clear_autocast_cache()  # others may have moved weights
            self._window_open = True
            if self.compiled is not None:
                self.compiled.window_began()

    def _watch_hooks(self) -> None:
        """Before the first window: those of the user's, also on shards that took the places of parameters."""
        if not self._watches_hooks:
            from distaccum.program import HOOKS, load  # noqa: PLC0415  an evaluation needs none of it

            self._watches_hooks = True
            self.on_close(load(HOOKS)(self._model))

    def _meet_others(self) -> None:
        """Before a forward that is in no micro-step."""
        if self.meet is not None and not self._window_open:
            self.meet()

    def _close_window(self) -> None:
        if self._window_open and self.compiled is not None:
            self.compiled.window_ended()
        self._window_open = False

    def _drop_stray_gradients(self) -> None:  # noqa: B027  an engine that has nothing to drop needs none
        """Drops gradients that were accumulated outside of a window; local, and in place where they lie in buckets."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those that the step asks to step."""
        return self._optimizers

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale of the next backward: 0-dim, on the device; None without a loss scaler."""
        return self._scaler.current if self._scaler else None

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The module that a training forward calls."""

    @property
    def unwrapped_model(self) -> nn.Module:
        """The user's model, for evaluation: its forward communicates only where forwards communicate."""
        return self._model

    @abstractmethod
    def describe(self) -> str:
        """One line for people: what a rank holds, and what a window sends."""

    def sync_buffers(self) -> None:
        """Sets buffers (running statistics) to rank 0's, so that all ranks evaluate one model; a collective.

        It costs a broadcast a buffer, and is therefore left to evaluations and the start.
        """
        for buffer in self.unwrapped_model.buffers():
            self._world.broadcast_(buffer)

    def weights_changed(self) -> None:  # noqa: B027  most engines have no copies
        """Told that somebody has changed parameters in place, between two windows: drops copies for forwards; local."""

    def begin_window(self, micro_steps: int, assignment: UnitAssignment | None = None) -> None:
        """Called before a window's first micro-step, with the number of micro-steps that this rank has in it.

        Where sums have a fixed order the window's ``assignment`` says whose its units are.

        Where a forward communicates this is a collective: a rank with fewer micro-steps than another replays an earlier
        input with a zero gradient for each missing one. Elsewhere ranks may have different numbers; it only opens the
        window, as the first micro-step would.
        """
        self._open_window()
        self._take_assignment(assignment)

    @abstractmethod
    def micro_step(self, *, sync: bool) -> AbstractContextManager[object]:
        """Around one forward and backward. With ``sync`` the backward reduces all that the window accumulated."""

    def autocast(self) -> AbstractContextManager[object]:
        """Around a forward and its loss, also in an evaluation: what the precision policy computes in."""
        return self._policy.autocast(self.device)

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradient of a 0-dim loss that is already divided by the window's count; scales it for fp16.

        Raises:
            MisuseError: the forward did not go through :attr:`model`, so that its gradients would not be reduced.
        """

    def set_lr_factor(self, factor: float) -> None:
        """Sets every group's ``lr`` to ``factor`` times its ``initial_lr``, the one it was built with."""
        self._settings.rates_are_scheduled = True
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

    @abstractmethod
    def shadow_micro_step(self, *, sync: bool = True) -> None:
        """The last micro-step of a rank that has no micro-batch in a window: it joins the reduction with zeros.

        Without ``sync`` it joins only what other ranks' forwards and backwards communicate.
        """

    def step(self, *, divisor: float = 1.0) -> StepOutput:
        """Unscales, clips, steps or skips, moves the loss scale and zeroes in place.

        One transaction over all ranks and optimizers, after the boundary. The gradient is what was accumulated over
        ``divisor``: the count, where it was not known before the backward. Where the gradient is NaN or infinite on any
        rank, or its norm not below :attr:`norm_bound`, no optimizer steps on any rank.
        """
        self.activity.phase = Phase.STEP
        for before in self.hooks.before_step:
            before(divisor)
        try:
            return self._step(divisor)
        finally:
            torch.clear_autocast_cache()  # within an autocast of the user's, casts of weights outlive the weights

    @abstractmethod
    def _step(self, divisor: float) -> StepOutput:
        """:meth:`step`, after the hooks."""

    def finishing(self) -> AbstractContextManager[None]:
        """Around what follows a window's last backward, which may lie in another accumulator's micro-step."""
        return nullcontext()

    @property
    def restart(self) -> Restart:
        """Whether a window that an error has ended can begin again on this rank."""
        return Restart.REFUSED

    def give_up(self, assignment: UnitAssignment | None = None) -> bool | None:
        """Ends a window whose gradient this rank cannot compute, and that others go on with: they are sent NaN for it.

        The window's :meth:`step` follows on every rank, and steps nowhere.

        Args:
            assignment: of the window, where :meth:`begin_window` was not called.

        Returns:
            Whether the others get NaN; False: they were sent the gradient before. None: a rank of this engine, or of
            this model, cannot do that alone, and nothing was done.
        """
        return None

    @abstractmethod
    def zero_gradients(self) -> None:
        """Zeroes in place, for a window that is not applied."""

    @abstractmethod
    def state(self) -> EngineState:
        """This rank's part of the state to save; a collective where state is sharded.

        Tensors are whole. At least one rank gives each; where several do, they give the same.
        """

    @abstractmethod
    def load_state(self, state: EngineState) -> None:
        """Restores a whole saved state before the first window; a rank reads what it holds.

        Raises:
            RuntimeError, KeyError, ValueError: the state belongs to another model.
        """

    def on_close(self, undo: Callable[[], object]) -> None:
        """Has :meth:`close` undo what was done to model and optimizers before the engine had them, last first."""
        self._undo.callback(undo)

    def close(self) -> None:
        """Gives model and optimizers back: unwrapped, without hooks, guards and gradients; local, and final.

        Where parameters are sharded they stay so. A rate that a schedule has moved is the one again that the optimizer
        was built with, which another run begins from.
        """
        if not self._closed:
            for group in self._rated:
                built_with = group.pop("initial_lr", group["lr"])
                if self._settings.rates_are_scheduled:
                    group["lr"] = built_with
        self._closed = True
        self._close_window()
        if self.compiled is not None:
            self.compiled.undo()
        self._undo.close()


def forward_past_engine() -> MisuseError:
    """For a backward without a forward of ``Engine.model``."""
    problem = "the forward went past the engine, or there was none, so gradients would not be reduced"
    remedy = "not the model that was wrapped, in each micro-step, also for a loss of zero (its output times 0)"
    return MisuseError(f"{problem}: call acc.model (engine.model), {remedy}")
