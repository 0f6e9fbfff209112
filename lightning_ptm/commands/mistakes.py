"""What a command line or a config has wrong, in a line: jsonargparse's messages, said shorter, with what to give instead.

Owns nothing. What jsonargparse says differs between its versions; the oldest and the newest that pyproject.toml allows are
tested.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from lightning_ptm.commands.entries import COMMANDS
from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError, some
from lightning_ptm.setting_hints import unknown_setting
from lightning_ptm.trainer.strategy import AngelPTMStrategy

_REFUSED_NAME = re.compile(
    r"Problem with given class_path '([\w.]+)':\s+(?:Option '([\w.]+)' is not accepted|"
    r"Validation failed: Key '([\w.]+)' is not expected)"
)
_REFUSED_VALUE = re.compile(
    r"Problem with given class_path '([\w.]+)':\s+Parser key \"([\w.]+)\":\s+(?:Not of type \w+: )?(.*)", re.DOTALL
)
_REFUSED_OPTION = re.compile(r"^Parser key \"([\w.]+)\":\s+(.*)", re.DOTALL)
_NO_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':\s+(?=\S)(?!Parser key|Option|Validation)([^\n]+)")
_NO_DOTTED_NAME = re.compile(r"Expected a dot import path string: (\S+)")
_ANOTHER_KIND = re.compile(r"Import path ?(\S*) does not correspond to a subclass of (\w+)")
_UNKNOWN_COMMAND = re.compile(r"argument subcommand: invalid choice: '([^']*)'")
_UNKNOWN_OPTION = re.compile(r"[Uu]nrecognized arguments: (--[\w.-]+)(?:[=\s].*)?$", re.DOTALL)
_UNKNOWN_KEY = re.compile(r"Subcommand '(\w+)' does not accept (?:option|nested key) '([\w.]+)'")
_NO_FILE = re.compile(r"^Parser key \"([\w.]+)\": File does not exist: '(.*)'$")
_REQUIRED = re.compile(r"the following arguments are required: (.*)$|Key \"([\w.]+)\" is required")

_PARTS = ("model", "data", "trainer", "seed_everything", "ckpt_path", "optimizer", "lr_scheduler")
"""What a config of a Trainer's subcommand has."""

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "dict": "a dictionary such as '{name: value}'",
    "Mapping": "a dictionary such as '{name: value}'",
    "list": "a list such as '[a, b]'",
    "Sequence": "a list such as '[a, b]'",
    "Iterable": "a list such as '[a, b]'",
    "NoneType": "null",
}
"""What people write for a type's values."""


def in_short(message: str, options: Sequence[str]) -> str:
    """What is wrong and what to give instead, in a line, without the types that were tried; what is not known here, as it is.

    Args:
        message: jsonargparse's. options: of the command line, as `--name`.
    """
    if (found := _REFUSED_NAME.search(message)) is not None:
        path, name = found[1], found[2] or found[3]
        if path == "lightning.LightningDataModule":  # which stands for any
            return f"--data names no class whose setting {name!r} could be; give one, such as --data=my_module.MyData"
        return f"{path} has no setting {name!r}{_instead(path, name)}"
    if (found := _NO_CLASS.search(message)) is not None:
        return _class_that_is_not_there(found[1], found[2].strip())
    if (found := _REFUSED_VALUE.search(message)) is not None:
        path, name, problem = found.groups()
        return f"{path}: {_what_to_give(name, problem, of=path)}"
    commands = [*LightningCLI.subcommands(), *COMMANDS]
    if (found := _UNKNOWN_COMMAND.search(message)) is not None:
        near = nearest(found[1], commands) or f"; the commands are {', '.join(commands)}"
        return f"there is no command {found[1]!r}{near}"
    if message.startswith('expected "subcommand"'):
        return f"give a command: {', '.join(commands)}"
    if (found := _UNKNOWN_OPTION.search(message)) is not None:
        return f"there is no option {found[1]!r}{nearest(found[1], options)}"
    if (found := _UNKNOWN_KEY.search(message)) is not None:
        key = found[2].partition(".")[0]
        near = nearest(key, [*_PARTS, *(option.removeprefix("--").partition(".")[0] for option in options)])
        return f"a config of {found[1]} has no {key!r}{near}"
    if (found := _NO_FILE.search(message)) is not None:
        return f"--{found[1]}: there is no file {found[2]}"
    if (found := _REQUIRED.search(message)) is not None:
        missing = [f"--{name.strip().partition('.')[2] or name.strip()}" for name in (found[1] or found[2]).split(",")]
        return f"{' and '.join(missing)} is missing; give it, or --config with a file that names it"
    if (found := _REFUSED_OPTION.search(message)) is not None:
        return f"--{_what_to_give(*found.groups())}"
    return " ".join(message.split())


