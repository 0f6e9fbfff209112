"""Error messages for users of Lightning's other front ends: `pytorch_lightning` (the same code, renamed) and Fabric.

Classes of the packages lightning and pytorch_lightning are unrelated, so a strategy for one does not work with the other, and
some of it would be wrong without an error (the base class would not clip the gradients of a pytorch_lightning module). The
strategy's names and class are therefore registered with each front end, and raise an explanation. Modules are not imported
here unless the user has imported them.
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
"""Modules with another front end's strategy registry: the registry's name, and the error message."""


def refuse_elsewhere(names: Iterable[str]) -> None:
    """Registers these names with the other front ends, now or when they are imported, so that their use is an error."""
    chosen = tuple(names)

    def introduce(module: ModuleType) -> None:
        registry, sentence = _FRONT_ENDS[module.__name__]
        for name in chosen:
            getattr(module, registry).register(name, _refusal(sentence, name), description="", override=True)

    for name in _FRONT_ENDS:
        after_import(name, introduce)


def asked_elsewhere(strategy: Class) -> Class:
    """Class decorator: makes other front ends accept the class as a strategy, so that they reach a call that raises."""
    for name in _FRONT_ENDS:
        after_import(name, lambda module: module.Strategy.register(strategy))
    return strategy


def check_front_end(thing: object, name: str) -> None:
    """Checks that a Trainer's part, such as its accelerator, is a class of the package lightning.

    Args:
        name: the strategy's name.

    Raises:
        ConfigError: it is a class of pytorch_lightning; says what to import instead.
    """
    packages = {base.__module__.partition(".")[0] for base in type(thing).__mro__}
    if "pytorch_lightning" in packages:
        raise ConfigError(_TWIN.format(name=name))


def refuse_fabric(name: str) -> NoReturn:
    """Raises ConfigError for a use in Fabric, which has read an attribute that only its own strategies have."""
    raise ConfigError(_FABRIC.format(name=name))


def _refusal(sentence: str, name: str) -> Callable[..., NoReturn]:
    def refuse(**settings: Any) -> NoReturn:
        raise ConfigError(sentence.format(name=name))

    return refuse
