"""What training costs on a GPU: the part ``speed``.

In order of worth. Each measurement is time-boxed: after a stated time it takes no further round.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from distaccum.config.schema import RunConfig
from distaccum.distributed.world import World
from distaccum.precision import hardware
from distaccum.precision.policy import PrecisionPolicy
from distaccum.train.components import TrainingComponents
from launch.bench.gpu import boundary
from launch.bench.gpu.figures import Figure, Measurement, Options
from launch.bench.gpu.fitting import at_largest, release
from launch.bench.gpu.peak_memory import peak_of_window
from launch.bench.gpu.rates import rate
from launch.bench.gpu.reference_loop import reference_loop
from launch.bench.gpu.runs import MODELS, TINY, alone, components_of, run_config
from launch.bench.gpu.stall import Published, stalls, window_times
from launch.bench.gpu.synchronisations import WINDOWS, synchronisations
from launch.bench.gpu.timing import ratios, seconds_of_windows
from launch.bench.throughput import WARM_UP, with_trainer
from launch.bench.variant import Step

# Tokens per second and GPU on the same model, compiled and in bf16, as is reported of other projects, on other cards
# perhaps: to be read beside what is measured.
REPORTED = {"llm.c": 468_000.0, "nanoGPT": 379_000.0}
COMPILED_LEAST = 400_000.0  # tokens per second
OVERHEAD_MOST = 1.02  # of a window over the hand-written loop's
STALL_MOST_S = 0.05
WINDOW = 512  # samples of 1,024 tokens: half a million tokens, as nanoGPT's and llm.c's runs have them
MICRO_SIZES = (64, 32, 16)  # the largest that fits is taken
WIDE_MICRO_SIZES = (32, 16, 8)  # of 32-bit activations


def trainer(components: TrainingComponents, world: World, folder: str) -> Step:
    """The loop of the Trainer, without loggers."""
    return with_trainer(components, world, folder=Path(folder))


def warmed_up(step: Step, windows: int = WARM_UP) -> Step:
    """The loop, after its first windows: they compile, rebuild DDP's buckets, and make the optimizer's state."""
    for _ in range(windows):
        step()
    return step


def _judged(options: Options, holds: bool) -> bool | None:
    return None if options.small else holds


def _of(name: str, config: RunConfig) -> str:
    accumulation = (config.batch.global_size or 0) // config.batch.micro_size
    return f"{name}, {accumulation} x {config.batch.micro_size} samples"


def boundaries(options: Options) -> list[Figure]:
    """The boundary of GPT-2's four sizes in bf16, and of the smallest in fp16."""
    bandwidth = boundary.copy_bandwidth(options)
    figures = [Figure(of="a plain copy on the card", name="bandwidth", value=bandwidth / 1e9, unit="GB/s")]
    cases = [(model, False) for model in MODELS] + [(MODELS[0], True)]
    for model, scaled in cases:
        figures += boundary.measure(options, model, scaled=scaled, bandwidth=bandwidth)
        release(options.device)
    return figures


def host_waits(options: Options) -> list[Figure]:
    """What the host waits for in windows of the Trainer that log nothing."""
    figures = []
    for precision in ("bf16", "fp16"):
        with alone(options) as world, TemporaryDirectory() as folder:
            config = run_config(options, "124m", *TINY, f"precision={precision}", micro_size=4, accumulation=8)
            step = warmed_up(trainer(components_of(config, world), world, folder))
            found = synchronisations(step, options.device)
        for name, number in found.items():
            wanted = name != "late reads"
            figures.append(
                Figure(
                    of=f"Trainer, {precision}, {WINDOWS} windows without a log",
                    name=name,
                    value=number,
                    target="0" if wanted else "",
                    holds=_judged(options, number == 0) if wanted else None,
                )
            )
    return figures


def tiny_window(options: Options) -> list[Figure]:
    """Microseconds of a tiny model's window, in which the host is what takes time."""
    with alone(options) as world, TemporaryDirectory() as folder:
        shape = ("precision=fp32", "loss=cross_entropy")
        config = run_config(options, "124m", *TINY, *shape, micro_size=4, accumulation=8)
        windows, rounds = (2, 3) if options.small else (20, 15)
        ours, theirs = (components_of(config, world, epoch=WARM_UP + windows * rounds + 1) for _ in range(2))
        steps = {
            "Trainer": warmed_up(trainer(ours, world, folder)),
            "hand-written": warmed_up(reference_loop(theirs, world)),
        }
        taken = seconds_of_windows(steps, options.device, windows=windows, rounds=rounds, within_s=20)
    of = _of("a GPT of 2 layers of width 32, fp32", config)
    mine, by_hand = ([1e6 * seconds for seconds in times] for times in taken.values())
    found = {
        "Trainer, a window": mine,
        "hand-written, a window": by_hand,
        "Trainer's window less the hand-written one": [a - b for a, b in zip(mine, by_hand, strict=True)],
    }
    figures = []
    for name, values in found.items():
        figures += [
            Figure(of=of, name=f"{name}, minimum", value=min(values), unit="us"),
            Figure(of=of, name=f"{name}, median", value=statistics.median(values), unit="us"),
        ]
    return figures


