"""Runs whose every number is the same on any number of ranks: ``python -m tests.support.reproducible`` is the table.

A cell is an engine, a precision and a program. It is run on each world, and a run is what it logs (but times), its
evaluations, and its final weights and optimizer state, bit by bit.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum import DataSpec, PadCollator
from tests.support import compared

WORLDS = (1, 2, 3, 4, 6, 8)
ENGINES = ("ddp", "zero1", "fsdp2")
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-weights")
SAMPLES, HELD_OUT, TOKENS, CLASSES, LONGEST = 37, 11, 13, 5, 9
UPDATES = 9  # two epochs of four windows and a half: the last window of an epoch has seven samples


class Transformer(nn.Module):
    """Two blocks with dropout, over sequences of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 10)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(10, 2, 14, dropout=0.2, batch_first=True) for _ in "12")
        self.head = nn.Linear(10, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, shape ``(batch, length, classes)``."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Drawing(Transformer):
    """Draws from Python's and NumPy's generators too, and leaves a layer out of some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(10, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * (1 + 0.1 * random.random()) + 0.1 * float(np.random.standard_normal())  # noqa: NPY002, S311
        if random.random() < 0.5:  # noqa: S311
            x = x + self.sometimes(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Weighted:
    """Two losses, of which one counts weights that are no whole numbers."""

    def count(self, batch: Any) -> dict[str, float]:
        weights = (batch["labels"] >= 0) * batch["weight"][:, None]
        return {"labels": float(weights.double().sum()), "size": float(len(batch["labels"]))}

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        logits = model(batch["tokens"])
        logits = logits if logits.dtype is torch.float64 else logits.float()
        each = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none")
        return {"labels": (each * batch["weight"][:, None]).sum(), "size": 0.01 * logits.square().mean((1, 2)).sum()}


class Samples:
    """Sequences of unequal lengths; ``noisy`` ones draw from the global generators whenever they are loaded."""

    def __init__(self, size: int, seed: int, *, noisy: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(2, LONGEST + 1, (size,), generator=generator).tolist()
        self._tokens = [torch.randint(1, TOKENS, (n,), generator=generator) for n in self.lengths]
        self._noisy = noisy

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, i: int) -> dict[str, Any]:
        tokens = self._tokens[i]
        if self._noisy:
            shift = random.randrange(3) + int(np.random.randint(3)) + int(torch.randint(3, ()))  # noqa: NPY002, S311
            tokens = 1 + (tokens + shift) % (TOKENS - 1)
        labels = tokens % CLASSES
        labels[::3] = -100
        return {"tokens": tokens, "labels": labels, "weight": torch.tensor(0.1 + 0.3 * (i % 7))}


class Labels:
    """Of the batches above, without their weights."""

    def count(self, batch: Any) -> int:
        return int((batch["labels"] != -100).sum())

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["tokens"])
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-100, reduction="sum")


@dataclass(frozen=True)
class Program:
    """What a user states: settings, and whether the model draws elsewhere, data are random, and losses are two."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    drawing: bool = False
    noisy: bool = False
    two: bool = False
    dtype: torch.dtype = torch.float32
    compares: str = ""
    """The loss of ``tests.support.compared``."""


PROGRAMS = {
    "plain": Program({"batch": {"global_size": 10, "micro_size": 2}}),
    "units of one": Program({"batch": {"global_size": 10, "unit_size": 1}, "optim": {"clip_norm": None}}),
    "few blocks": Program({"batch": {"global_size": 30, "micro_size": 3, "virtual_ranks": 8}}),
    "tokens": Program({"batch": {"global_size": None, "tokens": 60, "micro_size": 2}}),
    "micro tokens": Program({"batch": {"global_size": 18, "micro_tokens": 20, "group_by_length": True}}),
    "grouped": Program({"batch": {"global_size": 18, "micro_size": 2, "group_by_length": True}}),
    "schedule": Program(
        {"batch": {"global_size": 12, "micro_size": 2, "schedule": [{"global_size": 4, "updates": 3}]}}
    ),
    "two losses": Program({"batch": {"global_size": 10, "micro_size": 2}}, two=True),
    "drawing": Program({"batch": {"global_size": 10, "micro_size": 2}}, drawing=True, noisy=True),
    "fp64": Program({"batch": {"global_size": 10, "unit_size": 1}}, two=True, dtype=torch.float64),
    "contrast": Program({"batch": {"global_size": 10, "micro_size": 2}}, compares="contrast"),
    "sampled": Program({"batch": {"global_size": 10, "micro_size": 3}}, compares="sampled"),
    "experts": Program({"batch": {"global_size": 10, "micro_size": 2}}, compares="balanced"),
    "loaders": Program({"batch": {"global_size": 10, "micro_size": 2}, "trainer": {"num_workers": 1}}, noisy=True),
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    engine: str
    precision: str
    program: str

    def __str__(self) -> str:
        return f"{self.engine:6} {self.precision:13} {self.program}"


def cells() -> list[Cell]:
    every = (Cell(*values) for values in product(ENGINES, PRECISIONS, PROGRAMS))
    return [cell for cell in every if PROGRAMS[cell.program].dtype is torch.float32 or cell.precision == "fp32"]


COVERING = [
    *(Cell(engine, "fp32", "plain") for engine in ENGINES),
    Cell("ddp", "fp16", "few blocks"),
    Cell("zero1", "bf16", "tokens"),
    Cell("fsdp2", "fp16", "micro tokens"),
    Cell("ddp", "bf16-weights", "grouped"),
    Cell("fsdp2", "bf16", "schedule"),
    Cell("zero1", "fp32", "two losses"),
    Cell("ddp", "fp32", "drawing"),
    Cell("fsdp2", "fp32", "drawing"),
    Cell("fsdp2", "bf16-weights", "units of one"),
    Cell("ddp", "fp32", "contrast"),
    Cell("fsdp2", "fp32", "fp64"),
    Cell("fsdp2", "bf16", "experts"),
]


def settings(cell: Cell) -> dict[str, Any]:
    """Of the run, as nested plain values."""
    program = PROGRAMS[cell.program]
    engine: dict[str, Any] = {"name": cell.engine}
    if program.drawing and cell.engine != "fsdp2":
        engine["find_unused_parameters"] = True
    precision: dict[str, Any] = {"name": cell.precision}
    if cell.precision == "fp16":  # overflows at first, and after it has grown
        precision["scaler"] = {"initial_scale_power": 22, "growth_interval": 2, "hysteresis": 1}
    node: dict[str, Any] = {
        "numerics": "reproducible",
        "engine": engine,
        "precision": precision,
        "optim": {"lr": 0.01, "clip_norm": 0.5},
        "schedule": {"_target_": "distaccum.train.schedules.Constant"},
        "trainer": {"max_steps": UPDATES, "log_every": 1, "eval_every": 3, "verify": "first"},
        "checkpoint": {"every": 0},
        "metrics": {"console": False, "report": False, "wandb": {"mode": "disabled"}},
    }
    for key, values in program.settings.items():
        node[key] = {**node.get(key, {}), **values}
    return node


def data_of(cell: Cell) -> DataSpec:
    if PROGRAMS[cell.program].compares:
        pairs = compared.samples(SAMPLES + HELD_OUT, torch.float32)
        return DataSpec(train=pairs[:SAMPLES], eval_dataset=pairs[SAMPLES:], description="pairs")
    noisy = PROGRAMS[cell.program].noisy
    train = Samples(SAMPLES, 0, noisy=noisy)
    return DataSpec(
        train=train,
        eval_dataset=Samples(HELD_OUT, 1, noisy=noisy),
        collate=PadCollator({"tokens": 0, "labels": -100, "weight": None}),
        lengths=np.array(train.lengths),
        description="sequences",
    )


def model_of(cell: Cell) -> nn.Module:
    if compares := PROGRAMS[cell.program].compares:
        return compared.make_model(compares, torch.float32, dropout=0.1)
    torch.manual_seed(3)
    model: nn.Module = Drawing() if PROGRAMS[cell.program].drawing else Transformer()
    return model.to(PROGRAMS[cell.program].dtype)


def loss_of(cell: Cell) -> Any:
    if compares := PROGRAMS[cell.program].compares:
        return {**compared.LOSSES, **compared.RANDOM}[compares]()
    return Weighted() if PROGRAMS[cell.program].two else Labels()


SAME = (
    "step",
    "window",
    "epoch",
    "loss",
    "loss_labels",
    "loss_size",
    "loss_task",
    "loss_balance",
    "grad_norm",
    "lr",
    "loss_scale",
    "applied",
)


def records_of(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has logged, but times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    kept = (json.loads(line) for line in lines)
    return [{key: value for key, value in one.items() if key in SAME or key.startswith("eval_")} for one in kept]


def on_world(world: int, given: Sequence[Cell], folder: Path) -> list[dict[str, Any]]:
    """Each cell's ``records`` and ``weights`` (a hash) on a number of ranks."""
    from tests.support.commands import ROOT, run  # noqa: PLC0415  starts a server of processes

    asked, answer = folder / f"cells-{world}.json", folder / f"answer-{world}.json"
    asked.write_text(json.dumps([asdict(cell) for cell in given]))
    script = Path(__file__).parents[1] / "distributed" / "workers" / "reproducible.py"
    done = run(answer, asked, folder / f"runs-{world}", world=world, script=script, timeout=1800, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(answer.read_text())
    return found


def differing(given: Sequence[Cell], found: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterable[str]:
    """In words, each cell that is not the same on all worlds."""
    worlds = sorted(found)
    for number, cell in enumerate(given):
        first = found[worlds[0]][number]
        for world in worlds[1:]:
            other = found[world][number]
            for key in first:
                if first[key] != other[key]:
                    yield f"{cell}: {key} differs on {worlds[0]} and {world} ranks"


def main() -> int:
    """Prints the table: a line a cell, a hash a world."""
    given = [cell for cell in cells() if all(word in str(cell) for word in sys.argv[1:])]
    found: dict[int, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            found[world] = on_world(world, given, Path(folder))
    sys.stdout.write(f"{'':34} {'  '.join(f'{world} ranks'.ljust(8) for world in WORLDS)}  skips\n")
    for number, cell in enumerate(given):
        hashes = "  ".join(str(found[world][number]["all"])[:8] for world in WORLDS)
        sys.stdout.write(f"{cell!s:34} {hashes}  {found[1][number]['skips']}\n")
    wrong = list(differing(given, found))
    sys.stdout.write("\n".join([*wrong, f"{len(given)} cells on {len(WORLDS)} worlds, {len(wrong)} differences\n"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
