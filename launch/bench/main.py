"""The command ``python launch/bench [PROGRAM] [overrides]``, also under torchrun.

Without a program it takes Hydra overrides of ``conf/bench.yaml`` and measures one of

- what a window costs (``throughput.py``), by default;
- ``exactness=true``: how far each framework's gradient is from that of the global batch;
- ``boundary=true``: unscaling, clipping and the optimizer's step alone (``optimizer_step.py``);
- ``engines=true``: what a rank holds and sends with each engine;
- ``saves=true``: saves and verifications of checkpoints (``checkpoints.py``);
- ``loading=true``: whether loading is hidden behind computing;
- ``micro=true``: whether the micro-batch that a rehearsal finds is as fast as the best one;
- ``reproducible=true``: what ``numerics=reproducible`` costs.

``network`` measures two hosts with a slow link between them (``conf/link.yaml``), ``compare_engines`` trains the main
job once on each engine, ``elastic`` kills processes of a run, ``gpu`` measures what is right, fast and large on a GPU
(``conf/gpu.yaml``).
"""

from __future__ import annotations

import sys
from pkgutil import resolve_name

# By name: each program loads its own imports, of which another one's machine may lack some.
MEASURES = "launch.bench.one_process"
PROGRAMS = {
    "network": "launch.bench.network.main",
    "compare_engines": "launch.bench.compare_engines",
    "elastic": "launch.bench.elastic.main",
    "gpu": "launch.bench.gpu.main",
}


def main() -> int:
    """Runs the command; returns its exit code."""
    named = bool(sys.argv[1:]) and sys.argv[1] in PROGRAMS
    program = PROGRAMS[sys.argv.pop(1)] if named else MEASURES
    exit_code: int = resolve_name(f"{program}:main")()
    return exit_code