def _class_that_is_not_there(path: str, reason: str) -> str:
    """A class of this path was not found, for this reason in Python's words: where was looked, or what is spelt like it."""
    module, _, name = path.rpartition(".")
    missing = re.search(r"No module named '([\w.]+)'", reason)
    if missing is not None and not f"{path}.".startswith(f"{missing[1]}."):
        return f"{path} cannot be imported: {reason}, which {module} imports; install it"
    if missing is not None:
        folder = "not in" if sys.flags.safe_path else "neither in the current folder,"
        nor = ", and python -P was told not to look there;" if sys.flags.safe_path else ", nor among"
        return f"there is no class {path}: {reason}, {folder} {os.getcwd()}{nor} the installed packages"
    if "has no attribute" not in reason:
        return f"{path} cannot be imported: {reason}"
    if name == "py":
        return f"{path} is a file; give its class as Python imports it, such as {module}.MyClass"
    file = getattr(sys.modules.get(module), "__file__", None)
    there = f" ({file})" if file else ""
    return f"there is no class {path}: {module}{there} has no {name!r}{nearest(name, dir(sys.modules.get(module)))}"


def _what_to_give(key: str, problem: str, of: str = "") -> str:
    """`key: what is wrong`, for a value that jsonargparse has refused.

    Args:
        problem: jsonargparse's words behind the key. of: path of the class whose setting it is; empty for an option.
    """
    nested = re.search(r"NestedArg\(key='([\w.]+)', val='?(.*?)'?\)", problem)
    plain = re.search(r"(?:Given|Got) value: (?!NestedArg)(.*?)$", problem, re.MULTILINE)
    given = plain[1] if plain else nested[2] if nested and nested[1] == key else ""
    problem = problem.partition("Given value type: <class 'jsonargparse")[0]  # of the class around it
    if of.endswith(AngelPTMStrategy.__name__) and given and key in {each.name for each in dataclasses.fields(Settings)}:
        values: dict[str, Any] = {key: given}
        try:
            Settings(**values)
        except ConfigError as error:
            return str(error)  # as in Python
    if (found := _NO_DOTTED_NAME.search(problem)) is not None:
        if nested is not None:
            return (
                f"{key} is {found[1]!r}, a name that stands for settings and takes no others ({nested[1]}); give the class, "
                f"such as --{key}={AngelPTMStrategy.__module__.partition('.')[0]}.{AngelPTMStrategy.__name__}, before its "
                f"settings"
            )
        return (
            f"{key}: there is no class {found[1]!r} that is known by this name alone{nearest(found[1], _known_classes())}; "
            f"other classes are given with their module, as in my_module.{found[1]}"
        )
    if (found := _ANOTHER_KIND.search(problem)) is not None:
        return f"{key}: {found[1] or given} is no {found[2]}"
    if given.endswith(".py"):
        return f"{key}: {given} is a file; give its class as Python imports it, such as {Path(given).stem}.MyClass"
    tried = re.findall(r"^ +- (.*)$", problem, re.MULTILINE)
    if raised := [each for each in tried if not each.startswith(("Expected", "Does not validate", "Cannot take"))]:
        return f"{key}: {given} cannot be imported: {raised[0]}"  # what its module has raised
    types = re.search(r"Subtypes: \[(.*)\]$", problem, re.MULTILINE)
    wanted = _types_in_words(types[1] if types else problem)
    if wanted in ("", _TYPES["NoneType"]) or not given:
        return f"{key}: {' '.join(problem.split()).rstrip('.')}"
    return f"{key}={given!r}: give {wanted}"


def _types_in_words(types: str) -> str:
    """What values of these types are, as jsonargparse writes types; empty if none is known."""
    values = [value for each in re.findall(r"Literal\[([^\]]*)\]", types) for value in re.findall(r"[\w.-]+", each)]
    names = [name.rpartition(".")[2] for name in re.findall(r"(?:<class '|\b)([\w.]+)(?='>|\[)", types)]
    words = dict.fromkeys([*values, *(_TYPES[name] for name in names if name in _TYPES)])
    return " or ".join(filter(None, [", ".join(list(words)[:-1]), *list(words)[-1:]]))


def _known_classes() -> list[str]:
    """Names of classes that a command line or a config may give without their module: those that have been imported."""
    kinds = (LightningModule, LightningDataModule, Callback, Logger, Strategy)
    return [each.__name__ for kind in kinds for each in subclasses_of(kind)]


def subclasses_of(kind: type) -> set[type]:
    """All that are defined in this process, of any depth."""
    below: list[type] = kind.__subclasses__()
    return {*below, *(deeper for each in below for deeper in subclasses_of(each))}


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, to put behind a sentence; empty where nothing is spelt like it."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _instead(path: str, name: str) -> str:
    """What to give in place of a setting that the class of this path does not have, as far as that is known."""
    module, _, class_name = path.rpartition(".")
    found = getattr(sys.modules.get(module), class_name, None)
    known = [] if found is None else list(inspect.signature(found).parameters)
    if found is AngelPTMStrategy:
        return f"; {hint}" if (hint := unknown_setting(name, known)) else ""
    return nearest(name, known) or (f"; its settings are {some(known, 20)}" if known else "")
