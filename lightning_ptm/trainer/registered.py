"""The names of `Trainer(strategy=...)`, known to Lightning without an import of what they stand for.

`import lightning_ptm` runs this, with or without Lightning imported before it. Knows the standard library only until a name
is used. I1: a name stands in Lightning's registry before any Trainer can be made.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_ptm.trainer.after_import import after_import
from lightning_ptm.trainer.other_front_ends import refuse_elsewhere

if TYPE_CHECKING:
    from lightning_ptm.trainer.strategy import AngelPTMStrategy


@dataclass(frozen=True, slots=True)
class Named:
    """What a name stands for: `settings` as AngelPTMStrategy takes them."""

    description: str
    settings: Mapping[str, Any]


NAMES: Mapping[str, Named] = {
    "angel_ptm": Named("pages over device, host and disk; the plan decides what lives where", {}),
    "angel_ptm_host": Named("angel_ptm with master states on the host", {"offload_optimizer": "host"}),
    "angel_ptm_disk": Named("angel_ptm with master states on disk", {"offload_optimizer": "disk"}),
    "angel_ptm_lock_free": Named("angel_ptm_disk whose compute never waits for the disk", {"lock_free": True}),
}


def register() -> None:
    """Makes the names known to `Trainer(strategy=...)`, and the class to LightningCLI."""
    after_import("lightning.pytorch.strategies", _offer)
    # jsonargparse knows a class by its name alone, and lists it, only if it has been imported. That needs all of
    # lightning.pytorch, which a module of it can rely on only when it has been imported itself.
    after_import("lightning.pytorch.cli", lambda module: _class())
    refuse_elsewhere(NAMES)


def _offer(strategies: ModuleType) -> None:
    for name, named in NAMES.items():
        strategies.StrategyRegistry.register(
            name, _make, description=named.description, override=True, **named.settings
        )


def _make(**settings: Any) -> AngelPTMStrategy:
    return _class()(**settings)


def _class() -> type[AngelPTMStrategy]:
    strategy: type[AngelPTMStrategy] = importlib.import_module("lightning_ptm.trainer.strategy").AngelPTMStrategy
    return strategy
