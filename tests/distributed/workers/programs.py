"""Run on 2 ranks, ENGINE PROGRAM: one of ``tests.support.programs.PROGRAMS`` beside its truth; each rank writes."""

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from distaccum import Accumulator, World
from distaccum.distributed import world as world_module
from distaccum.engines.modules import full_tensor, to_local
from distaccum.errors import DistaccumError
from tests.distributed.workers.engine_matrix import weights_of as whole
from tests.support import programs
from tests.support.programs import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, PROGRAMS, Program


class Before:
    """The weights on this rank when an accumulator has them, to see whether they have moved."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, acc: Accumulator) -> Accumulator:
        for parameter in acc.engine.unwrapped_model.parameters():
            self._kept.append((parameter, to_local(parameter.detach()).clone()))
        return acc

    def moved(self) -> bool:
        return not all(torch.equal(to_local(parameter.detach()), kept) for parameter, kept in self._kept)


def ours(program: Program, engine: Any, world: World, before: Before) -> dict[str, torch.Tensor]:
    """The weights after an epoch, by a loop as the documentation writes it."""
    if program.loop is not None:
        return program.loop(engine, world, before)
    model, options = programs.start(program, torch.float32), dict(program.options)
    optimizer = program.optimizer(model)
    if "scheduler" in options:
        options["scheduler"] = ReduceLROnPlateau(optimizer)
    after_window, kept = program.after_window() if program.after_window else None, dict[str, torch.Tensor]()
    acc = Accumulator(
        model,
        optimizer,
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        count=program.count,
        engine=engine,
        world=world,
        **options,
    )
    before(acc)
    called = program.wrapped(acc.model)
    data = programs.stream(world.rank, world.size) if program.stream else programs.spec()
    for window in acc.windows(data):
        for micro in window:
            batch = programs.cast(micro.batch, torch.float32)
            with acc.accumulate():
                acc.backward(program.loss(called, batch))
        if after_window is not None:
            kept = after_window(model, optimizer)
        if program.probe is not None:
            program.probe(called, batch)
    found = {name.replace("_orig_mod.", ""): tensor for name, tensor in whole(acc.engine, world).items()}
    found |= {name: full_tensor(tensor.detach()) for name, tensor in kept.items()}
    return {name: (torch.view_as_real(t) if t.is_complex() else t).double() for name, t in found.items()}


def main() -> None:
    path, engine, name = sys.argv[1:]
    world_module.GROUP_TIMEOUT = timedelta(seconds=20)
    program, world = PROGRAMS[name], World.join()
    result: dict[str, Any]
    noted = Before()
    try:
        found = ours(program, engine, world, noted)
    except Exception as error:
        kind = "refused" if isinstance(error, DistaccumError) else "raised"
        result = {kind: f"{type(error).__name__}: {error}", "moved": noted.moved()}
    else:
        truth, plain = (programs.plain_loop(program, dtype) for dtype in (torch.float64, torch.float32))
        before = programs.before(program)
        result = {"error": programs.error(found, truth, before), "plain": programs.error(plain, truth, before)}
    Path(f"{path}.{world.rank}").write_text(json.dumps(result))
    print(world.rank, result)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
