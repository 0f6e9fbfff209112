"""One name, one meaning: no two files define a public class of one name, but for models, whose parts have the field's."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _twice(classes):
    """Returns names that several files have, with these files, from (name of a class, file); one of each model is
    allowed."""
    files = defaultdict(set)
    for name, file in classes:
        files[name].add("a model's" if file.startswith("lightning_ptm/models/") else file)
    return {name: sorted(found) for name, found in files.items() if len(found) > 1}


def _public_classes():
    for folder in ("lightning_ptm", "callbacks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    yield node.name, path.relative_to(ROOT).as_posix()


def test_no_two_classes_have_one_name():
    assert not (found := _twice(_public_classes())), f"call one of them something else: {found}"


def test_a_name_of_two_files_is_found():
    classes = [("Block", "lightning_ptm/models/gpt.py"), ("Block", "lightning_ptm/models/t5.py"), ("Page", "a.py")]
    assert _twice(classes) == {}
    assert _twice([*classes, ("Page", "b.py"), ("Page", "a.py")]) == {"Page": ["a.py", "b.py"]}
    assert list(_twice([*classes, ("Block", "a.py")])) == ["Block"]
