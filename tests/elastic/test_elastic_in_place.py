"""Real elastic runs of engines that shard the state: a rank dies, and the others go back to a checkpoint in memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.elastic.test_elastic_run import CHAINS as OF_DDP
from tests.elastic.test_elastic_run import VARIANTS as OF_RUNS
from tests.support.commands import free_port, metrics
from tests.support.elastic_runs import Fault, Job, References, elastic, first_difference, job, kills, near

pytestmark = pytest.mark.slow
_ALONE = "elastic.rejoin=false"
_FSDP2 = "engine=fsdp2", "elastic.memory_every=4"
_FP16 = "precision=fp16", "precision.scaler.initial_scale_power=22", "precision.scaler.growth_interval=2"


def _back(made: Job) -> list[tuple[str, int, int]]:
    """Where each view went back to, after which window, and how many windows were computed again; as rank 0 says it."""
    said = re.findall(r"WARNING .*: \d+ ranks? goe?s? on from (.*); (\d+) windows? ", made.logs())
    places = [(*to.partition(" after window ")[::2], int(again)) for to, again in said]
    return [(to.partition(":")[0], int(window or 0), again) for to, window, again in places]


CHAINS = {
    "in a window": [("0.0.1", "backward", 3), ("0.2.1", "step", 9), ("0.3.1", "forward", 17)],
    "over a checkpoint in memory": [("0.1.1", "keeping", 4), ("0.3.1", "exchanging", 8), ("0.0.1", "kept", 12)],
    "before the first one": [("0.0.1", "exchanging", 0), ("0.2.1", "keeping", 0), ("0.1.1", "built", 0)],
    **{name: OF_DDP[name] for name in ("over a checkpoint", "in an evaluation", "over a record", "at the end")},
    "when they go back": [("0.3.1", "backward", 5), ("0.1.1", "going back", 0), ("0.2.1", "went back", 1)],
}


@pytest.mark.heavy
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_three_of_four_ranks_are_killed_at_a_place(
    chain: list[tuple[str, str, int]], tmp_path: Path, reference: References
) -> None:
    made = elastic(tmp_path / "run", *_FSDP2, _ALONE, faults=kills(*chain), ranks=4)
    assert first_difference(made.folder, reference("engine=fsdp2")) == ""
    assert len([line for line in made.said().splitlines() if "was killed by SIGKILL; its place" in line]) >= 2
    assert [one["window"] for one in metrics(made.folder)] == list(range(1, 25))
    assert all(again <= 4 for to, _, again in _back(made) if "memory" in to), _back(made)
    assert "(elastic.memory_every)" in made.said()


VARIANTS = {
    **{name: OF_RUNS[name] for name in ("an average that is evaluated, and clipped norms", "spikes that are skipped")},
    "fp16, some windows of which overflow": _FP16,
    "loading processes": ("engine.reshard_after_forward=false", "trainer.num_workers=1"),
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.heavy
def test_other_runs_go_back_as_well(settings: tuple[str, ...], tmp_path: Path, reference: References) -> None:
    places = ("0.1.1", "backward", 3), ("0.0.1", "step", 9), ("0.2.1", "on_eval", 15)
    made = elastic(tmp_path / "run", *_FSDP2, _ALONE, *settings, faults=kills(*places), ranks=4)
    assert first_difference(made.folder, reference("engine=fsdp2", *settings)) == ""


@pytest.mark.heavy
def test_fast_numerics_go_back_to_the_last_bits(tmp_path: Path, reference: References) -> None:
    places = ("0.1.1", "backward", 3), ("0.0.1", "stepped", 9)
    plain = "numerics=fast", "+model.dropout=0"
    made = elastic(tmp_path / "run", *_FSDP2, _ALONE, *plain, "engine.sync=every", faults=kills(*places))
    near(made.folder, reference(*plain))


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
def test_a_node_is_lost_and_the_other_one_has_the_copies(tmp_path: Path, reference: References) -> None:
    with job(tmp_path / "run", *_FSDP2) as made:
        meeting = "--nnodes=2", f"--rdzv=127.0.0.1:{free_port()}", "--nproc=2"
        faults: list[Fault] = [("*", "update", 6, "await go")]
        made.start(*meeting, "--node-rank=0", faults=faults)
        other = made.start(*meeting, "--node-rank=1", faults=faults)
        made.wait_for(lambda: made.windows() >= 5)
        other.kill()
        (tmp_path / "go").touch()
        assert made.end() == 0, made.said()
        assert _back(made)[0][:2] == ("the checkpoint in memory", 4), made.logs()
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
