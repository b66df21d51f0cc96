"""The first minutes on a GPU, in order of worth: ``profile=first``.

Each measurement has a limit of its own, sizes that fit without a search, and short windows. What gives the most facts
comes first: what the card is, the main job, what is right; then what is quick.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from distaccum.accumulation.accumulator import Accumulator
from launch.bench.gpu import boundary, correct, out_of_memory, speed
from launch.bench.gpu.correct import succeed
from launch.bench.gpu.figures import Figure, Measurement, Options
from launch.bench.gpu.runs import TINY, alone, components_of, run_config
from launch.bench.gpu.synchronisations import WINDOWS, synchronisations
from launch.bench.gpu.timing import device_seconds

MICRO_SIZE, COMPILED_MICRO_SIZE = 16, 32  # samples of 1,024 tokens: in bf16 they fit into 24 GB, and into 40
SAMPLES, COMPILED_SAMPLES = 64, 128  # of a window
PRODUCT = 8192  # rows and columns
_OFFLINE = ("metrics=jsonl", "metrics.console=false", "metrics.report=false", "trainer.eval_every=0")
_TINY = ("model.n_layer=2", "model.n_head=2", "model.n_embd=64", "data.seq_len=64")
TRAIN = (*_TINY, "batch.global_size=16", "batch.micro_size=4", "precision=bf16", *_OFFLINE)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LOCAL = ("--local-addr", "127.0.0.1")  # a machine's own name may not resolve
FAULTS = {"": 0, "raise": 1, "kill": 1}  # of one rank, and the launcher's exit code


def card(options: Options) -> list[Figure]:
    """What the card does: a copy, a product, the way to the host, a launch."""
    device, cuda = options.device, options.device.type == "cuda"
    rows = 256 if options.small else PRODUCT
    one, other = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(2**20 if options.small else 2**28, dtype=torch.uint8, device=device)
    pinned = torch.empty(source.shape, dtype=torch.uint8, pin_memory=cuda)
    small = torch.zeros(8, device=device)
    works: dict[str, Callable[[], object]] = {
        "product": lambda: one @ other,
        "to the host": lambda: pinned.copy_(source, non_blocking=True),
    }
    taken = {name: min(times) for name, times in device_seconds(works, device, rounds=10).items()}
    began = time.perf_counter()
    for _ in range(2000):
        small.add_(1)
    launch = (time.perf_counter() - began) / 2000
    figures = {
        "copy": (boundary.copy_bandwidth(options) / 1e9, "GB/s"),
        "bf16 product": (2 * rows**3 / taken["product"] / 1e12, "TFLOP/s"),
        "to pinned memory of the host": (source.nbytes / taken["to the host"] / 1e9, "GB/s"),
        "launch of a kernel": (1e6 * launch, "us"),
    }
    return [Figure(of="the device", name=name, value=value, unit=unit) for name, (value, unit) in figures.items()]


def main_job(_: Options) -> list[Figure]:
    """The main job of 30 windows, with its first window's proof and checkpoints in the background."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "launch/train.py", *TRAIN, "trainer.max_steps=30", "checkpoint.every=10"]
        succeed([*command, f"hydra.run.dir={folder}"], {})
        saved = (Path(folder) / "checkpoints" / "latest").read_text().strip()
    of, target = "the main job, bf16", "step-30"
    return [Figure(of=of, name="last checkpoint", value=saved, target=target, holds=saved == target)]


