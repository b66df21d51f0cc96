"""Breaks each engine's arithmetic on purpose, one way at a time, and shows that the engine matrix notices.

``python -m tests.mutants.engines`` prints each mutant's largest error; 1: one is not caught.
"""

import sys
import tempfile
from pathlib import Path

from tests.mutants.gradient import Mutant, largest_error, one
from tests.support.commands import ROOT
from tests.support.engine_matrix import ENGINES, Cell

WORKER = ROOT / "tests" / "distributed" / "workers" / "engine_matrix.py"


def _one(engine: str, precision: str, name: str, *edit: str) -> tuple[str, str, Mutant]:
    return engine, precision, one(name, *edit)


# Of each mutant: the engine and the number format to look at it in.
MUTANTS: tuple[tuple[str, str, Mutant], ...] = (
    _one(
        "ddp",
        "bf16",
        "ddp: buckets are averaged",
        "engines/ddp/reducer.py",
        "(self._dtype, self.divisor)",
        "(self._dtype, self._world.size)",
    ),
    _one(
        "zero1",
        "fp32",
        "zero1: what each rank has stepped is not broadcast",
        "engines/ddp/zero1.py",
        "        self.broadcast()",
        "        pass",
    ),
    _one(
        "zero1",
        "fp32",
        "zero1: only the last rank's part is broadcast",
        "engines/ddp/zero1.py",
        "for rank, buffer in self._flat_buffers]",
        "for rank, buffer in self._flat_buffers[-1:]]",
    ),
    _one(
        "ddp",
        "bf16-weights",
        "ddp: the masters are made their roundings",
        "engines/ddp/masters.py",
        "            torch._foreach_copy_(places, masters)\n",
        ("            torch._foreach_copy_(places, masters)\n            torch._foreach_copy_(masters, places)\n"),
    ),
    _one(
        "zero1",
        "bf16-weights",
        "zero1: weights are sent before they are rounded",
        "engines/ddp/zero1.py",
        "        super().after_step()\n        self.broadcast()",
        "        self.broadcast()\n        super().after_step()",
    ),
    _one(
        "fsdp2 boundary",
        "bf16",
        "fsdp2: the loss is weighed as for an average",
        "engines/fsdp2/engine.py",
        "gradient_divide_factor=1,",
        "gradient_divide_factor=world.size,",
    ),
    _one(
        "fsdp2 every",
        "fp16",
        "fsdp2: its own division left in",
        "engines/fsdp2/engine.py",
        "        sharded.set_gradient_divide_factor(1.0)\n",
        "",
    ),
    (
        "fsdp2 boundary",
        "fp32",
        Mutant(
            "fsdp2: reduced in the first micro-step alone",
            (
                ("accumulation/step.py", "sync=i == last", "sync=i == 0"),
                ("accumulation/open_window.py", "sync=self._left == 1", "sync=self._left == len(self)"),
            ),
        ),
    ),
    _one(
        "fsdp2 boundary",
        "fp32",
        "fsdp2: missing micro-steps are not replayed",
        "engines/uneven_inputs.py",
        "return most - micro_steps",
        "return 0",
    ),
    (
        "fsdp2 every",
        "fp32",
        Mutant(
            "fsdp2: a replayed micro-step adds its gradient",
            (  # two guards: its backward begins with zeros, and what it reduces is zeroed
                ("engines/uneven_inputs.py", "torch.zeros_like(output)", "torch.ones_like(output)"),
                ("engines/fsdp2/tree_scatter.py", "            input_tensor.zero_()", "            pass"),
            ),
        ),
    ),
    (
        "fsdp2 boundary",
        "fp32",
        Mutant(
            "fsdp2: shards go on from the last window's gradient",
            (
                (
                    "engines/fsdp2/engine.py",
                    "late_faults=self._late_faults)\n        for parameter in self._parameters.values():",
                    "late_faults=self._late_faults)\n        for parameter in ():",
                ),
                (
                    "engines/fsdp2/engine.py",
                    "def _drop_gradients(self) -> None:\n        for parameter in self._parameters.values():",
                    "def _drop_gradients(self) -> None:\n        for parameter in ():",
                ),
            ),
        ),
    ),
    _one(
        "deepspeed 3",
        "bf16",
        "deepspeed: its averaging forgotten",
        "engines/deepspeed/engine.py",
        "gradient_divide_factor=1,",
        "gradient_divide_factor=world.size,",
    ),
    _one(
        "deepspeed 2",
        "fp16",
        "deepspeed: in fp16 the average is not made a sum",
        "engines/deepspeed/engine.py",
        "divisor / self._world.size",
        "divisor",
    ),
)


def main() -> int:
    """How many mutants are not caught."""
    wrong = 0
    for engine, precision, mutant in MUTANTS:
        if engine not in ENGINES:
            continue  # an optional extra
        cells = [Cell(engine, 2, precision, "unequal", "sgd")]  # two windows, of unequal lengths; the second is ragged
        with tempfile.TemporaryDirectory() as folder:
            error = largest_error(mutant, WORKER, cells, Path(folder))
        caught = not error <= cells[0].tolerance
        wrong += not caught
        print(f"{mutant.name:<55} {precision} error {error:8.1e}  {'caught' if caught else 'NOT CAUGHT'}")
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
