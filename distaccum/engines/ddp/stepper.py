"""Who steps which parameters of a replicated model, and what is stepped of each: itself, or its fp32 master."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from distaccum.distributed.world import World
from distaccum.engines.base import Engine, StateLayout
from distaccum.engines.ddp import masters
from distaccum.engines.ddp.masters import Masters
from distaccum.engines.gradient_watch import CHANGED_BY_HAND
from distaccum.engines.optimizer_state import by_entry
from distaccum.engines.optimizer_step import OptimizerStep
from distaccum.engines.probe import GradientProbe
from distaccum.precision.policy import PrecisionPolicy

_NOTHING = nullcontext()


class WholeStepper:
    """Every rank steps all parameters."""

    layout = StateLayout.FULL
    steps_parts = False
    weights: Masters
    """What is stepped of each parameter; :meth:`start` makes it."""

    def start(self, model: nn.Module, optimizers: Sequence[Optimizer], world: World, policy: PrecisionPolicy) -> None:
        """Makes weights and masters, and leaves the optimizers what this rank steps; before DDP looks at the model."""
        if policy.keeps_masters:
            masters.check(model, optimizers)
            masters.synchronize(model, world)
        self._prepare(optimizers, world)
        self.weights = Masters(model, optimizers, policy)
        self._partition(optimizers)

    def _prepare(self, optimizers: Sequence[Optimizer], world: World) -> None:
        """What precedes the masters."""

    def _partition(self, optimizers: Sequence[Optimizer]) -> None:
        self.weights.take_over(optimizers)

    @property
    def groups(self) -> AbstractContextManager[object]:
        """Within it the optimizers' groups hold what this rank steps."""
        return _NOTHING

    def describe(self, spread: str) -> str:
        """What a line about the engine ends in, given how many bytes of parameters there are."""
        return f"; {self.weights.held} too" if self.weights.rounded else ""

    def before_step(self, optimizers: Sequence[Optimizer], step: OptimizerStep) -> None:
        """What somebody has done to weights and groups since the last step is taken over, or refused."""
        if self.weights.rounded:
            self.weights.take_in()

    def after_step(self) -> None:
        """Weights become what was stepped, on every rank."""
        if self.weights.rounded:
            self.weights.round()

    def give_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Leaves optimizers whole, over weights that are fp32 again; a collective where ranks step parts."""
        self.weights.release(optimizers)
        self.weights.restore()


class DDPProbe(GradientProbe):
    """See :class:`GradientProbe`; whole weights, and what the stepper has of their masters and optimizers.

    Args:
        engine, policy: as there.
        stepper: the engine's.
        stepped: what is stepped of each trained parameter.
        leaves_out_unused: whether parameters that no rank used are looked for.
        changed: whether somebody has changed the open window's gradients.
    """

    def __init__(
        self,
        engine: Engine,
        policy: PrecisionPolicy,
        stepper: WholeStepper,
        stepped: Mapping[str, nn.Parameter],
        *,
        leaves_out_unused: bool,
        changed: Callable[[], bool],
    ) -> None:
        super().__init__(engine, policy)
        self._stepper, self._stepped, self._changed = stepper, stepped, changed
        self.leaves_out_unused = leaves_out_unused

    def known_fault(self) -> str:
        """See :class:`GradientProbe`; local."""
        return CHANGED_BY_HAND if self._changed() else ""

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """See :class:`GradientProbe`; on zero1 a weight whose master another rank has stands for itself."""
        return self._stepped

    @property
    def stepped_groups(self) -> AbstractContextManager[object]:
        """See :class:`GradientProbe`; of zero1 what this rank steps."""
        return self._stepper.groups

    def replicated(self) -> Mapping[str, Tensor]:
        """See :class:`GradientProbe`; masters as well, where every rank has them."""
        masters = [] if self._stepper.steps_parts else self._stepper.weights.by_name()
        return {**super().replicated(), **{f"the fp32 master of {name}": p for name, p in masters}}

    def replicated_state(self) -> tuple[int, dict[str, Tensor]]:
        """See :class:`GradientProbe`; of zero1 nothing, as one rank has a parameter's."""
        return 0, {} if self._stepper.steps_parts else by_entry(self._engine.optimizers, self._stepped)
