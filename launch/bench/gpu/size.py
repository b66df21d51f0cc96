"""How large a model one GPU trains, how fast, and in how much memory: the part ``size``."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory

import torch

from distaccum.config.schema import RunConfig
from distaccum.distributed.world import World
from distaccum.tools.plan.command import job_of, peak_bytes
from distaccum.tools.plan.memory import state
from launch.bench.gpu.figures import Figure, Measurement, Options
from launch.bench.gpu.fitting import at_largest, estimate, release
from launch.bench.gpu.peak_memory import GIB, Peak, peak_of_window
from launch.bench.gpu.runs import alone, components_of, run_config
from launch.bench.gpu.speed import rate_of, trainer, warmed_up
from launch.bench.memory import live_storages
from launch.bench.variant import WindowLoop

LARGEST_LEAST = 47_000.0  # tokens per second at 1.5B: 49 % MFU
SAMPLES = 128  # of a window: 131,072 tokens
ENGINES = ("ddp", "zero1", "fsdp2")
CHECKPOINTS = ("none", "selective", "blocks")
ROOM = 0.92  # of the card's memory: what the allocator rounds up to, and cuBLAS, need the rest
_ROOM_SMALL = 2**25  # bytes
_TRIALS, _MOST = (2, 4), 128  # micro-batch sizes


def compiled(options: Options, model: str, micro_sizes: tuple[int, ...], least: float | None = None) -> list[Figure]:
    """Rate and memory of a size, each block compiled by itself, at the largest micro-batch that fits."""
    settings = ("precision=bf16", "compile=blocks")
    name = f"{model}, bf16, ddp, compile=blocks"
    return rate_of(
        options, name, model, *settings, samples=SAMPLES, micro_sizes=micro_sizes, rounds=4, within_s=15, least=least
    )


def checkpointed(options: Options, activation_checkpoint: str) -> list[Figure]:
    """1.5B on fsdp2: the largest micro-batch that fits with this kind of recomputation, and the rate there."""
    kind = f"engine.activation_checkpoint={activation_checkpoint}"
    settings = ("precision=bf16", "compile=blocks", "engine=fsdp2", kind)
    most = 8 if options.small else _MOST
    sizes = estimate(partial(_peak_at, options, settings), _room(options), trials=_TRIALS, most=most)
    name = f"1.5b, bf16, fsdp2, activation_checkpoint={activation_checkpoint}, compile=blocks"

    def at(micro_size: int) -> list[Figure]:
        found = rate_of(
            options, name, "1.5b", *settings, samples=2 * micro_size, micro_sizes=(micro_size,), rounds=3, within_s=10
        )
        return [Figure(of=name, name="largest micro-batch", value=micro_size, unit="samples"), *found]

    return at_largest(at, sizes, options.device)


def _room(options: Options) -> float:
    if options.device.type != "cuda":
        return _ROOM_SMALL
    return ROOM * torch.cuda.get_device_properties(options.device).total_memory


def _peak_at(options: Options, settings: tuple[str, ...], micro_size: int) -> int:
    """The peak of a window of one micro-batch."""
    with alone(options) as world, TemporaryDirectory() as folder:
        config = run_config(options, "1.5b", *settings, micro_size=micro_size, accumulation=1)
        peak = peak_of_window(warmed_up(trainer(components_of(config, world), world, folder), 1), options.device)
    release(options.device)
    return peak.most


def memory_of(options: Options, model: str) -> list[Figure]:
    """A size's memory on each engine, beside the forecast."""
    return [figure for engine in ENGINES for figure in beside_forecast(options, model, engine)]


def beside_forecast(options: Options, model: str, engine: str) -> list[Figure]:
    """What is held when the optimizer steps, over the forecast of it; and the peak of a window."""
    with alone(options) as world:
        config = run_config(options, model, "precision=bf16", f"engine={engine}", micro_size=4, accumulation=2)
        held, peak = _held_and_peak(config, world)
    of = f"{model}, bf16, {engine}, micro-batch {config.batch.micro_size}"
    return [
        Figure(of=of, name="weights, gradients and optimizer state held at the step", value=held / GIB, unit="GiB"),
        Figure(of=of, name="held over the forecast", value=held / state(job_of(config), 1)["total"]),
        *peak.figures(of),
        Figure(of=of, name="peak over the forecast", value=peak.most / peak_bytes(config)),
    ]


def _held_and_peak(config: RunConfig, world: World) -> tuple[int, Peak]:
    """Bytes in tensors that were not there before the run: at the step, and at most within a window."""
    device = world.device
    release(device)
    before = live_storages() if device.type != "cuda" else {}
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    loop = WindowLoop(components_of(config, world, epoch=2), world)  # a CPU's memory has the data, too
    found: list[int] = []

    def look() -> None:
        if device.type == "cuda":
            found.append(torch.cuda.memory_allocated(device) - allocated)
        else:
            found.append(sum(size for place, size in live_storages().items() if place not in before))

    warmed_up(loop, 2)
    loop(before_step=look)
    own = sum(before.values()) + allocated
    peak = peak_of_window(loop, device)
    loop.engine.close()
    return found[-1], Peak(held=peak.held - own, most=peak.most - own)


MEASUREMENTS: dict[str, Measurement] = {
    "1.5b": partial(compiled, model="1.5b", micro_sizes=(32, 16, 8), least=LARGEST_LEAST),
    "774m": partial(compiled, model="774m", micro_sizes=(32, 16, 8)),
    "350m": partial(compiled, model="350m", micro_sizes=(64, 32, 16)),
    "memory 124m": partial(memory_of, model="124m"),
    "memory 1.5b": partial(memory_of, model="1.5b"),
    **{f"1.5b fsdp2 {kind}": partial(checkpointed, activation_checkpoint=kind) for kind in CHECKPOINTS},
}
