"""Train models larger than the GPU and larger than RAM with PyTorch Lightning: `Trainer(strategy="angel_ptm")`.

Imports neither torch nor Lightning before a name of it is used, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"lightning_ptm needs Linux (pages, files and checkpoints use its system calls), and this is {sys.platform}: run it "
        f"in WSL2 on Windows, in a Linux container or virtual machine on macOS"
    )

from lightning_ptm.trainer.registered import PACKAGES, after_import, register

if TYPE_CHECKING:
    from lightning_ptm.commands.plan import plan as plan
    from lightning_ptm.config import Checkpoints as Checkpoints
    from lightning_ptm.config import Debug as Debug
    from lightning_ptm.config import LockFree as LockFree
    from lightning_ptm.config import Settings as Settings
    from lightning_ptm.config import TensorParallel as TensorParallel
    from lightning_ptm.config import Tuning as Tuning
    from lightning_ptm.config import Weights as Weights
    from lightning_ptm.errors import AngelPTMError as AngelPTMError
    from lightning_ptm.errors import CapacityError as CapacityError
    from lightning_ptm.errors import CheckpointError as CheckpointError
    from lightning_ptm.errors import ConfigError as ConfigError
    from lightning_ptm.errors import InternalError as InternalError
    from lightning_ptm.errors import PageIOError as PageIOError
    from lightning_ptm.errors import RankError as RankError
    from lightning_ptm.errors import UsageError as UsageError
    from lightning_ptm.events import Event as Event
    from lightning_ptm.events import EventKind as EventKind
    from lightning_ptm.planning.trace import TensorUse as TensorUse
    from lightning_ptm.planning.trace import Tick as Tick
    from lightning_ptm.planning.trace import Trace as Trace
    from lightning_ptm.runtime.engine.inspection import PageUse as PageUse
    from lightning_ptm.runtime.engine.inspection import PlannedBytes as PlannedBytes
    from lightning_ptm.runtime.engine.inspection import StateBytes as StateBytes
    from lightning_ptm.runtime.engine.inspection import Statistics as Statistics
    from lightning_ptm.runtime.engine.inspection import TierRoom as TierRoom
    from lightning_ptm.runtime.updates.audits import UpdateAudit as UpdateAudit
    from lightning_ptm.trainer.fabric import AngelPTMFabricStrategy as AngelPTMFabricStrategy
    from lightning_ptm.trainer.precision import AngelPTMPrecision as AngelPTMPrecision
    from lightning_ptm.trainer.strategy import AngelPTMStrategy as AngelPTMStrategy

__version__ = "0.1.0"

_HOMES = {
    "commands.plan": ("plan",),
    "config": ("Checkpoints", "Debug", "LockFree", "Settings", "TensorParallel", "Tuning", "Weights"),
    "errors": (
        "AngelPTMError",
        "CapacityError",
        "CheckpointError",
        "ConfigError",
        "InternalError",
        "PageIOError",
        "RankError",
        "UsageError",
    ),
    "events": ("Event", "EventKind"),
    "planning.trace": ("TensorUse", "Tick", "Trace"),
    "runtime.engine.inspection": ("PageUse", "PlannedBytes", "StateBytes", "Statistics", "TierRoom"),
    "runtime.updates.audits": ("UpdateAudit",),
    "trainer.fabric": ("AngelPTMFabricStrategy",),
    "trainer.precision": ("AngelPTMPrecision",),
    "trainer.strategy": ("AngelPTMStrategy",),
}
"""The public names by the modules that they come from: what type checkers read above."""

HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [*HOME_OF, "__version__"]


def __getattr__(name: str) -> Any:
    """A public name or a module of this package, imported at its first use."""
    if name in HOME_OF:
        value = getattr(importlib.import_module(HOME_OF[name]), name)
        globals()[name] = value  # from now on it is found without this function
        return value
    module = f"{__name__}.{name}"
    if not name.startswith("_"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _connect_planner(strategies: ModuleType, ours: str) -> None:
    """Gives strategies the planner, which is imported when `parallel="auto"` first needs it."""

    def choose(*given: Any) -> Any:
        return importlib.import_module(f"{ours}.commands.run_choice").choose_for_run(*given)

    strategies.AngelPTMStrategy.choose_parallel = staticmethod(choose)


register()
for _package in PACKAGES.values():
    after_import(f"{_package}.trainer.strategy", partial(_connect_planner, ours=_package))
