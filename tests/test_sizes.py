"""Files, functions and classes are small, or their docstrings say why they are not: a sentence that begins "Long because"."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("lightning_ptm", "callbacks") for path in (ROOT / folder).rglob("*.py"))
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_METHODS = 25
REASON = "Long because "

Defined = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _size(node: Defined) -> str | None:
    """In words, what is too long of it."""
    if isinstance(node, ast.Module):
        lines, most = (node.body[-1].end_lineno or 0) if node.body else 0, MOST_LINES_OF_A_FILE
    elif isinstance(node, ast.ClassDef):
        methods = sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)
        return f"{methods} methods, {MOST_METHODS} at most" if methods > MOST_METHODS else None
    else:
        lines, most = (node.end_lineno or 0) - node.lineno + 1, MOST_LINES_OF_A_FUNCTION
    return f"{lines} lines, {most} at most" if lines > most else None


def _too_long(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """Names of what is too long in a tree and has no reason, with its size."""
    left: list[tuple[ast.AST, str]] = [(tree, name)]
    while left:
        node, name = left.pop()
        if isinstance(node, Defined):
            size = _size(node)
            if size is not None and REASON not in " ".join((ast.get_docstring(node) or "").split()):
                yield name, size
        # Nothing is defined in an expression.
        inside = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        left += [(child, f"{name}:{child.name}" if isinstance(child, Defined) else name) for child in inside]


def _found(text: str, name: str) -> dict[str, str]:
    return dict(_too_long(ast.parse(text), name))


def test_what_is_long_says_why():
    found = {}
    for path in FILES:
        found |= _found(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    assert not found, f"split it, or say why not in its docstring ({REASON!r}): {found}"


@pytest.mark.parametrize(("lines", "found"), [(60, []), (61, ["a.py:long"])])
def test_a_function_of_more_lines_is_found(lines, found):
    assert list(_found("\n".join(["def long():"] + ["    pass"] * (lines - 1)), "a.py")) == found


@pytest.mark.parametrize(("methods", "found"), [(25, []), (26, ["a.py:Many"])])
def test_a_class_of_more_methods_is_found(methods, found):
    text = "class Many:\n" + "".join(f"    def m{number}(self): ...\n" for number in range(methods))
    assert list(_found(text, "a.py")) == found


def test_a_file_of_more_lines_is_found_unless_it_says_why():
    text = "a = 1\n" * 401
    assert list(_found(text, "a.py")) == ["a.py"]
    assert not _found(f'"""All of one table. Long\nbecause it has many rows."""\n{text}', "a.py")
