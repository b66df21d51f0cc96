"""Run by torchrun: compiled forwards beside truth and eager ones; cells ``task,engine,compile,backend,precision``."""

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from distaccum import Accumulator, CompileConfig, World
from distaccum.config.engine import EngineConfig, FSDP2Config
from distaccum.engines.state import whole_state
from tests.distributed.workers.engine_matrix import source_of, weights_of
from tests.support import engine_matrix, matrix
from tests.support.accumulators import Loss as Squares
from tests.support.answers import give
from tests.support.engine_matrix import ENGINES, MICRO_SIZES
from tests.support.matrix import GLOBAL_SIZE, IGNORED, SEED

SETTINGS: dict[str, EngineConfig] = {
    **ENGINES,
    "fsdp2 recomputed": FSDP2Config(activation_checkpoint="blocks"),
    "fsdp2 selective": FSDP2Config(activation_checkpoint="selective"),
}


@dataclass(frozen=True)
class Cell:
    """What is run."""

    task: str
    engine: str
    compile: str
    backend: str
    precision: str


class Block(nn.Module):
    """With dropout, whose numbers a recomputation has to draw again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.3, self.training)


class Dropping(nn.Module):
    """``(B, 6)`` to ``(B, 1)``."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(F.dropout(x, 0.2, self.training))


class Two(matrix.Two):
    """Whose sums of the model's outputs are compiled with it."""

    to_compile = "of_outputs"

    def of_outputs(self, logits: Tensor, score: Tensor, labels: Tensor, target: Tensor) -> dict[str, Tensor]:
        flat = logits.flatten(0, 1), labels.flatten()
        language = F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")
        return {"language": language, "value": 0.5 * (score - target).square().sum()}

    def __call__(self, model: nn.Module, batch: matrix.Batch) -> dict[str, Tensor]:
        logits, score = model(batch["inputs"])
        return self.of_outputs(logits, score, batch["labels"], batch["target"])


