"""Run by torchrun: the errors of ``precision=fp8`` on ddp and fsdp2, by both recipes."""

from dataclasses import replace
from itertools import product
from typing import Any

from distaccum.config.engine import engine_config
from distaccum.config.precision import PrecisionConfig
from distaccum.distributed.world import World
from tests.support import fp8
from tests.support.answers import give

CELLS = list(product(("ddp", "fsdp2"), fp8.RECIPES))


def errors(world: World) -> tuple[Any, Any]:
    precision = PrecisionConfig(name="fp8", fp8_emulate=True, keep_fp32=fp8.KEPT)
    return CELLS, [
        fp8.errors(world, engine_config(name), 5, replace(precision, fp8_recipe=recipe)) for name, recipe in CELLS
    ]


if __name__ == "__main__":
    give(errors, timeout_s=30)
