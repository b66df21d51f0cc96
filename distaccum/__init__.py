"""distaccum: state the global batch, get exactly its gradient.

Three levels on one arithmetic: :mod:`distaccum.functional` for a hand-written loop, :class:`Accumulator` for a loop
that is told where a window ends, :class:`Trainer` for no loop at all.

The names in ``__all__`` are public. Everything else is internal and may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distaccum import functional as functional
    from distaccum.accumulation.accumulator import Accumulator as Accumulator
    from distaccum.accumulation.diagnose import diagnose as diagnose
    from distaccum.config.batch import BatchConfig as BatchConfig
    from distaccum.config.compile import CompileConfig as CompileConfig
    from distaccum.config.engine import DDPConfig as DDPConfig
    from distaccum.config.engine import DeepSpeedConfig as DeepSpeedConfig
    from distaccum.config.engine import FSDP2Config as FSDP2Config
    from distaccum.config.engine import Zero1Config as Zero1Config
    from distaccum.config.metrics import MetricsConfig as MetricsConfig
    from distaccum.config.metrics import MLflowConfig as MLflowConfig
    from distaccum.config.metrics import TensorBoardConfig as TensorBoardConfig
    from distaccum.config.metrics import WandbConfig as WandbConfig
    from distaccum.config.precision import PrecisionConfig as PrecisionConfig
    from distaccum.config.precision import ScalerConfig as ScalerConfig
    from distaccum.config.schema import RunConfig as RunConfig
    from distaccum.config.trainer import CheckpointConfig as CheckpointConfig
    from distaccum.config.trainer import OptimConfig as OptimConfig
    from distaccum.config.trainer import ProfileConfig as ProfileConfig
    from distaccum.config.trainer import TrainerConfig as TrainerConfig
    from distaccum.data.collate import PadCollator as PadCollator
    from distaccum.data.spec import DataSpec as DataSpec
    from distaccum.distributed.signals import StopSignals as StopSignals
    from distaccum.distributed.world import World as World
    from distaccum.errors import CheckpointError as CheckpointError
    from distaccum.errors import ConfigError as ConfigError
    from distaccum.errors import DataError as DataError
    from distaccum.errors import DistaccumError as DistaccumError
    from distaccum.errors import MisuseError as MisuseError
    from distaccum.errors import NonFiniteError as NonFiniteError
    from distaccum.errors import SpikeError as SpikeError
    from distaccum.errors import VerificationError as VerificationError
    from distaccum.losses.base import Loss as Loss
    from distaccum.losses.base import WindowLoss as WindowLoss
    from distaccum.losses.contrastive import InfoNCE as InfoNCE
    from distaccum.losses.cross_entropy import CrossEntropy as CrossEntropy
    from distaccum.losses.transformers import CausalLM as CausalLM
    from distaccum.losses.transformers import MaskedLM as MaskedLM
    from distaccum.losses.transformers import SequenceClassification as SequenceClassification
    from distaccum.precision.scaler import LossScaler as LossScaler
    from distaccum.tools.audit.session import audit as audit
    from distaccum.tools.from_deepspeed import from_deepspeed_json as from_deepspeed_json
    from distaccum.train.callbacks import Callback as Callback
    from distaccum.train.callbacks import EarlyStopping as EarlyStopping
    from distaccum.train.ema import EMA as EMA
    from distaccum.train.metrics.loggers import Logger as Logger
    from distaccum.train.metrics.loggers import RunInfo as RunInfo
    from distaccum.train.trainer import Trainer as Trainer

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
    "audit": "distaccum.tools.audit.session",
    "diagnose": "distaccum.accumulation.diagnose",
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