def beside_hand_written(
    options: Options, *, compiled: bool, micro_sizes: Sequence[int] = MICRO_SIZES, samples: int = WINDOW
) -> list[Figure]:
    """124M in bf16: the Trainer and the loop by hand, in turn, at the first micro-batch that fits."""

    def at(micro_size: int) -> list[Figure]:
        compile_ = "model" if compiled else "none"
        with alone(options) as world, TemporaryDirectory() as folder:
            settings = ("precision=bf16", f"compile={compile_}")
            config = run_config(options, "124m", *settings, micro_size=micro_size, accumulation=samples // micro_size)
            ours = warmed_up(trainer(components_of(config, world), world, folder), 2)
            peak = peak_of_window(ours, options.device)
            steps = {"Trainer": ours, "by hand": warmed_up(reference_loop(components_of(config, world), world), 2)}
            windows, rounds = (1, 2) if options.small else (2, 5)
            taken = seconds_of_windows(steps, options.device, windows=windows, rounds=rounds, within_s=30)
        kind = f"compile={compile_}" if compiled else "eager"
        of = _of(f"124m, bf16, {kind}", config)
        least = COMPILED_LEAST if compiled else None
        lowest, median = ratios(taken["Trainer"], taken["by hand"])
        over = Figure(
            of=of,
            name="Trainer's window over the hand-written one, median",
            value=median,
            target=f"at most {OVERHEAD_MOST}",
            holds=_judged(options, median <= OVERHEAD_MOST),
        )
        return [
            *rate(options, f"{of}, Trainer", config, statistics.median(taken["Trainer"]), least=least),
            *peak.figures(f"{of}, Trainer"),
            *rate(options, f"{of}, by hand", config, statistics.median(taken["by hand"])),
            over,
            Figure(of=of, name="Trainer's window over the hand-written one, minimum", value=lowest),
        ]

    figures = at_largest(at, micro_sizes, options.device)
    if compiled:
        figures += [
            Figure(of=f"124m, {name}, as reported", name="tokens per second", value=value, unit="tokens/s")
            for name, value in REPORTED.items()
        ]
    return figures


def rate_of(
    options: Options,
    name: str,
    model: str,
    *settings: str,
    samples: int,
    micro_sizes: Sequence[int],
    rounds: int,
    within_s: float = 20,
    least: float | None = None,
) -> list[Figure]:
    """Rate and memory of one run of the Trainer, at the largest micro-batch that fits; windows of ``samples``."""

    def at(micro_size: int) -> list[Figure]:
        with alone(options) as world, TemporaryDirectory() as folder:
            config = run_config(options, model, *settings, micro_size=micro_size, accumulation=samples // micro_size)
            step = warmed_up(trainer(components_of(config, world), world, folder), 2)
            peak = peak_of_window(step, options.device)
            taken = seconds_of_windows({"": step}, options.device, windows=1, rounds=rounds, within_s=within_s)
        of = _of(name, config)
        return [*rate(options, of, config, statistics.median(taken[""]), least=least), *peak.figures(of)]

    return at_largest(at, micro_sizes, options.device)


def blocks(options: Options) -> list[Figure]:
    """124M in bf16, each block compiled by itself."""
    settings = ("precision=bf16", "compile=blocks")
    return rate_of(
        options, "124m, bf16, compile=blocks", "124m", *settings, samples=WINDOW, micro_sizes=MICRO_SIZES, rounds=4
    )


def other_precisions(options: Options) -> list[Figure]:
    """124M, eager, in shorter windows; a CPU has no tf32."""
    figures = []
    for precision in ("fp16", "tf32", "fp32"):
        if precision != "tf32" or options.device.type == "cuda":
            sizes = MICRO_SIZES if precision == "fp16" else WIDE_MICRO_SIZES
            samples, name = 2 * sizes[0], f"124m, {precision}, eager"
            setting = f"precision={precision}"
            figures += rate_of(options, name, "124m", setting, samples=samples, micro_sizes=sizes, rounds=3, within_s=8)
            release(options.device)
    return figures


def checkpoint_stall(options: Options) -> list[Figure]:
    """124M: how long a save in the background holds training up, and one that is waited for."""
    figures = []
    for background, saves, every in ((True, 3, 5 if options.small else 80), (False, 2, 5)):
        published = Published()
        with alone(options) as world, TemporaryDirectory() as folder:
            saving = (f"checkpoint.every={every}", f"checkpoint.background={str(background).lower()}")
            config = run_config(options, "124m", "precision=bf16", *saving, micro_size=16, accumulation=1)
            windows = every * (saves + 1) - 1
            components = components_of(config, world, [published], epoch=windows)
            _ = components.facts  # as a run has them: before the engine wraps the model
            step = trainer(components, world, folder)
            times, complete = window_times(step, published, options.device, windows=windows)
            found = stalls(times, complete, every=every, warm_up=WARM_UP)
        of = f"124m, {'a save in the background' if background else 'a save that is waited for'}"
        first, *later = found.at_once
        stall = statistics.median(later)
        figures += [
            Figure(of=of, name="a window without a save", value=found.window_s, unit="s"),
            Figure(of=of, name="training stands still, first save", value=first, unit="s"),
            Figure(
                of=of,
                name="training stands still, later saves",
                value=stall,
                unit="s",
                target=f"at most {STALL_MOST_S} s" if background else "",
                holds=_judged(options, stall <= STALL_MOST_S) if background else None,
            ),
            Figure(of=of, name="all that a later save costs", value=statistics.median(found.in_all[1:]), unit="s"),
            Figure(of=of, name="published before the next was due", value="yes" if found.in_time else "no"),
        ]
    return figures


def split_k(options: Options) -> list[Figure]:
    """124M, eager: windows in which the parts of 16-bit products are added in fp32, over those with 16 bits."""

    def at(micro_size: int) -> list[Figure]:
        with alone(options) as world, TemporaryDirectory() as folder:
            config = run_config(options, "124m", "precision=bf16", micro_size=micro_size, accumulation=2)
            step = warmed_up(trainer(components_of(config, world), world, folder))
            wide = PrecisionPolicy.of(config.precision)

            def in_format(policy: PrecisionPolicy) -> None:
                hardware.configure(policy, options.device)
                step()

            steps = {"false": partial(in_format, wide), "true": partial(in_format, replace(wide, split_k_16bit=True))}
            rounds = 3 if options.small else 12
            taken = seconds_of_windows(steps, options.device, windows=1, rounds=rounds, within_s=12)
        return _compared(_of("124m, bf16, eager", config), "split_k_16bit=false", *taken.values())

    return at_largest(at, MICRO_SIZES, options.device)


def _compared(of: str, name: str, ours: Sequence[float], theirs: Sequence[float]) -> list[Figure]:
    lowest, median = ratios(ours, theirs)
    return [
        Figure(of=of, name=f"time with {name} over without, minimum", value=lowest),
        Figure(of=of, name=f"time with {name} over without, median", value=median),
    ]


def chunked(options: Options, *, compile: str) -> list[Figure]:  # noqa: A002  the setting's own name
    """124M: cross entropy in chunks of 2,048 tokens over that of whole logits: time, and memory."""

    def at(micro_size: int) -> list[Figure]:
        with alone(options) as world, TemporaryDirectory() as folder:
            steps, peaks = {}, {}
            for loss in ("chunked_cross_entropy", "cross_entropy"):
                settings = ("precision=bf16", f"compile={compile}", f"loss={loss}")
                config = run_config(options, "124m", *settings, micro_size=micro_size, accumulation=2)
                steps[loss] = warmed_up(trainer(components_of(config, world), world, f"{folder}/{loss}"))
                peaks[loss] = peak_of_window(steps[loss], options.device)
            rounds = 3 if options.small else 12
            taken = seconds_of_windows(steps, options.device, windows=1, rounds=rounds, within_s=12)
        of = _of(f"124m, bf16, compile={compile}", config)
        memory = [peak.above(f"{of}, loss={loss}") for loss, peak in peaks.items()]  # both runs are held
        return [*_compared(of, "cross entropy in chunks", *taken.values()), *memory]

    return at_largest(at, WIDE_MICRO_SIZES, options.device)


MEASUREMENTS: dict[str, Measurement] = {
    "124m compiled": partial(beside_hand_written, compiled=True),
    "boundary": boundaries,
    "host waits": host_waits,
    "checkpoint stall": checkpoint_stall,
    "124m eager": partial(beside_hand_written, compiled=False),
    "tiny window": tiny_window,
    "124m blocks": blocks,
    "other precisions": other_precisions,
    "chunked cross entropy": partial(chunked, compile="none"),
    "split-k": split_k,
    "chunked cross entropy compiled": partial(chunked, compile="blocks"),
}
