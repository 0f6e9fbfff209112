"""What `lightning-ptm --help` and `--version` print, without an import of torch or Lightning.

LightningCLI would print the same (a test compares them), and takes seconds to be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser  # type: ignore[attr-defined,unused-ignore]

import lightning_ptm
from lightning_ptm.commands.entries import COMMANDS

_TRAINER_COMMANDS = {
    "fit": "Runs the full optimization routine.",
    "validate": "Perform one evaluation epoch over the validation set.",
    "test": "Perform one evaluation epoch over the test set. It's separated from fit to make sure you never run on your",
    "predict": "Run inference on your data. This will call the model forward function to compute predictions. Useful to",
}
"""Those of LightningCLI, and the first lines of their docstrings as it takes them."""


def parser_settings() -> dict[str, Any]:
    """What our parser of all subcommands has that LightningCLI's has not."""
    return {"epilog": _own_commands_help(), "version": _versions()}


def answers(arguments: Sequence[str]) -> bool:
    """Whether `answer` is all that these arguments ask for."""
    return arguments[:1] in (["-h"], ["--help"], ["--version"])


def answer(arguments: Sequence[str]) -> None:
    """Prints it, and ends the process with status 0."""
    parser = ArgumentParser(description="Lightning Trainer command line tool", **parser_settings())
    parser.add_argument(
        "-c", "--config", action=ActionConfigFile, help="Path to a configuration file in json or yaml format."
    )
    subcommands = parser.add_subcommands()
    for name, first_line in _TRAINER_COMMANDS.items():
        subcommands.add_subcommand(name, ArgumentParser(), help=first_line)
    parser.parse_args(list(arguments[:1]))


def _versions() -> str:
    return f"{lightning_ptm.__version__} (torch {version('torch')}, lightning {version('lightning')})"


def _own_commands_help() -> str:
    firsts = [f"{name}: {(command.__doc__ or name).strip().splitlines()[0]}" for name, command in COMMANDS.items()]
    return f"There are also (each with its own --help): {' '.join(firsts)}"
