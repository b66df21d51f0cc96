"""Memory that really runs out: windows that begin again in smaller micro-batches, beside those with all of it.

On a CPU an error stands in for the memory that is over.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, CrossEntropy, DataSpec, World
from distaccum.config.engine import DDPConfig, EngineConfig, Zero1Config
from distaccum.models.gpt import GPT
from launch.bench.gpu.correct import tried
from launch.bench.gpu.figures import Figure, Options
from launch.bench.gpu.runs import alone

SMALL = {"vocab_size": 64, "seq_len": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
LARGE = {"vocab_size": 8192, "seq_len": 512, "n_layer": 4, "n_head": 8, "n_embd": 512}
SAMPLES, WINDOWS, FITS = 64, 2, 20  # of a window, which is one micro-batch; about as many fit where memory is cut
CASES: dict[str, tuple[EngineConfig, str, float]] = {
    "ddp, fp32": (DDPConfig(), "fp32", 1e-5),
    "zero1, bf16": (Zero1Config(), "bf16", 3e-2),
    "ddp, fp16": (DDPConfig(), "fp16", 1e-2),
    "ddp, bf16, blocks checkpointed": (DDPConfig(activation_checkpoint="blocks"), "bf16", 3e-2),
}


class _Run:
    """Trainings of one case on one device."""

    def __init__(self, options: Options, world: World, engine: EngineConfig, precision: str) -> None:
        self._sizes, self._world, self._engine, self._precision = (
            SMALL if options.small else LARGE,
            world,
            engine,
            precision,
        )

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(**self._sizes, dropout=0.0)

    def accumulator(self, micro: int) -> Accumulator:
        model = self.model()
        optimizer = SGD(model.parameters(), lr=1.0)
        sizes = {"global_batch_size": SAMPLES, "micro_batch_size": micro, "count": CrossEntropy().count}
        kind: dict[str, Any] = {"engine": self._engine, "precision": self._precision, "verify": "never"}
        return Accumulator(model, optimizer, world=self._world, **sizes, **kind)

    def data(self, windows: int = WINDOWS) -> DataSpec:
        generator = torch.Generator().manual_seed(1)
        shape = (windows * SAMPLES, self._sizes["seq_len"] + 1)
        rows = torch.randint(0, self._sizes["vocab_size"], shape, generator=generator)
        return DataSpec(train=[(row[:-1], row[1:]) for row in rows], description="random tokens", shuffle=False)

    def trained(self) -> tuple[Tensor, bool]:
        """The weights, flat on the host, and whether memory has run out."""
        accumulator = self.accumulator(SAMPLES)
        try:
            for window in accumulator.windows(self.data()):
                accumulator.step(window, CrossEntropy())
            weights = accumulator.state_dict()["model"].values()
            ran_out = bool(accumulator.engine.memory_marks.failed)
            return torch.cat([weight.float().cpu().flatten() for weight in weights]), ran_out
        finally:
            accumulator.close()

    def needed(self) -> int:
        """The most bytes that a window takes in micro-batches of ``FITS`` samples, with the model."""
        torch.cuda.reset_peak_memory_stats()
        accumulator = self.accumulator(FITS)
        for window in accumulator.windows(self.data(windows=1)):
            accumulator.step(window, CrossEntropy())
        accumulator.close()
        return torch.cuda.max_memory_allocated()


@contextmanager
def limited(run: _Run, device: torch.device) -> Iterator[None]:
    """Within the block about ``FITS`` samples have room; on a CPU a forward may have no more."""
    if device.type == "cuda":
        gc.collect()
        size = 1.1 * run.needed()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(device).total_memory)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    forward = GPT.forward

    def short(self: nn.Module, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(inputs) > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory (an error that stands in for it)")
        return forward(self, inputs, *args, **kwargs)  # type: ignore[arg-type]

    with patch.object(GPT, "forward", short):
        yield


def _beside(options: Options, world: World, name: str) -> tuple[str, bool]:
    engine, precision, most = CASES[name]
    run = _Run(options, world, engine, precision)
    before = torch.cat([p.detach().flatten() for p in run.model().parameters()])
    whole, _ = run.trained()
    with limited(run, options.device):
        parts, ran_out = run.trained()
    off = float((parts - whole).norm() / (whole - before).norm())
    gc.collect()
    return f"{off:.1e} off, {'' if ran_out else 'without '}running out of memory", ran_out and off <= most


def measure(options: Options) -> list[Figure]:
    """The weights' change where memory runs out, beside the same windows with all of it."""
    figures = []
    with alone(options) as world:
        for name, (*_, most) in CASES.items():
            target = f"at most {most:g} off, and it runs out"
            figures.append(tried(name, "windows that begin again", target, partial(_beside, options, world, name)))
    return figures
