"""Programs as users write them, on every engine: the weights of whole batches, or one message before any moves."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, run
from tests.support.programs import ENGINES, LATE, PROGRAMS, WRITE, table

WORKER = ROOT / "tests" / "distributed" / "workers" / "programs.py"
# Each program on one engine, each engine with a quarter of them; the rest is heavy. The default run has those of
# ddp, but for compiled ones.
COVERING = set(zip(PROGRAMS, cycle(ENGINES), strict=False))
COVERING ^= {("GAN, two accumulators", engine) for engine in ("fsdp2", "ddp")}  # test_fsdp2_programs has that of fsdp2


def _marks(name: str, engine: str) -> tuple[pytest.MarkDecorator, ...]:
    if (name, engine) not in COVERING:
        return (pytest.mark.heavy,)
    return () if engine == "ddp" and not name.startswith("compile") else (pytest.mark.slow,)


CELLS = [pytest.param(name, engine, marks=_marks(name, engine)) for name in PROGRAMS for engine in ENGINES]


@pytest.mark.parametrize(("name", "engine"), CELLS)
def test_a_program_is_exact_or_refused(name: str, engine: str, tmp_path: Path) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    path = tmp_path / "rank"
    warm = "deepspeed" if engine == "deepspeed" else "distaccum"
    finished = run(path, engine, name, world=2, script=WORKER, PYTHONPATH=str(ROOT), timeout=60, warm=warm)
    files = [Path(f"{path}.{rank}") for rank in range(2)]
    assert all(file.exists() for file in files), finished.stdout + finished.stderr
    ranks: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    words = table()[name][engine]
    if not words:
        for rank in ranks:
            # What fp32 itself loses on the way depends on the processor: a plain loop over whole batches loses it too.
            assert rank["error"] <= max(1e-6, 3 * rank["plain"]), ranks
        return
    late = (name, engine) in LATE  # what makes it inexact comes after windows that were exact
    messages = [rank["refused"] for rank in ranks if "refused" in rank]
    assert any(words in message for message in messages), ranks
    moved = any(rank["moved"] for rank in ranks) and name not in WRITE
    assert late or (len(messages) == len(ranks) and not moved), ranks


def test_the_table_of_the_documentation_has_every_program() -> None:
    assert table().keys() == PROGRAMS.keys()
