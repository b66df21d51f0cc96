"""How far a run's numbers depend on its ranks: ``numerics=fast``, or the same bits on any number of them.

Whoever makes a plan, a counter, an engine or an evaluation asks the run's :class:`Numerics`, and knows no setting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from distaccum.config.checks import NUMERICS, REPRODUCIBLE, require, require_choice
from distaccum.config.engine import EngineConfig, FSDP2Config
from distaccum.data.counter import GlobalCounter
from distaccum.data.plan.batch import CONFIG_KEYS, KEYWORDS, Plan, SizeNames
from distaccum.data.plan.stream import StreamPlan
from distaccum.data.plan.units import VIRTUAL_RANKS, UnitAssignment, UnitPlan
from distaccum.distributed.random import KeyedRandom, fork_rng
from distaccum.distributed.world import World
from distaccum.engines.rules import step_values
from distaccum.errors import ConfigError, MisuseError, shorten
from distaccum.losses.normalize import Count

if TYPE_CHECKING:
    from distaccum.engines.context import EngineContext

_ENGINES = ("ddp", "zero1", "fsdp2")
_ROWS, _COLUMNS = 151, 7  # of a trial matrix: odd, so that a row ends in the midst of a vector


class Buffers:
    """The model's buffers, which forwards may change: nobody looks."""

    def begin(self) -> None:
        """Before forwards."""

    def check(self) -> None:
        """After forwards; where somebody looks a collective."""


class Numerics:
    """With ``fast`` a run's sums are added up as its ranks share them out; :class:`Reproducible` does otherwise."""

    fixed_order: bool = False
    """Whether sums are added in an order that does not depend on the ranks."""

    @staticmethod
    def of(name: str | Numerics, virtual_ranks: int = VIRTUAL_RANKS) -> Numerics:
        """The numerics of this name, or themselves.

        Args:
            name: ``fast`` or ``reproducible``.
            virtual_ranks: the blocks in which a reproducible window is summed; the most ranks.

        Raises:
            ConfigError: another name.
        """
        if isinstance(name, Numerics):
            return name
        require_choice("numerics", name, NUMERICS)
        return Reproducible(virtual_ranks) if name == REPRODUCIBLE else Numerics()

    def plan(self, plan: Plan | StreamPlan, *, names: SizeNames = KEYWORDS) -> Plan | StreamPlan:
        """A plan with the micro-batches that the sums need.

        Args:
            plan: of ``make_plan``.
            names: what an error calls the sizes.
        """
        return plan

    def counter(self, world: World, count: Count | None) -> GlobalCounter:
        """What counts micro-batches, and sums their counts over the ranks."""
        return GlobalCounter(world, count, exact=self.fixed_order)

    def random(self, device: torch.device) -> KeyedRandom:
        """What seeds the generators of a micro-step; NumPy's and Python's, too, where these are to be the same."""
        return KeyedRandom(device, others=self.fixed_order)

    def buffers(self, model: nn.Module, world: World) -> Buffers:
        """What looks at the model's buffers."""
        return Buffers()

    def check(self, model: nn.Module, context: EngineContext) -> None:
        """Raises ConfigError for settings and models whose sums depend on the ranks; needs no process group."""

    def check_optimizers(self, optimizers: Iterable[Optimizer], engine: EngineConfig) -> set[tuple[int, int]]:
        """For engines that shard parameters: the numbers of optimizers and groups whose parts step to other bits."""
        return set()

    def check_loop(self, world: World, count: Count | None, *, rehearses: bool) -> None:
        """Raises ConfigError for what would make the windows of a loop depend on the ranks; may be a collective."""

    def take_assignment(self, assignment: UnitAssignment | None) -> None:
        """Where a window begins.

        Raises:
            MisuseError: its units are dealt, and sums are added up as the ranks share them out.
        """
        if assignment is not None:
            problem = "the window's units are dealt for numerics=reproducible, and this engine is not"
            raise MisuseError(f"{problem}: give create_engine(numerics=...) what plan_windows() was given")