def rates(options: Options) -> list[Figure]:
    """What the host waits for with each engine; 124M eager beside a loop by hand; the boundary."""
    figures = speed.host_waits(options)
    for engine in ("zero1", "fsdp2"):
        with alone(options) as world, TemporaryDirectory() as folder:
            settings = (*TINY, "precision=bf16", f"engine={engine}")
            config = run_config(options, "124m", *settings, micro_size=4, accumulation=8)
            step = speed.warmed_up(speed.trainer(components_of(config, world), world, folder))
            of = f"Trainer, {engine}, bf16, {WINDOWS} windows without a log"
            found = synchronisations(step, options.device)
        figures += [Figure(of=of, name=name, value=number) for name, number in found.items()]
    figures += speed.beside_hand_written(options, compiled=False, micro_sizes=(MICRO_SIZE,), samples=SAMPLES)
    bandwidth = boundary.copy_bandwidth(options)
    for scaled in (False, True):
        figures += boundary.measure(options, "124m", scaled=scaled, bandwidth=bandwidth)
    return figures


def nccl(options: Options) -> list[Figure]:
    """Two ranks on the one card over NCCL, which takes them for ranks of two hosts: they talk through sockets.

    Without a card it would be those over gloo once more, and is left out.
    """
    if options.device.type != "cuda":
        return [Figure(of="two ranks over NCCL", name="left out", value="no CUDA device")]
    return correct.two_ranks(options, "nccl")


def a_rank_fails(_: Options) -> list[Figure]:
    """The main job on two ranks, of which one raises or dies: whether all end by themselves, and after how long."""
    figures = []
    for fault, expected in FAULTS.items():
        with TemporaryDirectory() as folder:
            program = ["-m", "launch.bench.gpu.failing", *TRAIN, "checkpoint.every=0", "trainer.max_steps=20"]
            began = time.perf_counter()
            code = correct.run([*TORCHRUN, *LOCAL, *program, f"hydra.run.dir={folder}"], {"FAULT": fault})
            seconds = time.perf_counter() - began
        of, target = f"two ranks, one of which does {fault or 'nothing wrong'}", f"exit code {expected}"
        figures += [
            Figure(
                of=of, name="ended by itself with", value=f"exit code {code}", target=target, holds=code == expected
            ),
            Figure(of=of, name="after", value=seconds, unit="s"),
        ]
    return figures


def auto(options: Options) -> list[Figure]:
    """The micro-batch that a rehearsal finds for 124M in bf16."""
    with alone(options) as world:
        config = run_config(options, "124m", "precision=bf16", micro_size=8, accumulation=64)
        components = components_of(config, world, epoch=2)
        accumulator = Accumulator(
            components.model,
            components.optimizers,
            global_batch_size=config.batch.global_size,
            micro_batch_size="auto",
            loss=components.loss,
            precision="bf16",
            verify="never",
            world=world,
        )
        next(accumulator.windows(components.data))
        accumulator.abandon()
        found = accumulator.rehearsal
        accumulator.close()
    assert found is not None
    of = "124m, bf16, micro_batch_size=auto"
    tried = (f"{trial.size}: {trial.rate:.1f}/s, {(trial.memory or 0) / 2**30:.2f} GiB" for trial in found.trials)
    return [
        Figure(of=of, name="found", value=found.micro_size, unit="samples"),
        Figure(of=of, name="why", value=found.reason),
        Figure(of=of, name="sizes", value=", ".join(tried)),
        Figure(of=of, name="took", value=found.seconds, unit="s"),
    ]


compiled = partial(
    speed.beside_hand_written, compiled=True, micro_sizes=(COMPILED_MICRO_SIZE,), samples=COMPILED_SAMPLES
)

MEASUREMENTS: dict[str, Measurement] = {
    "card": card,
    "main job": main_job,
    "engines": correct.engines,
    "out of memory": out_of_memory.measure,
    "tests": correct.tests,
    "two ranks": correct.two_ranks,
    "rates": rates,
    "two ranks over NCCL": nccl,
    "auto": auto,
    "checkpoint stall": speed.checkpoint_stall,
    "a rank fails": a_rank_fails,
    "124m compiled": compiled,
}
LIMITS = dict(zip(MEASUREMENTS, (60, 45, 70, 75, 110, 80, 75, 50, 45, 60, 180, 170), strict=True))
"""Seconds of each."""
