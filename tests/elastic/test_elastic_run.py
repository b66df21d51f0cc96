"""Real elastic runs whose processes die at chosen places: they end as the run that nobody disturbs, bit for bit."""

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import free_port, metrics, status
from tests.support.elastic_runs import SOAKED, Fault, Job, References, elastic, first_difference, job, kills, near, same

pytestmark = pytest.mark.slow
_ALONE = "elastic.rejoin=false"
_FSDP2 = "engine=fsdp2", "elastic.memory_every=4"


CHAINS = {
    "before the reduction": [("0.1.1", "loading", 2), ("0.2.1", "forward", 6), ("0.0.1", "backward", 11)],
    "while it sends": [("0.3.1", "count", 2), ("0.0.1", "reduction", 5), ("0.1.1", "sent", 12)],
    "while it gathers": [("0.0.1", "gathering", 1), ("0.1.1", "gathered", 6), ("0.2.1", "gathered", 7)],
    "about the step": [("0.0.1", "step", 3), ("0.1.1", "stepped", 7), ("0.2.1", "update", 13)],
    "over a record": [("0.0.1", "log", 3), ("0.1.1", "logged", 7), ("0.2.1", "log", 16)],
    "over a checkpoint": [("0.0.1", "save", 4), ("0.1.1", "publish", 9), ("0.2.1", "published", 13)],
    "told of a checkpoint": [("0.1.1", "save", 4), ("0.0.1", "on_checkpoint", 9), ("0.2.1", "on_checkpoint", 15)],
    "in an evaluation": [("0.0.1", "evaluation", 4), ("0.2.1", "on_eval", 9), ("0.1.1", "evaluation data", 17)],
    "told of an evaluation": [("0.1.1", "evaluation", 4), ("0.0.1", "on_eval", 9), ("0.2.1", "log", 24)],
    "at the end": [("0.1.1", "update", 24), ("0.0.1", "on_end", 0), ("0.2.1", "ending", 0)],
    "three at once": [("0.0.1", "forward", 5), ("0.2.1", "forward", 5), ("0.3.1", "forward", 5)],
    "before the first window": [("0.0.1", "formed", -1), ("0.1.1", "built", 0), ("0.3.1", "built", 0)],
    "when they report": [("0.3.1", "backward", 5), ("0.0.1", "leaving", 0), ("0.1.1", "deciding", 0)],
    "when a view is decided": [("0.3.1", "reduction", 5), ("0.0.1", "decided", 0), ("0.1.1", "group", 1)],
    "when the next group is formed": [("0.3.1", "sent", 5), ("0.0.1", "formed", 0), ("0.1.1", "hand over", 1)],
    "when the state is handed over": [("0.3.1", "gathered", 5), ("0.0.1", "hand over", 0), ("0.1.1", "built", 1)],
    "once all have the state": [("0.3.1", "step", 5), ("0.0.1", "handed over", 0), ("0.1.1", "built", 1)],
}


def _marked(cases: Mapping[str, Any], *often: str) -> list[Any]:
    return [
        pytest.param(case, id=name, marks=() if name in often else pytest.mark.heavy) for name, case in cases.items()
    ]


@pytest.mark.parametrize("chain", _marked(CHAINS))
def test_three_of_four_ranks_are_killed_at_a_place(
    chain: list[tuple[str, str, int]], tmp_path: Path, reference: References
) -> None:
    made = elastic(tmp_path / "run", _ALONE, faults=kills(*chain), ranks=4)
    assert first_difference(made.folder, reference()) == ""
    killed = [line for line in made.said().splitlines() if "was killed by SIGKILL; its place stays empty" in line]
    certain = [phase for _, phase, _ in chain if phase not in ("decided", "deciding", "group")]
    assert len(killed) >= min(2, len(certain)), made.said()  # the others may not be the one who decides
    assert [one["window"] for one in metrics(made.folder)] == list(range(1, 25))
    assert len(re.findall(r"^world +\d x cpu$", made.said(), re.MULTILINE)) == 1  # of the header
    assert len(re.findall(r"^done: ", made.said(), re.MULTILINE)) == 1
    assert (made.folder / ".hydra" / "overrides.yaml").exists()


