"""Memory that runs out on purpose, and what the windows must give nevertheless.

The truth is a plain fp64 loop on one process: of models that give a sample the same in whatever company, over whole
windows; of models with dropout, or with batch statistics, over the micro-batches as they are without errors. Where
random numbers cannot be cut the micro-batches that were interrupted twice may be cut in halves, quarters and single
samples, and each part draws the numbers of a micro-batch that begins there. Each window is held
to it by itself, from the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD
from torch.utils.data import default_collate

from distaccum import Accumulator, DataSpec
from distaccum.accumulation.recovery import Recovery
from distaccum.config.compile import CompileConfig
from distaccum.config.engine import DDPConfig, Zero1Config
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.data.window import Window
from distaccum.distributed.random import keys_of
from distaccum.distributed.world import World
from distaccum.errors import ResourceError

FEATURES, WIDTH, CLASSES, IGNORED = 5, 8, 4, -100
MICRO, MICRO_STEPS, SEED, RATE = 4, 3, 3, 0.25
EXACT = 1e-12  # of fp64
MARGIN = 4  # of what a plain loop is off by, in the other formats
PLACES = ("forward", "loss", "activation", "tensor", "post")
Batch = dict[str, Any]
Weights = dict[str, Tensor]

# What users bring -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual one."""

    def __init__(self, dropout: float, normal: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if normal else nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout >= 0 else Noise()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.dropout(torch.tanh(self.wide(self.norm(x)))))


