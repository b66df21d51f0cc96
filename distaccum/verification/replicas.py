"""Finds ranks whose weights have diverged, at no collective of its own: a checksum rides in a later window's count.

The checksum of a tensor is the sum of its bits as 64-bit integers, modulo 2**64. It reads memory once (10 million fp32
parameters: 2.5 ms on one core). ``torch.hash_tensor`` (4.4 ms) is an XOR: it does not see an even number of equal
elements change alike, as a bias of zeros that becomes one of ones.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from math import ceil, log2

import torch
from torch import Tensor

from distaccum.data.hooks import WindowHook
from distaccum.data.window import Window
from distaccum.engines.base import Engine
from distaccum.engines.modules import HostCopy
from distaccum.errors import VerificationError

_log = logging.getLogger(__name__)
_BITS = 53  # what an fp64 sum over the ranks that share a slot carries without rounding
_MOST_SLOTS = 64
# A parameter costs at least this many operators in a micro-step's forward and backward, its checksum costs one.
_LEAST_OPERATORS = 4
_SHARE = 0.01  # of a window's operators, at most
_FIXED_OPERATORS = 4  # that combine the checksums of all parameters


class Replicas(WindowHook):
    """What is the same on every rank is compared after the first window, then every ``every`` windows.

    The checksums of window k travel with the count of window k + 1; on a GPU with that of k + 2, as the host would have
    to wait for the step otherwise. With them travel the counts of the micro-batches that were run: their sum is what
    the losses were divided by.

    Args:
        engine: knows what every rank holds.
        stops: whether ranks that differ end the run; otherwise they are logged, once.
    """

    def __init__(self, engine: Engine, *, stops: bool) -> None:
        self.every: int | None = None
        """Windows between two checksums; known with the first window's count."""
        self._engine, self._stops = engine, stops
        self._world = world = engine.world
        self._delay = 0 if world.device.type == "cpu" else 1  # windows
        self.saved: object = None
        """The last checkpoint that was compared before it was saved, for the messages; None: there is none."""
        self._slots = min(world.size, _MOST_SLOTS)
        self._mask = 2 ** (_BITS - ceil(log2(ceil(world.size / self._slots)))) - 1
        self._views: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._odd: Tensor | None = None
        self.restarted()

    def restarted(self) -> None:
        """Forgets what was noted, as when weights are loaded: the next window is compared again."""
        self._since: int | None = None  # windows since the last checksum
        self._pending: tuple[int, int, HostCopy] | None = None  # the window, the windows since, its checksum
        self._windows = 0
        self._sends = False  # whether a checksum is in the exchange that is on its way
        self._asked = False
        self._divided: dict[
            str, float
        ] = {}  # by loss: the counts that windows were divided by, since the last exchange
        self._counted: dict[str, float] = {}
        self._warned = self._warned_of_state = False
        self._weights: Mapping[str, Tensor] = {}  # asked for before the first checksum, and at each check()

    # --- what rides in a count, see GlobalCounter

    def outgoing(self, micro_batches: int, losses: int) -> list[float]:
        """The numbers of this rank that ride in the next count: as many on every rank, and in every count."""
        self._asked = self.every is None
        self._sends = self._pending is not None and self._pending[1] >= self._delay
        slots = [0.0] * self._slots
        if self._pending is not None and self._sends:
            slots[self._world.rank % self._slots] = float(self._pending[2].read() & self._mask)
        counted = [*self._counted.values(), *[0.0] * losses][:losses]
        return [float(micro_batches), *counted, *slots]

    def incoming(self, sums: list[float]) -> None:
        """What :meth:`outgoing` gave, summed over the ranks.

        Raises:
            VerificationError: the ranks differ; raised on all of them.
        """
        if self._asked:
            self.every = self._interval(sums[0] / self._world.size)
        divided, self._divided, self._counted = self._divided, {}, {}
        if self._pending is not None and self._sends:
            window, self._pending = self._pending[0], None
            self._compare(window, sums[-self._slots :])
        for (name, used), found in zip(divided.items(), sums[1:], strict=False):
            if abs(found - used) > 1e-9 * max(abs(found), abs(used)):
                ratio = f"{used / found:.4g}x" if found else "of nothing"
                raise VerificationError(
                    f"the loss {name!r} of window {self._windows} of this process was divided by {used:g}, and the "
                    f"window's micro-batches count {found:g} over all ranks: it was divided by {ratio} the true count. "
                    "A WindowLoader has to give the counts of the micro-batches that it gives"
                )

    def _interval(self, micro_steps: float) -> int:
        tensors = len(self._engine.probe.replicated())
        if not tensors:
            return 0
        window = _LEAST_OPERATORS * tensors * max(micro_steps, 1.0)
        every = max(1, ceil((tensors + _FIXED_OPERATORS) / (_SHARE * window)))
        if self._world.is_main:
            _log.info("replicas: weights compared over the ranks after the first step and every %d steps", every)
        return every

    # --- between windows

    def after_step(self, window: Window) -> None:
        """Notes a window whose step was made, and takes the checksum where it is due; nothing waits for the device."""
        self._windows += 1
        if self._pending is not None:
            self._pending = (self._pending[0], self._pending[1] + 1, self._pending[2])
        begun_by_others = (
            window.assignment is not None and window.assignment.begun_by_others
        )  # whose micro-batches count, too
        for name, used in () if begun_by_others else window.counts.items():
            self._divided[name] = self._divided.get(name, 0.0) + used
            own = sum([micro.counts.get(name, 0.0) for micro in window.micro_batches])  # a list: one Python call
            self._counted[name] = self._counted.get(name, 0.0) + own
        if not self.every or self._pending is not None:
            return
        self._since = None if self._since is None else self._since + 1
        if self._since is None or self._since >= self.every:
            self._since = 0
            self._pending = (self._windows, 0, HostCopy(self._checksum()))

    def check(self) -> None:
        """Compares at once, as before a checkpoint: one small host all-reduce; a collective.

        Raises:
            VerificationError: the ranks differ; raised on all of them.
        """
        if self._world.size == 1:
            return
        self._weights = self._engine.probe.replicated()
        if not self._weights:
            return
        slots = [0.0] * self._slots
        slots[self._world.rank % self._slots] = float(HostCopy(self._checksum()).read() & self._mask)
        self._pending = None
        self._divided, self._counted = {}, {}
        self._compare(self._windows, self._world.all_reduce_host(slots))

    def check_state(self) -> None:
        """Compares what the optimizers keep on several ranks, before it is saved; a collective that reads the device.

        Raises:
            VerificationError: the ranks differ; raised on all of them.
        """
        if self._world.size == 1 or self._warned_of_state:
            return
        group, tensors = self._engine.probe.replicated_state()
        own = _sums_by_name(tensors)
        everyone = self._world.all_gather_object((group, hashlib.sha256(repr(sorted(own.items())).encode()).digest()))
        ranks = {group: [rank for rank, (each, _) in enumerate(everyone) if each == group] for group, _ in everyone}
        differing = [held for held in ranks.values() if len({everyone[rank] for rank in held}) > 1]
        if not differing:
            return
        sums = self._world.all_gather_object(own)
        when = f"at the save after window {self._windows} of this process"
        message = self._told({rank: sums[rank] for rank in differing[0]}, when, of_state=True)
        if self._stops:
            raise VerificationError(message)
        self._warned_of_state = True
        if self._world.is_main:
            _log.warning("%s", message)

    def _compare(self, window: int, sums: list[float]) -> None:
        """Of the checksums of the ranks that share a slot, which are all the same number where no rank differs."""
        means = {total / len(range(slot, self._world.size, self._slots)) for slot, total in enumerate(sums)}
        if len(means) == 1 or self._warned:
            return
        message = self._explanation(window)
        if self._stops:
            raise VerificationError(message)
        self._warned = True
        if self._world.is_main:
            _log.warning("%s", message)

    def _explanation(self, window: int) -> str:
        """Which ranks, and which tensors; a collective."""
        own = {name: int(_sum_of_bits(tensor)) for name, tensor in self._engine.probe.replicated().items()}
        everyone = dict(enumerate(self._world.all_gather_object(own)))
        return self._told(everyone, f"after window {window} of this process")

    def _told(self, everyone: Mapping[int, Mapping[str, int]], when: str, *, of_state: bool = False) -> str:
        from distaccum.program import DIVERGED, load  # noqa: PLC0415  where ranks differ

        told: str = load(DIVERGED)(everyone, when, self.saved, of_state=of_state)
        return told

    # --- the checksum

    @torch.no_grad()
    def _checksum(self) -> Tensor:
        """0-dim int64, on the device."""
        self._weights = self._weights or self._engine.probe.replicated()
        sums = torch.stack([view.sum() for view in self._current_views()])
        if self._odd is None or len(self._odd) != len(sums):  # so that tensors that swap their values are seen
            self._odd = torch.arange(1, 2 * len(sums), 2, device=sums.device)
        return (sums * self._odd).sum()

    def _current_views(self) -> list[Tensor]:
        """Tensors as 64-bit integers: made once, and again where a tensor has moved."""
        views = []
        for name, tensor in self._weights.items():
            where = (tensor.data_ptr(), *tensor.shape)
            known = self._views.get(name)
            if known is None or known[0] != where:
                known = where, _as_integers(tensor)
                if known[1].data_ptr() == tensor.data_ptr():  # else it is a copy
                    self._views[name] = known
            views.append(known[1])
        return views


def _as_integers(tensor: Tensor) -> Tensor:
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = _dense(flat)
    whole = flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    if whole:
        return flat.view(torch.int64)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _dense(tensor: Tensor) -> Tensor:
    """1-D; of a tensor that fills its memory in another order, as channels_last does, a view of that memory."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for (stride, _), expected in zip(strides, _products(size for _, size in strides), strict=False):
        if stride != expected:
            return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _products(sizes: Iterable[int]) -> Iterator[int]:
    product = 1
    for size in sizes:
        yield product
        product *= size


def _sum_of_bits(tensor: Tensor) -> Tensor:
    return _as_integers(tensor).sum()


@torch.no_grad()
def _sums_by_name(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor's bits; one read for each device."""
    found: dict[str, int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        found |= dict(zip(names, torch.stack([_sum_of_bits(tensors[name]) for name in names]).tolist(), strict=True))
    return found