SHARDED = {
    "while state is sent to the next rank": [
        ("0.3.1", "exchange", 2),
        ("0.0.1", "exchanging", 6),
        ("0.1.1", "exchanged", 11),
    ],
    "while weights are sent": [("0.1.1", "broadcast", 2), ("0.3.1", "broadcasted", 6), ("0.0.1", "committed", 11)],
    "about a step": [("0.0.1", "step", 3), ("0.1.1", "stepped", 7), ("0.2.1", "update", 13)],
    "two at once": [("0.0.1", "broadcasted", 5), ("0.2.1", "broadcast", 5)],
    "when the state is dealt anew": [("0.2.1", "stepped", 5), ("0.0.1", "dealing", 1)],
    "over a checkpoint": [("0.1.1", "save", 4), ("0.0.1", "publish", 9), ("0.2.1", "published", 13)],
    "at the end": [("0.1.1", "update", 24), ("0.0.1", "on_end", 0), ("0.2.1", "ending", 0)],
}


@pytest.mark.parametrize("chain", _marked(SHARDED))
def test_of_a_sharded_optimizer_nothing_is_lost_with_a_rank(
    chain: list[tuple[str, str, int]], tmp_path: Path, reference: References
) -> None:
    made = elastic(tmp_path / "run", _ALONE, "engine=zero1", faults=kills(*chain), ranks=4)
    assert first_difference(made.folder, reference()) == ""
    assert made.views()[-1] < 4


@pytest.mark.heavy
@pytest.mark.parametrize(("at", "to"), [(5, "the beginning"), (14, "the checkpoint on disk after window 12")])
def test_where_a_part_of_the_state_is_gone_the_run_goes_back(
    at: int, to: str, tmp_path: Path, reference: References
) -> None:
    places = ("0.0.1", "forward", at), ("0.1.1", "forward", at)
    made = elastic(tmp_path / "run", _ALONE, "engine=zero1", faults=kills(*places), ranks=4)
    assert f"2 ranks go on from {to}" in made.logs()
    assert first_difference(made.folder, reference()) == ""


@pytest.mark.heavy
def test_a_checkpoint_that_is_damaged_is_passed_over_when_the_run_goes_back(
    tmp_path: Path, reference: References
) -> None:
    with job(tmp_path / "run", _ALONE, "engine=zero1") as made:
        made.start("--nproc=4", faults=[("*", "update", 14, "await go")])
        newest = made.folder / "checkpoints" / "step-12"
        made.wait_for(lambda: made.windows() >= 13 and (newest / "manifest.json").exists())
        for file in newest.glob("optimizer*.safetensors"):
            file.write_bytes(file.read_bytes()[:100])
        made.kill("0.0.1", "0.1.1")
        (tmp_path / "go").touch()
        assert made.end() == 0, made.said()
        assert "2 ranks go on from the checkpoint on disk after window 6" in made.logs()
        assert first_difference(made.folder, reference()) == ""


STOPS = "callbacks=early_stop", "callbacks.early_stop.patience=1", "trainer.max_steps=60"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings", [*(pytest.param(SOAKED[kind], id=kind) for kind in ("fp16", "average", "spikes", "loading")), STOPS]
)
def test_other_runs_go_on_as_well(settings: tuple[str, ...], tmp_path: Path, reference: References) -> None:
    places = ("0.1.1", "backward", 3), ("0.0.1", "step", 9), ("0.2.1", "on_eval", 15)
    made = elastic(tmp_path / "run", _ALONE, *settings, faults=kills(*places), ranks=4)
    expected = reference(*settings)
    assert first_difference(made.folder, expected) == ""
    assert status(made.folder)["reason"] == status(expected)["reason"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "places",
    [
        (("0.0.1", "skip", 1), ("0.1.1", "gathered", 6), ("0.2.1", "log", 8)),
        (("0.0.1", "recording", 1), ("0.1.1", "recorded", 2), ("0.2.1", "skip", 3)),
    ],
    ids=["told of", "logged"],
)
def test_windows_that_overflow_are_told_and_logged_once_whoever_is_lost_over_them(
    places: tuple[tuple[str, str, int], ...], tmp_path: Path, reference: References
) -> None:
    made = elastic(tmp_path / "run", _ALONE, *SOAKED["fp16"], faults=kills(*places), ranks=4)
    assert [one["applied"] for one in same(made.folder)][:2] == [False, False]
    assert first_difference(made.folder, reference(*SOAKED["fp16"])) == ""


