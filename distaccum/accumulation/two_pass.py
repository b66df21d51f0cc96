"""Losses that compare the samples of a window: all are represented first, and each micro-batch goes back from its own.

The first pass represents every micro-batch without gradients. The loss is computed once on the representations of all
ranks, and so is its gradient with respect to these. In the second pass each micro-batch is represented again, with the
same random numbers and buffers, and its loss is the product of its representations with their gradients: a sum over
micro-batches, whose gradient is that of the window's loss. So the second pass is a window like any other.

Source: L. Gao, Y. Zhang, J. Han, J. Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
(2021), where random numbers are kept as here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.accumulation.step import Outcome
from distaccum.data.batches import map_tensors, to_device
from distaccum.data.prefetch import on_device
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.distributed.memory import is_out_of_memory, out_of_memory
from distaccum.distributed.random import KeyedRandom, OtherGenerators, RNGState, keys_of
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.buffers import Buffers
from distaccum.engines.ownership import leaves_of
from distaccum.errors import MisuseError, PeerError, ResourceError, VerificationError
from distaccum.losses.base import AnyLoss, Loss, WindowLoss, is_window_loss
from distaccum.losses.normalize import SINGLE, Counts, LossSum, as_counts, as_loss_sums, logged_sums, normalize_loss
from distaccum.verification.additivity import in_16_bits

# What all ranks have represented of their batches, put together in one order on every rank.

_SIXTEEN = (torch.float16, torch.bfloat16)
_RETURN = "represent(model, batch) is to return a tensor, or tensors in dicts, lists and tuples"


def tensors_of(representation: Any) -> list[Tensor]:
    """The tensors of one batch's representation, in order.

    Raises:
        MisuseError: something in it is no tensor, has no leading dimension, or is complex.
    """
    found: list[Tensor] = []

    def add(tensor: Tensor) -> None:
        if tensor.ndim == 0:
            raise MisuseError(f"{_RETURN} with a leading dimension, and one has none: use tensor.reshape(1)")
        if tensor.is_complex():
            raise MisuseError(f"{_RETURN}, and one is complex: use torch.view_as_real(tensor)")
        found.append(tensor)

    map_tensors(representation, add, _refuse)
    if not found:
        raise MisuseError(f"{_RETURN}, and there is none in what it returns")
    return found


def _refuse(value: Any) -> None:
    raise MisuseError(f"{_RETURN}, and it returns a {type(value).__name__}")


def wide(tensor: Tensor) -> Tensor:
    """In fp32 where it is in 16 bits, which are too few for what a loss computes of it."""
    return tensor.float() if tensor.dtype in _SIXTEEN else tensor


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What a rank tells the others beforehand."""

    problem: str = ""
    """Why it has no representations: an error, in words."""
    key: int | None = None
    rows: Sequence[Sequence[int]] = ()
    """Of each of its batches, for each tensor: the leading dimension."""
    form: Any = None
    """A batch's representation with tensors of no rows, on the host; None where it has no batch."""


@dataclass(frozen=True)
class Representations:
    """Of all ranks' batches, the same on every rank.

    ``tensors`` are one after the other along the leading dimension, and in fp32 where they were in 16 bits.
    ``spans``: where those of this rank's batches lie, from the first row to before the last, for each batch and tensor.
    ``key``: of the first batch in the order, if it has one.
    """

    tensors: Sequence[Tensor]
    spans: Sequence[Sequence[tuple[int, int]]]
    key: int | None
    _form: Any = field(repr=False)

    def like(self, tensors: Sequence[Tensor]) -> Any:
        """``tensors`` in the containers that ``represent`` returns."""
        left = iter(tensors)
        return map_tensors(self._form, lambda _: next(left))


