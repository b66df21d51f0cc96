"""Every mutant in a run that nothing looks at but the run itself: ``verify=first`` has to catch it.

``python -m tests.mutants.verification`` prints what each run says; it exits with 1 if one trains to its end.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.distributed.workers.verify import Run
from tests.mutants import engines, gradient, scaling
from tests.mutants.gradient import Mutant
from tests.support.commands import ROOT, run
from tests.support.engine_matrix import ENGINES

WORKER = ROOT / "tests" / "distributed" / "workers" / "verify.py"
# A scale that moves within a window, and a clip that bites.
FP16 = {"precision": "fp16", "growth_interval": 3, "clip_norm": 0.05}
RUNS: dict[str, tuple[Run, ...]] = {
    "mean of means": (Run(level=3), Run(level=2)),
    "the engine's averaging forgotten": (Run(level=2),),
    "sync on a wrong micro-step": (Run(level=3), Run(level=2)),
    "the scale moves in every micro-step": (Run(precision="fp16", growth_interval=3), Run(**FP16)),
    "clipping before unscaling": (Run(**FP16),),
    "every rank decides by its own gradients, before the reduction": (Run(**FP16, overflow=17, epochs=20),),
}
# By nature: what nothing of a run's gradients, losses or weights shows, or what a right run may show too.
_BY_DESIGN = (
    "a gradient that is off by no number of the window's may be by design (detached targets): the run warns, and "
    "engine=ddp decides; tests/mutants/engines.py catches it, against a reference"
)
NOT_CAUGHT = {
    "step and rate move on a skip": "gradient and weights are right; the learning rate is the user's to choose",
    "a scale without a floor": "shows after two hundred overflows in a row, when no step was made",
    "fsdp2: missing micro-steps are not replayed": "ranks wait for each other for ever, until the group's timeout",
    "fsdp2: reduced in the first micro-step alone": f"0.31x the loss's slope: {_BY_DESIGN}",
    "fsdp2: a replayed micro-step adds its gradient": f"-7.03x the loss's slope: {_BY_DESIGN}",
}


def cases() -> list[tuple[Mutant, Run]]:
    """Each mutant, with the runs that it shows in."""
    found = []
    for mutant in (*gradient.MUTANTS, *scaling.MUTANTS):
        found += [(mutant, one) for one in RUNS.get(mutant.name, (Run(),))]
    for engine, precision, mutant in engines.MUTANTS:
        if engine in ENGINES:
            found += [(mutant, one) for one in RUNS.get(mutant.name, (Run(engine=engine, precision=precision),))]
    return [(mutant, one) for mutant, one in found if mutant.name not in NOT_CAUGHT]


def sayings(mutant: Mutant | None, runs: Sequence[Run]) -> list[list[str]]:
    """What every rank says of each run, with a mutated copy of the package on its path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = folder / "distaccum"
        shutil.copytree(ROOT / "distaccum", copy, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "conf").symlink_to(ROOT / "conf")
        (folder / "tests").symlink_to(ROOT / "tests")
        for file, old, new in mutant.edits if mutant else ():
            text = (copy / file).read_text()
            assert text.count(old) == 1, f"{file} no longer says {old!r} once: bring the mutant up to date"
            (copy / file).write_text(text.replace(old, new))
        asked, answered = folder / "runs.json", folder / "said.json"
        asked.write_text(json.dumps([asdict(one) for one in runs]))
        finished = run(answered, asked, world=2, script=WORKER, warm="torch", PYTHONPATH=str(folder), timeout=120)
        if finished.returncode:
            return [[f"exit code {finished.returncode}: {finished.stderr[-2000:]}"]]
        said: list[list[str]] = json.loads(answered.read_text())
        return said


def caught(said: Sequence[str]) -> bool:
    """Whether every rank ends with the proof's error, or a guard's before it."""
    return bool(said) and all(text.startswith(("VerificationError: ", "MisuseError: ")) for text in said)


def main(wanted: str = "") -> int:
    """How many mutants train to their end."""
    wrong = 0
    for mutant, one in cases():
        if wanted not in mutant.name:
            continue
        (said,) = sayings(mutant, [one])
        wrong += not caught(said)
        print(f"{'caught' if caught(said) else 'NOT CAUGHT'}  {mutant.name} (level {one.level}): {said[0]}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
