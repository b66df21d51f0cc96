"""distaccum: state the global batch, get exactly its gradient.

Three levels on one arithmetic: :mod:`distaccum.functional` for a hand-written loop, :class:`Accumulator` for a loop
that is told where a window ends, :class:`Trainer` for no loop at all.

The names in ``__all__`` are public. Everything else is internal and may change.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_HOMES = {
    "Accumulator": "distaccum.accumulation.accumulator",
    "BatchConfig": "distaccum.config.batch",
    "Callback": "distaccum.train.callbacks",
    "CausalLM": "distaccum.losses.transformers",
    "CheckpointConfig": "distaccum.config.trainer",
    "CheckpointError": "distaccum.errors",
    "CompileConfig": "distaccum.config.compile",
    "ConfigError": "distaccum.errors",
    "CrossEntropy": "distaccum.losses.cross_entropy",
    "DDPConfig": "distaccum.config.engine",
    "DataError": "distaccum.errors",
    "DataSpec": "distaccum.data.spec",
    "DeepSpeedConfig": "distaccum.config.engine",
    "DistaccumError": "distaccum.errors",
    "EMA": "distaccum.train.ema",
    "EarlyStopping": "distaccum.train.callbacks",
    "FSDP2Config": "distaccum.config.engine",
    "InfoNCE": "distaccum.losses.contrastive",
    "Logger": "distaccum.train.metrics.loggers",
    "Loss": "distaccum.losses.base",
    "LossScaler": "distaccum.precision.scaler",
    "MLflowConfig": "distaccum.config.metrics",
    "MaskedLM": "distaccum.losses.transformers",
    "MetricsConfig": "distaccum.config.metrics",
    "MisuseError": "distaccum.errors",
    "NonFiniteError": "distaccum.errors",
    "OptimConfig": "distaccum.config.trainer",
    "PadCollator": "distaccum.data.collate",
    "PrecisionConfig": "distaccum.config.precision",
    "ProfileConfig": "distaccum.config.trainer",
    "RunConfig": "distaccum.config.schema",
    "RunInfo": "distaccum.train.metrics.loggers",
    "ScalerConfig": "distaccum.config.precision",
    "SequenceClassification": "distaccum.losses.transformers",
    "SpikeError": "distaccum.errors",
    "StopSignals": "distaccum.distributed.signals",
    "TensorBoardConfig": "distaccum.config.metrics",
    "Trainer": "distaccum.train.trainer",
    "TrainerConfig": "distaccum.config.trainer",
    "VerificationError": "distaccum.errors",
    "WandbConfig": "distaccum.config.metrics",
    "WindowLoss": "distaccum.losses.base",
    "World": "distaccum.distributed.world",
    "Zero1Config": "distaccum.config.engine",
    "all_gather": "distaccum.tools.gather",
    "audit": "distaccum.tools.audit.session",
    "balance": "distaccum.tools.balance",
    "diagnose": "distaccum.tools.diagnose",
    "from_deepspeed_json": "distaccum.tools.from_deepspeed",
}
__all__ = ["functional", *_HOMES]  # noqa: PLE0604  the names of the table, in its order


def __getattr__(name: str) -> Any:
    """Imports a name's home on first use, so that ``import distaccum`` alone is quick."""
    if name == "functional":
        return import_module("distaccum.functional")
    if name not in _HOMES:
        raise AttributeError(f"module 'distaccum' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
