"""distaccum: state the global batch, get exactly its gradient.

Three levels on one arithmetic: :mod:`distaccum.functional` for a hand-written loop, :class:`Accumulator` for a loop
that is told where a window ends, :class:`Trainer` for no loop at all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distaccum.accumulation.accumulator import Accumulator as Accumulator
    from distaccum.data.spec import Source as Source
    from distaccum.distributed.signals import StopSignals as StopSignals
    from distaccum.distributed.world import World as World
    from distaccum.train.from_deepspeed import from_deepspeed_json as from_deepspeed_json
    from distaccum.train.trainer import Trainer as Trainer

__version__ = "0.1.0"
_HOMES = {
    "Accumulator": "distaccum.accumulation.accumulator",
    "Source": "distaccum.data.spec",
    "StopSignals": "distaccum.distributed.signals",
    "Trainer": "distaccum.train.trainer",
    "World": "distaccum.distributed.world",
    "from_deepspeed_json": "distaccum.train.from_deepspeed",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that ``import distaccum`` alone is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'distaccum' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
