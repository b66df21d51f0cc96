"""A run that nothing looks at but itself: a mutant ends it before a weight moves, and nothing ends a right one."""

import random
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workers.faults import FAULTS
from tests.distributed.workers.verify import MICRO_SIZE, Run
from tests.mutants import engines, guards, package, verification
from tests.support import commands, engine_matrix, matrix
from tests.support.answers import answer
from tests.support.commands import ROOT, TINY, status, succeed
from tests.support.engine_matrix import ENGINES

COVERING = {  # each way of being wrong: in a part, by a factor, after the step, on one rank, where the model is sharded
    "mean of means": "the gradient of every parameter is off by",
    "the engine's averaging forgotten": "2.00x = 2 ranks",
    "a leaked tail": "are still there after the step",
    "division by the planned instead of the actual count": "x the true count",
    "zero1: what each rank has stepped is not broadcast": "the weights are no longer the same",
    "fsdp2: the loss is weighed as for an average": "2.00x = 2 ranks",
}
CASES = verification.cases()
AGREES, MEANT, ENGINES_OWN = "agrees with", "x the loss's slope along it: by design where", "MisuseError: "
PROGRAMS = [  # right runs that a proof could take for wrong ones, and what they say
    (Run(engine="fsdp2 boundary", program="own targets", by_slope=True), MEANT),
    (Run(engine="fsdp2 every", program="own targets", clip_norm=0.05, by_slope=True), MEANT),
    (Run(engine="fsdp2 boundary", program="reversed", by_slope=True), "is -1.00" + MEANT),
    (Run(engine="fsdp2 boundary", program="own targets"), AGREES),
    (Run(engine="fsdp2 every", program="reversed", clip_norm=0.05), AGREES),
    (Run(engine="ddp", program="own targets"), AGREES),
    (Run(engine="ddp", program="spectral norm"), AGREES),
    (Run(engine="ddp", program="running mean", global_size=17), AGREES),
    (Run(engine="zero1", program="running mean"), AGREES),
    (Run(engine="fsdp2 boundary", program="running mean"), AGREES),
    (Run(engine="fsdp2 boundary", program="running mean", by_slope=True), AGREES),
    (Run(engine="ddp", program="other memory"), ""),
    (Run(engine="ddp", program="saturates"), ""),
    (Run(engine="ddp", program="reentrant"), ""),
    (Run(engine="ddp", program="reentrant", level=2), ""),
    (Run(engine="fsdp2 boundary", program="reentrant"), AGREES),
    (Run(engine="ddp", program="frees"), AGREES),
    (Run(engine="ddp", program="frees", level=2), ""),
    (Run(engine="fsdp2 boundary", program="complex"), AGREES),
    (Run(engine="zero1", program="late count", level=2, global_size=17), AGREES),
    (Run(engine="ddp", program="step pre-hook"), AGREES),
    (Run(engine="zero1", program="step pre-hook", clip_norm=0.05), "would see a part of the parameters on each rank"),
    (Run(engine="fsdp2 boundary", program="step pre-hook"), AGREES),
    (Run(engine="ddp", program="of one rank"), ENGINES_OWN),
    (Run(engine="fsdp2 boundary", program="swapped"), ENGINES_OWN),
]
RIGHT = [  # the number of ranks' micro-batches even and not; clipped and not
    Run(engine="ddp"),
    Run(engine="ddp", precision="bf16", level=2, global_size=17, clip_norm=0.05),
    Run(engine="zero1", precision="fp16", level=2, global_size=17, clip_norm=0.05),
    Run(engine="zero1", global_size=17),
    Run(engine="fsdp2 boundary", global_size=17, clip_norm=0.05),
    Run(engine="fsdp2 boundary", precision="fp16", global_size=17),
    Run(engine="fsdp2 every", precision="bf16"),
    Run(engine="fsdp2 boundary", global_size=17, clip_norm=0.05, by_slope=True),
    Run(engine="fsdp2 every", precision="bf16", by_slope=True),
]
RIGHT_ON_DEEPSPEED = [
    Run(engine=f"deepspeed {stage}", precision=precision, global_size=17, clip_norm=0.05)
    for stage, precision in ((0, "fp16"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16"), (3, "fp16"))
    if f"deepspeed {stage}" in ENGINES
]


def random_runs(number: int) -> list[Run]:
    """Plans of any sizes: ranks with more micro-batches than others, or none; short last windows."""
    draw = random.Random(0)  # noqa: S311  plans, not secrets
    whole, sharded = ("ddp", "zero1"), ("fsdp2 boundary", "fsdp2 every")
    return [
        Run(
            engine=draw.choice((*whole, *whole, *sharded)),
            by_slope=draw.choice((False, True)),
            precision=draw.choice(("fp32", "fp32", "bf16", "fp16")),
            level=draw.choice((2, 3)),
            global_size=(size := draw.randint(MICRO_SIZE, 24)),
            samples=size + draw.randint(0, 12),
            clip_norm=draw.choice((None, 0.05, 1.0)),
            epochs=draw.choice((1, 2)),
        )
        for _ in range(number)
    ]


def said_by(runs: list[Run], warm: str = "distaccum", world: int = 2) -> Any:
    return answer("verify", asked=[asdict(run) for run in runs], world=world, warm=warm, timeout=240)


def test_a_right_run_is_verified_on_every_engine() -> None:
    for run, said in zip(RIGHT, said_by(RIGHT), strict=True):
        assert all(text.startswith("the step's gradient") and "agrees with" in text for text in said), (run, said)


@pytest.mark.slow
def test_no_right_program_is_accused() -> None:
    for (run, expected), said in zip(PROGRAMS, said_by([run for run, _ in PROGRAMS]), strict=True):
        assert all(expected in text and "VerificationError" not in text for text in said), (run, said)


@pytest.mark.heavy
@pytest.mark.skipif(not RIGHT_ON_DEEPSPEED, reason="needs DeepSpeed")
def test_a_right_run_is_verified_at_every_stage_of_deepspeed() -> None:
    for run, said in zip(RIGHT_ON_DEEPSPEED, said_by(RIGHT_ON_DEEPSPEED, "deepspeed"), strict=True):
        assert all("agrees with" in text for text in said), (run, said)


def cells_said(cells: list[Any], world: int) -> dict[Any, list[str]]:
    chosen = [cell for cell in cells if cell.world == world]
    warm = "deepspeed" if isinstance(chosen[0], engine_matrix.Cell) else "distaccum"
    asked = [asdict(cell) for cell in chosen]
    said = answer("verify_cells", asked=asked, world=world, warm=warm, timeout=1200)
    return dict(zip(chosen, said, strict=True))


def unproved(said: dict[Any, list[str]], windows: int) -> dict[Any, list[str]]:
    """The cells of which fewer windows were proved, or of which something else was said."""
    lines = {cell: [line for line in found if not line.startswith("replicas: ")] for cell, found in said.items()}
    return {
        cell: found
        for cell, found in lines.items()
        if len(found) < windows or not all(line.startswith("verified: ") and AGREES in line for line in found)
    }


@pytest.mark.heavy
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world", matrix.AXES["world"])
def test_every_cell_of_the_matrix_proves_its_gradient(world: int) -> None:
    cells = [cell for cell in matrix.every_cell() if cell.level > 1]  # level 1 has no accumulator to prove it
    assert not unproved(cells_said(cells, world), windows=1)


@pytest.mark.heavy
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("world", engine_matrix.WORLDS)
def test_every_window_of_every_cell_of_the_engines_is_proved(world: int) -> None:
    left = unproved(cells_said(engine_matrix.every_cell(), world), windows=4)
    # In 16 bits a difference of losses may drown in rounding, and then nothing is said of the gradient. Which cells
    # these are hangs on the last bits of the losses, and so on the processor.
    sixteen = [c for c in engine_matrix.every_cell() if c.engine == "deepspeed 3" and c.precision in ("fp16", "bf16")]
    rough = [cell for cell in sixteen if cell in left]
    assert left.keys() <= set(rough), left
    assert len(rough) <= len([cell for cell in sixteen if (cell.precision, cell.world) == ("fp16", world)]) / 2
    assert all("Error: " not in line for cell in rough for line in left[cell])


@pytest.mark.heavy
@pytest.mark.parametrize("world", [1, 2])
def test_no_example_is_accused(tmp_path: Path, world: int) -> None:
    page = (ROOT / "docs" / "own-loop.md").read_text().splitlines()
    commands = [line.removeprefix("python ") for line in page if line.startswith("python launch/examples/")]
    assert len(commands) >= 4
    for command in commands:
        script, *arguments = shlex.split(command.replace("launch/examples/", f"{ROOT}/launch/examples/"), comments=True)
        done = succeed(*arguments, script=Path(script), world=world, timeout=200, cwd=tmp_path)
        assert "verified" not in done.stdout + done.stderr, command  # nothing but warnings is shown


@pytest.mark.slow
def test_ranks_refuse_a_mean_alike_and_accuse_no_right_program() -> None:
    succeed(world=2, script=Path(__file__).parent / "workers" / "means.py", PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_later_windows_cost_what_they_cost_without_a_proof() -> None:
    found = answer("verify_cost", timeout=120)
    later = found["first"]["later windows"]
    assert later == found["never"]["later windows"]
    assert later["aten ops"] <= 1.01 * found["plain"]["later windows"]["aten ops"]  # replicas compared once among them
    windows = found["first"]["every"]
    assert later["gradient reductions"] == windows * found["first"]["buckets"]
    assert later["other reductions"] == windows  # their counts
    assert later["other collectives"] == 0
    first, plain = found["first"]["first window"]["aten ops"], found["never"]["first window"]["aten ops"]
    assert first < 3.0 * plain  # a forward and three backwards more, of one micro-batch, and what compares


@pytest.mark.heavy
@pytest.mark.parametrize(("world", "number"), [(2, 12), (3, 300)])
def test_no_random_plan_is_accused(world: int, number: int) -> None:
    runs = random_runs(number)
    found = said_by(runs, world=world)
    accused = [(run, said) for run, said in zip(runs, found, strict=True) if "Error: " in said[0]]
    assert not accused
    for run, said in zip(runs, found, strict=True):
        assert said[0] or (run.engine.startswith("fsdp2") and run.level == 2), run  # a line in the log says why not


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if i == 1 else pytest.mark.slow if i <= 4 else pytest.mark.heavy)
        for i, name in enumerate(COVERING)
    ],
)
def test_a_mutant_is_caught_at_run_time(name: str) -> None:
    mutant, run = next((mutant, run) for mutant, run in CASES if mutant.name == name)
    (said,) = verification.sayings(mutant, [run])
    assert verification.caught(said), said
    assert COVERING[name] in said[0]


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_mutant_is_caught_at_run_time() -> None:
    assert verification.main() == 0


