"""An attribute of an object of ours is assigned in one file, that of the object's class; others call its methods."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning_ptm

ROOT = Path(lightning_ptm.__file__).parent

OF_PYTHON = {
    "__class__": "parameters that may not be read change theirs (runtime/units/parameter_guard.py)",
    "__cause__": "an error of another thread is raised with its own cause",
    "__signature__": "the strategy lists its settings",
    "__module__": "copies of users' functions, and replacements of torch's, say where they are from",
    "__enter__": "torch's saved-tensor hooks are watched",
    "exec_module": "of the loader of a module that is imported later",
    "restype": "of a function of the C library",
    "n": "of a tqdm bar",
    "__name__": "a class that stands for another one has its name",
    "__qualname__": "as __name__",
    "__dict__": "another view of one object shares its attributes",
    "choose_parallel": "the package gives strategies the planner, which imports them (lightning_ptm/__init__.py)",
}
OF_TORCH = {
    "data": "torch's way to give a parameter other memory",
    "grad": "torch's optimizers and users look for gradients there",
    "param_groups": "what an optimizer updates; copies of it update others",
    "state": "as param_groups; in a run, the user's optimizer has a state that refuses to be read",
    "step": "a scheduler wraps an optimizer's step, to see which names it leaves there",
    "pack_hook": "saved-tensor hooks of users never get page memory",
    "process_group": "of torch's SyncBatchNorm",
    "weight": "a head is tied to an embedding",
    "rootRank": "options of a backend's broadcast have no constructor with arguments",
    "training": "a block is proven in the mode that it is called in",
    "opens_to": "of the class of one parameter, which is made for it",
}
OF_AUTOGRAD = "ctx"
"""Name of the context of an autograd function, which keeps there what its backward needs."""
OF_LIGHTNING = {
    "rank": "rank_zero_only.rank: strategies set it",
    "checkpoint_io": "a wrapping plugin's: strategies set it",
    "resume_start": "the Trainer's choice of a checkpoint is ours with resume='auto'",
    "last_model_path": "ModelCheckpoint goes on with the name of its last checkpoint",
    "received_sigterm": "the Trainer ends when it is set",
    "filter_on_optimizer": "BaseFinetuning's, while it compares parameters in pages",
    "fn": "a Trainer that plans and does not run",
    "trainer": "as fn",
    "status": "of the Trainer of Fabric's loop, which runs none",
    "precision_plugin": "as fn",
}
EXCEPTIONS = OF_PYTHON | OF_TORCH | OF_LIGHTNING


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def attributes(target: ast.expr) -> Iterator[ast.Attribute]:
    if isinstance(target, ast.Attribute):
        yield target
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from attributes(each)
    elif isinstance(target, ast.Starred):
        yield from attributes(target.value)


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that code gives a value."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.For) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            targets = [node.target]
        elif isinstance(node, ast.With):
            targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
        for target in targets:
            yield from attributes(target)


def is_self(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def owned(tree: ast.Module) -> set[str]:
    """Attributes of the classes of a file: their fields, and what their methods give `self`."""
    found = {each.attr for each in assigned(tree) if is_self(each)}
    for node in ast.walk(tree):
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found.add(line.target.id)
    return found


def of_others(tree: ast.Module) -> list[ast.Attribute]:
    """Returns the file's assignments to attributes of objects whose class is defined elsewhere."""
    own = owned(tree)
    return [
        each
        for each in assigned(tree)
        if not is_self(each)
        and each.attr not in own
        and not (isinstance(each.value, ast.Name) and each.value.id == OF_AUTOGRAD)
    ]


def of_bases(found: dict[str, ast.Module]) -> list[str]:
    """Returns attributes that a class gives itself and a base of it, in another file, gives itself, too."""
    classes = {
        node.name: (path, node)
        for path, tree in found.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    twice = []
    for path, node in classes.values():
        names = [base.id for base in node.bases if isinstance(base, ast.Name)]
        while names:
            place, base = classes.get(names.pop(), ("", None))
            if base is None or place == path:
                continue
            names += [each.id for each in base.bases if isinstance(each, ast.Name)]
            theirs = {each.attr for each in assigned(base) if is_self(each)}
            ours = {each.attr for each in assigned(node) if is_self(each)}
            twice += [f"{path}: {node.name}.{name}, which {base.name} assigns in {place}" for name in theirs & ours]
    return twice


def test_attributes_are_assigned_where_their_class_is() -> None:
    found = trees()
    foreign = [
        f"{path}:{each.lineno}: {ast.unparse(each)} = ..."
        for path, tree in found.items()
        for each in of_others(tree)
        if each.attr not in EXCEPTIONS
    ]
    assert not foreign, "\n".join(["give the class a method:", *foreign])
    assert not of_bases(found)


def test_exceptions_are_needed() -> None:
    used = {each.attr for tree in trees().values() for each in of_others(tree)}
    assert EXCEPTIONS.keys() - used == set()


def test_what_is_assigned_from_outside_is_found() -> None:
    tree = ast.parse("class A:\n def f(self, b):\n  self.x = 1\n  b.x = 2\n  b.y, (b.z, *b.w) = 3\n  b.v += 4")
    assert sorted(each.attr for each in of_others(tree)) == ["v", "w", "y", "z"]


def test_what_a_base_assigns_too_is_found() -> None:
    files = {
        "a.py": ast.parse("class A:\n def f(self):\n  self.x = 1"),
        "b.py": ast.parse("class B(A):\n def f(self):\n  self.x: int = 2\n  self.y = 1"),
    }
    assert of_bases(files) == ["b.py: B.x, which A assigns in a.py"]
