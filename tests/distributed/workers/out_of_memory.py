"""Run by torchrun: trains in cells in which memory runs out, and writes what was found.

``out_of_memory.py RESULT CELLS``: a JSON file to write, and one with the cells of this world size. Of each cell it has
the errors against the truth, or what each rank says where one raises.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distaccum import World
from distaccum.errors import BatchStatisticsWarning
from tests.support import memory_faults
from tests.support.memory_faults import Cell

_LATE_S = 25  # a rank that waits so long for another one hangs


def everyone(world: World, found: Any) -> list[Any]:
    """What each rank found; tensors and all."""
    held, parts = io.BytesIO(), list[Any]([None] * world.size)
    torch.save(found, held)
    dist.all_gather_object(parts, held.getvalue())
    return [torch.load(io.BytesIO(part), weights_only=False) for part in parts]


def main() -> None:
    """See the module."""
    warnings.simplefilter("ignore", BatchStatisticsWarning)
    world, answers = World.join(timedelta(seconds=_LATE_S)), []
    for number, values in enumerate(json.loads(Path(sys.argv[2]).read_text())):
        cell = Cell(**{**values, "places": tuple(values["places"])})
        said, found = "", None
        try:
            found = memory_faults.run(cell, world)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if "imed out" in said or "gloo" in said:  # the ranks have gone apart
                raise SystemExit(f"rank {world.rank} in cell {number}, {cell}: {said}") from error
        ranks = everyone(world, (said, found))
        if world.is_main:
            sayings = [words for words, _ in ranks]
            answer = {"said": sayings} if any(sayings) else asdict(memory_faults.judge(cell, [one for _, one in ranks]))
            answers.append(answer)
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
