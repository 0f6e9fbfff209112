"""Exceptions for users. Each message says what happened (names, numbers), what follows, and what to do.

Knows the standard library only. `AngelPTMError` is the base class; `InternalError` means a bug in this package.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any


def some(names: Sequence[str], most: int = 5) -> str:
    """Returns `names` joined for a message, shortened as `a, b, c and 4 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_bytes(count: int | float) -> str:
    """Returns a size for messages and tables: `4194304` -> `4 MiB`, `1610612736` -> `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def one_line(error: BaseException) -> str:
    """Returns the class and message of an error in one line.

    If the message contains a traceback (of a DataLoader's worker), only its first and last lines are kept.
    """
    text = str(error).strip()
    lines = text.splitlines()
    if any("Traceback (most recent call last)" in line for line in lines):
        text = f"{lines[0].strip()} {lines[-1].strip()}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_REPORT = "this is a bug of lightning_ptm: please report it with this message and the traceback"


class AngelPTMError(Exception):
    """Base class of every error that lightning_ptm raises on purpose."""


class ConfigError(AngelPTMError, ValueError):
    """A setting, a model or an optimizer that cannot work, found before training starts."""


class CapacityError(AngelPTMError, MemoryError):
    """A plan, or an allocation of pages, needs more bytes in a tier than the tier has."""

    @property
    def shortage(self) -> str:
        """The part of the message that says what happened, without the remedy."""
        return re.split("; (?:raise|lower|use) ", str(self), maxsplit=1)[0]


class PageIOError(AngelPTMError, OSError):
    """A disk transfer failed or was short, or the disk is too small.

    Args:
        message: what happened, what follows, what to do.
        path: the file that contains the page.
        page: index of the page within its tier, or None when the error concerns the whole file.
        errno: the operating system's error number, or None for a short transfer.
    """

    def __init__(self, message: str, *, path: str | os.PathLike[str], page: int | None, errno: int | None) -> None:
        super().__init__(message)
        self.path = os.fspath(path)
        self.page = page
        self.errno = errno

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling calls the class with `args` alone, which lack the keyword arguments.
        return partial(PageIOError, path=self.path, page=self.page, errno=self.errno), self.args, vars(self)

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(AngelPTMError, RuntimeError):
    """A checkpoint cannot be written, or is damaged, incomplete, or of another model or run."""


class FailedElsewhere(CheckpointError):
    """A `CheckpointError` on a rank that knows only that another rank failed; the reason has not been received yet."""


class UsageError(AngelPTMError, RuntimeError):
    """A call came in a place or an order in which it cannot work (double backward, a read between steps...)."""


class RankError(AngelPTMError, RuntimeError):
    """Another rank failed, died, or does something other than this rank."""


class InternalError(AngelPTMError, RuntimeError):
    """A state that should be impossible: a bug of lightning_ptm. The message says so, and asks for a report."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if _REPORT in text else f"{text}; {_REPORT}"