DATA: Any = list(torch.randn(43, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind())


def settings(cell: Cell, *, eager: bool = False) -> CompileConfig:
    return CompileConfig(name="none" if eager else cell.compile, backend=cell.backend)


def gradient(cell: Cell, world: World) -> dict[str, float]:
    """The weights lose the gradient: its largest error in two windows, and a plain loop's on the same weights."""
    of = engine_matrix.Cell(cell.engine, world.size, cell.precision, "ragged", "sgd")
    model, loss = engine_matrix.make_model(), Two()
    acc = Accumulator(
        model,
        SGD(model.parameters(), lr=1.0),
        global_batch_size=GLOBAL_SIZE,
        micro_batch_size=MICRO_SIZES[world.size],
        count=loss.count,
        seed=SEED,
        world=world,
        engine=SETTINGS[cell.engine],
        precision=cell.precision,
        compile=settings(cell),
    )
    assert acc.engine.compiled is not None
    acc.engine.compiled.add_loss(loss)
    samples = engine_matrix.make_data(of)
    whole = engine_matrix.windows(samples, epoch=0)
    before, errors, plain = weights_of(acc.engine, world), [], []
    for number, window in enumerate(acc.windows(source_of(samples))):
        acc.step(window, loss)
        after = weights_of(acc.engine, world)
        truth = {n: before[n].double() - g for n, g in engine_matrix.gradient(before, whole[number]).items()}
        errors.append(engine_matrix.error(before, after, truth))
        by_hand = by_a_plain_loop(before, whole[number], cell.precision, MICRO_SIZES[world.size])
        plain.append(engine_matrix.error(before, {n: before[n] - g for n, g in by_hand.items()}, truth))
        before = after
    assert len(errors) == len(whole)
    names = list(before)
    graphs = acc.engine.compiled.graphs
    acc.close()
    clean = sorted(names) == sorted(engine_matrix.make_model().state_dict())
    return {"error": max(errors), "plain": max(plain), "clean": clean, "graphs": graphs}


def by_a_plain_loop(weights: Any, window: dict[str, Tensor], precision: str, size: int) -> dict[str, Tensor]:
    """One process, eager: each micro-batch's sums, over the counts of the whole window."""
    model = engine_matrix.Model()
    model.load_state_dict(dict(weights))
    tokens, samples = int((window["labels"] != IGNORED).sum()), len(window["target"])
    for begin in range(0, samples, size):
        part = {name: tensor[begin : begin + size] for name, tensor in window.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            sums = matrix.Two()(model, part)
        (sums["language"] / tokens + sums["value"] / samples).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def make(cell: Cell, world: World, *, eager: bool = False, lr: float = 0.01, adam: bool = True) -> Accumulator:
    """An accumulator over the model with dropout, in fp64; as in a process that has compiled nothing yet."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Dropping().double()
    optimizer = AdamW(model.parameters(), lr=lr) if adam else SGD(model.parameters(), lr=lr)
    sizes: Any = {"global_batch_size": 12, "micro_batch_size": 2, "seed": 7}
    return Accumulator(
        model,
        optimizer,
        **sizes,
        count=Squares().count,
        engine=SETTINGS[cell.engine],
        world=world,
        compile=settings(cell, eager=eager),
    )


def train(acc: Accumulator, windows: int) -> list[float]:
    """So many windows; the weights then."""
    while windows:
        for window in acc.windows(DATA):
            acc.step(window, Squares())
            windows -= 1
            if not windows:
                break
    return flat(acc)


def flat(acc: Accumulator) -> list[float]:
    model = whole_state(acc.engine, acc.world).model
    return [number for name in sorted(model) for number in model[name].flatten().tolist()]


def resume(cell: Cell, world: World) -> dict[str, Any]:
    """Three ways to the same window: run through, resumed compiled, and resumed as it was written."""
    whole = make(cell, world)
    found: dict[str, Any] = {"whole": train(whole, 5)}
    whole.close()
    first = make(cell, world)
    train(first, 3)
    state = first.state_dict()
    first.close()
    for name, eager in (("resumed", False), ("eager after", True)):
        second = make(cell, world, eager=eager)
        second.load_state_dict(state)
        found[name] = train(second, 2)
        second.close()
    eager_whole = make(cell, world, eager=True)
    found["eager"] = train(eager_whole, 5)
    eager_whole.close()
    return found


def slope(cell: Cell, world: World) -> dict[str, float]:
    """The norm of a window's gradient, and the difference of the window's losses along it, forwards only.

    The random numbers of inductor are its own, so that no eager run has them; but each forward of a window draws the
    same ones, and a backward that recomputes with others goes another way.
    """
    acc = make(cell, world, lr=1.0, adam=False)
    begin = acc.state_dict()

    def losses(weights: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        acc.load_state_dict({**begin, "model": weights})
        for window in acc.windows(DATA):
            acc.step(window, Squares())
            break
        return acc.mean_loss(), acc.state_dict()["model"]

    at: dict[str, Tensor] = begin["model"]
    _, after = losses(at)
    gradient = {name: at[name] - after[name] for name in at}
    norm = float(torch.cat([part.flatten() for part in gradient.values()]).norm())
    step = 1e-5 / norm
    up, down = (losses({n: at[n] + sign * step * gradient[n] for n in at})[0] for sign in (1, -1))
    acc.close()
    return {"norm": norm, "slope": (up - down) / (2 * step * norm)}


TASKS = {"gradient": gradient, "resume": resume, "slope": slope}


def main(world: World) -> dict[str, Any]:
    found = {}
    for text in sys.argv[2:]:
        cell = Cell(*text.split(","))
        torch._dynamo.reset()
        found[text] = TASKS[cell.task](cell, world)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    give(main, timeout_s=1200)  # while another rank compiles what this one has not met
