"""What is to happen when a module has been imported, by whomever and whenever; nothing is imported for it.

Knows the standard library only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, act: Callable[[ModuleType], object]) -> None:
    """Calls `act` with the module of this name: at once if it is imported, else once when it has been."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, act))


class _AfterImport(MetaPathFinder):
    """Calls `act` with a module when it has been imported, once."""

    def __init__(self, name: str, act: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._act = act
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that others find, its loader calling `act` behind."""
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # others may only have looked whether it is there
                sys.meta_path.remove(self)
                self._act(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
