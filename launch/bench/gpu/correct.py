"""The part ``correct``: on this device every engine computes what one process in fp64 does, and a run resumes bitwise.

All of it holds in small sizes as well, and is judged there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any
from xml.etree import ElementTree

import torch
from safetensors.torch import load_file
from torch import Tensor

from distaccum import CompileConfig, World
from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config, Zero1Config
from distaccum.config.precision import PrecisionConfig
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import open_world
from distaccum.errors import ConfigError
from distaccum.precision import hardware
from distaccum.precision.policy import PrecisionPolicy
from launch import ROOT, python_path
from launch.bench.gpu import window
from launch.bench.gpu.figures import Figure, Measurement, Options

OURS: dict[str, EngineConfig] = {
    "ddp": DDPConfig(),
    "zero1": Zero1Config(),
    "fsdp2, sync=boundary": FSDP2Config(),
    "fsdp2, sync=every": FSDP2Config(sync="every"),
}
RECOMPUTING: dict[str, EngineConfig] = {
    f"fsdp2, {kind}": FSDP2Config(activation_checkpoint=kind) for kind in ("blocks", "selective")
}
DEEPSPEED: dict[str, EngineConfig] = {f"deepspeed, stage={stage}": DeepSpeedConfig(stage=stage) for stage in range(4)}
COMPILED = {
    ("ddp", "blocks"): DDPConfig(),
    ("ddp", "model"): DDPConfig(),
    ("zero1", "blocks"): Zero1Config(),
    ("zero1", "model"): Zero1Config(),
    ("fsdp2", "blocks"): FSDP2Config(),
    ("fsdp2, selective", "blocks"): FSDP2Config(activation_checkpoint="selective"),
}
FEW_COMPILED = [("ddp", "model"), ("fsdp2, selective", "blocks")]  # inductor takes long for each
RATIO = "error of a window's weight change, over a plain loop's"
AT_MOST = f"at most {window.TIMES}"

EVERY, KILLED_AFTER = 5, 8  # of the run that is killed: updates between two checkpoints, records before the end
TRAIN = (
    *("data.seq_len=32", "model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.dropout=0.1"),
    *("batch.global_size=16", "batch.micro_size=4", "schedule.warmup_steps=5", "precision=bf16", "deterministic=true"),
    *("trainer.eval_every=0", "trainer.log_every=1", f"checkpoint.every={EVERY}"),
    *("metrics=jsonl", "metrics.console=false", "resume=auto"),
)
PATIENCE_S = 300.0  # for a run to come to where it is killed
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # deterministic=true asks for it


@contextmanager
def alone(device: torch.device) -> Iterator[World]:
    """A process group of one: NCCL for a GPU's tensors."""
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    ranks = LaunchEnvironment()
    with open_world(ranks, ranks.store(), device) as world:
        yield world


def precisions(device: torch.device) -> list[str]:
    """Those that the device has."""
    found = []
    for name in window.COMPUTE:
        try:
            hardware.check(PrecisionPolicy.of(PrecisionConfig(name=name)), hardware.gpu_of(device))
        except ConfigError as error:
            print(error, flush=True)  # noqa: T201  to the log
        else:
            found.append(name)
    return found


def tried(of: str, name: str, target: str, measure: Callable[[], tuple[float | str, bool]]) -> Figure:
    """A figure, and whether it holds; of what fails the error, so that the others are measured all the same."""
    try:
        value, holds = measure()
    except Exception as error:
        traceback.print_exc()  # to the log
        value, holds = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", False
    print(f"{of}: {name}: {value}", flush=True)  # noqa: T201  to the log, where the end of one that hangs is looked for
    return Figure(of=of, name=name, value=value, target=target, holds=holds)