class Noise(nn.Module):
    """Of an operator that says nothing of its rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.poisson(torch.ones_like(x))


class Net(nn.Module):
    """``(B, FEATURES)`` to ``(B, outputs)``; tied, its blocks share their weights."""

    def __init__(
        self, *, dropout: float = 0.0, normal: bool = False, tied: bool = False, unused: str = "", outputs: int = 1
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, normal) for _ in range(2))
        self.leave = nn.Linear(WIDTH, outputs)
        if tied:
            self.blocks[1].wide.weight = self.blocks[0].wide.weight
            self.blocks[1].narrow.weight = self.blocks[0].narrow.weight
        self.branch = nn.Linear(WIDTH, WIDTH) if unused else None
        self.sometimes = unused == "sometimes"

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        if self.branch is not None and self.sometimes and bool(chosen.any()):
            x = torch.where(chosen.unsqueeze(-1), self.branch(x), x)
        return self.leave(x)


class Tagger(nn.Module):
    """Tokens to classes; the output layer has the weights of the embedding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, normal=False) for _ in range(2))
        self.leave = nn.Linear(WIDTH, 11, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def squares(model: Any, batch: Batch) -> Tensor:
    """The sum of squared errors."""
    return (model(batch["x"], batch["chosen"])[:, 0] - batch["y"]).square().sum()


def two(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Two losses that count differently."""
    found = model(batch["x"], batch["chosen"])
    some = batch["chosen"].to(found.dtype)
    return {
        "all": (found[:, 0] - batch["y"]).square().sum(),
        "some": ((found[:, 1] + batch["y"]).square() * some).sum(),
    }


def tagged(model: Any, batch: Batch) -> Tensor:
    """Cross entropy of the labels that are not ignored."""
    found = model(batch["tokens"])
    return F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def contrastive(model: Any, batch: Batch) -> Tensor:
    """Of each sample against the others: no sum over samples."""
    found = model(batch["x"], batch["chosen"])
    return (found @ found.T - torch.eye(len(found), dtype=found.dtype)).square().sum()


def collate(samples: Sequence[Batch]) -> Batch:
    """Pads the tokens of a batch to its longest."""
    longest = max(len(sample["tokens"]) for sample in samples)
    padded = {
        name: torch.stack([F.pad(s[name], (0, longest - len(s[name])), value=value) for s in samples])
        for name, value in (("tokens", 0), ("labels", IGNORED))
    }
    return {**default_collate([{k: v for k, v in s.items() if k not in padded} for s in samples]), **padded}


def uncuttable(samples: Sequence[Batch]) -> Batch:
    """With a tensor that is of no sample."""
    return {**collate(samples), "table": torch.arange(7)}


def data(samples: int) -> list[Batch]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for i in range(samples):
        length = int(torch.randint(1, 6, (), generator=generator))
        tokens = torch.randint(1, 11, (length,), generator=generator)
        found.append(
            {
                "i": i,
                "x": torch.randn(FEATURES, generator=generator, dtype=torch.float64),
                "y": torch.randn((), generator=generator, dtype=torch.float64),
                "chosen": torch.tensor(i % 3 == 1),
                "tokens": tokens,
                "labels": torch.where(tokens % 3 > 0, tokens, IGNORED),
            }
        )
    return found


def as_type(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its real numbers in ``dtype``."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def samples_of(batch: Batch) -> int:
    """The samples of a batch."""
    return len(batch["i"])


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model, and what is minimised.

    Args:
        model: by what makes it.
        loss: sums.
        count: of a batch.
        collate: of samples.
        company: a sample's forward depends on the others of its micro-batch, or on numbers that they draw together.
        draws: from torch's generator.
        apart: its random numbers cannot be cut.
        whole: no micro-batch may be cut.
    """

    model: Callable[[], nn.Module] = Net
    loss: Callable[[Any, Batch], Any] = squares
    count: Callable[[Batch], Any] = samples_of
    collate: Callable[[Sequence[Batch]], Batch] = collate
    company: bool = False
    draws: bool = False
    apart: bool = False
    whole: bool = False


PROGRAMS = {
    "net": Program(),
    "tied": Program(model=partial(Net, tied=True)),
    "never": Program(model=partial(Net, unused="never")),
    "sometimes": Program(model=partial(Net, unused="sometimes")),
    "two": Program(
        model=partial(Net, outputs=2),
        loss=two,
        count=lambda batch: {"all": len(batch["i"]), "some": int(batch["chosen"].sum())},
    ),
    "tokens": Program(model=Tagger, loss=tagged, count=lambda batch: int((batch["labels"] != IGNORED).sum())),
    "dropout": Program(model=partial(Net, dropout=0.3), company=True, draws=True),
    "dropout, sometimes": Program(model=partial(Net, dropout=0.3, unused="sometimes"), company=True, draws=True),
    "tokens, dropout": Program(
        model=partial(Tagger, dropout=0.3),
        loss=tagged,
        count=lambda batch: int((batch["labels"] != IGNORED).sum()),
        company=True,
        draws=True,
    ),
    "noise": Program(model=partial(Net, dropout=-1.0), company=True, draws=True, apart=True),
    "batch norm": Program(model=partial(Net, normal=True), company=True, whole=True),
    "contrastive": Program(model=partial(Net, outputs=3), loss=contrastive, company=True, whole=True),
    "uncuttable": Program(collate=uncuttable),
    "uncuttable, dropout": Program(model=partial(Net, dropout=0.3), collate=uncuttable, company=True, draws=True),
}

# Cells ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Where memory runs out, and in what.

    Args:
        places: of the first error, the second and so on; each of ``PLACES``.
        leaf: the parameter, by number, whose hook raises in the places ``tensor`` and ``post``.
        early: its hooks are registered before the engine is made.
        window: with the errors; -1: every one, ``places`` in each.
        micro: in the window; -1: the boundary.
        rank: -1: all of them.
        last: an error strikes what holds the micro-batch's last sample, and not its first.
        whole: also where a single sample would fail in the end.
        rows: in place of all that, whatever has more samples runs out of memory, in the first of the places.
        windows: of ``MICRO_STEPS`` micro-batches a rank; a ragged one follows, of ``tail`` samples.
    """

    engine: str = "ddp"
    world: int = 2
    program: str = "net"
    precision: str = "fp64"
    compile: str = "none"
    checkpoint: str = "none"
    unused: bool = False
    places: tuple[str, ...] = ("tensor",)
    leaf: int = 0
    early: bool = False
    window: int = 0
    micro: int = 0
    rank: int = 0
    last: bool = False
    whole: bool = False
    rows: int = 0
    verify: str = "never"
    windows: int = 2
    tail: int = 3

    @property
    def size(self) -> int:
        """Of the global batch."""
        return MICRO * MICRO_STEPS * self.world

    @property
    def dtype(self) -> torch.dtype:
        """Of the model before an engine has it."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def by_process(self) -> bool:
        """Whether ranks cannot be threads: torch's generator and compiler are of the process."""
        return self.world > 1 and (PROGRAMS[self.program].draws or self.compile != "none")


class Fault:
    """Raises where a cell says, on one rank."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self.cell, self.struck, self.batches = cell, 0, list[list[int]]()
        """``batches``: the samples of every forward."""
        self._on = cell.rank in (-1, rank)
        self._target: int | None = None
        self._spent, self._ids = 0, list[int]()
        self.off = False

    def begin_window(self, number: int, micro_batches: Sequence[Any]) -> None:
        """Aims at one of its micro-batches."""
        cell, self._target = self.cell, None
        if cell.window in (-1, number):
            self._spent = 0
            place = cell.micro if cell.micro >= 0 else len(micro_batches) - 1
            if not 0 <= place < len(micro_batches):
                return
            ids = micro_batches[place].batch["i"]
            if cell.whole or len(ids) >= 2 ** len(cell.places):
                self._target = int(ids[-1 if cell.last else 0])

    def forward(self, batch: Batch) -> None:
        """Notes what is run."""
        self._ids = [int(i) for i in batch["i"]]
        self.batches.append(self._ids)

    def at(self, place: str) -> None:
        """Raises if this is where and when."""
        cell = self.cell
        if not self._on or self.off:
            return
        if cell.rows:
            wanted = place == cell.places[0] and len(self._ids) > cell.rows
        else:
            left = self._spent < len(cell.places)
            wanted = left and cell.places[self._spent] == place and self._target in self._ids
        if wanted:
            self._spent += 1
            self.struck += 1
            raise _error(self.struck)


def _error(number: int) -> BaseException:
    kinds = (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("Unable to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    )
    return kinds[number % len(kinds)]


def place_hooks(model: nn.Module, fault: Fault) -> None:
    """Of the places within the model."""
    leaves = list(model.parameters())
    leaf = leaves[fault.cell.leaf % len(leaves)]
    leaf.register_hook(lambda _: fault.at("tensor"))
    leaf.register_post_accumulate_grad_hook(lambda _: fault.at("post"))


def place_module_hooks(model: Any, fault: Fault) -> None:
    """Of the places before and behind the blocks."""
    model.leave.register_forward_pre_hook(lambda *_: fault.at("forward"))

    def watch(_: nn.Module, given: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: fault.at("activation"))

    (model.leave if fault.cell.leaf % 2 else model.enter).register_forward_hook(watch)


@dataclass
class Found:
    """What one rank has after each window."""

    weights: list[Weights] = field(default_factory=list)
    """Before the first window, and after each; with masters those."""
    buffers: list[Weights] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    batches: list[list[list[int]]] = field(default_factory=list)
    """The samples of each forward of each window."""
    planned: list[list[list[int]]] = field(default_factory=list)
    """The samples of each micro-batch of each window, as they are without errors."""
    struck: int = 0
    verified: str = ""
    repaired: int = 0
    said: str = ""
    """Of the window that this rank could not finish."""
    refused: bool = False
    """Whether a window was not stepped on, because of this rank or another one."""


def make_model(cell: Cell) -> nn.Module:
    """The same at every call."""
    torch.manual_seed(2)
    return PROGRAMS[cell.program].model().to(cell.dtype)


def run(cell: Cell, world: World, model: nn.Module | None = None) -> Found:
    """A rank's part of a cell; ``model`` where threads may not seed."""
    program, fault, found = PROGRAMS[cell.program], Fault(cell, world.rank), Found()
    model = make_model(cell) if model is None else model
    place_module_hooks(model, fault)
    if cell.early:
        place_hooks(model, fault)
    config = {"ddp": DDPConfig, "zero1": Zero1Config}[cell.engine]
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=RATE),
        global_batch_size=cell.size,
        micro_batch_size=MICRO,
        count=program.count,
        engine=config(find_unused_parameters=cell.unused, activation_checkpoint=cell.checkpoint, bucket_cap_mb=0.001),
        precision=precision_of(cell),
        compile=CompileConfig(
            name=cell.compile, blocks=["blocks.*"] if cell.compile == "blocks" else [], backend="eager"
        )
        if cell.compile != "none"
        else "none",
        seed=SEED,
        verify=cell.verify,
        world=world,
    )
    if not cell.early:
        place_hooks(model, fault)
    reduce = acc.engine.reduce

    def reduce_without() -> None:  # its hooks fire once more, and what is over then cannot be finished
        fault.off = True
        reduce()

    vars(acc.engine)["reduce"] = reduce_without
    samples = cell.windows * cell.size + cell.tail
    source = DataSpec(
        train=data(samples), eval_dataset=None, description="memory", shuffle=False, collate=program.collate
    )

    def loss(module: Any, batch: Batch) -> Any:
        fault.off = module is not acc.engine.model  # two samples are only looked at
        if not fault.off:
            fault.forward(batch)
        total = program.loss(module, as_type(batch, cell.dtype))
        fault.at("loss")
        return total

    with suppress(_RefusedError), closing(acc):
        found.weights.append(weights_of(acc))
        for number, window in enumerate(acc.windows(source)):
            fault.batches = []
            found.planned.append(planned(window.plain))
            fault.begin_window(number, window.plain.micro_batches)
            try:
                refused = not acc.step(window, loss).applied
            except ResourceError as error:
                found.said, refused = str(error), True
                acc.abandon()
            if refused:
                found.refused, found.struck = True, fault.struck
                found.weights.append(weights_of(acc))
                raise _RefusedError  # so that nobody waits for the others when it closes
            assert acc.last is not None
            found.losses.append(acc.mean_loss())
            found.norms.append(float(acc.last.grad_norm))
            found.batches.append(fault.batches)
            found.weights.append(weights_of(acc))
            found.buffers.append({k: b.detach().clone() for k, b in acc.engine.unwrapped_model.named_buffers()})
        found.struck, found.verified, found.repaired = fault.struck, acc.verified, Recovery.of(acc.engine).repaired
    return found


