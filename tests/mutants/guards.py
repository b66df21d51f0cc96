"""Faults of users' programs in a package without its guards: they train wrongly, and ``verify=first`` names them.

``python -m tests.mutants.guards [NAME]`` prints of each fault the error of its weights with ``verify=never`` and what
``verify=first`` says; it exits with 1 if one trains rightly without the guards, or is not named.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutants.gradient import Mutant
from tests.support.commands import ROOT, run

WORKER = ROOT / "tests" / "distributed" / "workers" / "faults.py"
WRONG = 1e-3  # of a run's change of weights: what a fault is off by at least; a right run by 1e-6 at most
# What ends a faulty run before the proof does, or makes it right.
GUARDS = Mutant(
    "no guards",
    (
        # gradients changed by hand
        ("engines/gradient_watch.py", "        if not self.unchanged:\n", "        if False:\n"),
        ("engines/ddp/engine.py", "return self._window_open and not self._watch.unchanged", "return False"),
        ("engines/fsdp2/shard_watch.py", "        if changed is None:\n", "        if True:\n"),
        # gradients from before the window
        ("engines/base.py", "            self._drop_stray_gradients()\n", ""),
        # a reduction that leaves a parameter out
        ("engines/ddp/engine.py", "if not loss.requires_grad or self._watch.unchanged:", "if False:"),
        (
            "engines/ddp/engine.py",
            "elif unreached := self._reduction.unreached():\n",
            "elif (unreached := self._reduction.unreached()) and False:\n",
        ),
        (
            "engines/ddp/engine.py",
            "        elif not told:  # the error came before DDP knew of a parameter\n",
            "        elif False:\n",
        ),
        ("engines/optimizer_step.py", "        if not held <= self._known:\n", "        if False:\n"),
        # a micro-step after the reduction
        (
            "engines/ddp/engine.py",
            'if self._reduced:\n            raise MisuseError("a micro',
            'if False:\n            raise MisuseError("a micro',
        ),
        (
            "engines/ddp/engine.py",
            'if self._reduced:\n            raise MisuseError("backward',
            'if False:\n            raise MisuseError("backward',
        ),
        # a forward past the engine
        ("engines/ddp/engine.py", "if not self._ddp.called:", "if False:"),
        # a model or an optimizer that somebody else reduces or steps
        ("engines/ownership.py", "if thing in _owners and _owners[thing].spent:", "if False:"),
        ("engines/ownership.py", "            if thing in _owners:\n", "            if False:\n"),
        ("engines/factory.py", "    check_wrappers(model)\n", ""),
        # steps and zeroing by hand
        (
            "engines/optimizer_step.py",
            '    raise MisuseError(f"{method}() was called by hand',
            '    return  # f"{method}() was called by hand',
        ),
        # settings that differ between ranks
        ("accumulation/lockstep.py", "if differ(sums, self._world.size):", "if False:"),
        # what needs a gradient, as the gathered weights say
        ("engines/fsdp2/engine.py", "        if self._trains != self._sharded.trains():\n", "        if False:\n"),
        # weights that stay gathered
        (
            "engines/fsdp2/engine.py",
            "        self._expect_untouched()\n        self._units.free()\n",
            "        self._expect_untouched()\n",
        ),
        # a window that gives no gradient at all
        (
            "engines/fsdp2/engine.py",
            "if all(parameter.grad is None for parameter in self._parameters.values()):",
            "if False:",
        ),
    ),
)


# What a run says of each fault of ``workers/faults.py``, by the names there.
_NOT_SUMMED = "is not the ranks' sum (on rank 0: rank 1 did not take part; on rank 1: rank 0 did not take part)"
_DIFFERS = "the weights are no longer the same on every rank after window 1"
_OFF = "the gradient of every parameter is off by"
NAMED = {
    "UnusedAtBoundary": f"the gradient of every parameter {_NOT_SUMMED}",
    "UnusedAtBoundaryOnZero1": f"the gradient of every parameter {_NOT_SUMMED}",
    "FrozenAfterWrapping": f"the gradient of every parameter {_NOT_SUMMED}",
    "TrainedAfterWrapping": f"the gradient of head.weight, head.bias {_NOT_SUMMED}",
    "ProbeBefore": _OFF,
    "ProbeBeforeOnFSDP2": _OFF,
    "TwoAccumulators": _OFF,
    "MeanLoss": "it is a mean over its count",
    "Clips": _OFF,
    "ClipsBeforeStep": "the optimizer is given the step's gradient times",
    "ClipsOnFSDP2": "the optimizer is given the step's gradient times",
    "Forgets": _OFF,
    "Zeroes": _OFF,
    "ZeroesModel": _OFF,
    "WritesData": "the gradient of head.weight, head.bias is 0.50x",
    "StepsByHand": _DIFFERS,
    "SecondBackward": _OFF,
    "StaleOnFSDP2": "the engine's forward computes something else",
    "EditsOneRank": _DIFFERS,
    "RateOfOneRank": _DIFFERS,
    "AverageOfOneRank": "the weights are no longer the same on every rank after window",
}


@contextmanager
def package(mutants: Sequence[Mutant | None]) -> Iterator[Path]:
    """A folder to import from: the package with all edits of ``mutants``, its configuration and the tests."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = folder / "distaccum"
        shutil.copytree(ROOT / "distaccum", copy, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "conf").symlink_to(ROOT / "conf")
        (folder / "tests").symlink_to(ROOT / "tests")
        for mutant in mutants:
            for file, old, new in mutant.edits if mutant else ():
                text = (copy / file).read_text()
                assert text.count(old) == 1, f"{file} no longer says {old!r} once: bring the mutant up to date"
                (copy / file).write_text(text.replace(old, new))
        yield folder


def ends(runs: Sequence[tuple[str, bool]], *, guarded: bool = False) -> list[dict[str, Any]]:
    """How runs of ``(fault, verify)`` end, on two ranks; by default without guards."""
    with package([] if guarded else [GUARDS]) as folder:
        asked, answered = folder / "runs.json", folder / "ends.json"
        asked.write_text(json.dumps(runs))
        finished = run(answered, asked, world=2, script=WORKER, warm="torch", PYTHONPATH=str(folder), timeout=120)
        if finished.returncode:
            failed = f"exit code {finished.returncode}: {finished.stderr[-3000:]}"
            return [{"said": [failed], "error": 0.0} for _ in runs]
        found: list[dict[str, Any]] = json.loads(answered.read_text())
        return found


def main(wanted: str = "") -> int:
    """How many faults are not what they should be."""
    wrong = 0
    for name, words in NAMED.items():
        if wanted not in name:
            continue
        unseen, seen = ends([(name, False), (name, True)])
        fine = is_wrong(unseen) and is_named(seen, words)
        wrong += not fine
        trained = unseen["said"][0] or f"off by {unseen['error']:.2g}"
        print(f"{'named' if fine else 'NOT NAMED'}  {name}: {trained}; {seen['said'][0]}", flush=True)
    return wrong


def is_wrong(end: dict[str, Any]) -> bool:
    """Whether a run has trained to its end, to wrong weights."""
    return not any(end["said"]) and end["error"] > WRONG


def is_named(end: dict[str, Any], words: str) -> bool:
    """Whether every rank ends with the proof's own error, in these words."""
    return all(said.startswith("VerificationError: ") and words in said for said in end["said"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
