"""Run on 2 ranks: frameworks' loops, and :data:`OURS`, in an audit that is told neither model nor optimizer."""

import sys
from typing import Any

from torch import Tensor, nn

from distaccum import World, audit
from distaccum.losses.cross_entropy import cross_entropy
from launch.bench.exactness import STEPS, WINDOWS, make_micro_batches, make_model, ours
from launch.bench.other_frameworks import FRAMEWORKS
from tests.support.answers import give
from tests.support.audit_loops import told


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    bare = getattr(model, "model", model)  # of the Trainer's model, which computes its loss itself
    return cross_entropy(bare(batch["input_ids"]), batch["labels"])[0]


def count(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


def main(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sys.argv[2:]:
        for window, number in WINDOWS.items():
            micro_batches = make_micro_batches(world.rank, number)
            with audit(
                loss_sum=loss_sum,
                count=count,
                batches=micro_batches,
                accumulation_steps=STEPS,
                show=lambda report: None,
            ) as report:
                if name == "distaccum":
                    ours(world, micro_batches)
                else:
                    FRAMEWORKS[name].run(make_model, micro_batches, STEPS)
            found[f"{name}, {window}"] = told(report)
    return found


if __name__ == "__main__":
    give(main)
