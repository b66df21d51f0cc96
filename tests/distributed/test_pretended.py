"""On a pretended GPU: numbers as on the CPU, waits of the host that are known, and the tests of a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.pretend import missing
from tests.support.commands import ROOT, TINY, succeed

pytestmark = [
    *(pytest.mark.pretend, pytest.mark.slow, pytest.mark.timeout(700)),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
# Of three windows of a Trainer with a record. Each more is a decision: what waits costs every step.
DECISION, RECORD = "event.synchronize() at engines/modules.py:read", "copy to the host at train/metrics/meter.py:record"
PRETENDED: Any = {"script": ROOT / "launch" / "pretend" / "__main__.py", "PYTHONPATH": str(ROOT)}
WAITS = {"ddp": {DECISION: 4, RECORD: 1}, "zero1": {DECISION: 4, RECORD: 1}, "fsdp2": {DECISION: 3, RECORD: 1}}
REDUCES = {"ddp": "allreduce_", "zero1": "allreduce_", "fsdp2": "_reduce_scatter_base_"}
WINDOWS, BLOCKS = 3, {"ddp": 1, "zero1": 1, "fsdp2": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("pretended") / "answer.json"
    succeed("compare", file, world=2, **PRETENDED)
    return json.loads(file.read_text())


@pytest.mark.parametrize("engine", WAITS)
def test_two_ranks_have_the_cpus_weights_and_wait_where_it_is_known(engine: str, trained: Any) -> None:
    found = trained[engine]
    assert found["ranks"] == [[True, []]] * 2
    assert found["seen"] == WAITS[engine]
    reduced = {name: n for name, n in found["collectives"].items() if f".{REDUCES[engine]}." in name}
    assert sum(n for name, n in reduced.items() if "/world.py" not in name) == WINDOWS * BLOCKS[engine]


def test_the_main_job_goes_on_from_a_checkpoint_with_the_cpus_weights(tmp_path: Path) -> None:
    settings = (*TINY, "model.dropout=0.1", "+model.attention=math", "batch.global_size=8", "batch.micro_size=4")
    settings += ("metrics=jsonl", "resume=auto", "checkpoint.every=3", "trainer.eval_every=0", "metrics.report=false")
    for steps in (3, 6):
        succeed("train", *settings, f"trainer.max_steps={steps}", f"hydra.run.dir={tmp_path / 'device'}", **PRETENDED)
    succeed(*settings, "trainer.max_steps=6", f"hydra.run.dir={tmp_path / 'cpu'}")
    files = [next((tmp_path / run / "checkpoints" / "step-6").glob("model*")) for run in ("device", "cpu")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_tests_of_a_gpu_pass_on_it(tmp_path: Path) -> None:
    files = [ROOT / "tests" / "gpu" / f"test_{name}.py" for name in ("boundary", "engines", "pretended")]
    chosen = "pretended or between or overflow or (every_engine and fp32 and fsdp2 and not held and not checkpoint)"
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'own'}", "-m", "gpu", "-k", chosen]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what the server has imported
    succeed("pytest", *options, *files, cwd=ROOT, timeout=600, **PRETENDED)
