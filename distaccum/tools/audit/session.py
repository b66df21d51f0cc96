"""The context manager around a loop, and what happens at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import nn

from distaccum.distributed.world import World
from distaccum.errors import DistaccumError, MisuseError, shorten
from distaccum.losses.base import is_window_loss
from distaccum.losses.normalize import Count
from distaccum.tools.audit import gather
from distaccum.tools.audit.judge import Judge
from distaccum.tools.audit.own_loss import OwnLoss
from distaccum.tools.audit.reference import LossOfModel, Reference
from distaccum.tools.audit.report import Finding, Report
from distaccum.tools.audit.watch import Watch


class audit:  # noqa: N801  a context manager is called like a function
    """Compares the gradient of every window of the loop in its block with the global batch's.

    A window is what lies between two optimizer steps. Each training forward is recorded with its batch, and the
    gradient just before the step. At the end of the block one process computes the global batch's gradient in fp64: the
    sum of ``loss_sum`` over the micro-batches of all ranks, divided once by the sum of ``count``. The report is printed
    by rank 0, and the same on every rank. Every rank has to enter and leave the block.

    Within the block dropout is off. Gradients, weights and batches are copied to the host at every step: audit some
    windows, not a training run.

    Args:
        model: bare, or as DistributedDataParallel, Fabric or DeepSpeed have wrapped it; FSDP2's sharded one. None: the
            first module outside of any other that computes with gradients.
        optimizer: whose parameters are audited; None: those of any optimizer over the model.
        loss_sum: gives of a model and a batch the loss summed (not averaged) over its items, or several by name. None:
            ``model(**batch).loss``, the mean that the model returns itself, times the labels that are not -100.
        count: gives of a batch the number of those items.
        batches: this rank's micro-batches. None: a forward's batch is what its ``DataLoader`` gave, found by the
            forward's inputs, or those inputs themselves (several as a tuple, named ones as a dict).
        windows: how many to audit from the first on; the last one, which may be short, is audited too.
        accumulation_steps: as the loop was told, to know a short window; None: as many as the first window has.
        tolerance: of the relative error; None: 1e-4 in fp32, 0.05 in fewer bits.
        on_enough: called when so many windows are recorded, before the optimizer steps; it may raise SystemExit.
        show: called with the report on rank 0.

    Raises:
        MisuseError: at the end of the block, on every rank: no optimizer step was seen, or a batch is not what
            ``loss_sum`` and ``count`` take.
        DataError: a window counts nothing.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Any = None,
        *,
        loss_sum: LossOfModel | None = None,
        count: Count | None = None,
        batches: Iterable[Any] | None = None,
        windows: int = 2,
        accumulation_steps: int | None = None,
        tolerance: float | None = None,
        on_enough: Callable[[], None] | None = None,
        show: Callable[[Report], None] | None = None,
    ) -> None:
        if (loss_sum is None) != (count is None):
            raise MisuseError("give both loss_sum and count, or neither: one is divided by the other")
        if is_window_loss(loss_sum):
            problem = f"{type(loss_sum).__name__} compares the samples of a whole window"
            raise MisuseError(
                f"{problem}, and the micro-batches of a loop are run again one by one: audit another loss"
            )
        if windows < 1:
            raise MisuseError(f"windows={windows}: audit at least 1")
        self._own = OwnLoss() if loss_sum is None else None
        self._loss_sum = loss_sum or self._own
        self._count = count or (self._own.count if self._own else None)
        self._tolerance = tolerance
        self._chosen = optimizer is not None
        self._steps = accumulation_steps or 0
        self._show = show or _print
        self._done = False
        self._watch = Watch(
            model, optimizer, batches, windows=windows, on_enough=on_enough, before_shutdown=self._finish
        )
        self._report = Report(record=self._watch.pool.announce)

    def __enter__(self) -> Report:
        """Begins to record. The report is empty until the block ends."""
        self._watch.open()
        return self._report

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None or isinstance(error, SystemExit):
                self._finish()
        finally:
            self._watch.close()

    def _finish(self) -> None:
        """Gathers, judges and reports, once."""
        if self._done:
            return
        self._done = True
        world = gather.open_world_or_none()
        indices = gather.common_indices(gather.all_gather(world, [window.index for window in self._watch.windows]))
        if not indices:
            self._complain(world)
        records = [gather.gather_window(world, window) for window in self._watch.windows if window.index in indices]
        outcome: Report | DistaccumError | None = None
        if world is None or world.is_main:
            try:
                outcome = self._judged([record for record in records if record is not None])
            except DistaccumError as error:
                outcome = error
            except Exception as error:  # the other ranks wait for an answer
                outcome = MisuseError(
                    f"the global batch's gradient cannot be computed: {type(error).__name__}: {error}"
                )
        outcome = gather.all_gather(world, outcome)[0]
        if isinstance(outcome, DistaccumError):
            raise outcome
        assert outcome is not None
        self._report.findings, self._report.notes = outcome.findings, outcome.notes
        self._report.ranks = 1 if world is None else world.size
        if world is None or world.is_main:
            self._show(self._report)

    def _judged(self, records: list[Any]) -> Report:
        model = self._watch.model
        assert model is not None
        assert self._loss_sum is not None
        assert self._count is not None
        if self._own is not None:
            self._own.learn(model)
        reference = Reference(model, records[0].weights, self._watch.training, self._loss_sum, self._count)
        names = sorted(records[0].gradients(0))
        judge = Judge(reference, names, self._tolerance, self._steps)
        findings: tuple[Finding, ...] = tuple(map(judge.judge, records))
        sources = sorted({source for record in records for rank in record.ranks for source in rank.sources})
        notes = [f"the batches are {' and '.join(sources)}"] if sources else []
        if self._own is not None:
            notes.append("the loss is the model's own: its mean times the labels that are not -100" + self._own.shift)
        if str(reference.dtype) != "torch.float64":
            notes.append("computed in fp32: the model makes fp32 tensors by itself")
        left_out = [name for name, p in reference.shapes().items() if p.requires_grad and name not in names]
        if left_out and not self._chosen:
            notes.append(f"no optimizer steps on {shorten(left_out)}, which need a gradient")
        if self._watch.without_dropout:
            notes.append(
                f"dropout was off in {len(self._watch.without_dropout)} modules during the audit, on both sides"
            )
        return Report(findings, tuple(notes))

    def _complain(self, world: World | None) -> None:
        seen = gather.all_gather(world, (self._watch.model is not None, len(self._watch.windows)))
        without_model = [rank for rank, (found, _) in enumerate(seen) if not found]
        if without_model:
            problem = f"no training forward was seen on ranks {without_model}"
            raise MisuseError(f"{problem}: the loop has to run inside of the block, with gradients enabled")
        raise MisuseError(
            f"the windows seen by rank are {[windows for _, windows in seen]}: every rank has to step an optimizer "
            "over the model's parameters in the block; give the wrapped model (DeepSpeed's engine) as model"
        )


def _print(report: Report) -> None:
    print(report, flush=True)  # noqa: T201  the report is what an audit is for
