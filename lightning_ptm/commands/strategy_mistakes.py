"""Mistakes in what a command line and its config files give `trainer.strategy`, found before jsonargparse sees them.

jsonargparse tries each type that a strategy may have, and lists why none of them fits. Here the settings are checked as the
strategy checks them, and the answer is one of its own, written as options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from lightning.pytorch.strategies import Strategy

from lightning_ptm.commands.class_names import unknown_class
from lightning_ptm.commands.config_names import CONFIG_OPTIONS
from lightning_ptm.commands.mistakes import STRATEGY_OPTION, as_options
from lightning_ptm.config import NESTED, Settings
from lightning_ptm.errors import ConfigError, some

_STRATEGY = "AngelPTMStrategy"
_BESIDE_CLASS = ("class_path", "init_args", "dict_kwargs")
_NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def wrong_strategy(arguments: Sequence[str], registered: Sequence[str], others: Sequence[str]) -> str:
    """Returns the first mistake in what is given as strategy; empty if none is known.

    Args:
        arguments: a command line, with paths of config files.
        registered: names of strategies.
        others: parameters of our strategy that are no settings.
    """
    named, settings = "", dict[str, Any]()
    for place, given in _given(arguments):
        if isinstance(given, str):
            named = given
            continue
        if not isinstance(given, Mapping):
            continue
        if problem := _wrong_form(given, named, registered):
            return f"{place} {problem}"
        named = str(given.get("class_path", named))
        inside = given.get("init_args") or {}
        if not isinstance(inside, Mapping):
            return f"{place} has init_args: {inside!r}; give settings with their values: {_form('host_memory: 64GiB')}"
        _merge(settings, inside)
    if named.rpartition(".")[2] != _STRATEGY:
        return ""
    asked = {name: _plain(name, value) for name, value in settings.items() if name not in others}
    if "${" in str(asked):  # interpolated later
        return ""
    try:
        Settings.of(asked)
    except ConfigError as error:
        told = as_options(str(error))
        return told if told.startswith(STRATEGY_OPTION) else f"{STRATEGY_OPTION}: {told}"
    return ""


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields (place, what it gives as strategy): a name, or a mapping with class_path and init_args."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        option, equals, value = argument.partition("=")
        value = value if equals else following
        if option in CONFIG_OPTIONS:
            yield f"trainer.strategy of {value}", _in_file(value)
        elif option == STRATEGY_OPTION:
            yield option, _parsed(value)
        elif option.startswith(f"{STRATEGY_OPTION}.") and not option.endswith("+"):
            path = option.removeprefix(f"{STRATEGY_OPTION}.").split(".")
            if path[0] == "class_path":
                yield option, value
                continue
            inside: Any = _parsed(value)
            for name in reversed(path if path[0] != "init_args" else path[1:]):
                inside = {name: inside}
            yield option, {"init_args": inside}


def _in_file(path: str) -> Any:
    """Returns the strategy that a config file gives; None: nothing, or the file cannot be read."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    for name in ("trainer", "strategy"):
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _parsed(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _wrong_form(given: Mapping[str, Any], named: str, registered: Sequence[str]) -> str:
    """Returns what is wrong with the keys of a strategy in a config file; empty if nothing is."""
    path = given.get("class_path")
    if path in registered:
        return f"has class_path: {path}, a strategy's name and no class; write strategy: {path}, or {_form('...')}"
    if path is not None and (problem := unknown_class(Strategy, path)):
        return f"has a wrong class_path: {problem}"
    beside = [str(name) for name in given if name not in _BESIDE_CLASS]
    settings = [name for name in beside if name in _NAMES]
    example = _form(", ".join(f"{name}: ..." for name in settings[:2]) or "...")
    if path is None and (settings or not named):
        return f"names no class; write {example}"
    if settings:
        return f"has {some(settings)} outside of init_args; write {example}"
    if beside and path is not None:
        return f"has {beside[0]!r} beside class_path; settings belong in init_args: {example}"
    return ""


def _form(settings: str) -> str:
    return f"{{class_path: {_STRATEGY}, init_args: {{{settings}}}}}"


def _merge(settings: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        before = settings.get(name)
        if isinstance(before, dict) and isinstance(value, Mapping):
            _merge(before, value)
        else:
            settings[name] = dict(value) if isinstance(value, Mapping) else value


def _plain(name: str, value: Any) -> Any:
    """The value of a setting without class names, which jsonargparse takes for nested settings, and without functions."""
    if name not in NESTED:
        return value
    class_name = NESTED[name].__name__
    if isinstance(value, str) and value.rpartition(".")[2] == class_name:
        return {}
    if not isinstance(value, Mapping):
        return value
    inside = dict(value)
    if str(inside.pop("class_path", class_name)).rpartition(".")[2] == class_name:
        inside |= inside.pop("init_args", None) or {}
    if isinstance(inside.get("key_mapping"), str):
        del inside["key_mapping"]
    return inside