@dataclass(frozen=True)
class Reproducible(Numerics):
    """A run's numbers are the same bit for bit on any number of ranks.

    Args:
        virtual_ranks: the blocks in which a window is summed; the most ranks.
    """

    virtual_ranks: int = VIRTUAL_RANKS
    fixed_order = True

    def plan(self, plan: Plan | StreamPlan, *, names: SizeNames = KEYWORDS) -> Plan:
        """The plan with micro-batches that are the same on any number of ranks.

        Raises:
            ConfigError: the data is a stream, or there are more ranks than ``virtual_ranks``.
        """
        if plan.is_stream:
            problem = "the data is a stream, of which each rank has its own samples"
            raise _refusal(problem, "Give a map-style dataset, or use numerics=fast")
        key = "batch.virtual_ranks" if names is CONFIG_KEYS else "virtual_ranks"
        return UnitPlan(plan=plan, virtual_ranks=self.virtual_ranks, key=key)

    def buffers(self, model: nn.Module, world: World) -> Buffers:
        """See :class:`Numerics`."""
        return ConstantBuffers(model, world)

    def take_assignment(self, assignment: UnitAssignment | None) -> None:
        """See :class:`Numerics`."""

    def check(self, model: nn.Module, context: EngineContext) -> None:
        """Raises ConfigError for settings and models whose sums depend on the ranks."""
        engine = context.engine
        if engine.name not in _ENGINES:
            problem = f"{engine.name} sums gradients over ranks in an order of its own"
            raise _refusal(problem, f"Use engine={', '.join(_ENGINES)}, or numerics=fast")
        if isinstance(engine, FSDP2Config):
            _check_fsdp2(engine)
        if context.compile.compiles:
            problem = f"compile={context.compile.name} makes other code for shapes that it has seen in another order"
            raise _refusal(problem, "Use compile=none, or numerics=fast")
        from distaccum.engines.compiled import compiled_parts  # noqa: PLC0415  few runs are reproducible

        if compiled_parts(model):
            problem = "the model is given to torch.compile, which makes other code for shapes seen in another order"
            raise _refusal(problem, "Give the model itself, or use numerics=fast")
        if context.policy.reduce_dtype is not torch.float32:
            problem = "gradients that travel in 16 bits are rounded as often as the ranks share them out"
            raise _refusal(problem, "Use precision.reduce_dtype=fp32, or numerics=fast")
        counting = [
            name or type(module).__name__
            for name, module in model.named_modules()
            if (isinstance(module, _NormBase) and module.track_running_stats and module.training)
            or _synchronizes(module)
        ]
        if counting:
            problem = f"{shorten(counting, 1)} keeps statistics of the micro-batches that its rank has seen"
            raise _refusal(problem, "Use GroupNorm or LayerNorm, track_running_stats=False, or numerics=fast")

    def check_optimizers(self, optimizers: Iterable[Optimizer], engine: EngineConfig) -> set[tuple[int, int]]:
        """See :class:`Numerics`.

        Raises:
            ConfigError: a kernel of one pass (``fused``) computes the last numbers of a tensor otherwise than others.
        """
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(_ROWS, _COLUMNS, generator=generator)
        others: set[tuple[int, int]] = set()
        for place, optimizer in enumerate(optimizers):
            kind = type(optimizer).__name__
            for number, group in enumerate(optimizer.param_groups):
                device = group["params"][0].device
                rows = list(torch.split(whole.to(device), 1))
                given: list[list[list[Tensor]]] = [[[] for _ in optimizer.param_groups] for _ in range(2)]
                given[0][number], given[1][number] = [whole.to(device)], rows
                with fork_rng([device]):
                    found, parts = (step_values(optimizer, one, 1.0, seed=0) for one in given)
                if found is None or parts is None:
                    problem = f"the rule of {kind} cannot be tried on a part of a matrix, and {engine.name} steps parts"
                    raise _refusal(problem, "Use engine=ddp or zero1, or numerics=fast")
                same = torch.equal(found[number][0].detach(), torch.cat([part.detach() for part in parts[number]]))
                if group.get("fused"):  # whose kernels differ in few elements, and not in every step
                    problem = f"{kind} steps a part of a matrix to other bits than the whole"
                    remedy = "Use optim.fused=false (fused=False), engine=ddp or zero1, or numerics=fast"
                    raise _refusal(f"{problem}, and {engine.name} steps parts", remedy)
                if not same:
                    others.add((place, number))
        return others

    def check_loop(self, world: World, count: Count | None, *, rehearses: bool) -> None:
        """See :class:`Numerics`; a collective.

        Raises:
            ConfigError: the micro-batch or the count is found out on the way; kernels may add in any order, or ranks
                have other numbers of threads; on all ranks.
        """
        problem = "is found by rate and memory, and with numerics=reproducible a run's numbers depend on it"
        require(not rehearses, "micro_batch_size", "auto", problem, "State a number")
        problem = "and with numerics=reproducible a window's count is known before it is run"
        require(count is not None, "count", None, problem, "Give count=, which counts a batch on the host")
        if not torch.are_deterministic_algorithms_enabled():
            problem = "and torch may choose kernels that add in any order"
            raise _refusal(problem, "Call torch.use_deterministic_algorithms(True) before")
        threads = world.all_gather_object(torch.get_num_threads())
        if len(set(threads)) > 1:
            problem = f"and the ranks have {', '.join(map(str, threads))} threads, by which kernels cut their sums"
            raise _refusal(problem, "Call torch.set_num_threads(n) with one n on every rank")


