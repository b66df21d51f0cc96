"""Evaluations do not depend on the ranks, nor on which one asks to stop; what follows a run has its best weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.answers import answer
from tests.support.commands import ROOT, TINY, metrics, run, status, succeed


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, Any]]:
    return {world: answer("evaluation", world=world, imports=["torchmetrics.classification"]) for world in (1, 3)}


@pytest.mark.parametrize("held_out", ["23", "2"])  # of 3 ranks, one holds less; one holds nothing
def test_results_are_those_of_one_process(results: dict[int, dict[str, Any]], held_out: str) -> None:
    alone, shared = results[1][held_out], results[3][held_out]
    names = [name for name in shared if name.startswith("eval_")]
    assert names == ["eval_loss", "eval_accuracy"] + (["eval_acc", "eval_auroc"] if held_out == "23" else [])
    assert [shared[name] for name in names] == pytest.approx([alone[name] for name in names], rel=1e-5)


@pytest.mark.parametrize("world", [1, 3])
def test_the_same_weights_give_the_same_numbers_on_any_number_of_ranks_and_workers(
    results: dict[int, dict[str, Any]], world: int
) -> None:
    alone = results[1]["0 workers"]
    assert alone["eval_loss"] == pytest.approx(alone["fp64"], rel=1e-6)
    assert alone["eval_samples"] == 23
    for workers in ("0 workers", "2 workers"):
        assert results[world][workers] == pytest.approx(alone, rel=1e-15)  # the order of fp64 sums


@pytest.mark.parametrize("world", [1, 3])
def test_one_rank_stops_all(results: dict[int, dict[str, Any]], world: int) -> None:
    for held_out in ("23", "2"):
        found = results[world][held_out]
        assert (found["state"], found["step"], found["reason"]) == ("done", 4, "rank 0 has seen enough")
    assert results[world]["level 2"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warm", "engines"),
    [
        ("distaccum", ["ddp", "fsdp2"]),
        *(
            pytest.param(*one, marks=pytest.mark.heavy)
            for one in (("distaccum", ["zero1"]), ("deepspeed", ["deepspeed"]))
        ),
    ],
)
def test_every_engine_evaluates_alone(warm: str, engines: list[str]) -> None:
    """Ground truth: fp64, each set at once. Then both windows and evaluations, whoever loads the samples."""
    if warm == "deepspeed":
        pytest.importorskip("deepspeed")
    found = answer("evaluation_engines", *engines, warm=warm)
    for engine in engines:
        assert found[engine] == pytest.approx(found["fp64"], rel=1e-6)
        first, second = found[f"{engine} trained"]
        assert first == second != found[engine]


@pytest.mark.slow
def test_the_command_line_evaluates_weights_alone(tmp_path: Path) -> None:
    """Sets by name, of token shards; the weights of another run; on two ranks as on one."""
    for number, name in enumerate(("train", "news", "code")):
        ids = np.random.default_rng(number).integers(0, 64, 200 + 40 * number)
        ids.astype("<u2").tofile(tmp_path / f"{name}.bin")
    data = [*TINY, "data=tokens", f"data.path={tmp_path}/train.bin", "data.vocab_size=64", "metrics=jsonl"]
    data += [f"data.held_out_path={{news: {tmp_path}/news.bin, code: {tmp_path}/code.bin}}", "batch.micro_size=3"]
    data += ["trainer.log_every=1"]
    succeed(*data, "trainer.max_steps=2", f"hydra.run.dir={tmp_path / 'trained'}")
    trained = metrics(tmp_path / "trained")[-1]
    weights = tmp_path / "trained" / "checkpoints" / "step-2"
    for world, start in ((1, f"init_from={weights}"), (2, f"init_from={weights}"), (1, f"resume={weights}")):
        folder = tmp_path / f"{world}-{start[0]}"
        ended = succeed(
            *data, "trainer.max_steps=0", start, "metrics.console=true", f"hydra.run.dir={folder}", world=world
        )
        (record,) = metrics(folder)
        names = [name for name in trained if name.startswith("eval_")]
        assert {"eval_news_loss", "eval_code_loss", "eval_news_samples", "eval_code_samples"} < set(names)
        assert {name: record[name] for name in names} == pytest.approx(
            {name: trained[name] for name in names}, rel=1e-12
        )
        assert status(folder)["state"] == "done"
        assert not (folder / "checkpoints").exists()
        assert "no step to train, only an evaluation" in ended.stdout
        assert "evaluated the weights after" in ended.stdout


@pytest.mark.slow
def test_a_result_of_no_set_is_a_bad_configuration(tmp_path: Path) -> None:
    np.arange(64, dtype="<u2").tofile(tmp_path / "a.bin")
    sets = f"data.held_out_path={{news: {tmp_path}/a.bin, code: {tmp_path}/a.bin}}"
    data = [
        "data=tokens",
        f"data.path={tmp_path}/a.bin",
        "data.vocab_size=64",
        sets,
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    refused = run(*TINY, *data, "callbacks=early_stop", "batch.global_size=3", "batch.micro_size=3")
    assert refused.returncode == 2
    assert "Use one of eval_news_loss, eval_code_loss" in " ".join(refused.stderr.split())


@pytest.mark.heavy
def test_every_engine_writes_the_same_texts(tmp_path: Path) -> None:
    """Of the same weights, drawn, on one rank and on two."""
    asked = [*TINY, "metrics=jsonl", "trainer.max_steps=0", "trainer.eval_samples=3", "eval.samples=3"]
    asked += ["eval.prompt_tokens=5", "eval.max_new_tokens=9"]
    engines = [(1, "ddp"), (2, "ddp"), (2, "zero1"), (2, "fsdp2"), (2, "deepspeed")]
    texts = []
    for world, engine in engines:
        folder = tmp_path / f"{engine}{world}"
        stage = ["engine.stage=3"] if engine == "deepspeed" else []
        succeed(*asked, f"engine={engine}", *stage, f"hydra.run.dir={folder}", world=world)
        texts.append(metrics(folder)[-1]["eval_texts"])
    assert len({one["text"] for one in texts[0]}) == 3
    assert texts == [texts[0]] * len(engines)


WORKER = Path(__file__).parent / "workers" / "inference.py"


@pytest.mark.parametrize(
    ("world", "warm", "engines"),
    [
        (1, "distaccum", ["ddp", "fsdp2"]),
        pytest.param(2, "distaccum", ["ddp", "zero1", "fsdp2"], marks=pytest.mark.slow),
        pytest.param(2, "deepspeed", ["deepspeed-1", "deepspeed-3"], marks=pytest.mark.slow),
    ],
)
def test_a_trainer_predicts_each_sample_once_in_order_with_the_weights_it_has(
    world: int, warm: str, engines: list[str], tmp_path: Path
) -> None:
    """Ground truth: the checkpoints' weights in fp64, in one process, all samples at once."""
    if warm == "deepspeed":
        pytest.importorskip("deepspeed")
    succeed(tmp_path / "results.json", *engines, world=world, script=WORKER, warm=warm, PYTHONPATH=str(ROOT))
    for away in json.loads((tmp_path / "results.json").read_text()).values():
        assert list(away) == ["step-3", "step-1 of 3", "step-4", "step-1 of 4"]
        assert max(away.values()) < 1e-6


def test_a_rank_that_fails_in_a_forward_of_shards_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, world=2, script=WORKER, timeout=90, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    assert "rank 1: ZeroDivisionError: division by zero; rank 0, which waited for it, ends with it" in done.stderr
