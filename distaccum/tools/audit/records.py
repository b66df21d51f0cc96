"""What the audit keeps of a loop: one record for each window on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor


@dataclass
class MicroBatch:
    """The training forwards on one batch.

    ``batch`` is on the host. ``source`` says where it is from. ``used``: a gradient that is not zero came back to a
    forward's output. ``reduces``: what DistributedDataParallel has noted for its backward; None without it. ``key``:
    what forwards on the same batch have alike.
    """

    batch: Any
    source: str
    used: bool = False
    reduces: bool | None = None
    key: object | None = None


@dataclass(frozen=True)
class Clip:
    """A call of ``clip_grad_norm_``, after so many backwards of the window; ``norm`` is the one before clipping."""

    backwards: int
    max_norm: float
    norm: float

    @property
    def coefficient(self) -> float:
        """What it multiplied the gradients by; as torch computes it."""
        return min(1.0, self.max_norm / (self.norm + 1e-6))


@dataclass
class Window:
    """The training forwards up to an optimizer step, and the state just before that step."""

    index: int
    micro_batches: list[MicroBatch]
    clips: list[Clip]
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    optimizers: set[int]
    loss_scale: float | None = None
    low_precision: bool = False


@dataclass(frozen=True)
class RankRecord:
    """One rank's part of a window as rank 0 receives it; ``gradients`` is None where a lower rank's are the same."""

    batches: list[Any]
    sources: list[str]
    reduces: list[bool | None]
    clips: list[Clip]
    gradients: dict[str, Tensor | None] | None
    same_as: int
    weights_digest: str
    loss_scale: float | None
    low_precision: bool


@dataclass(frozen=True)
class WindowRecord:
    """A window of all ranks, with the weights that its forwards used."""

    index: int
    ranks: list[RankRecord]
    weights: dict[str, Tensor] = field(repr=False)

    def gradients(self, rank: int) -> Mapping[str, Tensor | None]:
        """What ``rank`` was about to step with; of parameters that other ranks step on (ZeRO 1), what those were."""
        found: dict[str, Tensor | None] = {}
        for other in (self.ranks[rank], *self.ranks):
            held = self.ranks[other.same_as].gradients if other.gradients is None else other.gradients
            assert held is not None
            found = {**held, **found}
        return found


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from tensors_of(getattr(value, one.name))