@pytest.mark.heavy
@pytest.mark.parametrize("engine", [(), (*_FSDP2, "engine.sync=every")], ids=["ddp", "fsdp2"])
def test_fast_numerics_go_on_to_the_last_bits(engine: tuple[str, ...], tmp_path: Path, reference: References) -> None:
    places = ("0.1.1", "backward", 3), ("0.0.1", "stepped", 9)
    settings = "numerics=fast", "+model.dropout=0"
    made = elastic(tmp_path / "run", _ALONE, *engine, *settings, faults=kills(*places))
    near(made.folder, reference(*settings))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("engine", "place", "settings"),
    [
        ("ddp", "reduction", ()),
        ("zero1", "broadcasted", ()),
        ("zero1", "broadcasted", SOAKED["fp16"]),
        ("zero1", "broadcasted", ("precision=bf16-weights",)),
    ],
    ids=["ddp", "zero1", "fp16", "masters"],
)
def test_another_process_joins_and_gets_its_share_and_a_rank_that_stands_still_is_left_behind(
    engine: str, place: str, settings: tuple[str, ...], tmp_path: Path, reference: References
) -> None:
    faults: list[Fault] = [
        ("0.2.1", "forward", 3, "stop"),
        ("*", "update", 8, "await ready-0.2.2"),
        ("0.0.1", place, 14, "kill"),
        ("*", "update", 18, "await ready-0.0.2"),
    ]
    made = elastic(tmp_path / "run", "elastic.expel_after=3", f"engine={engine}", *settings, faults=faults)
    ranks = [one["ranks"] for one in metrics(made.folder)]
    assert [now for before, now in zip([0, *ranks], ranks, strict=False) if now != before] == [3, 2, 3, 2, 3]
    assert status(made.folder) == status(reference(*settings)) | {"ranks": 3}
    assert first_difference(made.folder, reference(*settings)) == ""


@pytest.mark.heavy
@pytest.mark.parametrize("engine", [(), _FSDP2], ids=["ddp", "fsdp2"])
def test_a_node_is_lost_with_its_agent(engine: tuple[str, ...], tmp_path: Path, reference: References) -> None:
    at = 6 if engine else 5
    with job(tmp_path / "run", *engine) as made:
        meeting = "--nnodes=2", f"--rdzv=127.0.0.1:{free_port()}", "--nproc=2"
        faults: list[Fault] = [("*", "update", at, "await go")]
        made.start(*meeting, "--node-rank=0", faults=faults)
        other = made.start(*meeting, "--node-rank=1", faults=faults)
        made.wait_for(lambda: made.windows() >= at - 1)
        other.kill()
        (tmp_path / "go").touch()
        assert made.end() == 0, made.said()
        ranks = [one["ranks"] for one in metrics(made.folder)]
        if engine:  # the other node has the copies
            assert _back(made)[0][:2] == ("the checkpoint in memory", 4), made.logs()
        else:
            assert ranks in ([4] * 4 + [2] * 20, [4] * 5 + [2] * 19)
        assert first_difference(made.folder, reference(*engine[:1])) == ""


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_told_to_leave_it_saves_and_the_same_command_goes_on(
    engine: str, tmp_path: Path, reference: References
) -> None:
    settings = () if engine == "ddp" else (f"engine={engine}",)
    with job(tmp_path / "run", "resume=auto", *settings, "elastic.memory_every=4", _ALONE) as made:
        agent = made.start("--nproc=3", faults=[("0.1.1", "forward", 5, "kill"), ("*", "update", 9, "await go")])
        made.wait_for(lambda: made.windows() >= 8)
        os.kill(agent.pid, signal.SIGTERM)
        (tmp_path / "go").touch()
        assert made.end() == 0, made.said()
        assert status(made.folder)["state"] == "preempted"
        assert status(made.folder)["step"] in (8, 9)
        made.start("--nproc=2")
        assert made.end() == 0, made.said()
        assert status(made.folder)["state"] == "done"
        assert first_difference(made.folder, reference(*settings)) == ""


