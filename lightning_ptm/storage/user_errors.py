"""Reads of files that may be damaged: errors for unreadable paths, and strict parsing of JSON.

Knows files, errors and the forms of JSON; not their meaning.
I1: only regular files are opened: a pipe would block for ever.
I2: JSON that does not have the requested form, or can be read in two ways, raises ValueError.
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
"""Upper bound of numbers that count bytes, elements or steps."""

_HINTS = {
    errno.EACCES: "; give the user of this process the right to read it and to enter its folders",
    errno.EPERM: "; give the user of this process the right to read it and to enter its folders",
    errno.EIO: "; see the system's log for the disk, and use another checkpoint",
}


def unread(path: Path, error: OSError) -> CheckpointError:
    """Returns the error for a file that cannot be read, with the system's reason and what to do."""
    hint = _HINTS.get(error.errno or 0, "; check the path, or use another file or checkpoint")
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}{hint}")


def is_folder(path: Path) -> bool:
    """Returns whether the path is a folder.

    Raises:
        CheckpointError: a folder above it may not be entered, so that this is unknown.
    """
    return _is(path, stat.S_ISDIR)


def is_file(path: Path) -> bool:
    """Returns whether the path is a file. Raises as `is_folder`."""
    return _is(path, stat.S_ISREG)


def _is(path: Path, wanted: Callable[[int], bool]) -> bool:
    try:
        return wanted(os.stat(path).st_mode)
    except PermissionError as error:
        raise unread(path, error) from error
    except (OSError, ValueError):
        return False


def regular(path: Path) -> Path:
    """Returns the path if it is a regular file (I1).

    Raises:
        CheckpointError: there is none, or it is something else.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise unread(path, error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is no regular file, so it is not opened; use an earlier checkpoint")
    return path


def contents(path: Path) -> bytes:
    """Returns all bytes of a small file. Raises CheckpointError."""
    try:
        return regular(path).read_bytes()
    except OSError as error:
        raise unread(path, error) from error


def parsed(content: bytes) -> Any:
    """Parses JSON in UTF-8 (I2). Refuses names that an object has twice, NaN, lone surrogates, and too deep nesting."""
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
    """Returns the value if it is a whole number within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{short(value)} is no whole number from {least} to {most}")
    return value


def text(value: Any) -> str:
    """Returns the value if it is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} is no text")
    return value


def items(value: Any, count: int | None = None) -> list[Any]:
    """Returns the value if it is a list, of `count` items if given; else raises ValueError (I2)."""
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise ValueError(f"{short(value)} is no list" + ("" if count is None else f" of {count}"))
    return value


def entries(value: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the value if it is an object, with exactly these keys if given."""
    if not isinstance(value, dict):
        raise ValueError(f"{short(value)} is no object")
    if keys is not None and (strange := set(keys) ^ set(value)):
        name = min(strange)
        raise ValueError(f"{short(name)} {'does not belong there' if name in value else 'is missing'}")
    return value


def short(value: Any) -> str:
    """Returns a value as text for an error, shortened."""
    shown = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
