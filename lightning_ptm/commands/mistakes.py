"""Short error messages for command lines and configs: jsonargparse's message in one line, with suggestions for misspelled
names."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Sequence

from lightning_ptm.errors import some
from lightning_ptm.setting_hints import unknown_setting

_LEFT_OUT = (
    *(
        "Subtypes:",
        "Errors:",
        "Given value type:",
        "Given value: NestedArg",
        "Does not validate",
        "Expected a path but",
    ),
    *("Expected a <class 'NoneType'>", "Expected a <class 'list'>"),
)
"""Beginnings of lines that list the types that jsonargparse has tried."""

_UNKNOWN = re.compile(
    r"(?:class_path '([\w.]+)':\s+(?:Validation failed: )?)?(?:[Uu]nrecognized arguments:|[Oo]ption|[Kk]ey) '?-*([\w.]+)'?"
    r"(?: is not (?:accepted|expected)|=|\s|$)"
)


def in_short(message: str, options: Sequence[str] = ()) -> str:
    """jsonargparse's message in one line, with a suggestion for an unknown name.

    Args:
        options: options of the command line, as `--name`.
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    sentences = [
        line if line.endswith(":") else f"{line};" for line in lines if line and not line.startswith(_LEFT_OUT)
    ]
    return f"{' '.join(sentences).rstrip(';')}{_instead(message, options)}"


def nearest(name: str, known: Sequence[str]) -> str:
    """A suffix `; did you mean 'x'?`; empty if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _instead(message: str, options: Sequence[str]) -> str:
    if (found := _UNKNOWN.search(message)) is None:
        return ""
    path, name = found.groups()
    if path is None:
        return nearest(f"--{name}", options) or nearest(f"--{name.partition('.')[0]}", options)
    module, _, class_name = path.rpartition(".")
    kind = getattr(sys.modules.get(module), class_name, None)
    known = [] if kind is None else list(inspect.signature(kind).parameters)
    if class_name == "AngelPTMStrategy":  # not imported, which takes seconds
        return f"; {hint}" if (hint := unknown_setting(name, known)) else ""
    return nearest(name, known) or (f"; its settings are {some(known, 20)}" if known else "")
