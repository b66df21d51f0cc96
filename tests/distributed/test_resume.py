"""A run that is killed and continued ends as one that was not, in fp16 at the same scales."""

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.workers import resumes
from tests.support import wide
from tests.support.commands import ROOT, SIXTY, TINY, kill_when, metrics, run, status, succeed

SETTINGS = (*SIXTY, "checkpoint.every=7")
ALL_AT_ONCE = [
    "checkpoint.background=true",
    "compile=blocks",
    "loss=chunked_cross_entropy",
    "loss.chunk=8",
    "optim=adamw_no_decay",
    "schedule=wsd",
    "trainer.num_workers=2",
    "trainer.prefetch_windows=2",
    "trainer.eval_samples=40",
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_killed_and_resumed_is_bitwise_uninterrupted(tmp_path: Path, world: int) -> None:
    settings = (*SETTINGS, "trainer.max_steps=36", "trainer.eval_every=12")
    succeed(*settings, f"hydra.run.dir={tmp_path / 'whole'}", world=world)
    kill_when(tmp_path / "killed", 17, *settings, world=world)
    assert status(tmp_path / "killed")["state"] == "running"
    resumed = succeed(*settings, f"hydra.run.dir={tmp_path / 'killed'}", world=world)
    assert "resuming" in resumed.stdout
    assert "at step 36" not in resumed.stdout  # none of its processes had gone on

    whole, killed = metrics(tmp_path / "whole"), metrics(tmp_path / "killed")
    exact = ("step", "window", "epoch", "loss", "grad_norm", "lr", "samples", "tokens", "eval_loss")
    assert len(whole) == 36
    assert [[record.get(key) for key in exact] for record in killed] == [
        [record.get(key) for key in exact] for record in whole
    ]
    assert status(tmp_path / "killed") == {"state": "done", "step": 36, "reason": ""}


@pytest.mark.fault("kill -9 of any ranks at any moment, again and again")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "more"),
    [
        pytest.param(5, ["checkpoint.background=false"], marks=pytest.mark.heavy),
        pytest.param(20, ["checkpoint.background=false"], marks=pytest.mark.heavy),
        pytest.param(3, ["checkpoint.background=true"], marks=pytest.mark.heavy),
        pytest.param(30, ["checkpoint.background=true"], marks=pytest.mark.heavy),
        pytest.param(3, ALL_AT_ONCE, marks=pytest.mark.heavy),
    ],
    ids=["5", "20", "background-3", "background-30", "all at once-3"],
)
def test_killed_at_random_moments_is_bitwise_uninterrupted(
    tmp_path: Path, times: int, more: list[str], says: Callable[[str], None]
) -> None:
    settings = [*SETTINGS, "checkpoint.every=4", f"trainer.max_steps={12 * times}", "trainer.eval_every=30", *more]
    settings += ["trainer.verify=never", "+callbacks.killed._target_=tests.support.deaths.KilledAnywhere"]
    where = {name: f"hydra.run.dir={tmp_path / name}" for name in ("whole", "killed")}
    succeed(*settings, where["whole"], world=2, PYTHONPATH=str(ROOT))
    # A save in the background is killed where it is being written, or waits to be published, some windows later.
    background = "checkpoint.background=true" in more
    farthest, latest = (8, 0.06) if background else (5, 0.015)
    draw, half_written = random.Random(times), 0  # noqa: S311
    for _ in range(times):
        # By the folders: a kill may come between a checkpoint's publication and the history's note of it.
        saved = [int(path.name.removeprefix("step-")) for path in (tmp_path / "killed" / "checkpoints").glob("step-*")]
        step = max(saved, default=0) + draw.randint(1, farthest)
        who = draw.choice(["0", "1", "01"])
        given = {"AT": str(step), "WHO": who, "LATER": f"{draw.random() * latest:.4f}"}
        killed = run(*settings, where["killed"], world=2, timeout=60, grace=5, PYTHONPATH=str(ROOT), **given)
        found = status(tmp_path / "killed")
        half_written += any((tmp_path / "killed" / "checkpoints").glob(".saving-step-*"))
        assert found["state"] != "done", given
        if who == "1":  # rank 0 lives to say so
            assert found["reason"].startswith("rank 1 "), found
            says(killed.stderr)
    print(f"{times} kills, {half_written} while a checkpoint was being written")
    assert not background or half_written >= times // 6
    succeed(*settings, where["killed"], world=2, PYTHONPATH=str(ROOT), timeout=600)
    exact = ("step", "window", "epoch", "loss", "grad_norm", "lr", "samples", "tokens", "eval_loss")
    ours, theirs = (metrics(tmp_path / name) for name in ("killed", "whole"))
    assert [[record.get(key) for key in exact] for record in ours] == [
        [record.get(key) for key in exact] for record in theirs
    ]
    ours, theirs = (sorted((tmp_path / name).glob(f"checkpoints/step-{12 * times}/*.safetensors")) for name in where)
    assert [file.name for file in ours] == [file.name for file in theirs] != []
    for one, other in zip(ours, theirs, strict=True):
        weights = load_file(one), load_file(other)
        assert all(weights[0][name].equal(weights[1][name]) for name in weights[0] | weights[1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packing", pytest.param("adapters", marks=pytest.mark.heavy)])
def test_a_mode_resumes_bitwise_on_shards(tmp_path: Path, mode: str) -> None:
    """Packed documents, and LoRA, on zero1, fsdp2 and DeepSpeed's stage 2; whose checkpoints begin anew a process."""
    for module in ("deepspeed", *(("peft", "transformers") if mode == "adapters" else ())):
        pytest.importorskip(module)
    for part in ("whole", "parts"):
        succeed(tmp_path, mode, part, world=2, script=resumes.__file__, warm="deepspeed", PYTHONPATH=str(ROOT))
    for engine in resumes.ENGINES:
        whole, parts = tmp_path / "whole" / engine, tmp_path / "parts" / engine
        exact = ("step", "window", "epoch", "loss", "grad_norm", "samples", "tokens")
        ours, theirs = ([[record[key] for key in exact] for record in metrics(run)] for run in (parts, whole))
        assert len(theirs) == resumes.UPDATES
        assert ours == theirs[resumes.UPDATES // 2 :], engine
        last = f"checkpoints/step-{resumes.UPDATES}"
        saved = [{file.name: load_file(file) for file in (run / last).glob("*.safetensors")} for run in (parts, whole)]
        assert saved[0].keys() == saved[1].keys()
        assert any(name.startswith("model") for name in saved[0])
        for file, tensors in saved[1].items():
            assert saved[0][file].keys() == tensors.keys()
            assert all(saved[0][file][name].equal(value) for name, value in tensors.items()), (engine, file)


@pytest.mark.slow
@pytest.mark.fault("a run that goes on on other numbers of ranks, 2 to 1 to 3")
def test_two_ranks_then_one_then_three(tmp_path: Path, says: Callable[[str], None]) -> None:
    settings = [
        *SETTINGS,
        "batch.global_size=12",
        "schedule=constant",
        "model.dropout=0",
        "trainer.eval_every=0",
        wide.MODEL,
    ]

    def run_to(steps: int, name: str, world: int) -> str:
        arguments = (*settings, f"trainer.max_steps={steps}", f"hydra.run.dir={tmp_path / name}")
        return succeed(*arguments, world=world, PYTHONPATH=str(ROOT)).stdout

    run_to(24, "whole", 2)
    for world, steps in ((2, 8), (1, 16), (3, 24)):
        printed = run_to(steps, "moved", world)
        if world != 2:
            says(printed)
    whole, moved = metrics(tmp_path / "whole"), metrics(tmp_path / "moved")
    where = ("step", "window", "epoch", "samples", "tokens")
    assert [[record[key] for key in where] for record in moved] == [[record[key] for key in where] for record in whole]
    assert [record["loss"] for record in moved] == pytest.approx([record["loss"] for record in whole], rel=wide.AGREES)


@pytest.mark.slow
def test_the_same_command_finds_its_own_run(tmp_path: Path) -> None:
    short = [*SETTINGS, "trainer.max_steps=7"]
    for _ in range(2):
        succeed(*short, cwd=tmp_path)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("auto-")
    assert len(metrics(run_dir)) == 7


IN_FP16 = (
    *TINY,
    "batch.global_size=6",
    "batch.micro_size=2",
    "trainer.max_steps=30",
    "metrics=jsonl",
    "trainer.log_every=1",
    "trainer.eval_every=0",
    "checkpoint.every=4",
    "resume=auto",
    "precision=fp16",
    "precision.scaler.growth_interval=7",
    "precision.scaler.hysteresis=2",
    "precision.scaler.initial_scale_power=22",
    "precision.underflow_every=0",
)
EXACT = ("step", "window", "loss", "grad_norm", "lr", "loss_scale", "applied", "skipped", "nonfinite", "samples")


@pytest.mark.heavy
@pytest.mark.parametrize(("world", "records"), [(1, 30), (2, 21)])
def test_killed_within_a_growth_interval_and_resumed_is_bitwise_uninterrupted(
    tmp_path: Path, world: int, records: int
) -> None:
    """At 21 records a growth lies ahead, for which those before the checkpoint count; at 30, with an overflow forgiven
    before the checkpoint, one that is not forgiven any more."""
    succeed(*IN_FP16, f"hydra.run.dir={tmp_path / 'whole'}", world=world)
    kill_when(tmp_path / "killed", records, *IN_FP16, world=world)
    assert status(tmp_path / "killed")["state"] == "running"
    resumed = succeed(*IN_FP16, f"hydra.run.dir={tmp_path / 'killed'}", world=world)
    assert "resuming" in resumed.stdout
    assert "at step 30" not in resumed.stdout  # none of its processes had gone on

    whole, killed = metrics(tmp_path / "whole"), metrics(tmp_path / "killed")
    # repr, as NaN is not equal to itself
    assert [repr([record[key] for key in EXACT]) for record in killed] == [
        repr([record[key] for key in EXACT]) for record in whole
    ]
    scales = [record["loss_scale"] for record in whole]
    assert not whole[0]["applied"]
    assert scales[0] == scales[1] == 2.0**22  # the first overflow is forgiven
    assert any(before < after for before, after in pairwise(scales))
    assert status(tmp_path / "killed") == {"state": "done", "step": 30, "reason": ""}
