"""lightning_ptm for `pytorch_lightning`: `from lightning_ptm.pytorch_lightning import AngelPTMStrategy`.

pytorch_lightning is the code of lightning.pytorch under another name, with classes of its own: Lightning makes one from the
other by renaming imports. This package does the same when it is imported: `lightning_ptm.pytorch_lightning.trainer.strategy`
is loaded from the file of `lightning_ptm.trainer.strategy`, in which `lightning.pytorch` is replaced by `pytorch_lightning`.
So both packages can be used in one process, and pickles and new processes find the classes by their names.

I1: modules that do not import Lightning (runtime, memory...) exist once. I2: no module of this package imports `lightning`.
I3: line numbers are those of the file.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

import lightning_ptm

_LOADED_AGAIN = (
    "callbacks",
    "checkpoints",
    "command_line",
    "commands",
    "data",
    "forecasting",
    "models",
    "sharded",
    "trainer",
)
"""The packages and modules of lightning_ptm that import Lightning."""
_SHARED = r"trainer\.(?:device_mesh|other_front_ends|registered)"
"""Modules among them that import no Lightning and own what a process has once."""
_NAMES = (
    (re.compile(r"\blightning\.pytorch\b"), "pytorch_lightning"),
    (re.compile(r"\blightning\.fabric\b"), "lightning_fabric"),
    (re.compile(rf"\blightning_ptm\.(?!{_SHARED}\b)(?=(?:{'|'.join(_LOADED_AGAIN)})\b)"), f"{__name__}."),
    (re.compile(r"\bfrom lightning_ptm import\b"), f"from {__name__} import"),
)
"""Pairs of a pattern in the text of a source file, and the text that replaces it."""

__all__ = lightning_ptm.__all__


def renamed(text: str) -> str:
    """A text of code for lightning.pytorch as one for pytorch_lightning: names of modules in imports and in messages."""
    for pattern, replacement in _NAMES:
        text = pattern.sub(replacement, text)
    return text


class _Finder(MetaPathFinder):
    """Finds the modules of this package in the files of the modules that they are copies of."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = fullname.partition(f"{__name__}.")
        if package or not inner or inner.partition(".")[0] not in _LOADED_AGAIN:
            return None
        copied = f"{lightning_ptm.__name__}.{inner}"
        # The folder of the first package is that of lightning_ptm; further down both packages have the same folder.
        folder = path if "." in inner else lightning_ptm.__path__
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(copied, folder) for finder in others)), None)
        if spec is None or not isinstance(spec.loader, ExecutionLoader):
            return None
        return spec_from_loader(fullname, _Loader(spec.loader, copied))


class _Loader(ExecutionLoader):
    """Loads a module from another module's file, with names replaced."""

    def __init__(self, loader: ExecutionLoader, copied: str) -> None:
        self._loader = loader
        self._copied = copied

    def get_filename(self, fullname: str) -> str:
        return self._loader.get_filename(self._copied)

    def is_package(self, fullname: str) -> bool:
        return self._loader.is_package(self._copied)

    def get_source(self, fullname: str) -> str | None:
        source = self._loader.get_source(self._copied)
        return None if source is None else renamed(source)


def __getattr__(name: str) -> Any:
    """A public name of lightning_ptm, for pytorch_lightning; or one of its modules."""
    if name in _LOADED_AGAIN:
        return importlib.import_module(f"{__name__}.{name}")
    home = lightning_ptm.HOME_OF.get(name)
    value = getattr(lightning_ptm if home is None else importlib.import_module(renamed(home)), name)
    globals()[name] = value  # from now on it is found without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.meta_path.insert(0, _Finder())
