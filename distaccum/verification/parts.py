"""May a micro-batch be cut? Samples apart must give the gradient that they give together, and each time the same.

Asked once, before the first micro-step is finished in parts. The model is as it trains, and random numbers are
constants: what is left out at random would differ from one forward to the next. Where it draws any, the same is asked
once more with them: whether parts can have the numbers that their samples have in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distaccum.data.batches import to_device
from distaccum.distributed.memory import is_out_of_memory
from distaccum.distributed.random import KeyedRandom, OtherGenerators
from distaccum.distributed.sliced_random import (
    DROPOUT,
    CannotSliceError,
    Drawn,
    Rows,
    Slice,
    SlicedRandom,
    by_name,
    draws,
    is_fill,
    slices_of,
)
from distaccum.engines.base import Engine
from distaccum.engines.buffers import Buffers, state_restored
from distaccum.engines.compiled import compiled_parts, uncompiled
from distaccum.engines.modules import trained
from distaccum.losses.base import Loss
from distaccum.losses.normalize import as_loss_sums
from distaccum.verification.additivity import in_16_bits

MOST = 8  # samples
_ROUNDING, _ROUNDING_16 = 2e-5, 3e-2  # of a parameter's gradient, for the same samples in another shape
_NOISE = 2e-6  # of the whole gradient: what is nothing but rounding in a parameter whose gradient cancels out
_OWN = "its forward draws from a generator of its own"
_FOREIGN = "its forward writes to tensors that are not the model's: its own input, or another model's buffers"
_KEY = 1  # of the random numbers of a look


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a look at some samples has found."""

    differs: str = ""
    """In words, why parts do not add up to the whole; empty where they do."""
    changes: bool = False
    """Whether a forward changes buffers."""
    again: str = ""
    """In words, why the same forward cannot be had again; empty where it can."""
    draws_elsewhere: bool = False
    """Whether forwards draw from Python's or NumPy's generators."""
    slices: tuple[Slice, ...] | None = ()
    """How what a forward draws of torch's generators is cut for its parts: nothing, if it draws nothing; None where
    parts cannot have the numbers of the whole."""


def parts_to_look_at(rows: int) -> list[tuple[int, int]]:
    """A half, a quarter and so on of the first rows, eight at most: from each first one to before the second."""
    found, start, stop = [], 0, min(rows, MOST)
    while stop - start > 1:
        middle = start + (stop - start) // 2
        found.append((start, middle))
        start = middle
    return [*found, (start, stop)]


def rounding_of(engine: Engine) -> float:
    """What the same samples may differ by in another shape, relative to the largest part."""
    return _ROUNDING_16 if in_16_bits(engine) else _ROUNDING


