"""Each tool answers of one real run: what the default tests have of ``tests/tools``."""

import json
from pathlib import Path

import pytest

from tests.support.commands import QUIET, ROOT, TINY, run, succeed

COMMAND = ROOT / "distaccum" / "__main__.py"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "run"
    settings = (*TINY, *QUIET, "trainer.max_steps=3", "checkpoint.every=3", "metrics.windows=true")
    settings += ("trainer.eval_every=3", "eval.samples=1", "eval.prompt_tokens=4", "eval.max_new_tokens=2")
    succeed(*settings, f"hydra.run.dir={folder}", world=2)
    return folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "RUN"], "step-3"),
        (["compare", "--help"], "usage: distaccum compare"),
        (["report", "RUN"], "report.html"),
        (["export", "RUN/checkpoints/step-3", "RUN/weights.safetensors"], "weights.safetensors"),
        (["audit", "--help"], "usage: distaccum audit"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_a_command_answers_of_a_run(arguments: list[str], says: str, run_dir: Path) -> None:
    given = [word.replace("RUN", str(run_dir)) for word in arguments]
    assert says in succeed(*given, script=COMMAND, cwd=run_dir.parent).stdout


def test_a_run_writes_texts_at_its_evaluation(run_dir: Path) -> None:
    *before, last = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert [one.keys() for one in last["eval_texts"]] == [{"prompt", "text"}]
    assert not any("eval_texts" in record for record in before)


def test_the_forecast_is_of_the_run_that_is_described(tmp_path: Path) -> None:
    given = ("plan", *TINY, "cluster.nodes=2", "cluster.gpus=2", "cluster.micro_step_ms=1")
    succeed(*given, f"hydra.run.dir={tmp_path}", script=COMMAND, cwd=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["cluster"]["gpus"] == 2


def test_the_doctor_looks_at_the_software() -> None:
    found = run("doctor", "--json", "--only", "software", script=COMMAND)
    assert found.returncode in (0, 1)
    assert "torch" in found.stdout
