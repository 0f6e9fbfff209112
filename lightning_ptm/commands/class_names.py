"""Names of classes on the command line and in configs, checked before jsonargparse sees them.

jsonargparse answers a name that it does not know with "Expected a dot import path string". Here the nearest names are
proposed. A name that could be anything else (a file, a keyword, a module that does not import) is left to jsonargparse.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_ptm.commands.config_names import CONFIG_OPTIONS
from lightning_ptm.commands.mistakes import nearest
from lightning_ptm.errors import some

KINDS: Mapping[str, type] = {
    "model": LightningModule,
    "data": LightningDataModule,
    "trainer.callbacks": Callback,
    "trainer.logger": Logger,
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
}
"""Options whose values name classes, each with the base class. `--trainer.strategy` and `--trainer.accelerator` also take
registered names; command_line.py resolves them."""

_KEYWORDS = ("true", "false", "null", "none")


def subclasses_of(kind: type) -> set[type]:
    """All subclasses defined in this process, at any depth."""
    below: list[type] = kind.__subclasses__()
    return {*below, *(deeper for each in below for deeper in subclasses_of(each))}


def names_of(kind: type) -> list[str]:
    """Names by which jsonargparse knows the subclasses of `kind`."""
    names = {each.__name__ for each in subclasses_of(kind) if not inspect.isabstract(each)}
    return sorted(name for name in names if not name.startswith("_"))


def unknown_class(kind: type, given: object) -> str:
    """Returns that `given` names no subclass of `kind`, with names that do; empty if it may name one."""
    if not isinstance(given, str) or not all(part.isidentifier() for part in given.split(".")):
        return ""
    if given.lower() in _KEYWORDS or Path(given).is_file():
        return ""
    module_name, _, name = given.rpartition(".")
    if not module_name:
        if name in {kind.__name__, *(each.__name__ for each in subclasses_of(kind))}:
            return ""
        problem = f"there is no {kind.__name__} {name!r} (one of yours is named with its module: my_module.{name})"
        return f"{problem}{_instead(name, names_of(kind))}"
    try:
        module = importlib.import_module(module_name)
        if hasattr(module, name):
            return ""
        # Of a module that imports its classes when they are used, only those are imported whose names are similar.
        near = {each: getattr(module, each) for each in difflib.get_close_matches(name, dir(module))}
    except Exception:  # the user's code can raise anything; jsonargparse imports it again, and reports it
        return ""
    known = [each for each, value in {**vars(module), **near}.items() if _is_subclass(value, kind)]
    return f"{module_name} has no {kind.__name__} {name!r}{_instead(name, known)}" if known else ""


def _instead(name: str, known: Sequence[str]) -> str:
    public = [each for each in known if not each.startswith("_")]
    return nearest(name, public) or f"; there are {some(public, 8)}"


def _is_subclass(value: object, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind) and value is not kind


def unknown_class_among(arguments: Sequence[str]) -> str:
    """Returns what is wrong with the first unknown class that a command line or one of its config files names; empty if
    none is known to be wrong."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        option, equals, value = argument.partition("=")
        value = value if equals else following
        if option in CONFIG_OPTIONS:
            named = ((f"{key} of {value}", KINDS[key], given) for key, given in _named_in(value))
        else:
            key = option.removeprefix("--").removesuffix("+").removesuffix(".class_path")
            named = ((option, KINDS[key], value) for _ in [0] if key in KINDS and option.startswith("--"))
        for place, kind, given in named:
            if problem := unknown_class(kind, given):
                return f"{place}: {problem}"
    return ""


def _named_in(path: str) -> Iterator[tuple[str, Any]]:
    """Yields (key in KINDS, what the config file gives there): the name of a class, another value, or None.

    A file that cannot be read yields nothing.
    """
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return
    for key in KINDS:
        value: Any = document
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        for each in value if isinstance(value, list) else [value]:
            yield key, each.get("class_path") if isinstance(each, dict) else each
