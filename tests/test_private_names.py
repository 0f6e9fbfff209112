"""Private names of other packages are in two files, which ask for each of them: elsewhere there are none, and a version that
lacks one is refused in words."""

import ast
import importlib
import pkgutil
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonargparse
import pytest
import torch

import callbacks
import lightning_ptm
from lightning_ptm import torch_internals
from lightning_ptm.errors import ConfigError
from lightning_ptm.trainer import internals

ROOT = Path(__file__).parents[1]
FILES = {"lightning_ptm/torch_internals.py": torch_internals, "lightning_ptm/trainer/internals.py": internals}
OURS = ("lightning_ptm", "callbacks")
FETCHING = ("private", "reader", "writer", "checked")
OF_PYTHON = frozenset(("_getframe", "_DummyThread", "_fields", "_abc_impl", "_initializing"))
"""The standard library's own."""
OF_FILES = frozenset(("_class_path", "_instantiator", "_growth_tracker"))
"""Keys in files that others write."""


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


@cache
def _trees() -> dict[str, ast.Module]:
    paths = sorted(path for folder in OURS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def _defined(tree: ast.AST) -> set[str]:
    """Names that code gives to something of its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return found


def _is_self(node: ast.expr) -> bool:
    of_base = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return of_base or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


@cache
def _fetched() -> frozenset[str]:
    """All private names in the two files."""
    texts = [
        node.value
        for file in FILES
        for node in ast.walk(_trees()[file])
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return frozenset(name for text in texts if " " not in text for name in text.split(".") if _is_private(name))


@cache
def _own() -> frozenset[str]:
    return frozenset(name for file, tree in _trees().items() if file not in FILES for name in _defined(tree))


def _foreign(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of what is private to others in a file of ours: imports, attributes of objects, and attributes by name."""
    found: list[tuple[int, str]] = []
    here = _defined(tree) - _fetched()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in OURS:
            names = [f"{node.module}.{each.name}" for each in node.names]
            found += [(node.lineno, name) for name in names if any(map(_is_private, name.split(".")))]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, each.name) for each in node.names if any(map(_is_private, each.name.split(".")))]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            # By `self` a class means its own, or its base's, of which `test_subclasses` knows; of another object it means its
            # own where the same file defines it and torch and Lightning have no such name.
            own = node.attr in _own() or node.attr in _fetched() if _is_self(node.value) else node.attr in here
            if not own and not _is_of_ours(node):
                found.append((node.lineno, node.attr))
        else:
            found += [(node.lineno, repr(name)) for name in _by_text(node)]
    return [(line, name) for line, name in found if name.strip("'") not in (*OF_PYTHON, *OF_FILES)]


def _by_text(node: ast.AST) -> list[str]:
    """Names of others' attributes in `getattr(object, NAME)` and the like, in `vars(object)[NAME]`, and names that the two
    files have wherever they are written."""
    if isinstance(node, ast.Call) and len(node.args) > 1:
        return [name for name in _private_texts(node.args[1]) if name not in _own()]
    if isinstance(node, ast.Subscript):
        return [name for name in _private_texts(node.slice) if name in _fetched() or name not in _own()]
    return [name for name in _private_texts(node) if name in _fetched() and name not in _own()]


def _private_texts(node: ast.AST) -> list[str]:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value)
    return [node.value] if is_text else []


def _is_of_ours(node: ast.Attribute) -> bool:
    """Whether the node is an attribute that one class of this package reads of another, in another file."""
    return node.attr in _own() and node.attr not in _fetched()


def test_private_names_are_in_two_files() -> None:
    files = [(file, tree) for file, tree in _trees().items() if file not in FILES]
    found = [f"{file}:{line} {name}" for file, tree in files for line, name in _foreign(tree)]
    assert not found, f"fetch these in {' or '.join(FILES)}: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "from torch._dynamo import OptimizedModule",
        "from torch.nn.modules.module import _IncompatibleKeys",
        "import torch._dynamo",
        "torch._C._current_graph_task_id()",
        "tensor._version",
        "module._parameters['weight'] = parameter",
        "getattr(trainer, '_signal_connector', None)",
        "self._replace(trainer.fit_loop, '_no_such_method_of_ours', method)",
        "vars(module)['_parameters']",
        "self._no_attribute_of_ours",
    ],
)
def test_uses_elsewhere_are_found(text: str) -> None:
    assert _foreign(ast.parse(text))


