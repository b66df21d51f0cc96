"""Run by torchrun: the asked cells of oracle and engine matrix with their proofs, of every window of the latter."""

import logging

import torch
from torch.optim import SGD, AdamW

from distaccum import World
from distaccum.errors import DistaccumError
from tests.distributed.workers import engine_matrix as engines
from tests.distributed.workers import matrix as levels
from tests.support import engine_matrix, matrix
from tests.support.answers import asked, give

LOG = logging.getLogger("distaccum.verification")
WINDOWS = 4  # of an engine's cell


class Said(logging.Handler):
    """What proofs have logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def of_levels(cell: matrix.Cell, world: World) -> None:
    """A run of level 2 or 3, as it stands: ``verify=first``."""
    model = matrix.make_model(cell.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    {2: levels.by_accumulator, 3: levels.by_trainer}[cell.level](cell, model, optimizer, world)


def of_engines(cell: engine_matrix.Cell, world: World) -> None:
    """An own loop or whole windows, each of which is proved."""
    model, loss = engine_matrix.make_model(), matrix.Two()
    own_loop = cell.update == "sgd"
    acc = engines.accumulator(cell, model, (SGD if own_loop else AdamW)(model.parameters(), lr=0.05), world)
    for _ in range(WINDOWS // 2):
        for window in acc.windows(engines.source_of(engine_matrix.make_data(cell))):
            acc.verify(window, loss)
            if not own_loop:
                acc.step(window, loss)
                continue
            for micro in window:
                with acc.accumulate():
                    acc.backward(loss(acc.model, micro.batch))
    acc.close()


def main(world: World) -> list[list[str]]:
    cells = asked()
    if any("engine" in cell and cell["engine"].startswith("deepspeed") for cell in cells):
        engines.allow_fp16()
    answer = []
    for values in cells:
        said = Said()
        LOG.addHandler(said)
        try:
            if "engine" in values:
                of_engines(engine_matrix.Cell(**values), world)
            else:
                of_levels(matrix.Cell(**values), world)
        except DistaccumError as error:
            said.lines.append(f"{type(error).__name__}: {error}")
        finally:
            LOG.removeHandler(said)
        answer.append(said.lines)
    return answer


if __name__ == "__main__":
    LOG.setLevel(logging.INFO)
    give(main, timeout_s=60)
