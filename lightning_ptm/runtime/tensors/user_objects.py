"""Objects of a module's user, whose attributes a forward may read and a step may change. Owns nothing.

I1: objects are looked into if all their classes are the user's: of the packages of the module's own classes. Objects of other
    libraries (trainers, loggers, data sets) may change at any time, and objects with locks or threads as well.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes of every nn.Module."""

_LIBRARIES = sys.stdlib_module_names | {"lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics"}
"""Packages whose objects are not looked into (I1)."""
_BASES = {"abc", "types", "typing"}
"""Packages of base classes (Protocol, SimpleNamespace) that objects of the user's may have."""
_OF_THREADS = {"_thread", "threading", "queue", "multiprocessing", "concurrent"}

_NO_SLOTS = {"__dict__", "__weakref__"}


class ObjectsOf:
    """Tells the objects of a module's user, whose attributes a step may change, from all others (I1).

    Args:
        module: whose classes, and those of its parts, are in the user's packages.
    """

    def __init__(self, module: nn.Module) -> None:
        classes = {base for each in module.modules() for base in type(each).__mro__}
        self._packages = {_package_of(each) for each in classes} - _LIBRARIES | {"types"}

    def attributes(self, value: Any) -> dict[str, Any] | None:
        """Returns the attributes of an object of the user's; None for other values."""
        kind = type(value)
        if _package_of(kind) not in self._packages or isinstance(value, (nn.Module, type)):
            return None
        bases = kind.__mro__[:-1]
        if any(_package_of(base) in _LIBRARIES - _BASES for base in bases):
            return None
        slots = (name for base in bases for name in _slots_of(base) if name not in _NO_SLOTS and hasattr(value, name))
        found = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
        return None if any(_package_of(type(each)) in _OF_THREADS for each in found.values()) else found

    def put(self, value: Any, attributes: Mapping[str, Any]) -> None:
        """Gives an object of the user's exactly these attributes."""
        for name in (self.attributes(value) or {}).keys() - attributes.keys():
            object.__delattr__(value, name)
        own = getattr(value, "__dict__", {})
        for name, each in attributes.items():
            if name in own:
                own[name] = each  # not by its class, which may have a property of this name
            else:
                object.__setattr__(value, name, each)


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    private = f"_{kind.__name__.lstrip('_')}"
    return tuple(
        f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in ((slots,) if isinstance(slots, str) else slots)
    )