class _RefusedError(Exception):
    """Some rank could not finish a window."""


def planned(window: Window) -> list[list[int]]:
    """The samples of its micro-batches, where those of one that is cut are together."""
    found: list[list[int]] = []
    for ids, part in zip(window.ids(), window.parts or [None] * len(window.micro_batches), strict=True):
        if part is not None and part.rows.start > 0:
            found[-1] += ids
        else:
            found.append(list(ids))
    return found


def weights_of(acc: Accumulator) -> Weights:
    """What this rank has of them: of masters those that it steps."""
    names = dict(acc.engine.unwrapped_model.named_parameters())
    return {name: t.detach().clone() for name, t in acc.engine.state().model.items() if name in names}


def precision_of(cell: Cell) -> PrecisionConfig:
    """At 2**10 no gradient of these models is too large for fp16."""
    name = "fp32" if cell.precision == "fp64" else cell.precision
    return PrecisionConfig(name=name, scaler=ScalerConfig(initial_scale_power=10))


# The truth ------------------------------------------------------------------------------------------------------------
Ids = list[int]


@dataclass(frozen=True)
class Truth:
    """Of one window, from given weights."""

    gradient: Weights
    loss: float

    @property
    def norm(self) -> float:
        """Of the gradient."""
        return float(sum(g.square().sum() for g in self.gradient.values())) ** 0.5


