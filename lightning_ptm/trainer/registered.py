"""Registers the strategy's names with the Trainer and Fabric of both packages, without importing Lightning or torch.

Lightning has no entry point for strategies, and importing its registry imports torch and all of Lightning, which would make
`lightning-ptm --help` take seconds instead of a fraction of one. So an import hook registers the names once the registry's
module has been imported. Uses the standard library only until a name is used.
I1: a name is in Lightning's registry before any Trainer or Fabric can be made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Named:
    """Meaning of a strategy name: a description, and settings of AngelPTMStrategy."""

    description: str
    settings: Mapping[str, Any]


NAMES: Mapping[str, Named] = {
    "angel_ptm": Named("pages over device, host and disk; the plan decides where each state is stored", {}),
    "angel_ptm_host": Named("angel_ptm with master states on the host", {"offload_optimizer": "host"}),
    "angel_ptm_disk": Named("angel_ptm with master states on disk", {"offload_optimizer": "disk"}),
    "angel_ptm_lock_free": Named(
        "angel_ptm_disk with lock-free updates: a step may use parameters that lack the newest update",
        {"lock_free": True},
    ),
}


PACKAGES: Mapping[str, str] = {
    "lightning.pytorch": "lightning_ptm",
    "pytorch_lightning": "lightning_ptm.pytorch_lightning",
}
"""The two packages of the Trainer, and the package from which each gets its strategy and callbacks."""
FABRICS: Mapping[str, str] = {
    "lightning.fabric": "lightning_ptm",
    "lightning_fabric": "lightning_ptm.pytorch_lightning",
}
"""The two packages of Fabric, and the package from which each gets its strategy."""


def register() -> None:
    """Makes the names known to `Trainer(strategy=...)` and `Fabric(strategy=...)`, and the class to LightningCLI."""
    for package, ours in PACKAGES.items():
        _register(package, ours)
    for fabric, ours in FABRICS.items():
        after_import(f"{fabric}.strategies", partial(_offer_fabric, ours=ours))


def _register(package: str, ours: str) -> None:
    after_import(f"{package}.strategies", lambda strategies: _offer(strategies, ours))
    # jsonargparse finds and lists a class by its short name only after it has been imported. Importing it needs all of
    # the package, which is complete only once its cli is.
    after_import(f"{package}.cli", lambda module: _class(ours))


def _offer(strategies: ModuleType, ours: str) -> None:
    def make(**settings: Any) -> Any:
        return _class(ours)(**settings)

    for name, named in NAMES.items():
        strategies.StrategyRegistry.register(name, make, description=named.description, override=True, **named.settings)


def _offer_fabric(strategies: ModuleType, ours: str) -> None:
    def make(**settings: Any) -> Any:
        return importlib.import_module(f"{ours}.trainer.fabric").AngelPTMFabricStrategy(**settings)

    for name, named in NAMES.items():
        strategies.STRATEGY_REGISTRY.register(
            name, make, description=named.description, override=True, **named.settings
        )


def _class(ours: str) -> type[Any]:
    strategy: type[Any] = importlib.import_module(f"{ours}.trainer.strategy").AngelPTMStrategy
    return strategy


def after_import(name: str, act: Callable[[ModuleType], object]) -> None:
    """Calls `act` once with the module of this name: now if it is imported, otherwise after its import."""
    if name in sys.modules:
        act(importlib.import_module(name))  # waits if another thread has not finished importing it
    else:
        sys.meta_path.insert(0, _AfterImport(name, act))


class _AfterImport(MetaPathFinder):
    """Import hook that makes the module's loader call `act` once, after it has executed the module."""

    def __init__(self, name: str, act: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in later)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path and module.__name__ == self._name:  # zipimport shares a loader between modules
                sys.meta_path.remove(self)
                self._act(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
