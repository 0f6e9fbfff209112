"""Train models larger than the GPU and larger than RAM with PyTorch Lightning: `Trainer(strategy="angel_ptm")`."""

from lightning_ptm.config import Settings
from lightning_ptm.errors import (
    AngelPTMError,
    CapacityError,
    CheckpointError,
    ConfigError,
    InternalError,
    PageIOError,
    RankError,
    UsageError,
)
from lightning_ptm.events import Event, EventKind
from lightning_ptm.planning.trace import TensorUse, Tick, Trace
from lightning_ptm.runtime.inspection import PageUse, PlannedBytes, StateBytes, TierRoom
from lightning_ptm.runtime.lockfree import UpdateAudit
from lightning_ptm.runtime.statistics import Statistics
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.strategy import AngelPTMStrategy, register

__version__ = "0.1.0"

register()

__all__ = [
    "AngelPTMError",
    "AngelPTMPrecision",
    "AngelPTMStrategy",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Event",
    "EventKind",
    "InternalError",
    "PageIOError",
    "PageUse",
    "PlannedBytes",
    "RankError",
    "Settings",
    "StateBytes",
    "Statistics",
    "TensorUse",
    "Tick",
    "TierRoom",
    "Trace",
    "UpdateAudit",
    "UsageError",
    "__version__",
]