class PlainLoops:
    """The errors of plain loops, each measured once, and what others are over them."""

    def __init__(self, options: Options, ranks: int) -> None:
        self.window = window.Window.of(small=options.small)
        self._device, self._size = options.device, window.MICRO_SIZES[ranks]
        self._true = self.window.truth()
        self._errors: dict[str, float] = {}

    def figure(self, precision: str) -> Figure:
        """The error of the plain loop itself, which shows that the truth is of the same computation."""
        most = window.PLAIN_MOST[precision]

        def measure() -> tuple[float, bool]:
            found = self.window.error(self.window.plain(precision, self._device, self._size), self._true)
            self._errors[precision] = found
            return found, 0 < found <= most

        return tried(f"a plain loop, {precision}", "error of a window's weight change", f"at most {most:g}", measure)

    def beside(self, of: str, precision: str, weights: Callable[[], window.Weights]) -> Figure:
        """The error of these weights, over the plain loop's."""

        def measure() -> tuple[float, bool]:
            ratio = self.window.error(weights(), self._true) / self._errors[precision]
            return ratio, ratio <= window.TIMES

        return tried(f"{of}, {precision}", RATIO, AT_MOST, measure)


def _cells(options: Options, engines: Mapping[str, EngineConfig], formats: Sequence[str]) -> list[Figure]:
    with alone(options.device) as world:
        loops, figures = PlainLoops(options, world.size), []
        for precision in formats:
            figures.append(loops.figure(precision))
            for name, engine in engines.items():
                figures.append(loops.beside(name, precision, partial(loops.window.ours, engine, precision, world)))
    return figures


def engines(options: Options) -> list[Figure]:
    """ddp, zero1 and fsdp2 in every precision, on one rank."""
    return _cells(options, OURS | RECOMPUTING, precisions(options.device))


def deepspeed(options: Options) -> list[Figure]:
    """DeepSpeed's stages in every precision, on one rank; its CPU has no fp16."""
    if find_spec("deepspeed") is None:
        return [Figure(of="deepspeed", name="installed", value="no")]
    able = [name for name in precisions(options.device) if (options.device.type, name) != ("cpu", "fp16")]
    return _cells(options, DEEPSPEED, able)


def compiled(options: Options) -> list[Figure]:
    """Compiled forwards, on one rank: by inductor, in small sizes a few by AOT autograd alone, without a compiler."""
    backend = "aot_eager" if options.small else "inductor"
    formats = {"bf16": FEW_COMPILED} if options.small else {"bf16": list(COMPILED), "fp32": FEW_COMPILED}
    with alone(options.device) as world:
        loops, figures = PlainLoops(options, world.size), []
        for precision, cells in formats.items():
            figures.append(loops.figure(precision))
            for name, what in cells:
                torch._dynamo.reset()  # as in a process that has compiled nothing yet
                settings = CompileConfig(name=what, backend=backend)
                weights = partial(loops.window.ours, COMPILED[name, what], precision, world, settings=settings)
                figures.append(loops.beside(f"{name}, compile={what}, {backend}", precision, weights))
    return figures


def tests(options: Options) -> list[Figure]:
    """The project's tests that need a GPU: ``pytest -m gpu``.

    Raises:
        RuntimeError: pytest is not installed, or did not run.
    """
    if find_spec("pytest") is None:
        raise RuntimeError("pytest is not installed")
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        # Without the project's own options: this machine may lack the plugins that they name.
        arguments = (
            "-m",
            "gpu",
            "-o",
            "addopts=",
            "-W",
            "ignore::pytest.PytestConfigWarning",
            "-p",
            "no:cacheprovider",
        )
        command = [sys.executable, "-m", "pytest", "-q", "-rfEs", *arguments, f"--junitxml={results}", "tests/gpu"]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | python_path(), check=False).returncode  # noqa: S603
        if not results.exists():
            raise RuntimeError(f"pytest ended with exit code {code}, and no results")
        suite = ElementTree.parse(results).getroot().find("testsuite")  # noqa: S314  written by the line above
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    enough = passed > 0 if options.device.type == "cuda" else None
    command_line = "pytest -m gpu"
    return [
        Figure(of="failed", name=command_line, value=failed, unit="tests", target="0", holds=failed == 0 and code == 0),
        Figure(of="passed", name=command_line, value=passed, unit="tests", target="1 or more", holds=enough),
        Figure(of="skipped", name=command_line, value=counts["skipped"], unit="tests"),
    ]


