"""What is to happen when a module has been imported, by whomever and whenever; nothing is imported for it.

Knows the standard library only. I1: it happens once, when all of the module has been executed, whichever thread imports it.
I2: loaders are left as they are: some are shared by the modules of a folder (zipimport).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, act: Callable[[ModuleType], object]) -> None:
    """Calls `act` with the module of this name: at once if it is imported, else once when it has been."""
    finder = _AfterImport(name, act)
    sys.meta_path.insert(0, finder)
    # Another thread may be at it, past the place where finders are asked; it begins with the packages around.
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        around = ".".join(parts[:count])
        if _is_being_imported(around):
            importlib.import_module(around)  # waits for that thread
    if name in sys.modules and not _is_being_imported(name):
        finder.happened(sys.modules[name])


def _is_being_imported(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


class _AfterImport(MetaPathFinder):
    """Calls `act` with a module when it has been imported, once."""

    def __init__(self, name: str, act: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the finders behind this one have, with a loader that acts behind theirs."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Acting(spec.loader, self)
                return spec
        return None

    def happened(self, module: ModuleType) -> None:
        """The module has been imported. Safe for threads: one of them acts."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return
        self._act(module)


class _Acting(Loader):
    """A loader that tells `finder` when it has executed a module, which then has its own loader and no trace of this one."""

    def __init__(self, loader: Any, finder: _AfterImport) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # sources and resources, for others that only look

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.happened(module)
