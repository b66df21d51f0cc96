"""Run by torchrun: the asked cells, in which memory runs out; ranks are processes, as torch's generator is of one."""

import io
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distaccum import World
from tests.support.answers import give
from tests.support.memory_faults import Cell, judge, run


def main() -> None:
    world, answers = World.join(timedelta(seconds=25)), []
    for values in json.loads(Path(sys.argv[2]).read_text()):
        cell, held, parts = Cell(**values), io.BytesIO(), list[Any]([None] * world.size)
        torch.save(run(cell, world), held)  # tensors and all
        dist.all_gather_object(parts, held.getvalue())
        ranks = [torch.load(io.BytesIO(part), weights_only=False) for part in parts]
        assert sum(rank.struck for rank in ranks) >= 1, cell
        answers.append(judge(cell, ranks))
    give(answers, world)


if __name__ == "__main__":
    main()
