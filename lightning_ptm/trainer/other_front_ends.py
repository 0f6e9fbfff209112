"""Error messages for what is not of the Trainer's package, and for a Trainer's strategy in Fabric.

Classes of the packages lightning and pytorch_lightning are unrelated, so a strategy or a callback of one does not work with
the Trainer of the other, and some of it would be wrong without an error (the strategy's base class would not clip the
gradients, a callback that swaps weights would not be recognized). Modules are not imported here unless the user has imported
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, TypeVar

from lightning_ptm.errors import ConfigError
from lightning_ptm.trainer.registered import FABRICS, PACKAGES, after_import

Class = TypeVar("Class", bound=type)


def asked_elsewhere(strategy: Class) -> Class:
    """Class decorator: makes all of them accept the class as a strategy, so that they reach a call that raises."""
    for name in (f"{package}.strategies" for package in (*FABRICS, *PACKAGES)):
        after_import(name, lambda module: module.Strategy.register(strategy))
    return strategy


def check_trainer(accelerator: object, lightnings: type, name: str) -> None:
    """Checks that a Trainer is of the strategy's package, by its accelerator.

    Args:
        lightnings: a class of Lightning that the strategy's module has imported.
        name: the strategy's name.

    Raises:
        ConfigError: it is of the other package; says what to import instead.
    """
    own, other = _packages(lightnings)
    if _is_of(other, accelerator):
        raise ConfigError(
            f"this Trainer is of the package {other}, and this AngelPTMStrategy is for that of {own}, whose classes are "
            f"others: write `from {PACKAGES[other]} import AngelPTMStrategy`, or strategy={name!r}, which works with both"
        )


def check_callbacks(callbacks: Iterable[object], lightnings: type) -> None:
    """Checks that callbacks are of the strategy's package. Arguments and errors as for `check_trainer`."""
    own, other = _packages(lightnings)
    for callback in callbacks:
        if _is_of(other, callback):
            kind = type(callback)
            ours = kind.__module__.startswith("lightning_ptm.")
            instead = f"{PACKAGES[own]}.callbacks import {kind.__name__}" if ours else f"{own}.callbacks import ..."
            raise ConfigError(
                f"the Trainer is of the package {own}, and its callback {kind.__name__} ({kind.__module__}) is, or derives "
                f"from, a class of {other}, which neither the Trainer nor the strategy recognizes: write "
                f"`from {instead}` instead"
            )


def check_planned(module: object, lightnings: type) -> None:
    """Checks that a module to be planned for is of the planner's package. Arguments and errors as for `check_trainer`."""
    own, other = _packages(lightnings)
    if _is_of(other, module):
        raise ConfigError(
            f"{type(module).__name__} is a module of {other}, and this `plan` is for those of {own}: write "
            f"`from {PACKAGES[other]} import plan`"
        )


def refuse_fabric(name: str) -> NoReturn:
    """Raises ConfigError for a use in Fabric, which has read an attribute that only its own strategies have."""
    raise ConfigError(
        f"Fabric has a strategy class of its own, since its loop is yours: write Fabric(strategy={name!r}), or "
        f"Fabric(strategy=AngelPTMFabricStrategy(...)) with the same settings"
    )


def _packages(lightnings: type) -> tuple[str, str]:
    """The package of a class of Lightning, and the other one."""
    first, second = PACKAGES
    return (first, second) if lightnings.__module__.startswith(f"{first}.") else (second, first)


def _is_of(package: str, thing: object) -> bool:
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in type(thing).__mro__)
