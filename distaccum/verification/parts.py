"""May a micro-batch be cut? Samples apart must give the gradient that they give together.

Two samples are looked at before a window begins again with smaller micro-batches. The model is as it trains, and random
numbers are constants: what is left out at random would differ from one forward to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from distaccum.data.batches import to_device
from distaccum.distributed.random import KeyedRandom, OtherGenerators
from distaccum.engines.base import Engine
from distaccum.engines.buffers import Buffers, state_restored
from distaccum.engines.compiled import BesideCompiled, uncompiled
from distaccum.engines.modules import trained
from distaccum.engines.ownership import is_owned, leaves_of
from distaccum.losses.base import Loss
from distaccum.losses.normalize import as_loss_sums
from distaccum.precision.selection import SIXTEEN_BIT
from distaccum.verification.additivity import in_16_bits

_ROUNDING, _ROUNDING_16 = 2e-5, 3e-2  # of a parameter's gradient, for the same samples in another shape
_NOISE = 2e-6  # of the whole gradient: what is nothing but rounding in a parameter whose gradient cancels out
_REPEATS = 1e-6  # of a loss, for the same samples once more
_DROPOUT = ("p", "dropout_p", "dropout")  # arguments of operators that draw if they are not 0
_KEYS = (1,)  # of the random numbers of a look
_STRANGE = "its loss reaches learned tensors outside of the model, and nobody knows which have their gradient"


def why_not_cut(engine: Engine, loss: Loss, rows: Callable[[int, int], Any], before: Iterable[Any] = ()) -> str:
    """In words, why a micro-batch may not be cut; empty where it may. Reads the device; accumulates no gradient.

    Where a forward is a collective the losses alone are compared, and every rank has to call this.

    Args:
        engine: of the model.
        loss: of a micro-batch.
        rows: gives the rows of a micro-batch of two at least, from the first number to before the second, on the host.
        before: the window's micro-batches that have been run, on the host: what they have added to a learned tensor
            outside of the model is not undone where the window begins again.
    """
    look = _Look(engine, loss)
    try:
        with state_restored(engine, loss), uncompiled, torch.set_grad_enabled(bool(look.weights)), look.constants:
            return look.compare(rows) or look.reached(before)
    except Exception as error:
        if engine.facts.forward_communicates:
            raise
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return f"nobody can tell whether its gradient is a sum over samples, some of which end in {said}"


class _Look:
    """Runs forwards and backwards that begin alike, and accumulate nothing."""

    def __init__(self, engine: Engine, loss: Loss) -> None:
        self._engine, self._loss = engine, loss
        self.weights: dict[str, Any] = {} if engine.facts.forward_communicates else trained(engine.unwrapped_model)
        self.constants = _Constants()
        self._random, self._others = KeyedRandom(engine.device), OtherGenerators()
        self._buffers = Buffers(engine)
        self._strange = False  # whether a loss reached learned tensors that are not the model's
        self.losses: list[Mapping[str, float]] = []

    def compare(self, rows: Callable[[int, int], Any]) -> str:
        """The whole comes once more at the end: what a forward carries over to the next one is another part's then."""
        together, gradients = self._measure(rows(0, 2))
        moves = bool(self._buffers.changed())
        (first, of_first), (second, of_second) = self._measure(rows(0, 1)), self._measure(rows(1, 2))
        once_more, _ = self._measure(rows(0, 2))
        if self.constants.own:
            return "its forward draws from a generator of its own"
        if not abs(once_more - together) <= _REPEATS * max(abs(once_more), abs(together)):
            return f"the loss of the same samples is {together:.6g}, and {once_more:.6g} once more"
        if self._strange:
            return _STRANGE
        rounding = _ROUNDING_16 if in_16_bits(self._engine) else _ROUNDING
        if not abs(first + second - together) <= rounding * max(abs(together), abs(first), abs(second)):
            return f"its loss is no sum over samples: {together:.6g} together and {first + second:.6g} apart"
        sixteen = in_16_bits(self._engine)
        said = gradients_differ(self.weights, gradients, [of_first, of_second], sixteen=sixteen)
        return said or ("its forward changes buffers, and parts of it would change them once each" if moves else "")

    def reached(self, batches: Iterable[Any]) -> str:
        """In words, that the loss of one of these reaches learned tensors outside of the model; empty if none does."""
        for batch in batches if self.weights else ():
            with self._random.keyed(_KEYS, 0):
                self._total(batch)
            if self._strange:
                return _STRANGE
        return ""

    def _measure(self, batch: Any) -> tuple[float, Sequence[Tensor | None]]:
        """The loss of a batch on the host, and its gradient: of one forward and backward."""
        weights = list(self.weights.values())
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        with self._random.keyed(_KEYS, 0):
            total = self._total(batch)
            if weights and total.requires_grad:
                gradients = torch.autograd.grad(total, weights, allow_unused=True)
        return float(total.detach()), gradients

    def _total(self, batch: Any) -> Tensor:
        """The loss of a batch on the host; notes whether it reaches what is not the model's."""
        engine = self._engine
        self._others.restore()
        self._buffers.restore()
        with engine.autocast():
            sums = as_loss_sums(self._loss(engine.unwrapped_model, to_device(batch, engine.device)))
        self.losses.append({name: float(part.detach()) for name, part in sums.items()})
        total = torch.stack([part.float().reshape(()) for part in sums.values()]).sum()
        if self.weights and total.requires_grad:
            self._strange |= not all(is_owned(leaf) for leaf in leaves_of(total))
        return total