def two_ranks(options: Options, backend: str = "gloo") -> list[Figure]:
    """Two ranks which share the GPU: see ``two_ranks.py``.

    Raises:
        RuntimeError: a rank failed.
    """
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        start += ["--local-addr", "127.0.0.1", "-m", "launch.bench.gpu.two_ranks"]
        succeed([*start, str(answer), "small" if options.small else "full", backend], {"OMP_NUM_THREADS": "1"})
        return [Figure(**one) for one in json.loads(answer.read_text())]


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a program of this checkout to its end, and gives its exit code; its output goes to the log."""
    given = {**os.environ, **python_path(), **environment}
    return subprocess.run(command, cwd=ROOT, env=given, check=False).returncode  # noqa: S603


def succeed(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a program of this checkout to its end; its output goes to the log.

    Raises:
        RuntimeError: it failed.
    """
    if code := run(command, environment):
        raise RuntimeError(f"{' '.join(command[1:4])} ended with exit code {code}")


def resume(options: Options) -> list[Figure]:
    """The main job, killed without warning and started again, beside the same job undisturbed; bit by bit."""
    updates = f"trainer.max_steps={30 if options.small else 300}"
    with TemporaryDirectory() as temporary:
        whole = Path(temporary) / "whole"
        succeed(_command(whole, updates, "checkpoint.background=false"), WORKSPACES)
        expected = _result(whole)
        figures = []
        for background in ("true",) if options.small else ("false", "true"):
            folder = Path(temporary) / background
            saves = f"checkpoint.background={background}"
            command = _command(folder, updates, saves)

            def measure(folder: Path = folder, command: Sequence[str] = command) -> tuple[str, bool]:
                step = _kill(folder, command)
                succeed(command, WORKSPACES)
                wrong = _differences(_result(folder), expected)
                return (f"differs in {', '.join(wrong)}" if wrong else f"the same, from step {step} on"), not wrong

            figures.append(tried(saves, "killed and resumed", "the same bits", measure))
    return figures


def _command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "distaccum.train", *TRAIN, *arguments, f"hydra.run.dir={folder}"]


def _kill(folder: Path, command: Sequence[str]) -> int:
    """Starts the run, and kills it once it has a checkpoint and is past it; returns the checkpoint's step."""
    process = subprocess.Popen(command, env={**os.environ, **python_path(), **WORKSPACES})  # noqa: S603
    latest, end = folder / "checkpoints" / "latest", monotonic() + PATIENCE_S
    try:
        while not latest.exists() or len(_records(folder)) < KILLED_AFTER:
            if process.poll() is not None:
                raise RuntimeError("the run ended before it was killed")
            if monotonic() > end:
                raise RuntimeError(f"the run was not at its checkpoint after {PATIENCE_S:.0f} s")
            sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        code = process.wait()
    if code != -signal.SIGKILL:
        raise RuntimeError("the run ended before it was killed")
    return int(latest.read_text().strip().removeprefix("step-"))


def _records(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of ``metrics.jsonl``."""
    file = folder / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _result(folder: Path) -> dict[str, Any]:
    """The losses and gradient norms by update, and all tensors of the last checkpoint."""
    found: dict[str, Any] = {}
    for record in _records(folder):
        found[f"loss of step {record['step']}"] = record["loss"]
        found[f"norm of step {record['step']}"] = record["grad_norm"]
    checkpoints = folder / "checkpoints"
    last = checkpoints / (checkpoints / "latest").read_text().strip()
    for file in sorted(last.glob("*.safetensors")):
        found |= {f"{file.stem}: {name}": tensor for name, tensor in load_file(file).items()}
    return found


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The names of what is not the same, bit by bit; the first ones."""
    names = [name for name in theirs.keys() | ours.keys() if not _same(ours.get(name), theirs.get(name))]
    return sorted(names)[:3]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


MEASUREMENTS: dict[str, Measurement] = {
    "tests": tests,
    "engines": engines,
    "two ranks": two_ranks,
    "resume": resume,
    "deepspeed": deepspeed,
    "compiled": compiled,
}