def gather(
    world: World, parts: Sequence[Any], *, error: Exception | None = None, key: int | None = None, dealt: bool = False
) -> Representations:
    """Puts the representations of all ranks' batches together; a collective, of which a small one runs on the host.

    Args:
        world: this rank.
        parts: what was represented of each of this rank's batches; ranks may have different numbers of them, or none.
        error: what has kept this rank from it: it is raised, and the other ranks raise that it was.
        key: of the first batch.
        dealt: whether batches were dealt to the ranks in turn, one each; otherwise rank after rank has its own.

    Raises:
        PeerError: another rank has an error.
        MisuseError: a representation cannot be put together with others.
    """
    told, mine = _Told(), list[list[Tensor]]()
    try:
        if error is None:
            mine = [tensors_of(part) for part in parts]
            told = _Told(
                key=key,
                rows=[[len(tensor) for tensor in tensors] for tensors in mine],
                form=map_tensors(parts[0], lambda tensor: tensor[:0].cpu()) if parts else None,
            )
            _expect_alike([map_tensors(part, lambda tensor: tensor[:0]) for part in parts])
    except MisuseError as problem:
        error = problem
    if error is not None:
        told = _Told(problem=f"rank {world.rank}: {type(error).__name__}: {error}")
    everyone: list[_Told] = world.all_gather_object(told)
    if error is not None:
        raise error
    problems = [each.problem for each in everyone if each.problem]
    if problems:
        raise PeerError(problems[0], "in the first pass of a window's representations")
    forms = [each.form for each in everyone if each.rows]
    if not forms:
        raise MisuseError("no rank has a batch to represent")
    _expect_alike(forms)
    order = [(rank, i) for rank, each in enumerate(everyone) for i in range(len(each.rows))]
    if dealt:
        order.sort(key=lambda place: (place[1], place[0]))
    return Representations(*_put_together(world, mine, everyone, order, tensors_of(forms[0])), _form=forms[0])


def _put_together(
    world: World,
    mine: Sequence[Sequence[Tensor]],
    everyone: Sequence[_Told],
    order: Sequence[tuple[int, int]],
    form: Sequence[Tensor],
) -> tuple[list[Tensor], list[list[tuple[int, int]]], int | None]:
    tensors: list[Tensor] = []
    spans: list[list[tuple[int, int]]] = [[] for _ in mine]
    for k, empty in enumerate(form):
        own = torch.cat([each[k] for each in mine]) if mine else empty.to(world.device)
        rows = [[sizes[k] for sizes in each.rows] for each in everyone]
        gathered = world.all_gather_rows(own.detach().contiguous(), list(map(sum, rows)))
        pieces = [torch.split(each, sizes) for each, sizes in zip(gathered, rows, strict=True)]
        tensors.append(wide(torch.cat([pieces[rank][i] for rank, i in order])))
        ends = list(accumulate(rows[rank][i] for rank, i in order))
        for (rank, i), end in zip(order, ends, strict=True):
            if rank == world.rank:
                spans[i].append((end - rows[rank][i], end))
    return tensors, spans, everyone[order[0][0]].key


def _expect_alike(forms: Sequence[Any]) -> None:
    """Raises MisuseError where representations differ in more than their leading dimensions."""
    shown = [str(map_tensors(form, lambda tensor: f"{tensor.dtype} {list(tensor.shape[1:])}")) for form in forms]
    other = next((one for one in shown if one != shown[0]), None)
    if other is not None:
        problem = f"represent(model, batch) returns {shown[0]} for one batch and {other} for another"
        raise MisuseError(f"{problem}: they may differ in the leading dimension alone, as what they are joined along")


_log = logging.getLogger(__name__)
_OTHER, _OTHER_16 = 1e-4, 3e-2  # of a representation: what a forward without gradients may round otherwise
_SAME = 1e-3  # of a gradient


@dataclass(frozen=True)
class _Part:
    """A micro-batch after the first pass."""

    state: RNGState  # that its forward began with
    gradients: Mapping[str, Sequence[Tensor | None]]  # by loss, of each tensor; None where it does not depend on it
    represented: Sequence[Tensor]  # kept where the second pass is compared with the first; else empty


