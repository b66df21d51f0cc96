"""Every mutant in a run that nothing looks at but the run itself: ``verify=first`` alone has to catch it.

``python -m tests.mutants.verification`` prints a table of mutants and what their runs say. What the engine's own checks
end before is run once more without them. It exits with 1 if one trains to its end, or something else ends it.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict

from tests.distributed.workers.verify import Run
from tests.mutants import Mutant, answered, engines, gradient, scaling
from tests.mutants.guards import GUARDS
from tests.support.engine_matrix import ENGINES

# A scale that moves within a window, and a clip that bites.
FP16 = {"precision": "fp16", "growth_interval": 3, "clip_norm": 0.05}
RUNS: dict[str, tuple[Run, ...]] = {
    "mean of means": (Run(level=3), Run(level=2)),
    "the engine's averaging forgotten": (Run(level=2),),
    "sync on a wrong micro-step": (Run(level=3), Run(level=2)),
    "fsdp2: the loss is weighed as for an average": (
        Run(engine="fsdp2 boundary", precision="bf16"),
        Run(engine="fsdp2 boundary", precision="bf16", by_slope=True),
    ),
    "fsdp2: a replayed micro-step adds its gradient": (Run(engine="fsdp2 every", global_size=17),),
    "fsdp2: its own division left in": (
        Run(engine="fsdp2 every", precision="fp16"),
        Run(engine="fsdp2 every", precision="fp16", by_slope=True),
    ),
    "the scale moves in every micro-step": (Run(precision="fp16", growth_interval=3), Run(**FP16)),
    "clipping before unscaling": (Run(**FP16),),
    "every rank decides by its own gradients, before the reduction": (Run(**FP16, overflow=17, epochs=20),),
    "step and rate move on a skip": (Run(precision="fp16", overflow=0, samples=16),),
    "a scale without a floor": (Run(precision="fp16", overflow=0, samples=16, epochs=20),),
}
# By nature: what nothing of a run's gradients, losses or weights shows, or what a right run may show too.
NOT_CAUGHT = {
    "fsdp2: missing micro-steps are not replayed": "ranks wait for each other for ever: the watch ends the run"
}
# Ended by the engine's own checks before its gradient is looked at; without those the proof has to catch them too.
ENDED_BEFORE = frozenset({"sync on a wrong micro-step"})


def cases() -> list[tuple[Mutant, Run]]:
    """Each mutant, with the runs that it shows in."""
    found = []
    for mutant in (*gradient.MUTANTS, *scaling.MUTANTS):
        found += [(mutant, one) for one in RUNS.get(mutant.name, (Run(),))]
    for mutant in engines.MUTANTS:
        engine, precision = mutant.where.split(", ")
        if engine in ENGINES:
            found += [(mutant, one) for one in RUNS.get(mutant.name, (Run(engine=engine, precision=precision),))]
    return [(mutant, one) for mutant, one in found if mutant.name not in NOT_CAUGHT]


def sayings(mutant: Mutant | None, runs: Sequence[Run], *, guarded: bool = True) -> list[list[str]]:
    """What every rank says of each run, with a mutated copy of the package on its path."""
    said = answered([mutant, None if guarded else GUARDS], "verify", [asdict(one) for one in runs])
    return [[said]] if isinstance(said, str) else said


def caught(said: Sequence[str], error: str = "VerificationError") -> bool:
    """Whether every rank ends with the proof's own error."""
    return bool(said) and all(text.startswith(f"{error}: ") for text in said)


def main(wanted: str = "") -> int:
    """How many mutants train to their end, or are caught by something else than the proof."""
    wrong = 0
    for mutant, one in cases():
        if wanted not in mutant.name:
            continue
        before = mutant.name in ENDED_BEFORE
        (said,) = sayings(mutant, [one])
        fine = caught(said, "MisuseError" if before else "VerificationError")
        if before:
            print(f"{'ended' if fine else 'NOT ENDED'}   {mutant.name} (level {one.level}): {said[0]}", flush=True)
            (said,) = sayings(mutant, [one], guarded=False)
            fine &= caught(said)
        wrong += not fine
        where = f"{one.engine}, level {one.level}{', by slope' if one.by_slope else ''}"
        where += ", without guards" if before else ""
        print(f"{'caught' if fine else 'NOT CAUGHT'}  {mutant.name} ({where}): {said[0]}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