LOOKS = ContextVar("LOOKS", default=False)
"""Whether forwards of the model are looks at some samples, on which nothing trains: an audit leaves them out."""


@contextmanager
def _looking() -> Iterator[None]:
    token = LOOKS.set(True)
    try:
        yield
    finally:
        LOOKS.reset(token)


def gradient_of_parts(
    engine: Engine, loss: Any, apart: Sequence[Any], together: Any, weights: Mapping[str, Tensor] | None = None
) -> tuple[str, list[Mapping[str, float]]]:
    """In words, a gradient that is no sum over samples though the loss is one; empty where it is, or nobody can tell.

    Args:
        engine: of a model whose forwards are local.
        loss: of a micro-batch.
        apart, together: the same samples, on the host.
        weights: whole ones, that stand in the places of shards; none for the losses alone.

    Returns:
        the words; and the losses of the samples together and of each, unless they draw by a generator of their own.
    """
    look = _Look(engine, loss)
    look.weights = look.weights if weights is None else dict(weights)
    measured = list[tuple[float, Sequence[Tensor | None]]]()
    with uncompiled, look.constants, _looking():
        for batch in (together, *apart):
            with state_restored(engine, loss):  # each begins alike
                measured.append(look._measure(batch))
    (whole, gradient), *parts = measured
    sums, of_parts = sum(part for part, _ in parts), [gradients for _, gradients in parts]
    losses = [] if look.constants.own else look.losses
    sixteen = in_16_bits(engine) or look.constants.sixteen
    rounding = _ROUNDING_16 if sixteen else _ROUNDING
    if look.constants.own or not abs(whole - sums) <= rounding * max(abs(whole), abs(sums)):
        return "", losses
    return gradients_differ(look.weights, gradient, of_parts, sixteen=sixteen), losses


def gradients_differ(
    names: Iterable[str],
    whole: Sequence[Tensor | None],
    apart: Sequence[Sequence[Tensor | None]],
    *,
    sixteen: bool,
    what: str = "is no sum over samples",
    noise: float = _NOISE,
) -> str:
    """In words, the parameter whose gradient is not the sum of its parts'; empty where there is none."""
    rounding = _ROUNDING_16 if sixteen else _ROUNDING
    off, size = dict[str, float](), dict[str, float]()
    for name, together, *single in zip(names, whole, *apart, strict=True):
        given = [gradient.float() for gradient in (together, *single) if gradient is not None]
        if given:
            sums = torch.zeros_like(given[0]) if together is None else together.float()
            for gradient in single:
                sums = sums if gradient is None else sums - gradient.float()
            off[name], size[name] = float(sums.norm()), sum(float(gradient.norm()) for gradient in given)
    least = noise * (rounding / _ROUNDING if noise == _NOISE else 1.0) * math.hypot(*size.values())
    worst = max(off, key=lambda name: off[name] - rounding * size[name], default="")
    if not worst or off[worst] <= rounding * size[worst] + least:
        return ""
    return f"the gradient of {worst} {what}: off by {off[worst] / size[worst]:.2g} of it"


class _Constants(BesideCompiled):
    """Random operators give constants, and nothing is left out: every sample is treated alike, in any company."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = False
        """Whether something has drawn from a generator that is not torch's own."""
        self.sixteen = False
        """Whether something was computed in 16 bits, as in an autocast of the user's."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator; what it draws is then set to a constant."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
            given = function(*args, **kwargs)
            self.sixteen |= isinstance(given, Tensor) and given.dtype in SIXTEEN_BIT
            return given
        names = [argument.name for argument in function._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("train") is False or any(given[name] == 0.0 for name in _DROPOUT if name in given):
            return function(*args, **kwargs)
        self.own |= kwargs.get("generator") is not None
        if any(name in ("dropout_p", "dropout", "train") for name in names):  # else p is a distribution's
            args = [0.0 if name in _DROPOUT else value for name, value in zip(names, args)]  # noqa: B905  the rest are keywords
            return function(*args, **(kwargs | {name: 0.0 for name in kwargs if name in _DROPOUT}))
        found = function(*args, **kwargs)
        if isinstance(found, Tensor):
            _fill(found, function._schema.name)
        return found


def _fill(drawn: Tensor, name: str) -> None:
    if "randperm" in name:
        drawn.copy_(torch.arange(drawn.numel(), device=drawn.device))
    elif drawn.is_floating_point():
        drawn.fill_(1.0 if "bernoulli" in name else 0.5)
    else:
        drawn.zero_()
