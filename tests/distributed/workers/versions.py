"""Run by torchrun in its own environment: an engine's covering set with whatever torch and DeepSpeed there are."""

import json
import sys
from datetime import timedelta
from pathlib import Path

from torch.optim import SGD

from distaccum import World
from distaccum.distributed import world as world_module
from distaccum.errors import DistaccumError
from tests.distributed.workers import engine_matrix as worker
from tests.support import engine_matrix, matrix
from tests.support.engine_matrix import Cell

CELLS = {  # "unequal" micro-batches; the last window of every epoch has more of them on some ranks
    "even": ("fp32", "full", "adamw"),
    "uneven": ("fp32", "unequal", "sgd"),
    "resume": ("fp32", "ragged", "sgd"),
    "fp16": ("fp16", "ragged", "sgd"),
}


def resumed(cell: Cell, world: World) -> float:
    """The second window's gradient, from what was saved after the first, in a new model, optimizer and engine."""
    loss, samples, found = matrix.Two(), engine_matrix.make_data(cell), []
    whole = engine_matrix.windows(samples, epoch=0)
    state = None
    for number in range(2):
        model = engine_matrix.make_model()
        acc = worker.accumulator(cell, model, SGD(model.parameters(), lr=1.0), world)
        if state is not None:
            acc.load_state_dict(state)
        before = worker.weights_of(acc.engine, world)
        for window in acc.windows(worker.source_of(samples)):
            acc.step(window, loss)
            break
        gradient = engine_matrix.gradient(before, whole[number])
        truth = {name: before[name].double() - g for name, g in gradient.items()}
        found.append(engine_matrix.error(before, worker.weights_of(acc.engine, world), truth))
        state = acc.state_dict()
    return max(found)


def main() -> None:
    """Writes after each cell, so that one that never ends is known."""
    path, engine = Path(sys.argv[1]), sys.argv[2]
    world = World.join()
    if engine.startswith("deepspeed"):
        worker.allow_fp16()
    found: dict[str, str] = {}
    for name, (precision, data, update) in CELLS.items():
        cell = Cell(engine=engine, world=world.size, precision=precision, data=data, update=update)
        try:
            error = resumed(cell, world) if name == "resume" else worker.run([cell], world)[0]
            found[name] = "exact" if error <= cell.tolerance else f"off by {error:.1e}"
        except DistaccumError as error:
            found[name] = f"refused: {error}"
        except Exception as error:  # the table says of every cell what it did
            found[name] = f"failed: {type(error).__name__}: {error}"
        if world.is_main:
            path.write_text(json.dumps(found))


if __name__ == "__main__":
    world_module.GROUP_TIMEOUT = timedelta(seconds=30)
    main()
