"""The main job once on each engine, and how far their losses are apart: a table, and a plot of all their curves.

``python launch/bench compare_engines`` or, with some of its keys, ``python launch/bench compare_engines
engines=[ddp,fsdp2/sync=every] steps=20``. An engine may have settings: ``deepspeed/stage=3``. The others are compared
with the first one. Every run is the default one (``launch/train.py``), with its loss logged at every update and
evaluated at its end; a run of fewer than 300 steps has a shorter warm-up and decay, in proportion.
Runs go to ``out``/ENGINE, the table to ``out``/overlay.md, the plot to ``plot``. ``train=false`` draws the runs that
are there already. It exits with 1 where an engine ends farther from the first one than ``within``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distaccum.errors import ConfigError
from distaccum.tools.plan.settings_command import plot_file
from launch import python_path
from launch.bench.variant import installed_version

WARM_UP, STEPS = 60, 300  # of the default run
NEEDS = {"deepspeed": "deepspeed"}  # packages, by engine
Records = list[dict[str, Any]]


@dataclass
class Options:
    """The keys of the command line."""

    engines: list[str] = field(default_factory=lambda: ["ddp", "zero1", "fsdp2", "deepspeed"])
    steps: int = STEPS
    ranks: int = 2
    out: Path = Path("runs/overlay")
    plot: Path | None = None  # by default in ``out``
    train: bool = True
    within: float = 0.005
    overrides: list[str] = field(default_factory=list)  # of every run


def folder_of(options: Options, engine: str) -> Path:
    """The run directory of an engine."""
    return options.out / engine.replace("/", "-").replace("=", "-")


def train(options: Options, engine: str) -> int:
    """Runs the main job on an engine, with its output on the console; returns its exit code."""
    name, *settings = engine.split("/")
    arguments = [
        f"engine={name}",
        *(f"engine.{setting}" for setting in settings),
        f"trainer.max_steps={options.steps}",
        "trainer.log_every=1",
        f"trainer.eval_every={options.steps}",
        f"schedule.warmup_steps={min(WARM_UP, options.steps * WARM_UP // STEPS)}",
        "checkpoint.every=0",
        "metrics=jsonl",
        *options.overrides,
        f"hydra.run.dir={folder_of(options, engine)}",
    ]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.ranks))}
    command = [*start, "-m", "distaccum.train", *arguments]
    return subprocess.run(command, check=False, env=threads | dict(os.environ) | python_path()).returncode  # noqa: S603  as the user asks


def losses(records: Records) -> dict[int, float]:
    """The training loss by update."""
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def held_out(records: Records) -> float:
    """Bits per byte of the last evaluation; NaN where the run has none."""
    return float([math.nan, *(r["eval_bits_per_byte"] for r in records if "eval_bits_per_byte" in r)][-1])


def relative(ours: dict[int, float], first: dict[int, float]) -> dict[int, float]:
    """The distance of a curve from the first one, relative to that, by update."""
    return {step: abs(loss / first[step] - 1) for step, loss in ours.items() if step in first}


def table(runs: dict[str, Records], absent: list[str]) -> str:
    """Markdown: where each engine ended, and its largest distance from the first one."""
    first, *_ = runs
    curve, end = losses(runs[first]), held_out(runs[first])
    lines = [
        f"| engine | updates | held-out bits per byte | relative to {first} | a window's loss, at most |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, records in runs.items():
        found, worst = held_out(records), max(relative(losses(records), curve).values())
        beside = "-" if name == first else f"{found / end - 1:+.1e}"
        lines.append(f"| {name} | {max(losses(records))} | {found:.4f} | {beside} | {worst:.1e} |")
    lines += [f"| {name} | not installed | | | |" for name in absent]
    return "\n".join(lines) + "\n"


def far_off(runs: dict[str, Records], within: float) -> list[str]:
    """The engines that end farther than ``within`` from the first one, relative to it."""
    end, *_ = (held_out(records) for records in runs.values())
    return [name for name, records in runs.items() if not abs(held_out(records) / end - 1) <= within]


def draw(runs: dict[str, Records], path: Path) -> None:
    """Draws all losses over each other, and below them the distances to the first one, to a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    first, *others = runs
    curve = losses(runs[first])
    figure = Figure(figsize=(7, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    upper.plot(curve.keys(), curve.values(), label=first, color="0.75", linewidth=5)
    for i, name in enumerate(others):
        own = losses(runs[name])
        dashes = (i * 3, (3, 3 * len(others) - 3)) if len(others) > 1 else "-"  # each shows where others leave gaps
        (line,) = upper.plot(own.keys(), own.values(), label=name, linewidth=1.5, linestyle=dashes)
        off = {step: distance for step, distance in relative(own, curve).items() if distance}
        lower.plot(off.keys(), off.values(), color=line.get_color(), linewidth=0.8)
    upper.set_ylabel("training loss")
    upper.legend(frameon=False)
    lower.set_yscale("log")
    lower.set_ylabel(f"|loss / {first} - 1|")
    lower.set_xlabel("update")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main() -> int:
    """Runs the command; returns its exit code."""
    try:
        given = OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_cli())
        options = cast(Options, OmegaConf.to_object(given))
        plot = plot_file("plot", options.plot, options.out / "overlay.png")
    except OmegaConfBaseException as error:
        return _complain(f"{str(error).splitlines()[0]}. Its keys: {', '.join(vars(Options()))}")
    except ConfigError as error:
        return _complain(str(error))
    needed = {engine: NEEDS.get(engine.split("/")[0]) for engine in options.engines}
    absent = [engine for engine, package in needed.items() if package and installed_version(package) is None]
    present = [engine for engine in options.engines if engine not in absent]
    if options.train:
        for engine in present:
            if train(options, engine):
                _complain(f"engine={engine} failed; see above")
                return 1
    missing = [engine for engine in present if not (folder_of(options, engine) / "metrics.jsonl").is_file()]
    if missing or not present:
        wanted = ", ".join(missing) or "any engine"
        return _complain(f"no run of {wanted} in {options.out}; use train=true")
    runs = {
        engine: [json.loads(line) for line in (folder_of(options, engine) / "metrics.jsonl").read_text().splitlines()]
        for engine in present
    }
    text = table(runs, absent)
    (options.out / "overlay.md").write_text(text)
    if plot is not None:
        draw(runs, plot)
    print(text)  # noqa: T201
    off = far_off(runs, options.within)
    if off:
        _complain(f"farther than {options.within:.1%} from {present[0]}: {', '.join(off)}")
    return 1 if off else 0


def _complain(problem: str) -> int:
    """Prints one line on stderr; returns the exit code of bad settings."""
    print(f"compare_engines: {problem}", file=sys.stderr)  # noqa: T201
    return 2
