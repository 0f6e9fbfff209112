"""Short error messages for command lines and configs: jsonargparse's message in one line, with suggestions for misspelled
names."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Sequence

from lightning_ptm.config import NESTED, Settings
from lightning_ptm.errors import some
from lightning_ptm.setting_hints import unknown_setting

STRATEGY_OPTION = "--trainer.strategy"
_VALUE = r"\w+=(?:'[^']*'|[\w.]+)"
_NESTED = re.compile(
    rf"\b({'|'.join(NESTED)})=(?:lightning_ptm\.)?(?:{'|'.join(each.__name__ for each in NESTED.values())})"
    rf"\(({_VALUE}(?:, {_VALUE})*)\)"
)
"""Nested settings in an error's text: `lock_free=LockFree(max_staleness=2)`."""
_FLAT = re.compile(
    rf"(?<![\w.])(?=(?:{'|'.join(field.name for field in dataclasses.fields(Settings))})=){_VALUE}(?![\w(])"
)
"""Other settings: `host_memory='4MiB'`."""
_YAML_WORDS = {"True": "true", "False": "false", "None": "null"}
_QUOTE = "'"
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

_SAYS_MORE = re.compile(
    "Problem with given class_path|Expected a typing.Literal|Expected a dot import path|instantiatable"
)
"""Lines that say more than which types were tried."""
_SAYS_LITTLE = (
    *("Expected a <class ", "Not a valid subclass of", "Subclass types expect", "a class path (str)", "a dict with"),
    *("Given value: {", "Given value: ["),
)
"""Beginnings of lines that are left out beside these."""
_NO_SUBCLASS = "does not correspond to a subclass of"
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
    if any(map(_SAYS_MORE.search, lines)):
        lines = [line for line in lines if "Got value" in line or not line.startswith(_SAYS_LITTLE)]
    sentences = [
        line if line.endswith(":") else f"{line};" for line in lines if line and not line.startswith(_LEFT_OUT)
    ]
    told = _in_words(" ".join(sentences).rstrip(";"))
    return f"{told}{_of_the_other_package(message) or _instead(message, options)}"


def _in_words(text: str) -> str:
    """Types and places of jsonargparse's texts in a reader's words."""
    text = re.sub(r"Parser key \"([\w.]+)\": ", lambda found: f"--{found[1]}: ", text, count=1)
    text = re.sub(r"Parser key \"([\w.]+)\": ", r"\1: ", text)
    text = re.sub(r"Expected an? <class '(?:\w+\.)*(\w+)'>", r"expected \1", text)
    text = re.sub(r"Expected a typing\.Literal\[(.*?)\]", r"use one of \1", text)
    text = re.sub(r"(?:\.|;) (?:Got|Given) value: ([^;]*)$", r", got \1", text)
    return text.replace("'; use one of '", "', '").replace("; expected ", " or ")


def as_options(text: str, prefix: str = f"{STRATEGY_OPTION}.") -> str:
    """Writes settings in an error's text as options: `host_memory='4MiB'` becomes `--trainer.strategy.host_memory=4MiB`, and
    `lock_free=LockFree(max_staleness=...)` becomes `--trainer.strategy.lock_free.max_staleness=...`."""

    def nested(found: re.Match[str]) -> str:
        return " ".join(f"{prefix}{found[1]}.{_written(part)}" for part in found[2].split(", "))

    return _FLAT.sub(lambda found: f"{prefix}{_written(found[0])}", _NESTED.sub(nested, text))


def _written(setting: str) -> str:
    name, _, value = setting.partition("=")
    return f"{name}={_YAML_WORDS.get(value, value.strip(_QUOTE))}"


def nearest(name: str, known: Sequence[str]) -> str:
    """A suffix `; did you mean 'x'?`; empty if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _of_the_other_package(message: str) -> str:
    """A suffix for a class of pytorch_lightning that is refused as no subclass; else empty."""
    for path in re.findall(r"\w+(?:\.\w+)+", message) if _NO_SUBCLASS in message else ():
        module, _, name = path.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and any(base.__module__.startswith("pytorch_lightning.") for base in kind.__mro__):
            return (
                f"; {name} is a class of pytorch_lightning, and lightning-ptm takes those of lightning.pytorch: change its "
                "imports, or use pytorch_lightning.cli.LightningCLI with --trainer.strategy=angel_ptm"
            )
    return ""


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
