"""``Accumulator.save`` and ``resume`` on one rank: what is there, what is passed over, and what is refused."""

import logging
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from distaccum import Accumulator, CrossEntropy, Trainer
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError, ConfigError, MisuseError
from distaccum.tools.loop_checkpoints import _own_of
from tests.support.accumulators import weights

pytestmark = pytest.mark.filterwarnings("ignore::distaccum.errors.PrecisionWarning")  # fp16 is slow on a CPU
SIZES: Any = {"global_batch_size": 4, "micro_batch_size": 2}
DATA: Any = [torch.tensor([float(i), 1.0]) / (8 if i != 5 else 0) for i in range(16)]  # one window is not finite


def _make(world: World, kind: Any = torch.optim.AdamW, scheduler: Any = ExponentialLR, width: int = 4) -> Accumulator:
    """Of two optimizers, with a scheduler each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.1), nn.Linear(width, 1))
    optimizers = [kind(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]
    schedulers = [scheduler(one, gamma=0.9, **({"step_size": 1} if scheduler is StepLR else {})) for one in optimizers]
    precision = PrecisionConfig(name="fp16", scaler=ScalerConfig(initial_scale_power=8))
    sizes: Any = {"global_batch_size": 4, "micro_batch_size": 2, "count": len, "precision": precision}
    return Accumulator(model, optimizers, scheduler=schedulers, nonfinite="skip", world=world, **sizes)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).float() - 1).square().sum()  # type: ignore[no-any-return]


def _run(acc: Accumulator, windows: int, folder: Path | None = None, **options: Any) -> None:
    while True:
        for window in acc.windows(DATA):
            acc.step(window, _loss)
            if folder is not None:
                acc.save(folder, **options)
            windows -= 1
            if not windows:
                return


def _steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def test_a_loop_goes_on_bit_for_bit(gloo_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Into its second epoch, after windows that were skipped; nothing is there at first, and later a damaged one."""
    whole = _make(gloo_world)
    assert whole.resume(tmp_path / "whole") == 0
    _run(whole, 8)
    first = _make(gloo_world)
    _run(first, 6, tmp_path)
    drawn = random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002, S311  the generators users have
    _run(first, 1, tmp_path, keep=3)
    assert _steps(tmp_path) == ["step-3", "step-4", "step-5"]
    with (tmp_path / "checkpoints" / "step-5" / "loop-0.pt").open("ab") as file:
        file.write(b"more")
    second = _make(gloo_world)
    assert second.resume(str(tmp_path)) == 4
    assert "step-5: missing, added or changed: loop-0.pt" in caplog.text
    assert drawn == (random.random(), np.random.random(), torch.rand(()).item())  # noqa: NPY002, S311
    assert (second.progress.window, second.progress.epoch_window, second.progress.skipped) == (6, 2, 2)
    _run(second, 2)
    assert second.progress == whole.progress
    assert second.last is not None
    assert whole.last is not None
    assert second.last.loss_scale == whole.last.loss_scale == 2**6  # it has fallen twice
    assert torch.equal(weights(second), weights(whole))
    rates = [one.param_groups[0]["lr"] for one in second.engine.optimizers]
    assert rates == pytest.approx([0.1 * 0.9**6] * 2)
    for _ in range(2):  # of the same step: in its place
        second.save(tmp_path, keep=1)
    assert _steps(tmp_path) == ["step-6"]


def _none_whole(folder: Path, world: World) -> None:
    for path in (folder / "checkpoints").glob("step-*"):
        (path / "state.json").unlink()
    _make(world).resume(folder)


def _of_a_trainer(folder: Path, world: World) -> None:
    for name in _steps(folder):
        path = folder / "checkpoints" / name
        (path / "loop-0.pt").unlink()
        manifest = path / "manifest.json"
        manifest.write_text("".join(line for line in manifest.read_text().splitlines(True) if "loop" not in line))
    acc = _make(world)
    with suppress(CheckpointError):
        acc.resume(folder)
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        acc.save(folder)
    acc.resume(folder)


def _within_a_window(folder: Path, world: World) -> None:
    acc = _make(world)
    for _ in acc.windows(DATA):
        acc.save(folder / "other")


def _on_other_sizes(folder: Path, world: World) -> None:
    acc = _make(world)
    acc.resume(folder)
    next(iter(acc.windows(DATA[:10])))


