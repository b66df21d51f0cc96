"""Faults of users' programs in a package without its guards: they train wrongly, and ``verify=first`` names them.

``python -m tests.mutants.guards [NAME]`` prints of each fault the error of its weights with ``verify=never`` and what
``verify=first`` says; it exits with 1 if one trains rightly without the guards, or is not named.
"""

import sys
from collections.abc import Sequence
from typing import Any

from tests.mutants import answered, read

(GUARDS,) = read("guards")
WRONG = 1e-3  # of a run's change of weights: what a fault is off by at least; a right run by 1e-6 at most
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


def ends(runs: Sequence[tuple[str, bool]], *, guarded: bool = False) -> list[dict[str, Any]]:
    """How runs of ``(fault, verify)`` end, on two ranks; by default without guards."""
    found = answered([] if guarded else [GUARDS], "faults", runs)
    return [{"said": [found], "error": 0.0} for _ in runs] if isinstance(found, str) else found


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