class SecondPass:
    """An ordinary loss, whose gradient over the micro-batches of a window is that of a :class:`WindowLoss`.

    It is called with the micro-batches in order.

    Args:
        loss: of the window.
        parts: this rank's micro-batches.
        sums: the window's losses by name, this rank's shares.
        logged: what the loss logs of the window, on this rank.
        tolerance: of the comparison of both passes.
    """

    def __init__(
        self,
        loss: WindowLoss,
        parts: Sequence[_Part],
        sums: Mapping[str, Tensor],
        logged: Sequence[Mapping[str, Tensor]],
        tolerance: float,
    ) -> None:
        self.sums, self._logged = sums, logged
        self.fault = ""
        """In words, what differed between the passes, if they were compared; empty if nothing did."""
        self._represent, self.count = loss.represent, loss.count
        self._parts, self._tolerance = parts, tolerance
        self._next = 0

    def begin(self, i: int) -> None:
        """The next call is for the ``i``-th micro-batch."""
        self._next = i

    def outcome(self, outcome: Outcome) -> Outcome:
        """The outcome of the second pass, with the losses of the window: they are of no unit."""
        sums = {**outcome.loss_sums, **self.sums}
        return replace(outcome, loss_sums=sums, logged=self._logged, assignment=None, by_unit=None)

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The products of the batch's representations with their gradients, summed; by loss."""
        i, self._next = self._next, self._next + 1
        if i >= len(self._parts):  # of a rank that runs another's micro-batch, as its forward is a collective
            found = tensors_of(self._represent(model, batch))
            return {name: torch.zeros((), device=found[0].device) for name in self.sums}
        part = self._parts[i]
        part.state.restore()
        found = [wide(tensor) for tensor in tensors_of(self._represent(model, batch))]
        self._compare(i, part, found)
        return {name: _product(found, gradients) for name, gradients in part.gradients.items()}

    def _compare(self, i: int, part: _Part, found: Sequence[Tensor]) -> None:
        """Whether the second pass represents what the first did: its shape, and where that was kept its numbers."""
        (gradients,) = list(part.gradients.values())[:1]
        for tensor, gradient in zip(found, gradients, strict=False):
            if gradient is not None and tensor.shape != gradient.shape:
                shapes = f"{list(gradient.shape)} in the first pass and {list(tensor.shape)} in the second"
                raise MisuseError(f"represent(model, batch) gives another shape a second time: {shapes}")
        for first, second in zip(part.represented, found, strict=False):
            known = first.double()
            size, off = (float(torch.linalg.vector_norm(each)) for each in (known, second.detach().double() - known))
            if off > self._tolerance * size and not self.fault:
                self.fault = (
                    f"micro-batch {i} of a rank is represented otherwise a second time (off by "
                    f"{off / (size or 1.0):.1%}), so the gradient would not be the window's: represent(model, batch) "
                    "may depend on the model, the batch and random numbers of torch, NumPy and Python alone, not on "
                    "what was called before"
                )


