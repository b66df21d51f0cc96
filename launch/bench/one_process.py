"""The measurements of one launch, in one process or under torchrun: what ``conf/bench.yaml`` chooses."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from distaccum.config.command_line import register_aliases
from distaccum.config.schema import RunConfig, conf_dir, plain
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import open_world
from launch.bench import (
    checkpoints,
    engines,
    exactness,
    loading,
    micro_batches,
    numerics,
    optimizer_step,
    tables,
    throughput,
)

MEASURES = ("exactness", "boundary", "engines", "saves", "loading", "micro", "reproducible")


def run(node: DictConfig) -> None:
    """Measures on this rank; rank 0 prints the figures, and writes them to ``bench.json`` in the run directory."""
    values, folder = plain(node), Path(HydraConfig.get().runtime.output_dir)
    options = values.pop("bench")
    sizes, saved_sizes, loads = options.pop("boundary_sizes"), options.pop("saved_sizes"), options.pop("loading")
    micro, reproducible = options.pop("micro"), options.pop("reproducible")
    wanted = {name for name in MEASURES if values.pop(name)}
    config, ranks = RunConfig.from_dict(values), LaunchEnvironment.from_environment()
    with open_world(ranks, ranks.store(), ranks.device()) as world:
        if "exactness" in wanted:
            figures, show = exactness.compare(world), partial(exactness.show, world=world)
        elif "boundary" in wanted:
            figures = optimizer_step.compare(world, sizes, pairs=options["pairs"])
            show = partial(optimizer_step.show, device=world.device)
        elif "engines" in wanted:
            figures, show = engines.compare(config, world), partial(tables.show, path=folder / "engines.md")
        elif "saves" in wanted:
            figures = checkpoints.compare(world, saved_sizes, folder, pairs=options["pairs"])
            show = partial(checkpoints.show, ranks=world.size)
        elif "loading" in wanted:
            figures, show = loading.compare(world, **loads), loading.show
        elif "micro" in wanted:
            figures, show = micro_batches.compare(world, **micro), micro_batches.show
        elif "reproducible" in wanted:
            figures, show = numerics.compare(config, world, **reproducible), numerics.show
        else:
            figures = throughput.compare(config, world, folder, **options)
            show = partial(throughput.show, ranks=world.size)
        if world.is_main:
            show(figures)
            (folder / "bench.json").write_text(json.dumps(figures, indent=2))


def main() -> int:
    """Runs the command; returns its exit code."""
    sys.argv[1:] = register_aliases(sys.argv[1:])
    hydra.main(config_path=str(conf_dir()), config_name="bench", version_base="1.3")(run)()
    return 0
