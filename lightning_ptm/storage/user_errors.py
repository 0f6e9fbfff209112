"""Reading what may be damaged: what a user is told of a path that cannot be read, and JSON that is taken at its word only.

Knows files, errors and the forms of JSON; not what is in them.
I1: nothing but a regular file is opened: a pipe would wait for ever.
I2: what does not have the form that was asked for raises ValueError, and so does JSON that could be read in two ways.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_ptm.errors import CheckpointError

MOST = (1 << 63) - 1
"""Of any number that counts bytes, elements or steps."""

_HINTS = {
    errno.EACCES: "; give the user of this process the right to read it and to enter its folders",
    errno.EPERM: "; give the user of this process the right to read it and to enter its folders",
    errno.EIO: "; see the system's log for the disk, and use another checkpoint",
}


def unread(path: Path, error: OSError) -> CheckpointError:
    """The system's reason why a file cannot be read, and what to do."""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}{_HINTS.get(error.errno or 0, '')}")


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name.

    Raises:
        CheckpointError: nobody can know, since one of the folders around it may not be entered.
    """
    return _is(path, stat.S_ISDIR)


def is_file(path: Path) -> bool:
    """Whether there is a file of this name. Raises as `is_folder`."""
    return _is(path, stat.S_ISREG)


def _is(path: Path, wanted: Callable[[int], bool]) -> bool:
    try:
        return wanted(os.stat(path).st_mode)
    except PermissionError as error:
        raise unread(path, error) from error
    except (OSError, ValueError):
        return False


def regular(path: Path) -> Path:
    """The path of a file that can be opened (I1).

    Raises:
        CheckpointError: there is none, or it is something else.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise unread(path, error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is no file; use an earlier checkpoint")
    return path


def contents(path: Path) -> bytes:
    """All of a small file. Raises CheckpointError."""
    try:
        return regular(path).read_bytes()
    except OSError as error:
        raise unread(path, error) from error


def parsed(content: bytes) -> Any:
    """JSON in UTF-8 (I2): no name twice in an object, no NaN, no half of a character, nothing nested without end."""
    text = content.decode()
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def number(value: Any, least: int = 0, most: int = MOST) -> int:
    """A whole number within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{short(value)} is no whole number from {least} to {most}")
    return value


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} is no text")
    return value


def items(value: Any, count: int | None = None) -> list[Any]:
    """A list, of `count` items if that is given."""
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise ValueError(f"{short(value)} is no list" + ("" if count is None else f" of {count}"))
    return value


def entries(value: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """An object, with exactly these keys if they are given."""
    if not isinstance(value, dict):
        raise ValueError(f"{short(value)} is no object")
    if keys is not None and (strange := set(keys) ^ set(value)):
        name = min(strange)
        raise ValueError(f"{short(name)} {'does not belong there' if name in value else 'is missing'}")
    return value


def short(value: Any) -> str:
    """A value in an error, however long it is."""
    shown = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