def windows_of(cell: Cell) -> list[Ids]:
    """The samples of each window, in the data's own order."""
    samples = cell.windows * cell.size + cell.tail
    return [list(range(start, min(start + cell.size, samples))) for start in range(0, samples, cell.size)]


def plain(
    cell: Cell,
    before: Mapping[str, Tensor],
    window: Ids,
    parts: Sequence[Ids],
    *,
    dtype: torch.dtype,
    buffers: Weights | None = None,
) -> Truth:
    """A plain loop over parts of a window; ``buffers`` are changed by it. As users write it, if not in fp64."""
    program = PROGRAMS[cell.program]
    model, samples = make_model(cell).to(dtype), data(window[-1] + 1)
    rounded = cell.precision == "bf16-weights"
    names = {name for name, _ in model.named_parameters()}
    leaves = {}
    for name in names:
        tensor = before[name].to(torch.bfloat16) if rounded else before[name]
        kept = torch.bfloat16 if rounded and dtype is not torch.float64 else dtype
        leaves[name] = tensor.to(kept).clone().requires_grad_()
    counts = program.count(program.collate([samples[i] for i in window]))
    counts = counts if isinstance(counts, Mapping) else {"": counts}
    total, gradient = 0.0, {name: torch.zeros_like(leaf, dtype=dtype) for name, leaf in leaves.items()}
    auto = {"bf16": torch.bfloat16, "bf16-weights": torch.bfloat16, "fp16": torch.float16}.get(cell.precision)
    scale = 2.0**10 if cell.precision == "fp16" and dtype is not torch.float64 else 1.0
    outer = torch.get_rng_state()
    for ids in parts:
        torch.manual_seed(keys_of(ids[:1], SEED, 0)[0])
        batch = as_type(program.collate([samples[i] for i in ids]), dtype)
        tied = {**leaves, **(buffers or {})}
        with torch.autocast("cpu", auto, enabled=auto is not None and dtype is not torch.float64):
            sums = program.loss(lambda *a, t=tied: functional_call(model, t, a), batch)
        sums = sums if isinstance(sums, Mapping) else {"": sums}
        loss = torch.stack([sums[name] / counts[name] for name in sums]).sum()
        found = torch.autograd.grad(loss * scale, list(leaves.values()), allow_unused=True)
        for name, part in zip(leaves, found, strict=True):
            if part is not None:
                gradient[name] += part / scale
        total += float(loss.detach())
    torch.set_rng_state(outer)
    return Truth(gradient, total)


