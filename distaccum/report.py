"""What a person reads at the start and at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from distaccum.build import Parts
from distaccum.clocks import Clocks
from distaccum.run_dir import RunDir
from distaccum.world import World


def introduce(parts: Parts, world: World, run_dir: RunDir, note: str, console: Console) -> None:
    """Prints what is about to be trained, and the whole batch plan."""
    plan, config = parts.plan, parts.config
    size = sum(p.numel() for p in parts.model.parameters())
    tail = len(plan.window(plan.windows_per_epoch - 1))
    lines = {
        "run": f"{run_dir.path}" + (f" ({note})" if note else ""),
        "world": f"{world.size} x {world.device.type}, engine {config.engine.name}, precision {config.precision.name}",
        "data": parts.source.description,
        "model": f"{type(parts.model).__name__}, {size:,} parameters",
        "plan": f"global batch {plan.global_size} samples = {world.size} ranks x {plan.accumulation_steps} micro-steps "
        f"of at most {plan.micro_size}; one gradient reduction per update",
        "epoch": f"{plan.samples:,} samples in {plan.windows_per_epoch} windows, the last of {tail}; "
        f"{parts.total_steps} updates to make",
    }
    for name, line in lines.items():
        console.print(f"{name:<6}{line}", highlight=False, soft_wrap=True)


def summarise(parts: Parts, clocks: Clocks, evaluation: Mapping[str, float], run_dir: RunDir, console: Console) -> None:
    """Prints how the run ended, next to what simple models reach on the same split."""
    rows = {name.removeprefix("eval_").replace("_", " "): value for name, value in evaluation.items()}
    baselines = parts.source.baselines() if "bits per byte" in rows else {}
    console.print(
        f"done: {clocks.step} updates, {clocks.samples:,} samples, {clocks.skipped} skipped; {run_dir.path}",
        soft_wrap=True,
    )
    if rows:
        console.print("held-out")
    for name, value in rows.items():
        console.print(f"  {name:<16}{value:.4f}", highlight=False)
    for name, value in baselines.items():
        console.print(f"    {name:<14}{value:.4f}  (bits per byte, same split)", highlight=False)