REFUSED: dict[str, tuple[Callable[[Path, World], object], type[Exception], str]] = {
    "none is whole": (_none_whole, CheckpointError, r"no whole checkpoint to resume from \(step-1, step-2\)\. Restore"),
    "a Trainer's": (_of_a_trainer, CheckpointError, r"no checkpoint of Accumulator\.save\(\), but of a Trainer"),
    "a Trainer that goes on": (
        lambda folder, _: Trainer(nn.Linear(2, 1), CrossEntropy(), DATA, resume="auto", run_dir=folder, **SIZES).fit(),
        ConfigError,
        r"resume=auto: .*step-2 is of Accumulator\.save\(\), .*\. Use acc\.resume\(\) in its loop, or init_from=",
    ),
    "another run's folder": (
        lambda folder, world: _run(_make(world), 1, folder),
        ConfigError,
        r"holds checkpoints of another run \(step-1, step-2\)\. Call acc\.resume\(folder\) before the first window",
    ),
    "no folder": (
        lambda folder, world: _run(_make(world), 1, folder / "file"),
        ConfigError,
        r"cannot be used \((Not a directory|File exists)\)\. Choose a folder that you can write to",
    ),
    "another optimizer": (
        lambda folder, world: _make(world, torch.optim.RMSprop).resume(folder),
        CheckpointError,
        r"step-2 does not fit .*: the state is that of AdamW, SGD, and it would be loaded into RMSprop, SGD: continue",
    ),
    "another schedule": (
        lambda folder, world: _make(world, scheduler=StepLR).resume(folder),
        CheckpointError,
        r"scheduler=StepLR, StepLR: .*step-2 has the state of ExponentialLR, ExponentialLR",
    ),
    "another model": (
        lambda folder, world: _make(world, width=5).resume(folder),
        CheckpointError,
        r"step-2 does not fit this model and optimizer: .* size mismatch for 0.weight",
    ),
    "other data": (_on_other_sizes, CheckpointError, r"saved with samples=16, and this loop has samples=10"),
    "within a window": (_within_a_window, MisuseError, r"save\(\) between two micro-batches: run every micro-batch"),
    "a negative number": (
        lambda folder, world: _make(world).save(folder / "other", keep=-1),
        ConfigError,
        r"keep=-1: must be",
    ),
    "a state that is code": (
        lambda folder, world: _make(world).save(folder / "other", state={"best": np.float64(1.0)}),
        CheckpointError,
        r"save\(state=\): cannot be saved \(.*numpy.*\): give numbers, strings, tensors",
    ),
    "an object that was not saved": (
        lambda folder, world: _make(world).resume(folder, state={"average": nn.Linear(2, 1)}),
        CheckpointError,
        r"resume\(state=\): there is no state of average: .*step-2 has best\. Name what save\(\) was given",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(gloo_world: World, tmp_path: Path, what: str) -> None:
    _run(_make(gloo_world), 3, tmp_path, state={"best": 1.0})  # the second one is skipped
    (tmp_path / "file").touch()
    call, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        call(tmp_path, gloo_world)


def test_what_is_the_loops_own(gloo_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))
    rows = torch.arange(6.0)[::2]
    own: dict[str, Any] = {"average": average, "best": 0.5, "seen": {"rows": rows, "names": ["a"]}}
    _run(_make(gloo_world), 1, tmp_path, state=own)
    again = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))
    found: dict[str, Any] = {"average": again, "best": 7.0}
    assert _make(gloo_world).resume(tmp_path, state=found) == 1
    assert torch.equal(again.module.weight, average.module.weight)
    assert found["average"] is again
    assert found["best"] == 0.5
    assert torch.equal(found["seen"]["rows"], rows)
    assert found["seen"]["names"] == ["a"]
    assert not caplog.records
    caplog.set_level(logging.WARNING)
    _make(gloo_world).resume(tmp_path)
    assert "a state of average, best, seen, which is not restored: resume(state=) does not name it" in caplog.text


def test_ranks_with_states_of_their_own_are_as_many_as_before(gloo_world: World, tmp_path: Path) -> None:
    own = [{"own": {"values": {"rank": rank}}} for rank in range(2)]
    for rank in range(2):
        torch.save(own[rank], tmp_path / f"loop-{rank}.pt")
        world = World(rank=rank, size=2, device=gloo_world.device)
        assert _own_of(tmp_path, 2, world, own[0]["own"]) == own[rank]["own"]
    with pytest.raises(CheckpointError, match="state= differed between the 2 ranks that saved it, and there are 1 now"):
        _own_of(tmp_path, 2, gloo_world, own[0]["own"])


def test_a_loop_that_saves_loads_no_settings_and_no_trainer(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from distaccum import Accumulator\n"
        "model = torch.nn.Linear(1, 1); optimizer = torch.optim.SGD(model.parameters())\n"
        "acc = Accumulator(model, optimizer, global_batch_size=1, micro_batch_size=1)\n"
        f"acc.save({str(tmp_path)!r}); acc.resume({str(tmp_path)!r})\n"
        "assert not {'hydra', 'omegaconf', 'wandb', 'rich', 'distaccum.train.trainer'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