def _failed(made: Job) -> str:
    assert made.end(60) == 1, made.said()
    assert status(made.folder)["state"] == "failed"
    assert "another is started" not in made.said().partition("the run failed")[0]
    return str(status(made.folder)["reason"])


@pytest.mark.heavy
@pytest.mark.parametrize("lost", ["", "0.0.1", "0.2.1"])
def test_gradients_that_are_nan_end_the_run_also_when_a_rank_is_lost_over_them(lost: str, tmp_path: Path) -> None:
    with job(tmp_path / "run", _ALONE) as made:
        faults: list[Fault] = [("0.1.1", "forward", 5, "nan")]
        made.start("--nproc=3", faults=[*faults, (lost, "diagnosis", 5, "kill")] if lost else faults)
        assert "NonFiniteError" in _failed(made)
        assert ("was killed by SIGKILL" in made.said()) == bool(lost)
        assert made.windows() == 6


@pytest.mark.heavy
def test_an_error_on_one_rank_is_that_ranks_end_and_not_the_runs(tmp_path: Path, reference: References) -> None:
    faults: list[Fault] = [("0.0.1", "forward", 5, "raise"), ("0.2.1", "backward", 11, "exit")]
    made = elastic(tmp_path / "run", _ALONE, faults=faults)
    assert "asked to fail" in made.said() + made.logs()
    assert "0.2.1" in made.said()
    assert first_difference(made.folder, reference()) == ""
    assert status(made.folder) == status(reference()) | {"ranks": 1}


@pytest.mark.heavy
def test_a_process_that_dies_before_the_run_begins_ends_it(tmp_path: Path) -> None:
    for member in ("0.0.1", "0.1.1"):
        with job(tmp_path / member) as made:
            made.start("--nproc=2", faults=kills((member, "starting", 0)))
            assert made.end(60) == 1, made.said()
            rank = member.split(".")[1]
            assert f"rank {rank} was killed by SIGKILL before the run had begun" in made.said()


@pytest.mark.heavy
def test_where_nobody_is_left_the_agent_writes_why_and_says_how_to_go_on(tmp_path: Path, reference: References) -> None:
    with job(tmp_path / "run", "elastic.rejoin=false") as made:
        made.start("--nproc=2", faults=kills(("0.1.1", "forward", 7), ("0.0.1", "forward", 9)))
        assert made.end(60) == 1, made.said()
        why = "no rank is left: first 0.0.1 was killed by SIGKILL"
        assert status(made.folder) == {"state": "failed", "step": 9, "reason": why}
        assert f"distaccum: the run failed: {why}" in made.said()
        assert f"the same command with resume=auto hydra.run.dir={made.folder}" in made.said()
    with job(tmp_path / "run", "resume=auto") as again:
        again.start("--nproc=2")
        assert again.end() == 0, again.said()
        assert first_difference(again.folder, reference()) == ""


