"""distaccum: state the global batch, get exactly its gradient.

Three levels on one arithmetic: :mod:`distaccum.functional` for a hand-written loop, :class:`Accumulator` for a loop
that is told where a window ends, :class:`Trainer` for no loop at all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distaccum.accumulator import Accumulator as Accumulator
    from distaccum.data.source import Source as Source
    from distaccum.deepspeed_json.read import from_deepspeed_json as from_deepspeed_json
    from distaccum.signals import StopSignals as StopSignals
    from distaccum.trainer import Trainer as Trainer
    from distaccum.world import World as World

__version__ = "0.1.0"
_HOMES = {
    "Accumulator": "distaccum.accumulator",
    "Source": "distaccum.data.source",
    "StopSignals": "distaccum.signals",
    "Trainer": "distaccum.trainer",
    "World": "distaccum.world",
    "from_deepspeed_json": "distaccum.deepspeed_json.read",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that ``import distaccum`` alone is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'distaccum' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
