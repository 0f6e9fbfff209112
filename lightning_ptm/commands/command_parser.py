"""The parser of a command that is not the Trainer's: a function's parameters are its options, its docstring is its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from lightning_ptm.commands.config_names import config_anywhere, config_first
from lightning_ptm.commands.mistakes import in_short


class CommandParser(ArgumentParser):
    """Options of `command`. Unlike jsonargparse's parsers it has no `--print_config` and no config file of its own options,
    and reports a usage error in one line."""

    def __init__(self, name: str, command: Callable[..., None]) -> None:
        description = inspect.getdoc(command) or name
        super().__init__(prog=f"lightning-ptm {name}", description=description.partition("\n\nArgs:")[0])
        self.add_function_arguments(command, as_group=False, as_positional=True)
        self.command = command

    def arguments(self, given: Sequence[str]) -> dict[str, Any]:
        """The arguments of a call of `command`.

        A parameter `config_file` is given as `--config NAME`, which is looked up as for `fit`, or, if it is the first
        parameter and has no default, as `NAME`.

        Raises:
            ConfigError: there is no config file of that name.
        """
        rest = list(given)
        parameter = inspect.signature(self.command).parameters.get("config_file")
        if parameter is not None:
            rest = config_first(rest) if parameter.default is parameter.empty else config_anywhere(rest)
        rest = self._flags_set(list(map(_with_underscores, rest)))
        parsed: dict[str, Any] = self.parse_args(rest).as_dict()
        return parsed

    def _flags_set(self, arguments: Sequence[str]) -> list[str]:
        """Converts a lone `--json` to `--json=true`."""
        parameters = inspect.signature(self.command, eval_str=True).parameters.items()
        flags = {f"--{name}" for name, parameter in parameters if parameter.annotation is bool}
        following = [*arguments, "--"][1:]
        return [
            f"{argument}=true" if argument in flags and after.lower() not in ("true", "false") else argument
            for argument, after in zip(arguments, following, strict=True)
        ]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends the process with status 2 and the message on standard error."""
        options = [f"--{name}" for name in inspect.signature(self.command).parameters]
        self.exit(2, f"{self.prog}: {in_short(message, options)} (see {self.prog} --help)\n")


def _with_underscores(argument: str) -> str:
    """Converts `--shard-size=1GB` to `--shard_size=1GB`, the spelling of parameters."""
    option, equals, value = argument.partition("=")
    return option.replace("-", "_").replace("__", "--", 1) + equals + value if option.startswith("--") else argument