@pytest.mark.heavy
def test_a_checkpoint_is_that_of_the_ranks_that_are_there(tmp_path: Path, reference: References) -> None:
    made = elastic(tmp_path / "run", _ALONE, "checkpoint.keep=0", faults=kills(("0.1.1", "backward", 13)))
    for step, ranks in ((12, 3), (18, 2), (24, 2)):
        folder = made.folder / "checkpoints" / f"step-{step}"
        assert len(list(folder.glob("random-*.json"))) == ranks
    assert first_difference(made.folder, reference("checkpoint.keep=0")) == ""


@pytest.mark.heavy
def test_a_newcomer_that_cannot_begin_is_told_and_is_not_the_runs_end(tmp_path: Path, reference: References) -> None:
    with job(tmp_path / "run") as made:
        faults: list[Fault] = [("0.1.1", "forward", 3, "kill"), ("*", "update", 8, "await go")]
        faults += [(f"0.1.{life}", "starting", 0, "leave") for life in (2, 3, 4)]
        made.start("--nproc=2", faults=faults)
        made.wait_for(lambda: "asked to leave" in made.said())
        (tmp_path / "go").touch()
        assert made.end() == 0, made.said()
        assert status(made.folder) == status(reference()) | {"ranks": 1}
        assert first_difference(made.folder, reference()) == ""


@pytest.mark.heavy
def test_fewer_than_go_on_save_and_leave_when_they_are_told_to(tmp_path: Path) -> None:
    with job(tmp_path / "run", _ALONE, "elastic.min_ranks=3") as made:
        agent = made.start("--nproc=3", faults=kills(("0.1.1", "forward", 9)))
        made.wait_for(lambda: "(elastic.min_ranks): waiting for others" in made.said())
        agent.terminate()
        assert made.end(60) == 0, made.said()
        assert status(made.folder) == {"state": "preempted", "step": 9, "reason": "SIGTERM", "ranks": 2}
        assert (made.folder / "checkpoints" / "step-9" / "manifest.json").exists()
        assert made.said().count("waiting for others") == 1


@pytest.mark.heavy
def test_a_first_rank_that_wakes_ends_alone_and_the_run_ends_well(tmp_path: Path, reference: References) -> None:
    with job(tmp_path / "run", _ALONE, "elastic.expel_after=3") as made:
        faults: list[Fault] = [("0.0.1", "recorded", 5, "stop"), ("*", "update", 8, "await go")]
        made.start("--nproc=3", faults=faults)
        made.wait_for(lambda: made.windows() >= 5)
        woken = made.workers()["0.0.1"]
        made.wait_for(lambda: len(made.views()) >= 2)
        os.kill(woken, signal.SIGCONT)
        made.wait_for(lambda: "0.0.1" not in made.workers())
        (tmp_path / "go").touch()
        assert made.end() == 0, made.said()
        assert status(made.folder) == status(reference()) | {"ranks": 2}
        assert first_difference(made.folder, reference()) == ""


def _back(made: Job) -> list[tuple[str, int, int]]:
    """Where each view went back to, after which window, and how many windows were computed again; as rank 0 says it."""
    said = re.findall(r"WARNING .*: \d+ ranks? goe?s? on from (.*); (\d+) windows? ", made.logs())
    places = [(*to.partition(" after window ")[::2], int(again)) for to, again in said]
    return [(to.partition(":")[0], int(window or 0), again) for to, window, again in places]


GO_BACK = {
    "in a window": [("0.0.1", "backward", 3), ("0.2.1", "step", 9), ("0.3.1", "forward", 17)],
    "over a checkpoint in memory": [("0.1.1", "keeping", 4), ("0.3.1", "exchanging", 8), ("0.0.1", "kept", 12)],
    "before the first one": [("0.0.1", "exchanging", 0), ("0.2.1", "keeping", 0), ("0.1.1", "built", 0)],
    **{name: CHAINS[name] for name in ("over a checkpoint", "in an evaluation", "over a record", "at the end")},
    "when they go back": [("0.3.1", "backward", 5), ("0.1.1", "going back", 0), ("0.2.1", "went back", 1)],
}