def off(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The relative error in the 2-norm over all weights."""
    wrong = sum(float((found[name].double() - truth[name].double()).square().sum()) for name in truth)
    size = sum(float(truth[name].double().square().sum()) for name in truth)
    return (wrong / size) ** 0.5


def cuts(ids: Ids) -> Iterator[list[Ids]]:
    """The whole, and every way to cut it in halves again and again."""
    yield [ids]
    if len(ids) > 1:
        middle = len(ids) // 2
        for first, second in product(cuts(ids[:middle]), cuts(ids[middle:])):
            yield [*first, *second]


@dataclass(frozen=True)
class Errors:
    """Of the worst window: relative errors of the gradient, the loss and its norm; and of a plain loop's gradient."""

    gradient: float
    loss: float
    norm: float
    plain: float
    buffers: float
    lost: int
    """The most samples that a rank has run for nothing in a window."""
    struck: int
    """Errors, on all ranks."""
    said: Sequence[str] = ()
    """What ranks say that could not finish a window."""
    refused: bool = False
    """Whether all ranks have left a window out."""

    def wrong(self, cell: Cell) -> str:
        """What is not as it must be; empty if all is."""
        exact = cell.precision == "fp64"
        bound = EXACT if exact else max(MARGIN * self.plain, 1e-7)
        errors = {"gradient": self.gradient, "norm": self.norm, "buffers": self.buffers}
        # A loss is logged in the format of its sum.
        errors["loss"] = self.loss if exact else self.loss / 4
        faults = [f"{name} {value:.1e} > {bound:.1e}" for name, value in errors.items() if not value <= bound]
        if not cell.rows and cell.verify == "never" and self.lost > MICRO * max(len(cell.places), 1):
            faults.append(f"{self.lost} samples were run for nothing")
        return ", ".join(faults)


def judge(cell: Cell, ranks: Sequence[Found]) -> Errors:
    """Holds what the ranks found to the truth."""
    program, worst = PROGRAMS[cell.program], dict.fromkeys(("gradient", "loss", "norm", "plain", "buffers"), 0.0)
    windows, lost = windows_of(cell), 0
    (done,) = {len(rank.losses) for rank in ranks}
    (refused,) = {rank.refused for rank in ranks}
    assert done == len(windows) or refused
    state = [
        {k: b.double() if b.is_floating_point() else b for k, b in make_model(cell).named_buffers()} for _ in ranks
    ]
    for number, window in enumerate(windows[:done]):
        before, after = (whole_of(cell, ranks, number + n) for n in (0, 1))
        run = [_kept(rank.batches[number], window) for rank in ranks]
        for rank, parts in zip(ranks, run, strict=True):
            lost = max(lost, sum(map(len, rank.batches[number])) - sum(map(len, parts)))
        parts = [part for of_rank in run for part in of_rank]
        assert sorted(i for part in parts for i in part) == window
        if program.whole:
            assert sorted(parts) == _micro(window)
        alike = [window]
        if program.company:
            alike = parts if _draws_apart(cell, number) else [ids for rank in ranks for ids in rank.planned[number]]
        truth = plain(cell, before, window, alike, dtype=torch.float64)
        if cell.precision != "fp64":
            loop = plain(cell, before, window, alike if program.company else _micro(window), dtype=torch.float32)
            stepped = {name: before[name].float() - RATE * g.float() for name, g in loop.gradient.items()}
            worst["plain"] = max(worst["plain"], off(_moved(before, stepped), truth.gradient))
        for rank, found in enumerate(ranks):
            worst["loss"] = max(worst["loss"], abs(found.losses[number] / truth.loss - 1))
            worst["norm"] = max(worst["norm"], abs(found.norms[number] / truth.norm - 1))
            if state[rank]:
                plain(cell, before, window, run[rank], dtype=torch.float64, buffers=state[rank])
                for name, buffer in state[rank].items():
                    error = float((found.buffers[number][name].double() - buffer.double()).abs().max())
                    worst["buffers"] = max(worst["buffers"], error)
        worst["gradient"] = max(worst["gradient"], off(_moved(before, after), truth.gradient))
    if refused:
        before, after = (whole_of(cell, ranks, done + n) for n in (0, 1))
        assert all(torch.equal(before[name], after[name]) for name in before)
    said = [rank.said for rank in ranks if rank.said]
    return Errors(**worst, lost=lost, struck=sum(rank.struck for rank in ranks), said=said, refused=refused)


def _draws_apart(cell: Cell, number: int) -> bool:
    """Whether what is cut in a window draws numbers of its own."""
    apart = PROGRAMS[cell.program].draws and (PROGRAMS[cell.program].apart or cell.compile != "none")
    return apart and (len(cell.places) > 1 or cell.window == -1 or number > cell.window)


def _moved(before: Weights, after: Weights) -> Weights:
    """The gradient that a step has taken."""
    return {name: (before[name].double() - after[name].double()) / RATE for name in before}


def whole_of(cell: Cell, ranks: Sequence[Found], number: int) -> Weights:
    """The weights of all ranks, who must agree bit by bit."""
    found: Weights = {}
    for rank in ranks:
        for name, tensor in rank.weights[number].items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"ranks differ in {name}"
    names = [name for name, _ in make_model(cell).named_parameters()]
    return {name: found[name] for name in names}


def _micro(window: Ids) -> list[Ids]:
    return [window[start : start + MICRO] for start in range(0, len(window), MICRO)]


def _kept(batches: Sequence[Ids], window: Ids) -> list[Ids]:
    """The forwards that count: of each sample the last one, and each of them as a whole."""
    last = {i: number for number, ids in enumerate(batches) for i in ids}
    found = []
    for number, ids in enumerate(batches):
        own = [last[i] == number for i in ids]
        if any(own):
            assert all(own), f"samples {ids} are in one forward, and some of them in another"
            assert set(ids) <= set(window)
            found.append(ids)
    return found