def test_a_fault_is_named_without_the_guard_that_would_end_it() -> None:
    names = ("UnusedAtBoundary", "Zeroes", "StaleOnFSDP2")
    right, *found = guards.ends([("", True), *((name, verify) for name in names for verify in (False, True))])
    assert not any(right["said"])
    assert right["error"] < 1e-6
    for name, unseen, seen in zip(names, found[::2], found[1::2], strict=True):
        assert guards.is_wrong(unseen), (name, unseen)
        assert guards.is_named(seen, guards.NAMED[name]), (name, seen)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_fault_is_named_without_the_guards() -> None:
    assert guards.main() == 0


def test_the_faults_are_those_of_the_worker() -> None:
    assert FAULTS.keys() == guards.NAMED.keys()
    assert all(FAULTS[name].__doc__ and words for name, words in guards.NAMED.items())


@pytest.mark.heavy
def test_a_mutant_that_hangs_is_ended_by_the_watch(tmp_path: Path) -> None:
    """Nothing can be compared while ranks wait for each other."""
    (mutant,) = (mutant for mutant in engines.MUTANTS if mutant.name in verification.NOT_CAUGHT)
    uneven = ("engine=fsdp2", "batch.global_size=5", "batch.micro_size=2", "trainer.hang_timeout=3s")
    arguments = (*TINY, *uneven, "trainer.max_steps=2", "metrics=jsonl", f"hydra.run.dir={tmp_path}")
    with package([mutant]) as folder:
        finished = commands.run(*arguments, world=2, warm="torch", PYTHONPATH=str(folder), timeout=120)
    assert finished.returncode
    assert "which the other ranks have not called, in a backward of window 1" in status(tmp_path)["reason"]


def test_what_cannot_be_caught_is_listed_with_its_reason() -> None:
    known = {mutant.name for mutant, _ in CASES}
    assert not known & verification.NOT_CAUGHT.keys()
    assert set(verification.RUNS) <= known
    assert all(verification.NOT_CAUGHT.values())
