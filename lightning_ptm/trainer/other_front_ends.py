"""What users of Lightning's other front ends are told: `pytorch_lightning`, the same code under another name, and Fabric.

Classes of the two packages are strangers to each other, so a strategy of one cannot serve the other; and what strategies are
asked in silence would be wrong (the base class would not clip a LightningModule of the twin's). Each front end therefore
knows our names and our class, and what they lead to is a sentence. Modules that nobody has imported are not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from lightning_ptm.errors import ConfigError
from lightning_ptm.trainer.registered import after_import

Class = TypeVar("Class", bound=type)

_TWIN = (
    "this Trainer is of the package pytorch_lightning, and {name} works with that of lightning, which is the same code under "
    "another name: write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, for the "
    "LightningModule and callbacks, too"
)
_FABRIC = (
    "Fabric leaves the loop to you, and {name} has to know where a step begins and ends: use it with "
    "lightning.pytorch.Trainer(strategy={name!r}), where manual optimization (automatic_optimization = False) leaves you "
    "backward and step"
)

_FRONT_ENDS = {
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", _FABRIC),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", _FABRIC),
    "pytorch_lightning.strategies": ("StrategyRegistry", _TWIN),
}
"""Modules with a registry of strategies that are not ours: its name there, and what to say."""


def refuse_elsewhere(names: Iterable[str]) -> None:
    """Makes the front ends that are not ours, also those that are imported later, answer these names with a sentence."""
    chosen = tuple(names)

    def introduce(module: ModuleType) -> None:
        registry, sentence = _FRONT_ENDS[module.__name__]
        for name in chosen:
            getattr(module, registry).register(name, _refusal(sentence, name), description="", override=True)

    for name in _FRONT_ENDS:
        after_import(name, introduce)


def asked_elsewhere(strategy: Class) -> Class:
    """A decorator: the class passes as a strategy of other front ends, so that they come as far as asking it something."""
    for name in _FRONT_ENDS:
        after_import(name, lambda module: module.Strategy.register(strategy))
    return strategy


def check_front_end(thing: object, name: str) -> None:
    """Refuses a Trainer's part, such as its accelerator, that is a class of another front end's.

    Args:
        name: of the strategy that it was given to.

    Raises:
        ConfigError: with what to import instead.
    """
    packages = {base.__module__.partition(".")[0] for base in type(thing).__mro__}
    if "pytorch_lightning" in packages:
        raise ConfigError(_TWIN.format(name=name))


def refuse_fabric(name: str) -> NoReturn:
    """Fabric has asked for what only its own strategies have. Raises ConfigError."""
    raise ConfigError(_FABRIC.format(name=name))


def _refusal(sentence: str, name: str) -> Callable[..., NoReturn]:
    def refuse(**settings: Any) -> NoReturn:
        raise ConfigError(sentence.format(name=name))

    return refuse
