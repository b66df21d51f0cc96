"""Memory that runs out on purpose, and what the windows must give nevertheless: what a plain fp64 loop gives.

Each window is held to the loop by itself, from the weights that it began with.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import default_collate

from distaccum import Accumulator, DataSpec
from distaccum.config.engine import DDPConfig, Zero1Config
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.distributed.random import keys_of
from distaccum.distributed.world import World
from distaccum.errors import ResourceError
from distaccum.verification.parts import _Constants

FEATURES, WIDTH, MICRO, MICRO_STEPS, SEED, RATE = 5, 8, 4, 3, 3, 0.25
EXACT = 1e-12  # of fp64
Batch = dict[str, Any]
Weights = dict[str, Tensor]


class Net(nn.Module):
    """``(B, FEATURES)`` to ``(B, outputs)``."""

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        normal: bool = False,
        tied: bool = False,
        sometimes: bool = False,
        outputs: int = 1,
    ) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, outputs)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if normal else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        if tied:
            self.blocks[1].weight = self.blocks[0].weight
        self.branch = nn.Linear(WIDTH, WIDTH) if sometimes else None

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + self.dropout(torch.tanh(block(self.norm(x))))
        if self.branch is not None and bool(chosen.any()):
            x = torch.where(chosen.unsqueeze(-1), self.branch(x), x)
        found: Tensor = self.leave(x)
        return found


def squares(model: Any, batch: Batch) -> Tensor:
    return (model(batch["x"], batch["chosen"])[:, 0] - batch["y"]).square().sum()


def two(model: Any, batch: Batch) -> dict[str, Tensor]:
    found = model(batch["x"], batch["chosen"])
    some = batch["chosen"].to(found.dtype)
    return {
        "all": (found[:, 0] - batch["y"]).square().sum(),
        "some": ((found[:, 1] + batch["y"]).square() * some).sum(),
    }


def contrastive(model: Any, batch: Batch) -> Tensor:
    """Of each sample against the others: no sum over samples."""
    found = model(batch["x"], batch["chosen"])
    return (found @ found.T - torch.eye(len(found), dtype=found.dtype)).square().sum()


def uncuttable(samples: Sequence[Batch]) -> Batch:
    """With a tensor that is of no sample."""
    return {**default_collate(list(samples)), "table": torch.arange(7)}


def data(samples: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "i": i,
            "x": torch.randn(FEATURES, generator=generator, dtype=torch.float64),
            "y": torch.randn((), generator=generator, dtype=torch.float64),
            "chosen": torch.tensor(i % 3 == 1),
        }
        for i in range(samples)
    ]


def as_type(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its real numbers in ``dtype``."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What users bring; ``draws``: random numbers in the forward."""

    model: Callable[[], nn.Module] = Net
    loss: Callable[[Any, Batch], Any] = squares
    count: Callable[[Batch], Any] = lambda batch: len(batch["i"])
    collate: Callable[[Sequence[Batch]], Batch] = default_collate
    draws: bool = False


