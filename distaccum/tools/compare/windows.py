"""``windows.jsonl``: of every window what it held and what it computed, bit by bit, for ``distaccum compare``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from distaccum.accumulation.progress import Progress
from distaccum.accumulation.step import Outcome
from distaccum.data.batches import map_tensors
from distaccum.data.window import Window
from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.modules import HostCopy, trained
from distaccum.train.metrics.loggers import JsonlLogger
from distaccum.train.parts.base import Done, Part

if TYPE_CHECKING:
    from distaccum.train.loop import Loop

_MODULUS = 2**40  # of a digest: the sum of those of 8,192 ranks is exact in fp64
_PLAIN = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What this rank's part of a window holds, before it runs."""

    ids: int
    cut: int
    contents: int
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class _Ran:
    """A window that ran: its numbers are on their way to the host."""

    held: _Held
    window: Window
    outcome: Outcome
    numbers: HostCopy
    lr: Sequence[float | HostCopy]


class WindowRecorder(Part):
    """Writes a line for every window: rank 0 does, and every rank takes part.

    Nothing waits for a window that still runs: its line is written when the next one has run, or when something is
    due after it. It takes one small all-reduce on the host.

    Args:
        engine: whose parameters' gradients are recorded.
        optimizers: whose learning rates are.
        world: this rank.
        file: that the lines are appended to; None on the ranks that write none.
        numbered: whether the samples have numbers that say which they are; those of a stream have none.
    """

    def __init__(
        self, engine: Engine, optimizers: Sequence[Optimizer], world: World, *, file: Path | None, numbered: bool
    ) -> None:
        self._names = list(trained(engine.unwrapped_model))
        self._optimizers, self._world, self._numbered = optimizers, world, numbered
        self._lines = None if file is None else JsonlLogger(file)
        self._held: _Held | None = None
        self._ran: _Ran | None = None

    def window_begins(self, _: Loop, window: Window) -> None:
        """Takes the digests of what the window holds."""
        ids = [np.fromiter(one, dtype=np.int64) for one in window.ids()]
        self._held = _Held(
            ids=sum(map(ids_digest, ids)) % _MODULUS if self._numbered else 0,
            cut=sum(zlib.crc32(one.tobytes()) for one in ids) % _MODULUS,
            contents=sum(contents_digest(micro.batch) for micro in window.micro_batches) % _MODULUS,
            micro_batches=len(window.micro_batches),
        )

    def on_window(self, _: Loop, window: Window, outcome: Outcome) -> None:
        """Adds the window when it was run; nothing is read from the device."""
        assert self._held is not None
        losses = outcome.placed(self._world.rank).flatten()
        norm = outcome.grad_norm.double().reshape(1)
        found = torch.cat((losses.to(norm.device), norm))
        if outcome.step is not None:
            found = torch.cat((found, outcome.step.norms.double().to(found.device) / outcome.step.norms_scale))
        rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]
        lr = [HostCopy(one.double().reshape(1)) if isinstance(one, Tensor) else float(one) for one in rates]
        self._ran = _Ran(held=self._held, window=window, outcome=outcome, numbers=HostCopy(found), lr=lr)
        self._held = None

    def on_update(self, run: Loop, done: Done) -> None:
        """Writes the line of the window, if there is one; a collective then."""
        if self._ran is None:
            return
        ran, self._ran = self._ran, None
        activity = self._world.activity
        before, activity.phase = activity.phase, Phase.RECORD
        self._write(ran, run.known_progress)  # windows that count nothing may have followed it
        activity.phase = before

    on_skip = on_update

    def _write(self, ran: _Ran, progress: Progress) -> None:
        held, outcome, step = ran.held, ran.outcome, ran.outcome.step
        numbers = ran.numbers.read()
        kinds = len(outcome.loss_sums)
        units = 1 if outcome.assignment is None else outcome.assignment.units  # whose losses are added in their order
        sums, grad_norm, norms = numbers[: kinds * units], numbers[kinds * units], numbers[kinds * units + 1 :]
        # A rank whose shard is empty has one norm, 0, of no parameter.
        by_name = {} if step is None else dict(zip(step.names, norms, strict=False))
        own = (held.ids, held.cut, held.contents, held.micro_batches)
        total = self._world.all_reduce_host([*own, *sums])
        if self._lines is None:
            return
        ids, cut, contents, micro_batches, *rest = total
        of_kinds = torch.tensor(rest[: len(sums)], dtype=torch.float64).view(kinds, units).sum(1).tolist()
        losses = {name: sum_ / (n or 1) for sum_, (name, n) in zip(of_kinds, outcome.counts.items(), strict=True)}
        self._lines.log(
            {
                "epoch": ran.window.epoch,
                "window": progress.window,
                "step": progress.step,
                "applied": outcome.applied,
                "ids": int(ids) % _MODULUS if self._numbered else None,
                "cut": int(cut) % _MODULUS,
                "contents": int(contents) % _MODULUS,
                "micro_batches": int(micro_batches),
                "samples": ran.window.samples,
                "counts": dict(outcome.counts),
                "loss": sum(losses.values()),
                **({} if kinds == 1 else {"losses": losses}),
                "grad_norm": grad_norm,
                "lr": [one if isinstance(one, float) else one.read()[0] for one in ran.lr],
                "loss_scale": outcome.loss_scale,
                "norms": by_name,
            }
        )

    def before_save(self, _: Loop) -> None:
        """Forces the lines to the disk: the checkpoint goes on after them."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close(failed=False)


def ids_digest(ids: npt.ArrayLike) -> int:
    """Of the numbers of samples, in any order and split among any ranks: digests of parts add up, modulo 2**40."""
    numbers = np.asarray(ids, dtype=np.int64).view(np.uint64)
    # The finalizer of SplitMix64 (Steele, Lea, Flood 2014), of which 32 bits are taken.
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return int((mixed >> np.uint64(32)).sum()) % _MODULUS


def contents_digest(batch: Any) -> int:
    """Of a micro-batch on the host: its tensors with their types and shapes, arrays, numbers and texts, in order.

    An object that is neither a container nor one of these counts by its type alone.
    """
    found = 0

    def add(content: Any) -> None:
        nonlocal found
        found = zlib.crc32(content, found)

    def add_tensor(tensor: Tensor) -> Tensor:
        add(f"{tensor.dtype}{list(tensor.shape)}".encode())
        add(_bytes_of(tensor))
        return tensor

    def add_other(value: Any) -> Any:
        add(type(value).__qualname__.encode())
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            add(f"{value.dtype}{list(value.shape)}".encode())
            add(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        elif isinstance(value, _PLAIN):
            add(repr(value).encode())
        return value

    map_tensors(batch, add_tensor, add_other)
    return found


def _bytes_of(tensor: Tensor) -> Any:
    plain = tensor.detach()
    if plain.is_nested:
        plain = torch.cat([part.reshape(-1) for part in plain.unbind()])
    elif plain.is_quantized:
        plain = plain.int_repr()
    elif plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()
