"""Reads config files of `fit`, and builds their models and data as `fit` would. Owns nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped,unused-ignore]
from jsonargparse import ArgumentError, ArgumentParser

from lightning_ptm.commands.class_names import unknown_class
from lightning_ptm.commands.mistakes import in_short
from lightning_ptm.data import TextBytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT, T5, T5MoE

Built = TypeVar("Built")

OURS = (GPT, T5, T5MoE, TextBytes)
"""Classes that a config may name without their module (`class_path: GPT`): jsonargparse knows the imported ones."""


def read_config(path: Path) -> Mapping[str, Any]:
    """Reads a config file of `fit` that names a model.

    Raises:
        ConfigError: it cannot be read, or names no model.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a config ({error}); name a YAML file of `fit`") from error
    if not isinstance(document, Mapping) or not isinstance(document.get("model"), Mapping):
        raise ConfigError(f"{path} names no model, so there is nothing to count; it needs model.class_path")
    return document


def builder(kind: type[Built], part: str, given: Any, path: str | Path) -> Callable[[], Built]:
    """A function that builds a part of a config; exceptions of the part's class are raised by that function.

    Args:
        kind: the part's class or an ancestor of it.
        part: its name in the config: `model`, `data`.
        given: its `class_path` and `init_args`.
        path: the config file, for messages.

    Raises:
        ConfigError: `given` names no such class, or arguments that it does not accept.
    """
    if problem := unknown_class(kind, given.get("class_path") if isinstance(given, Mapping) else given):
        raise ConfigError(f"the {part} of {path} cannot be built: {problem}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, part)
    try:
        parsed = parser.parse_object({part: given})
    except ArgumentError as error:
        raise ConfigError(f"the {part} of {path} cannot be built: {in_short(str(error))}") from error
    # Later versions of jsonargparse warn of the longer name, and earlier ones have only that.
    instantiate = parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes

    def build() -> Built:
        built: Built = getattr(instantiate(parsed), part)
        return built

    return build