PROGRAMS = {
    "net": Program(),
    "tied": Program(model=partial(Net, tied=True)),
    "sometimes": Program(model=partial(Net, sometimes=True)),
    "two": Program(
        model=partial(Net, outputs=2),
        loss=two,
        count=lambda batch: {"all": len(batch["i"]), "some": int(batch["chosen"].sum())},
    ),
    "dropout": Program(model=partial(Net, dropout=0.3), draws=True),
    "batch norm": Program(model=partial(Net, normal=True)),
    "contrastive": Program(model=partial(Net, outputs=3), loss=contrastive),
    "uncuttable": Program(collate=uncuttable),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Where memory runs out.

    Args:
        place: ``forward``; ``backward``, in the hook of a parameter before its gradient is added; ``after`` that.
        leaf: this parameter, by number.
        rows: a micro-batch of more samples runs out of memory.
        window, micro, rank: in which; a ``micro`` of -1 is the boundary, a ``rank`` of -1 all.
        windows: of ``MICRO_STEPS`` micro-batches a rank; a ragged one follows, of three samples.
    """

    engine: str = "ddp"
    world: int = 2
    program: str = "net"
    precision: str = "fp64"
    unused: bool = False
    place: str = "backward"
    leaf: int = 0
    rows: int = 2
    window: int = 0
    micro: int = 0
    rank: int = 0
    verify: str = "never"
    windows: int = 3

    @property
    def size(self) -> int:
        return MICRO * MICRO_STEPS * self.world

    @property
    def dtype(self) -> torch.dtype:
        """Of the model before an engine has it."""
        return torch.float64 if self.precision == "fp64" else torch.float32


@dataclass
class Found:
    """What one rank has after each window."""

    weights: list[Weights] = field(default_factory=list)
    """Before the first window, and after each."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    batches: list[list[list[int]]] = field(default_factory=list)
    """The samples of each forward of each window."""
    struck: int = 0
    verified: str = ""
    said: str = ""
    """Of the window that this rank could not run."""


class Fault:
    """Raises where a cell says, on one rank."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self.cell, self.struck, self.batches, self._ids = cell, 0, list[list[int]](), list[int]()
        self._on, self._aim = cell.rank in (-1, rank), set[int]()

    def aim(self, number: int, micro_batches: Sequence[Any]) -> None:
        """At one micro-batch of a window, by its samples."""
        aims = number == self.cell.window and micro_batches
        self._aim = {int(i) for i in micro_batches[self.cell.micro].batch["i"]} if aims else set()
        self.batches = []

    def forward(self, batch: Batch) -> None:
        self._ids = [int(i) for i in batch["i"]]
        self.batches.append(self._ids)

    def at(self, place: str) -> None:
        """Raises if this is where and when; not in a look at some samples, nor where there are no more of them."""
        looked_at = _get_current_dispatch_mode() is not None
        fits = len(self._ids) <= self.cell.rows or not self._aim & set(self._ids)
        if self._on and not (looked_at or fits) and place == self.cell.place:
            self.struck, self._ids = self.struck + 1, []  # once a forward
            raise _error(self.struck)


def _error(number: int) -> BaseException:
    kinds = (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("Unable to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    )
    return kinds[number % len(kinds)]


def make_model(cell: Cell) -> nn.Module:
    torch.manual_seed(2)
    return PROGRAMS[cell.program].model().to(cell.dtype)


def run(cell: Cell, world: World, model: nn.Module | None = None) -> Found:
    """A rank's part of a cell; ``model`` where threads may not seed."""
    program, fault, found = PROGRAMS[cell.program], Fault(cell, world.rank), Found()
    model = make_model(cell) if model is None else model
    config = {"ddp": DDPConfig, "zero1": Zero1Config}[cell.engine]
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=RATE),
        global_batch_size=cell.size,
        micro_batch_size=MICRO,
        count=program.count,
        engine=config(find_unused_parameters=cell.unused, bucket_cap_mb=0.001),
        precision=PrecisionConfig(
            name="fp32" if cell.precision == "fp64" else cell.precision, scaler=ScalerConfig(initial_scale_power=10)
        ),
        seed=SEED,
        verify=cell.verify,
        world=world,
    )
    leaves = list(model.parameters())
    leaf = leaves[cell.leaf % len(leaves)]
    leaf.register_hook(lambda _: fault.at("backward"))
    leaf.register_post_accumulate_grad_hook(lambda _: fault.at("after"))

    def loss(module: Any, batch: Batch) -> Any:
        if not isinstance(_get_current_dispatch_mode(), _Constants) and module is acc.engine.model:
            fault.forward(batch)
        total = program.loss(module, as_type(batch, cell.dtype))
        fault.at("forward")
        return total

    samples = data(cell.windows * cell.size + 3)
    source = DataSpec(train=samples, eval_dataset=None, description="", shuffle=False, collate=program.collate)
    with closing(acc):
        found.weights.append(weights_of(acc))
        for number, window in enumerate(acc.windows(source)):
            fault.aim(number, window.plain.micro_batches)
            try:
                outcome = acc.step(window, loss)
            except ResourceError as error:
                found.said = str(error)
                acc.abandon()
                outcome = None
            found.applied.append(outcome is not None and outcome.applied)
            found.weights.append(weights_of(acc))
            found.batches.append(fault.batches)
            if not found.applied[-1]:
                found.losses, found.norms = [*found.losses, 0.0], [*found.norms, 0.0]
                if cell.windows == 1 or found.said or cell.place == "forward" or cell.rank == -1:
                    acc.close(alone=True)  # a rank that is refused leaves, and nobody waits for it
                    break
                continue
            assert outcome is not None
            found.losses.append(acc.mean_loss())
            found.norms.append(float(outcome.grad_norm))
        found.struck, found.verified = fault.struck, acc.verified
    return found


