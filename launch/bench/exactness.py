"""How far each framework's gradient is from that of the global batch, on one window of unequal lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.distributed.world import World
from distaccum.losses.cross_entropy import count_labels
from launch.bench.other_frameworks import FRAMEWORKS, IGNORED, MicroBatches

VOCABULARY, WIDTH, SAMPLES, LONGEST = 64, 32, 4, 32
STEPS = 4  # micro-batches of a full window on each rank; a ragged one has half of them
WINDOWS = {"full window": STEPS, "ragged window": STEPS // 2}
Figures = dict[str, dict[str, Any]]


def make_model() -> nn.Module:
    """A bigram model, with the same weights on every rank and for every framework."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))


def make_micro_batches(rank: int, number: int) -> MicroBatches:
    """Rows of 1 to 32 tokens, padded to 32 with labels that do not count."""
    generator = torch.Generator().manual_seed(1 + rank)
    batches = []
    for _ in range(number):
        ids = torch.randint(0, VOCABULARY, (SAMPLES, LONGEST + 1), generator=generator)
        lengths = torch.randint(1, LONGEST + 1, (SAMPLES, 1), generator=generator)
        labels = torch.where(torch.arange(LONGEST) < lengths, ids[:, 1:], IGNORED)
        batches.append({"input_ids": ids[:, :-1].contiguous(), "labels": labels})
    return batches


def truth(world: World, number: int) -> Tensor:
    """The gradient of the mean over all labels of all ranks: fp64, in one forward. Flat."""
    batches = [batch for rank in range(world.size) for batch in make_micro_batches(rank, number)]
    inputs, labels = (torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels"))
    model = make_model().double()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


def ours(world: World, micro_batches: MicroBatches) -> Tensor:
    """The window through distaccum's ``accumulate()``."""
    model, found = make_model(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()]))  # type: ignore[union-attr]
    )
    acc = Accumulator(
        model,
        optimizer,
        global_batch_size=STEPS * SAMPLES * world.size,
        micro_batch_size=SAMPLES,
        world=world,
        count=lambda batch: count_labels(batch["labels"]),
    )
    for window in acc.windows(iter(micro_batches)):
        for micro in window:
            with acc.accumulate():
                logits, labels = acc.model(micro.batch["input_ids"]), micro.batch["labels"]
                acc.backward(
                    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
                )
    (gradient,) = found
    return gradient


def compare(world: World) -> Figures:
    """Each framework's version (None where it is absent), and the relative error of each window's gradient."""
    figures: Figures = {"distaccum": {"version": ""}}
    figures |= {name: {"version": framework.version} for name, framework in FRAMEWORKS.items()}
    for window, number in WINDOWS.items():
        expected, micro_batches = truth(world, number), make_micro_batches(world.rank, number)
        for name, row in figures.items():
            if row["version"] is None:
                continue
            if name == "distaccum":
                found = ours(world, micro_batches)
            else:
                found = FRAMEWORKS[name].run(make_model, micro_batches, STEPS)
            row[window] = None if found is None else float((found - expected).norm() / expected.norm())
    return figures


def show(figures: Figures, world: World) -> None:
    """Prints a line for each framework."""
    title = f"relative error of a window's gradient, {world.size} ranks x {STEPS} micro-batches of unequal lengths"
    table = Table("", "version", *WINDOWS, title=title)
    for name, row in figures.items():
        if row["version"] is None:
            table.add_row(name, "absent", *("-" for _ in WINDOWS))
        else:
            errors = (row[window] for window in WINDOWS)
            table.add_row(name, row["version"], *("-" if error is None else f"{error:.1e}" for error in errors))
    Console().print(table)
