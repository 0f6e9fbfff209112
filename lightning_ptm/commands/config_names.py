"""Lookup of config names on the command line: which file a bare name means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_ptm.errors import ConfigError

CONFIG_FOLDERS = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs")
"""Folders of the installed configs: inside the installed package, or next to it in a checkout."""

CONFIG_OPTIONS = ("--config", "-c")

_PIECE = 1 << 16
"""Characters read at once."""


def resolve_config_names(arguments: Sequence[str], folders: Sequence[Path] = CONFIG_FOLDERS) -> list[str]:
    """Replaces values of `--config` and `-c` that are bare names by the file of that name in one of `folders`.

    A file of that name in the working directory has precedence; a name may leave out `.yaml`; a value with a folder in it is
    left as it is.

    Raises:
        ConfigError: there is no file of a bare name, or a file is not text.
    """
    resolved: list[str] = []
    value_follows = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if value_follows:
            resolved.append(_resolve(argument, folders))
        elif equals and option in CONFIG_OPTIONS:
            resolved.append(f"{option}={_resolve(value, folders)}")
        else:
            resolved.append(argument)
        value_follows = not value_follows and argument in CONFIG_OPTIONS
    return resolved


def _resolve(name: str, folders: Sequence[Path]) -> str:
    if Path(name).name != name or Path(name).is_file():
        _check_text(name)
        return name
    for folder in folders:
        for candidate in (folder / name, folder / f"{name}.yaml"):
            if candidate.is_file():
                return str(candidate)
    if Path(f"{name}.py").is_file():
        raise ConfigError(
            f"{name} is a module, and no config file; name a class or function of it, such as {name}:MyModel"
        )
    known = sorted({path.name for folder in folders for path in folder.glob("*.yaml")})
    raise ConfigError(
        f"there is no config file {name!r}, neither in {Path.cwd()} nor among the installed ones "
        f"({', '.join(known) or 'none'}); name one of these or give a path"
    )


def _check_text(name: str) -> None:
    """Refuses a file such as a checkpoint, before all of it is read as YAML. Unreadable files are reported by the reader."""
    try:
        with open(name, encoding="utf-8") as file:
            while file.read(_PIECE):
                pass
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not a text file ({error}); give a YAML config file of `fit`") from error
    except OSError:
        return


def names_module(name: str) -> bool:
    """Whether a name is that of a model of the user's, `my_module:MyModel`, and of no file."""
    return ":" in name and not Path(name).is_file()


def config_first(arguments: Sequence[str]) -> list[str]:
    """Converts `--config NAME ...` and `NAME ...` to `PATH ...`; jsonargparse supports neither both forms at once nor a
    positional argument named `config`."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    if len(arguments) > 1 and arguments[0] in CONFIG_OPTIONS and names_module(arguments[1]):
        return list(arguments[1:])
    first, *rest = resolve_config_names(arguments) or [""]
    option, equals, value = first.partition("=")
    if option not in CONFIG_OPTIONS:
        return list(arguments)
    return [value, *rest] if equals else rest


def config_anywhere(arguments: Sequence[str]) -> list[str]:
    """Converts `... --config NAME ...` to `... --config_file PATH ...`."""
    resolved = resolve_config_names(arguments)
    values = [False, *(argument in CONFIG_OPTIONS for argument in resolved)]
    named = []
    for argument, is_value in zip(resolved, values, strict=False):
        option, equals, value = argument.partition("=")
        renamed = option in CONFIG_OPTIONS and not is_value
        named.append(f"--config_file{equals}{value}" if renamed else argument)
    return named