def weights_of(acc: Accumulator) -> Weights:
    """What this rank has of them: of masters those that it steps."""
    names = dict(acc.engine.unwrapped_model.named_parameters())
    return {name: t.detach().clone() for name, t in acc.engine.state().model.items() if name in names}


def plain(cell: Cell, before: Weights, ids: Sequence[int], parts: Sequence[Sequence[int]]) -> tuple[Weights, float]:
    """The gradient and the loss of a window of these samples, by a plain fp64 loop over its parts."""
    program, model, samples = PROGRAMS[cell.program], make_model(cell).double(), data(max(ids) + 1)
    leaves = {name: before[name].double().clone().requires_grad_() for name, _ in model.named_parameters()}
    counts = program.count(default_collate([samples[i] for i in ids]))
    counts = counts if isinstance(counts, Mapping) else {"": counts}
    total, gradient = 0.0, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    outer = torch.get_rng_state()
    for part in parts:
        torch.manual_seed(keys_of(part[:1], SEED, 0)[0])
        batch = as_type(default_collate([samples[i] for i in part]), torch.float64)
        sums = program.loss(lambda *given: functional_call(model, leaves, given), batch)
        sums = sums if isinstance(sums, Mapping) else {"": sums}
        loss = torch.stack([sums[name] / counts[name] for name in sums]).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for name, one in zip(leaves, found, strict=True):
            gradient[name] += 0.0 if one is None else one
        total += float(loss.detach())
    torch.set_rng_state(outer)
    return gradient, total


def judge(cell: Cell, ranks: Sequence[Found]) -> list[bool]:
    """Holds every window to the truth; gives which of them were stepped on."""
    samples = cell.windows * cell.size + 3
    windows = [list(range(start, min(start + cell.size, samples))) for start in range(0, samples, cell.size)]
    bound = EXACT if cell.precision == "fp64" else {"fp32": 1e-5, "bf16": 3e-2, "fp16": 3e-3}[cell.precision]
    (applied,) = {tuple(rank.applied) for rank in ranks}
    for number, stepped in enumerate(applied):
        before, after = (_whole(cell, ranks, number + n) for n in (0, 1))
        if not stepped:
            assert all(torch.equal(before[name], after[name]) for name in before)
            continue
        parts = [part for rank in ranks for part in _kept(rank.batches[number])]
        assert sorted(i for part in parts for i in part) == windows[number]
        gradient, loss = plain(
            cell, before, windows[number], parts if PROGRAMS[cell.program].draws else [windows[number]]
        )
        size = sum(float(one.square().sum()) for one in gradient.values())
        moved = {name: (before[name].double() - after[name].double()) / RATE for name in before}
        off = sum(float((moved[name] - gradient[name]).square().sum()) for name in gradient)
        assert (off / size) ** 0.5 <= bound, (cell, number, (off / size) ** 0.5)
        for rank in ranks:
            assert abs(rank.losses[number] / loss - 1) <= max(bound, 4e-16), (cell, number)
            assert abs(rank.norms[number] / size**0.5 - 1) <= bound, (cell, number)
    return list(applied)


def _whole(cell: Cell, ranks: Sequence[Found], number: int) -> Weights:
    """The weights of all ranks, who must agree bit by bit."""
    found: Weights = {}
    for rank in ranks:
        for name, tensor in rank.weights[number].items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"ranks differ in {name}"
    return {name: found[name] for name, _ in make_model(cell).named_parameters()}


def _kept(batches: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The forwards that count: those of the last attempt, which begins with the window's first sample."""
    starts = [n for n, ids in enumerate(batches) if ids and ids[0] == min(i for one in batches for i in one)]
    return list(batches[starts[-1] :]) if starts else []
