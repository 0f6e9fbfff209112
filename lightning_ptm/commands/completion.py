"""The bash script of `lightning-ptm --print_completion bash`, which completes commands, options and their values.

Written here since jsonargparse's own ends in a RecursionError for the Trainer's subcommands. The script is static: to ask
Python at each key would import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_ptm.commands.class_names import KINDS, names_of
from lightning_ptm.commands.config_names import CONFIG_FOLDERS, CONFIG_OPTIONS
from lightning_ptm.commands.configured import OURS
from lightning_ptm.config import Settings
from lightning_ptm.trainer.internals import options_of

_SCRIPT = """\
# bash completion of lightning-ptm. File names are completed where nothing else is known.
_lightning_ptm() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} option=${{COMP_WORDS[COMP_CWORD-1]}} CHOICES=
    # To bash, "=" is a word of its own.
    if [ "$word" = = ]; then
        word=
    elif [ "$option" = = ]; then
        option=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    COMPREPLY=()
    if [ "$COMP_CWORD" = 1 ]; then
        CHOICES='{commands}'
    elif [[ $word == -* ]]; then
        case ${{COMP_WORDS[1]}} in
{options}
        esac
    else
        case $option in
{values}
        esac
    fi
    COMPREPLY=($(compgen -W "$CHOICES" -- "$word"))
}}
complete -o default -F _lightning_ptm lightning-ptm
"""


def bash_script(
    trainer_parsers: Mapping[str, argparse.ArgumentParser], functions: Mapping[str, Callable[..., None]]
) -> str:
    """Returns the script for the Trainer's subcommands, whose options their parsers have, and for commands that are
    functions, whose options are their parameters."""
    settings = _settings(Settings, "--trainer.strategy.init_args.")
    of_classes = [
        f"--{part}.init_args.{name}"
        for kind in OURS
        for part in ["model" if issubclass(kind, LightningModule) else "data"]
        for name in inspect.signature(kind).parameters
    ]
    options = {
        command: [
            *(option for action in options_of(parser) for option in action.option_strings if option.startswith("--")),
            *settings,
            *of_classes,
        ]
        for command, parser in trainer_parsers.items()
    }
    of_trainer = typing.get_type_hints(Trainer.__init__).items()
    values = {
        **{f"--trainer.{name}": _values(hint) for name, hint in of_trainer},
        **settings,
        **{f"--{key}": names_of(kind) for key, kind in KINDS.items()},
    }
    values["--trainer.strategy"] = ["auto", *StrategyRegistry.available_strategies()]
    values["--trainer.accelerator"] = ["auto", *AcceleratorRegistry.available_accelerators()]
    configs = [path.stem for folder in CONFIG_FOLDERS for path in sorted(folder.glob("*.yaml"))]
    values |= dict.fromkeys(CONFIG_OPTIONS, configs)
    for command, function in functions.items():
        parameters = inspect.signature(function).parameters.items()
        # `config_file` is given as `--config`, others without a default are not options.
        names = {name: f"--{name.replace('_', '-')}" for name, each in parameters if each.default is not each.empty}
        options[command] = [*(["--config"] if "config_file" in dict(parameters) else []), *names.values(), "--help"]
        hints = typing.get_type_hints(function)
        values |= {option: _values(hints[name]) for name, option in names.items()}
        if "config_file" in dict(parameters):
            values[command] = configs
    hardware = [path.stem for folder in CONFIG_FOLDERS for path in sorted((folder / "hardware").glob("*.yaml"))]
    values["--hardware"] = hardware
    return _SCRIPT.format(
        commands=" ".join(options),
        options="\n".join(
            f"        {name}) CHOICES='{' '.join(dict.fromkeys(each))}' ;;" for name, each in options.items()
        ),
        values="\n".join(f"        {name}) CHOICES='{' '.join(each)}' ;;" for name, each in values.items() if each),
    )


def _settings(kind: type, prefix: str) -> dict[str, list[str]]:
    """Options of the fields of a dataclass, and of those of dataclasses in it, with their values."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        found[prefix + name] = _values(hint)
        for each in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(each) and isinstance(each, type):
                found |= _settings(each, f"{prefix}{name}.")
    return found


def _values(hint: Any) -> list[str]:
    """The values that a type lists: those of Literals, also within a union."""
    if hint is bool:
        return ["true", "false"]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [str(each) for each in arguments]
    if typing.get_origin(hint) in (typing.Union, typing.get_origin(int | None)):
        return list(dict.fromkeys(value for each in arguments for value in _values(each)))
    return []
