"""The console script: `lightning-ptm`, and `python main.py` from a checkout.

Imports neither torch nor Lightning for what does not need them: help of the commands that are not Lightning's, and the
version. The Trainer's subcommands are LightningCLI's (command_line.py).
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence

from lightning_ptm.commands import top
from lightning_ptm.commands.config_names import config_anywhere, config_first
from lightning_ptm.commands.entries import COMMANDS
from lightning_ptm.errors import AngelPTMError


def main(args: Sequence[str] | None = None) -> None:
    """The console script: one of COMMANDS, or a subcommand of LightningCLI. An error of ours ends it with status 1."""
    arguments = list(sys.argv[1:] if args is None else args)
    _find_modules_of_the_current_folder()
    if arguments and arguments[0] in COMMANDS:
        _run(*arguments)
    elif top.answers(arguments):
        top.answer(arguments)
    else:
        from lightning_ptm.command_line import run_trainer

        run_trainer(None if args is None else arguments)


def _find_modules_of_the_current_folder() -> None:
    """Makes `--model=my_module.Net` find `my_module.py` where the command is called, as `python -m` would, unless Python was
    told not to look there (`python -P`). The path of a console script begins with the script's own folder."""
    folder = os.getcwd()
    if not sys.flags.safe_path and not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)


def _run(name: str, *given: str) -> None:
    from jsonargparse import auto_cli

    command, rest = COMMANDS[name], list(given)
    try:
        parameter = inspect.signature(command).parameters.get("config_file")
        if parameter is not None:
            rest = config_first(rest) if parameter.default is parameter.empty else config_anywhere(rest)
        rest = _flags_set(list(map(_with_underscores, rest)), command)
        auto_cli(command, args=rest, prog=f"lightning-ptm {name}")
    except AngelPTMError as error:
        sys.exit(f"lightning-ptm {name}: {error}")


def _with_underscores(argument: str) -> str:
    """`--shard-size=1GB` is `--shard_size=1GB`, which is how parameters are spelt."""
    option, equals, value = argument.partition("=")
    return option.replace("-", "_").replace("__", "--", 1) + equals + value if option.startswith("--") else argument


def _flags_set(arguments: Sequence[str], command: Callable[..., None]) -> list[str]:
    """`--json` alone is `--json=true`."""
    flags = {
        f"--{name}"
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if parameter.annotation is bool
    }
    following = [*arguments, "--"][1:]
    return [
        f"{argument}=true" if argument in flags and after.lower() not in ("true", "false") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]
