"""Breaks loss scaling and skipping on purpose, one way at a time, and shows that arithmetic by hand notices.

``python -m tests.mutants.scaling`` prints each mutant's largest error; it exits with 1 if one of them is not caught.
"""

import sys

from tests.distributed.workers.engine_overflow import CASES
from tests.mutants.gradient import Mutant, one, survivors
from tests.support.commands import ROOT

WORKER = ROOT / "tests" / "distributed" / "workers" / "engine_overflow.py"
TOLERANCE = 1e-6  # of fp32 weights; without a mutant it is their last digit
MUTANTS = (
    Mutant(
        "the scale moves in every micro-step",
        (
            (
                "engines/ddp/engine.py",
                "            self._boundary(scaled)\n        if self.compiled is not None:\n",
                (
                    "            self._boundary(scaled)\n"
                    "        if self._scaler:\n"
                    "            self._scaler.advance(1.0 - torch.isfinite(scaled).float())\n"
                    "        if self.compiled is not None:\n"
                ),
            ),
            ("engines/optimizer_step.py", "            scaler.advance(1.0 - finite)", "            pass"),
        ),
    ),
    one(
        "clipping before unscaling",
        "engines/optimizer_step.py",
        "excess = ((norm + _CLIP_EPSILON)",
        "excess = ((norm * (1.0 if scale is None else scale) + _CLIP_EPSILON)",
    ),
    Mutant(
        "every rank decides by its own gradients, before the reduction",
        (
            (
                "engines/ddp/engine.py",
                "        scaled = loss if self._scaler is None else self._scaler.scale(loss)\n",
                (
                    "        scaled = loss if self._scaler is None else self._scaler.scale(loss)\n"
                    "        update = self._optimizer_step._update\n"
                    "        own = torch.autograd.grad(scaled, self._parameters, retain_graph=True)\n"
                    "        finite = all(bool(one.isfinite().all()) for one in own)\n"
                    "        update.own = getattr(update, 'own', True) and finite\n"
                ),
            ),
            (
                "engines/optimizer_step.py",
                "        self._apply(",
                (
                    "        applied = finite = torch.full_like(norm, float(self.__dict__.pop('own', True)))\n"
                    "        self._apply("
                ),
            ),
            # Ranks that decide differently would wait for each other here.
            ("accumulation/tracker.py", "self._world.all_gather_names(own) if together else own", "own"),
        ),
    ),
    one(
        "step and rate move on a skip",
        "accumulation/tracker.py",
        "applied, finite, tokens = outcome.applied, outcome.finite,",
        "applied, finite, tokens = True, outcome.finite,",
    ),
    one(
        "a scale without a floor",
        "precision/loss_scale.py",
        "self._scale.mul_(factor).clamp_(self.min_scale, self.max_scale)",
        "self._scale.mul_(factor).clamp_(max=self.max_scale)",
    ),
)


def main() -> int:
    """Of scaling and skipping."""
    return survivors(MUTANTS, WORKER, CASES[:1], TOLERANCE)


if __name__ == "__main__":
    sys.exit(main() > 0)
