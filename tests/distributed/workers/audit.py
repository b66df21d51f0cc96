"""Run on two ranks: every loop of ``tests/support/audit_loops.py`` within an audit. ``audit.py RESULT``."""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distaccum import audit
from tests.support.audit_loops import FAULTS, LOOPS, RIGHT, Rig, count, loss_sum, told


def main() -> None:
    dist.init_process_group("gloo")
    found: list[dict[str, Any]] = []
    for expected in [*FAULTS, *RIGHT]:
        rig = Rig(**expected.rig)
        with audit(
            rig.model, rig.optimizer, loss_sum=loss_sum, count=count, batches=rig.batches, show=lambda report: None
        ) as report:
            rig.record = report.record
            LOOPS[expected.loop](rig)
        found.append(told(report))
        assert rig.plain.body[2].p == 0.5  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
