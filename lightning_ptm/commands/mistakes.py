"""What a command line or a config has wrong, in a line: jsonargparse's message without the types that were tried, and what is
spelt like a name that is not known."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Sequence

from lightning_ptm.errors import some
from lightning_ptm.setting_hints import unknown_setting
from lightning_ptm.trainer.strategy import AngelPTMStrategy

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
"""Lines of a message that say what was tried."""

_UNKNOWN = re.compile(
    r"(?:class_path '([\w.]+)':\s+(?:Validation failed: )?)?(?:[Uu]nrecognized arguments:|[Oo]ption|[Kk]ey) '?-*([\w.]+)'?"
    r"(?: is not (?:accepted|expected)|=|\s|$)"
)


def in_short(message: str, options: Sequence[str] = ()) -> str:
    """jsonargparse's message in a line, with what to give instead of a name that is not known.

    Args:
        options: of the command line, as `--name`.
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    told = [line if line.endswith(":") else f"{line};" for line in lines if line and not line.startswith(_LEFT_OUT)]
    return f"{' '.join(told).rstrip(';')}{_instead(message, options)}"


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, to put behind a sentence; empty where nothing is spelt like it."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def subclasses_of(kind: type) -> set[type]:
    """All that are defined in this process, of any depth."""
    below: list[type] = kind.__subclasses__()
    return {*below, *(deeper for each in below for deeper in subclasses_of(each))}


def _instead(message: str, options: Sequence[str]) -> str:
    if (found := _UNKNOWN.search(message)) is None:
        return ""
    path, name = found.groups()
    if path is None:
        return nearest(f"--{name}", options) or nearest(f"--{name.partition('.')[0]}", options)
    module, _, class_name = path.rpartition(".")
    kind = getattr(sys.modules.get(module), class_name, None)
    known = [] if kind is None else list(inspect.signature(kind).parameters)
    if kind is AngelPTMStrategy:
        return f"; {hint}" if (hint := unknown_setting(name, known)) else ""
    return nearest(name, known) or (f"; its settings are {some(known, 20)}" if known else "")
