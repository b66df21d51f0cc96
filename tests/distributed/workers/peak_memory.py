"""The most bytes that this rank allocates in three windows of a run, and what was forecast: prints one line of JSON.

Counted by torch's profiler from before the model is built; the arguments are those of ``distaccum train``.
"""

import json
import sys
from itertools import islice

from hydra import compose, initialize_config_dir
from torch.profiler import ProfilerActivity, profile

from distaccum.config.command_line import register_aliases
from distaccum.config.schema import RunConfig, conf_dir, plain
from distaccum.data.factory import build_loader
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.world import World, open_world
from distaccum.tools.plan.command import job_of, memory_of, peak_bytes
from distaccum.train.components import components_from_config
from distaccum.train.run import build_accumulator

WINDOWS = 3


def most_allocated(config: RunConfig, world: World) -> int:
    """Bytes at once, beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        components = components_from_config(config, world_size=world.size, device=world.device)
        accumulator = build_accumulator(components, world)
        loader = build_loader(components.data, components.plan, world)
        for window in islice(accumulator.windows(loader), WINDOWS):
            accumulator.step(window, components.loss)
    return most_at_once(recorded)[0]


def most_at_once(recorded: profile) -> tuple[int, int]:
    """The most bytes that a profile has seen, and those that are left in the end."""
    live = most = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most, live


def main() -> None:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        values = plain(compose("config", register_aliases(sys.argv[1:])))
    config, ranks = RunConfig.from_dict(values), LaunchEnvironment.from_environment()
    with open_world(ranks, ranks.store(), ranks.device()) as world:
        most = most_allocated(config, world)
        parts = memory_of(config, job_of(config), world.size, measures=True)["peak"]
        if world.is_main:
            found = {"ranks": world.size, "most": most, "forecast": peak_bytes(config, world.size), "parts": parts}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