@pytest.mark.heavy
@pytest.mark.parametrize("chain", GO_BACK.values(), ids=GO_BACK)
def test_three_of_four_ranks_of_a_sharded_model_are_killed_at_a_place(
    chain: list[tuple[str, str, int]], tmp_path: Path, reference: References
) -> None:
    made = elastic(tmp_path / "run", *_FSDP2, _ALONE, faults=kills(*chain), ranks=4)
    assert first_difference(made.folder, reference("engine=fsdp2")) == ""
    assert len([line for line in made.said().splitlines() if "was killed by SIGKILL; its place" in line]) >= 2
    assert [one["window"] for one in metrics(made.folder)] == list(range(1, 25))
    assert all(again <= 4 for to, _, again in _back(made) if "memory" in to), _back(made)
    assert "(elastic.memory_every)" in made.said()


@pytest.mark.parametrize("kind", ["average", "spikes", "fp16", "loading"])
@pytest.mark.heavy
def test_other_runs_go_back_as_well(kind: str, tmp_path: Path, reference: References) -> None:
    settings = (*SOAKED[kind], *(["engine.reshard_after_forward=false"] if kind == "loading" else []))
    places = ("0.1.1", "backward", 3), ("0.0.1", "step", 9), ("0.2.1", "on_eval", 15)
    made = elastic(tmp_path / "run", *_FSDP2, _ALONE, *settings, faults=kills(*places), ranks=4)
    assert first_difference(made.folder, reference("engine=fsdp2", *settings)) == ""


@pytest.mark.heavy
def test_nothing_is_computed_again_when_a_process_joins(tmp_path: Path, reference: References) -> None:
    faults: list[Fault] = [("0.2.1", "forward", 3, "kill"), ("*", "update", 9, "await ready-0.2.2")]
    made = elastic(tmp_path / "run", *_FSDP2, faults=faults)
    ranks = [one["ranks"] for one in metrics(made.folder)]
    assert [now for before, now in zip([0, *ranks], ranks, strict=False) if now != before] == [3, 2, 3]
    assert first_difference(made.folder, reference("engine=fsdp2")) == ""
    (_, _, first), (to, window, again) = _back(made)
    assert first == 3  # of the three windows since the beginning
    assert (to, again) == ("the checkpoint in memory", 0)
    assert window in (9, 10)


@pytest.mark.heavy
@pytest.mark.parametrize(("after", "to", "window"), [(8, "the checkpoint on disk", 6), (3, "the beginning", 0)])
def test_two_neighbours_die_at_once(after: int, to: str, window: int, tmp_path: Path, reference: References) -> None:
    with job(tmp_path / "run", *_FSDP2, _ALONE) as made:
        made.start("--nproc=4", faults=[("*", "update", after, "await go")])
        made.wait_for(lambda: made.windows() >= after - 1)
        made.kill("0.1.1", "0.2.1")
        (tmp_path / "go").touch()
        assert made.end() == 0, made.said()
        assert _back(made)[0][:2] == (to, window), made.logs()
        assert first_difference(made.folder, reference("engine=fsdp2")) == ""


@pytest.mark.heavy
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_goes_back_in_the_same_processes(stage: int, tmp_path: Path, reference: References) -> None:
    pytest.importorskip("deepspeed")
    faults: list[Fault] = [("0.1.1", "backward", 3, "kill"), ("*", "update", 9, "await ready-0.1.2")]
    faults += [("0.0.1", "step", 14, "kill"), ("*", "update", 19, "await ready-0.0.2")]
    plain = "numerics=fast", "+model.dropout=0"
    settings = "engine=deepspeed", f"engine.stage={stage}", "elastic.memory_every=4"
    made = elastic(tmp_path / "run", *settings, *plain, faults=faults)
    ranks = [one["ranks"] for one in metrics(made.folder)]
    assert [now for before, now in zip([0, *ranks], ranks, strict=False) if now != before] == [3, 2, 3, 2, 3]
    assert {to for to, _, _ in _back(made)} == {"the checkpoint in memory"}
    near(made.folder, reference(*plain))