def _synchronizes(module: nn.Module) -> bool:
    return any("SyncBatchNorm" in base.__name__ for base in type(module).__mro__)


def _check_fsdp2(engine: FSDP2Config) -> None:
    settings = vars(engine)
    for key, wanted in (("sync", "boundary"), ("replicas", 1), ("offload", False)):
        if settings[key] != wanted:
            problem = f"engine.{key}={settings[key]} adds up gradients in an order that depends on the ranks"
            raise _refusal(problem, f"Use engine.{key}={wanted}, or numerics=fast")
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  takes seconds

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        problem = f"torch {torch.__version__} has no way to say how engine=fsdp2 adds up gradients"
        raise _refusal(problem, "Use a newer torch, or engine=ddp")


def _refusal(problem: str, remedy: str) -> ConfigError:
    return ConfigError("numerics", REPRODUCIBLE, problem, remedy)


class ConstantBuffers(Buffers):
    """Looks, for ``numerics=reproducible``, whether forwards have changed the model's buffers.

    By their values: a version tells neither of a buffer that was assigned anew nor of one changed by way of ``.data``.

    Args:
        model: whose buffers they are.
        world: this rank.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world
        self._names = {name for name, _ in model.named_buffers()}
        self._kept: dict[str, Tensor] = {}
        self._digest: int | None = None  # of them

    def begin(self) -> None:
        """Before forwards: what somebody has set by now is as good as what was there."""
        for name, buffer in self._model.named_buffers():
            known = self._kept.get(name)
            if known is None or not _is_same(buffer, known):
                self._kept[name], self._digest = buffer.detach().clone(), None

    def check(self) -> None:
        """After forwards; a collective.

        Raises:
            MisuseError: a buffer has another value, or was not there when the model was wrapped, on any rank, or ranks
                had others; on all of them.
        """
        if self._digest is None:
            self._digest = crc32(b"".join(_bytes_of(kept) for _, kept in sorted(self._kept.items())))
        now = dict(self._model.named_buffers())
        changed = [
            name
            for name, buffer in now.items()
            if name not in self._names or name not in self._kept or not _is_same(buffer, self._kept[name])
        ]
        anywhere, most, least = self._world.all_reduce_max_host([bool(changed), self._digest, -self._digest])
        if most != -least:
            problem = "ranks have other values in the model's buffers, as if each had made them of its own samples"
            raise MisuseError(f"{problem}: numerics=reproducible needs the same ones on all of them")
        if not anywhere:
            return
        names = shorten(self._world.all_gather_names(changed))
        problem = f"a forward has changed the buffer {names}, which each rank changes by its own units"
        raise MisuseError(f"{problem}: numerics=reproducible needs a model without such, or use numerics=fast")


def _bytes_of(tensor: Tensor) -> bytes:
    content: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content


def _is_same(buffer: Tensor, known: Tensor) -> bool:
    """Whether they are equal, NaN included; waits for the device."""
    if buffer.shape != known.shape or buffer.dtype != known.dtype or buffer.device != known.device:
        return False
    return torch.equal(buffer, known) or torch.equal(
        torch.nan_to_num(buffer.double()) if buffer.is_floating_point() else buffer,
        torch.nan_to_num(known.double()) if known.is_floating_point() else known,
    )