def test_our_own_are_not() -> None:
    code = "class One:\n    def __init__(self):\n        self._held = 1\n\ndef two(one):\n    return one._held, one.__dict__"
    assert not _foreign(ast.parse(code))


def _modules() -> list[ModuleType]:
    named = [
        each.name
        for package in (lightning_ptm, callbacks)
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not each.name.endswith("__main__")
    ]
    return [importlib.import_module(name) for name in named]


@cache
def _classes_in(path: str) -> dict[str, ast.ClassDef]:
    """By their qualified names."""
    found: dict[str, ast.ClassDef] = {}

    def enter(node: ast.AST, within: str) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef):
                found[within + each.name] = each
                enter(each, f"{within}{each.name}.")

    enter(ast.parse(Path(path).read_text(encoding="utf-8")), "")
    return found


def _code_of(kind: type) -> ast.AST:
    """Returns the code of a class; empty if the class is written in C, or made by a function."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return _classes_in(path).get(kind.__qualname__, ast.Pass()) if path.endswith(".py") else ast.Pass()


@cache
def _private_names_of(kind: type) -> frozenset[str]:
    """Returns the private names that another library's class has, or gives its objects."""
    return frozenset(name for name in {*vars(kind), *_defined(_code_of(kind))} if _is_private(name))


def test_subclasses_take_no_private_name_of_their_bases() -> None:
    """Private names that subclasses take of their bases are those that the two files ask for.

    A method that overrides nothing, and an attribute that nothing reads, would otherwise do nothing in a version that
    calls it something else.
    """
    found = set()
    kinds = {each for module in _modules() for each in vars(module).values() if isinstance(each, type)}
    for kind in kinds:
        if kind.__module__.split(".")[0] not in OURS:
            continue
        tree = _code_of(kind)
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
        used |= _defined(tree)
        for base in kind.__mro__:
            package = base.__module__.split(".")[0]
            if package not in OURS and package not in sys.stdlib_module_names:
                found |= {(kind.__qualname__, name) for name in used & _private_names_of(base) - _fetched()}
    assert not found


def _calls() -> list[tuple[str, str]]:
    """(file, code) of each place that fetches names; one for each name."""
    found = []
    for file in FILES:  # parsed alone: this runs when tests are collected, in each of pytest's processes
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        inside = {id(part) for node in tree.body if _is_fetcher(node) for part in ast.walk(node)}
        for node in ast.walk(tree):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called in FETCHING and id(node) not in inside:
                assert isinstance(node, ast.Call)
                found += [
                    (file, f"{called}({ast.unparse(node.args[0])}, {ast.unparse(name)})") for name in node.args[1:]
                ]
    return found


def _is_fetcher(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in FETCHING


@pytest.fixture(scope="module")
def variables() -> dict[str, Any]:
    """Objects on which the private names in the two files are looked up."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    optimizer.step()
    marked = torch.nn.Module()
    marked._ddp_params_and_buffers_to_ignore = ()
    return {"optimizer": optimizer, "marked": marked, "parser": jsonargparse.ArgumentParser(), "name": "bf16"}


@pytest.mark.parametrize(("file", "code"), _calls())
def test_each_name_is_there_and_would_be_missed(file: str, code: str, variables: dict[str, Any]) -> None:
    names = {**vars(FILES[file]), **variables}
    eval(code, names)
    missing = re.sub(r"(['\"])\)$", r"_gone\1)", code)
    assert missing != code
    with pytest.raises(ConfigError, match=r'\d\S* has no .*_gone, a private name .* pip install "[a-z]+.*\d"'):
        eval(missing, names)


def test_transformers_has_the_names_that_models_of_its_have() -> None:
    transformers = pytest.importorskip("transformers", reason="it is an extra, which .ci/versions does not install")
    for name in (torch_internals.INIT_WEIGHTS, torch_internals.MAY_BE_MISSING, torch_internals.MAY_BE_UNEXPECTED):
        assert hasattr(transformers.PreTrainedModel, name)


def test_functions_fetch_at_first_use() -> None:
    assert torch_internals.marks_of_schedulers() == ("_wrapped_by_lr_sched", "_opt_called")
    assert torch_internals.flat_weight_names() == ("_flat_weights", "_flat_weight_refs")
    assert torch_internals.ignored_by_ddp() == "_ddp_params_and_buffers_to_ignore"
    module = torch.nn.Linear(1, 1)
    assert not torch_internals.is_compiled(module)
    module.compile()
    assert torch_internals.is_compiled(module) and torch_internals.is_compiled(torch.compile(torch.nn.Linear(1, 1)))