def look_at_rows(
    engine: Engine,
    loss: Loss,
    part: Callable[[int, int], Any],
    rows: int,
    *,
    apart: bool = True,
    anywhere: Callable[[Sequence[bool]], Sequence[int]] = list,
) -> Parts:
    """Looks at the first rows of a micro-batch, eight at most; at fewer, down to two, if memory runs out.

    Args:
        engine: of the model.
        loss: of a micro-batch.
        part: gives the rows of the micro-batch from the first number to before the second, on the host.
        rows: of the micro-batch.
        apart: whether parts are compared with the whole; else it with itself.
        anywhere: which of these hold on any rank; where a forward is a collective, the ranks look together.
    """
    spans = parts_to_look_at(rows)
    most = spans[-1][1]
    if not apart:
        spans = [(0, most - 1)] if rows > 2 else []  # noqa: PLR2004  other samples than the whole's, in between
    elif rows == 1:
        spans = []
    try:
        parts = [(Rows(*span, most), part(*span)) for span in spans]
        return look_at_parts(engine, loss, part(0, most), parts, compare=apart, anywhere=anywhere)
    except Exception as error:
        if engine.forward_communicates or rows <= 2 or not is_out_of_memory(error):  # noqa: PLR2004
            raise
    return look_at_rows(engine, loss, part, min(rows, MOST) // 2, apart=apart, anywhere=anywhere)


def look_at_parts(
    engine: Engine,
    loss: Loss,
    whole: Any,
    parts: Sequence[tuple[Rows, Any]],
    *,
    compare: bool = True,
    anywhere: Callable[[Sequence[bool]], Sequence[int]] = list,
) -> Parts:
    """Compares a small micro-batch with its parts, and with itself; reads the device. No gradient is accumulated.

    The whole comes once more at the end: what a forward carries over to the next one is another part's by then.
    Where a forward is a collective the losses alone are compared, and every rank has to call this with as many parts.
    """
    look = _Look(engine, loss)
    with ExitStack() as around:
        around.enter_context(state_restored(engine))
        around.enter_context(uncompiled(engine.unwrapped_model))
        around.enter_context(torch.set_grad_enabled(bool(look.weights)))
        look.begin()
        with look.constants:
            together = look.measure(whole)
            elsewhere, changes = look.others.have_drawn(), bool(look.before.changed())
            unknown = not together.drawn and KeyedRandom.has_drawn(_KEY, engine.device)
            apart = [look.again(batch) for _, batch in parts]
            once_more = look.again(whole).loss
        said = look.constants.said
        if not said and not abs(once_more - together.loss) <= 1e-6 * max(abs(once_more), abs(together.loss)):
            said = f"the loss of the same samples is {together.loss:.6g}, and {once_more:.6g} once more"
        differs = look.compare(together, apart) if parts and compare and not said else ""
        # Of operators that do not say that they draw nobody knows anything.
        slices = None if said or differs or unknown else look.slices(together, parts if compare else (), apart)
        none, some = anywhere([slices is None, bool(slices)])
        if none:
            slices = None if slices else slices
        elif some and not look.holds(whole, parts, slices or ()):
            slices = None
    return Parts(differs=differs, changes=changes, again=said, draws_elsewhere=elsewhere, slices=slices)


@dataclass(frozen=True)
class _Measured:
    """One forward and backward."""

    loss: float
    gradients: Sequence[Tensor | None]
    drawn: Sequence[Drawn]
    """In the forward, while random numbers are constants."""


class _Look:
    """Runs forwards and backwards that begin alike, and accumulate nothing."""

    def __init__(self, engine: Engine, loss: Loss) -> None:
        self._engine, self._loss = engine, loss
        self._model = engine.unwrapped_model
        self.weights = {} if engine.forward_communicates else trained(self._model)
        self.constants = _Constants(None if engine.forward_communicates else self._model)
        self._random = KeyedRandom(engine.device)

    def begin(self) -> None:
        """Notes what each forward begins with."""
        self.others, self.before = OtherGenerators(), Buffers(self._engine)
        self._random.again(_KEY)

    def again(self, batch: Any) -> _Measured:
        """As :meth:`measure`, from the same beginning."""
        self.others.restore()
        self.before.restore()
        self._random.again(_KEY)
        return self.measure(batch)

    def measure(self, batch: Any) -> _Measured:
        """The loss of a batch on the host, and its gradient."""
        drawn: list[Drawn] = []
        self.constants.drawn = drawn
        with self._engine.autocast():
            sums = as_loss_sums(self._loss(self._model, to_device(batch, self._engine.device)))
        self.constants.drawn = []
        total = torch.stack([part.float().reshape(()) for part in sums.values()]).sum()
        weights = list(self.weights.values())
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if weights and total.requires_grad:
            gradients = torch.autograd.grad(total, weights, allow_unused=True)
        return _Measured(float(total.detach()), gradients, drawn)

    def compare(self, whole: _Measured, apart: Sequence[_Measured]) -> str:
        """In words, what of the whole is not the sum of its parts'; empty where all is."""
        rounding = rounding_of(self._engine)
        said = losses_differ(whole.loss, [one.loss for one in apart], rounding)
        return said or _gradients(self.weights, whole.gradients, [one.gradients for one in apart], rounding)

    def slices(
        self, whole: _Measured, parts: Sequence[tuple[Rows, Any]], apart: Sequence[_Measured]
    ) -> tuple[Slice, ...] | None:
        """How what forwards draw is cut, by the shapes; None where these do not say."""
        if not whole.drawn:
            return ()
        if not parts or self._engine.compiled is not None or compiled_parts(self._model):
            return None  # compiled code draws numbers of its own
        sizes = [rows.stop - rows.start for rows, _ in parts]
        try:
            fewer = [(one.drawn, size) for one, size in zip(apart, sizes, strict=True)]
            return slices_of(whole.drawn, parts[0][0].of, fewer)
        except CannotSliceError:
            return None

    def holds(self, whole: Any, parts: Sequence[tuple[Rows, Any]], slices: Sequence[Slice]) -> bool:
        """Whether parts whose random numbers are cut so add up to the whole."""
        together, apart, lost = self.again(whole), [], ""
        for rows, batch in parts:
            with SlicedRandom(rows, slices, strict=False) as cut:
                apart.append(self.again(batch))
            lost = lost or cut.lost
        return not (lost or self.compare(together, apart))


def losses_differ(whole: float, apart: Sequence[float], rounding: float) -> str:
    """In words, the loss of a micro-batch and that of its parts; empty where it is their sum."""
    if abs(sum(apart) - whole) <= rounding * max(abs(whole), *map(abs, apart)):
        return ""
    return f"its loss is no sum over samples: {whole:.6g} together and {sum(apart):.6g} apart"


def _gradients(
    weights: Mapping[str, Tensor],
    whole: Sequence[Tensor | None],
    apart: Sequence[Sequence[Tensor | None]],
    rounding: float,
) -> str:
    """In words, the parameter whose gradient is not the sum of its parts'; empty where there is none."""
    off, size = dict[str, float](), dict[str, float]()
    for name, together, *single in zip(weights, whole, *apart, strict=True):
        given = [gradient.float() for gradient in (together, *single) if gradient is not None]
        if given:
            sums = torch.zeros_like(given[0]) if together is None else together.float()
            for gradient in single:
                sums = sums if gradient is None else sums - gradient.float()
            off[name], size[name] = float(sums.norm()), sum(float(gradient.norm()) for gradient in given)
    noise = (_NOISE if rounding == _ROUNDING else _NOISE * _ROUNDING_16 / _ROUNDING) * math.hypot(*size.values())
    worst = max(off, key=lambda name: off[name] - rounding * size[name], default="")
    if not worst or off[worst] <= rounding * size[worst] + noise:
        return ""
    return f"the gradient of {worst} is no sum over samples: off by {off[worst] / size[worst]:.2g} of it"


class _Constants(TorchDispatchMode):
    """Random operators give constants, and nothing is left out: every sample is treated alike, in any company.

    Args:
        model: whose buffers a forward may write to; None: nobody looks at what is written to.
    """

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Drawn] = []
        """What operators have drawn."""
        self.said = ""
        """Why the same forward cannot be had again; empty where nothing was seen."""
        self._looks = model is not None
        self._known = set[int]() if model is None else {_place(buffer) for buffer in model.buffers()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator; notes what it writes to that was there before."""
        if self._looks:
            for tensor in _written(function, args, kwargs or {}):
                if _place(tensor) not in self._known:
                    self.said = _FOREIGN
        found = self._run(function, args, dict(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if self._looks and isinstance(tensor, Tensor):
                self._known.add(_place(tensor))
        return found

    def _run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = by_name(function, args, kwargs)
        if not draws(function, given):
            return function(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self.said = _OWN
        names = [argument.name for argument in function._schema.arguments]
        leaves_out = any(name in DROPOUT for name in names) and not is_fill(function)
        if leaves_out:
            args = [0.0 if name in DROPOUT else value for name, value in zip(names, args)]  # noqa: B905  the rest are keywords
            kwargs |= {name: 0.0 for name in kwargs if name in DROPOUT}
        found = function(*args, **kwargs)
        self.drawn.append(Drawn.by(function, found))
        if not leaves_out and isinstance(found, Tensor):
            _fill(found, function._schema.name)
        return found


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to; a batch norm's schema does not say so of its statistics."""
    schema = getattr(function, "_schema", None)
    if schema is None:  # no operator
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    trains = given.get("training", given.get("train"))
    if "batch_norm" in schema.name and "backward" not in schema.name and trains:
        names += ["running_mean", "running_var"]
    values = [given.get(name) for name in names]
    return [value for value in values if isinstance(value, Tensor) and value.numel()]


def _fill(drawn: Tensor, name: str) -> None:
    if "randperm" in name:
        drawn.copy_(torch.arange(drawn.numel(), device=drawn.device))
    elif drawn.is_floating_point():
        drawn.fill_(1.0 if "bernoulli" in name else 0.5)
    else:
        drawn.zero_()