def _product(found: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    total = torch.zeros((), device=found[0].device)
    for tensor, gradient in zip(found, gradients, strict=True):
        if gradient is not None:
            total = total + (tensor * gradient).sum()
    return total


def represented(engine: Engine, window: Window, loss: WindowLoss, *, prefetch: int, compared: bool) -> SecondPass:
    """Represents the window, and computes its loss and the gradient with respect to the representations; a collective.

    Args:
        engine: whose model it is; its window has not begun.
        window: its counts must be known.
        loss: of the whole window.
        prefetch: micro-batches on the device at once, the one being computed included.
        compared: whether the second pass is compared with this one, and the loss looked at for being a sum; both read
            the device.

    Raises:
        MisuseError: what the loss gives is no sum, or it depends on learned numbers past the representations.
        VerificationError: it gives a mean.
        PeerError: another rank has an error.
        ResourceError: memory is over.
    """
    world = engine.world
    error: Exception | None = None
    parts: list[Any] = []
    states: list[RNGState] = []
    if not engine.facts.forward_communicates:
        engine.begin_window(len(window.micro_batches))  # where a layer communicates: do all ranks have as many?
    before = Buffers(engine)
    try:
        with torch.no_grad(), _together(engine):
            parts, states = _represent(engine, window, loss, prefetch)
    except Exception as problem:
        over = is_out_of_memory(problem)
        if engine.facts.forward_communicates and not over:  # the others wait in it, and cannot be told
            raise
        error = out_of_memory(problem, world) if over else problem.with_traceback(None)
        if engine.facts.forward_communicates:
            raise error from problem
    before.restore()
    key = window.keys[0] if window.keys else None
    together = gather(world, parts, error=error, key=key)
    engine.activity.phase = Phase.FORWARD
    sums: dict[str, Tensor] = {}
    logged: dict[str, Tensor] = {}
    gradients: dict[str, list[Tensor | None]] = {}
    try:
        sums, logged, gradients = _compare(engine, window, loss, together)
        if compared:
            _expect_sums(engine, window, loss, together, gradients)
    except Exception as problem:
        error = _too_large(problem, together) if is_out_of_memory(problem) else problem
    if world.all_reduce_max_host([error is not None])[0]:
        raise error or PeerError("the loss of a window's representations has failed on another rank", "its second pass")
    tolerance = _OTHER_16 if in_16_bits(engine) else _OTHER
    own = [
        _Part(
            state,
            {name: _rows(tensors, spans) for name, tensors in gradients.items()},
            [each for each in _rows(together.tensors, spans) if each is not None] if compared else (),
        )
        for state, spans in zip(states, together.spans, strict=True)
    ]
    # Rank 0 has the whole of it: the shares are summed, and the sum does not depend on the number of ranks.
    shares = {name: total if world.is_main else torch.zeros_like(total) for name, total in sums.items()}
    return SecondPass(loss, own, shares, [logged] if world.is_main else [], tolerance)


def _rows(tensors: Sequence[Tensor | None], spans: Sequence[tuple[int, int]]) -> list[Tensor | None]:
    """Copies, so that what other ranks need is freed."""
    return [None if t is None else t[start:stop].clone() for t, (start, stop) in zip(tensors, spans, strict=True)]


def _represent(engine: Engine, window: Window, loss: WindowLoss, prefetch: int) -> tuple[list[Any], list[RNGState]]:
    """This rank's micro-batches, and the random numbers that each began with."""
    parts: list[Any] = []
    states: list[RNGState] = []
    random, activity = engine.facts.numerics.random(engine.device), engine.activity
    idle = _idle_steps(engine, window) if engine.facts.forward_communicates else ()
    batches = on_device((micro.batch for micro in window.micro_batches), engine.device, prefetch)
    for i, batch in enumerate(batches):
        activity.phase, activity.done = Phase.FORWARD, i
        with random.keyed(window.keys, i):
            states.append(RNGState.capture(engine.device))
            with engine.autocast():
                parts.append(loss.represent(engine.model, batch))
    state = RNGState.capture(engine.device)
    for batch in idle:
        with engine.autocast():
            loss.represent(engine.model, to_device(batch, engine.device))
    state.restore()
    return parts, states


@contextmanager
def _together(engine: Engine) -> Iterator[None]:
    """Forwards in the block do not ask whether the other ranks are there: they are, with as many."""
    meet, engine.meet = engine.meet, None
    try:
        yield
    finally:
        engine.meet = meet


def _idle_steps(engine: Engine, window: Window) -> Sequence[Any]:
    """What a rank runs for nothing while others, with more micro-batches, are in a forward; a collective."""
    world, own = engine.world, window.micro_batches
    most, fewest = world.all_reduce_max_host([len(own), -len(own)])
    batch = own[0].batch if own else None
    if not fewest:  # who has none runs another rank's
        given = world.all_gather_object(None if batch is None else map_tensors(batch, Tensor.cpu))
        batch = batch if own else next(one for one in given if one is not None)
    return [batch] * (most - len(own))


def _compare(
    engine: Engine, window: Window, loss: WindowLoss, together: Representations
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, list[Tensor | None]]]:
    """The window's losses, what is logged beside, and each loss's gradient by tensor; the same on every rank."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in together.tensors]
    others = OtherGenerators()
    given = _called(engine, window, loss, together.like(leaves), together.key)
    sums, logged = as_loss_sums(given), logged_sums(given, engine.device)
    total = normalize_loss(sums, window.counts, 1)
    if others.have_drawn():
        problem = f"{type(loss).__name__} draws from NumPy's or Python's generators, which differ between ranks"
        raise MisuseError(f"{problem}: draw from torch's, which are the same on all of them")
    known = set(map(id, leaves))
    if foreign := [leaf for leaf in leaves_of(total) if id(leaf) not in known]:
        problem = f"{type(loss).__name__} depends on a learned tensor of shape {list(foreign[0].shape)}"
        raise MisuseError(
            f"{problem} past its representations, which would get no gradient: make it a part of the model, and use it "
            "in represent(model, batch), as in a temperature that multiplies the representations"
        )
    gradients = {name: _gradients(part, leaves) for name, part in sums.items()}
    return {name: part.detach() for name, part in sums.items()}, logged, gradients


def _called(engine: Engine, window: Window, loss: WindowLoss, representations: Any, key: int | None) -> LossSum:
    """The losses. What is drawn depends on the window alone, as in a micro-step: the same on every rank."""
    keys = keys_of([0], "comparison", window.samples if key is None else key, window.epoch)
    with torch.enable_grad(), KeyedRandom(engine.device).keyed(keys, 0):
        return loss(representations)


def _gradients(part: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """With respect to each; None for those that it does not depend on."""
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    wanted = part.requires_grad and learned
    found = iter(torch.autograd.grad(part, learned, retain_graph=True, allow_unused=True) if wanted else ())
    return [next(found, None) if leaf.requires_grad else None for leaf in leaves]


def _expect_sums(
    engine: Engine,
    window: Window,
    loss: WindowLoss,
    together: Representations,
    gradients: Mapping[str, Sequence[Tensor | None]],
) -> None:
    """Gives the loss everything twice: the gradient of a sum is then twice as large, and that of a mean the same.

    Raises:
        VerificationError: it is the same, and would be divided by the count once more.
    """
    leaves = [torch.cat([t, t]).requires_grad_(t.is_floating_point()) for t in together.tensors]
    try:
        sums = as_loss_sums(_called(engine, window, loss, together.like(leaves), together.key))
        doubled = {name: _gradients(part, leaves) for name, part in sums.items()}
    except Exception as problem:  # the user's code, on twice as much as it was made for
        _log.info("the loss was not checked for being a sum: %s: %s", type(problem).__name__, problem)
        return
    for name, once in gradients.items():
        size = off = 0.0
        for own, both in zip(once, doubled.get(name, ()), strict=False):
            if own is not None and both is not None:
                first, second = both.double().tensor_split(2)
                size += float(own.double().square().sum())
                off += float((first + second - own).square().sum())
        if size and off <= _SAME**2 * size and window.counts[name] > 1:
            of = "" if name == SINGLE else f" {name!r}"
            raise VerificationError(
                f"the loss{of} has the same gradient for a window and for all of it twice: it is a mean over the "
                f"window, and would be divided by its count ({window.counts[name]:g}) a second time. Return the sum: "
                'reduction="sum" in the loss function, or the mean times what it is over'
            )


def _too_large(problem: Exception, together: Representations) -> ResourceError:
    said = (str(problem).splitlines() or [type(problem).__name__])[0]
    shapes = ", ".join(str(list(tensor.shape)) for tensor in together.tensors)
    return ResourceError(
        f"out of memory in the loss of a window's representations of shape {shapes}: {said}. Lower batch.global_size, "
        "or compute the loss in parts that are computed again in its backward (torch.utils.checkpoint)"
    )


class StandIn:
    """An ordinary loss whose micro-step takes what one of the second pass does: to measure memory, time and operations.

    Args:
        loss: of a window.
        names: of its counts, until one is counted.
    """

    def __init__(self, loss: WindowLoss, names: Iterable[str] = (SINGLE,)) -> None:
        self._loss, self._names = loss, list(names)

    def count(self, batch: Any) -> float | Counts:
        """The loss's own."""
        counts = self._loss.count(batch)
        self._names = list(as_counts(counts))
        return counts

    def __call__(self, model: nn.Module, batch: Any) -> LossSum:
        """The sum of the representations, as the first of the losses that were counted last."""
        found = tensors_of(self._loss.represent(model, batch))
        total = torch.stack([wide(tensor).sum() for tensor in found if tensor.is_floating_point()]).sum()
        return {name: total if name == self._names[0] else torch.zeros_like(total) for name in self._names}


def of_micro_batch(loss: AnyLoss, names: Iterable[str] = (SINGLE,)) -> Loss:
    """What a micro-step runs, to measure it: the loss itself, or its stand-in."""
    return StandIn(loss, names) if is_window_loss(loss) else loss
