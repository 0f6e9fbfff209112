"""The text of the page reference.md in the site, from docstrings. conf.py puts it there when the site is built.

Docstrings are read without importing the package, so that the site can be built without torch. They are Markdown, with
sections of Google's style (`Args:`, `Raises:`), which become lists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SETTINGS = ("Settings", "LockFree", "Weights", "Checkpoints", "TensorParallel", "Tuning", "Debug")
COMMANDS = ("plan", "probe", "params", "inspect", "export")
NOT_FOR_USERS = ("boxes", "builder", "engine", "further_tiers", "is_distributed", "num_processes", "request")
"""Public attributes of the strategy that are not for its users: hooks of subclasses, and Lightning's own."""

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")

Definition = ast.ClassDef | ast.FunctionDef


def definitions(path: str) -> dict[str, Definition]:
    """The classes and functions of a module by name."""
    body = ast.parse((ROOT / path).read_text()).body
    return {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def described(node: Definition) -> Iterator[str]:
    """Yields the lines of a docstring, with a list for each section."""
    inside = False
    for line in (ast.get_docstring(node) or "").splitlines():
        section = SECTION.match(line)
        if section:
            inside = True
            yield from (f"*{section[1]}*", "")
        elif inside and line.startswith("    ") and line[4:5].strip():
            name, colon, rest = line.strip().partition(": ")
            plain = re.fullmatch(r"\*{0,2}\w[\w, .*]*", name) if colon else None
            words = ", ".join(f"`{each}`" for each in name.split(", "))
            yield f"- {words}: {rest}" if plain else f"- {line.strip()}"
        elif inside and line.strip():
            yield f"  {line.strip()}"
        else:
            yield line
    yield ""


def signature(node: Definition) -> str:
    """The call of a function, or of a class by its `__init__` or its fields, without types."""
    function: ast.FunctionDef | None = node if isinstance(node, ast.FunctionDef) else None
    fields = []
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            function = each
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            fields.append(each.target.id + (f"={ast.unparse(each.value)}" if each.value else ""))
    if function is None:
        return f"{node.name}({', '.join(fields)})"
    given = function.args
    positional = [each.arg for each in given.args if each.arg != "self"]
    defaults = [""] * (len(positional) - len(given.defaults)) + [f"={ast.unparse(each)}" for each in given.defaults]
    named = [
        each.arg + (f"={ast.unparse(value)}" if value else "")
        for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    rest = [f"*{given.vararg.arg}"] if given.vararg else []
    last = [f"**{given.kwarg.arg}"] if given.kwarg else []
    listed = [name + default for name, default in zip(positional, defaults, strict=True)] + rest + named + last
    return f"{node.name}({', '.join(listed)})"


def entry(node: Definition, *, call: str | None = None, level: int = 3) -> Iterator[str]:
    """Yields a heading, the call and the docstring of a definition."""
    yield from (f"{'#' * level} {node.name}", "")
    shown = signature(node) if call is None else call
    if len(shown) > 100:
        shown = shown.replace("(", "(\n    ", 1).replace(", ", ",\n    ")[:-1] + ",\n)"
    yield from ("```text", shown, "```", "") if shown else ()
    yield from described(node)


def methods(strategy: Definition) -> Iterator[str]:
    """Yields entries of the strategy's own public methods and properties."""
    for each in strategy.body:
        if not isinstance(each, ast.FunctionDef) or each.name.startswith("_") or each.name in NOT_FOR_USERS:
            continue
        marks = [ast.unparse(mark) for mark in each.decorator_list]
        if "override" not in marks and not any(mark.endswith(".setter") for mark in marks):
            name = f"trainer.strategy.{each.name}"
            yield from entry(each, call=name if "property" in marks else f"trainer.strategy.{signature(each)}")


def page() -> str:
    """The page without its introduction."""
    strategy = definitions("lightning_ptm/trainer/strategy.py")["AngelPTMStrategy"]
    config = definitions("lightning_ptm/config.py")
    errors = definitions("lightning_ptm/errors.py")
    commands = definitions("lightning_ptm/cli.py")
    lines = ["## Strategy", "", *entry(strategy, call="AngelPTMStrategy(**settings)"), *methods(strategy)]
    lines += ["## Settings and nested settings", ""]
    for name in SETTINGS:
        lines += entry(config[name], call="" if name == "Settings" else None)
    lines += ["## Callbacks", "", "Names of `lightning_ptm.callbacks`.", ""]
    exported = ast.parse((ROOT / "callbacks/__init__.py").read_text())
    for node in exported.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found = definitions(f"callbacks/{node.module}.py")
            for each in node.names:
                lines += entry(found[each.name])
    lines += ["## Commands", "", "`lightning-ptm NAME --help` has the options with their types.", ""]
    for name in COMMANDS:
        lines += entry(commands[name], call="")
    lines += ["## Exceptions", "", "[Troubleshooting](troubleshooting.md) has their texts.", ""]
    for name, node in errors.items():
        if isinstance(node, ast.ClassDef) and name != "FailedElsewhere":
            lines += entry(node, call="")
    return "\n".join(lines)
