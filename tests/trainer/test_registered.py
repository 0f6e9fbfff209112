"""Actions after an import happen once, with the whole module, whatever imports it and in whatever thread."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
import zipfile
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_ptm.trainer.registered import after_import

PACKAGE = "package_to_be_waited_for"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def package(place: Path, **modules: str) -> None:
    (place / PACKAGE).mkdir()
    for name, text in {"__init__": "", **modules}.items():
        (place / PACKAGE / f"{name}.py").write_text(text)


def acted(name: str) -> list[str]:
    """Values of modules that have been acted on."""
    found: list[str] = []
    after_import(f"{PACKAGE}.{name}", lambda module: found.append(module.VALUE))
    return found


def test_a_module_that_is_there_is_acted_on_at_once_and_another_when_it_comes(place: Path) -> None:
    package(place, first="VALUE = 'first'", second="VALUE = 'second'")
    importlib.import_module(f"{PACKAGE}.first")
    first, second = acted("first"), acted("second")
    assert (first, second) == (["first"], [])
    importlib.util.find_spec(f"{PACKAGE}.second")  # somebody only looks whether it is there
    assert second == []
    importlib.import_module(f"{PACKAGE}.second")
    assert (first, second) == (["first"], ["second"])


@pytest.mark.parametrize("begun", ["package", "module"])
def test_what_another_thread_imports_at_the_moment_is_waited_for(
    begun: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = ModuleType("hand")
    hand.begun, hand.go_on = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hand", hand)
    waits = "import hand; hand.begun.set(); hand.go_on.wait(20)\n"
    package(place, module=(waits if begun == "module" else "") + "VALUE = 'whole'")
    if begun == "package":
        (place / PACKAGE / "__init__.py").write_text(waits + f"import {PACKAGE}.module")
    importer = threading.Thread(target=importlib.import_module, args=(f"{PACKAGE}.module",))
    importer.start()
    assert hand.begun.wait(20)
    found: list[str] = []
    act: Any = lambda module: found.append(module.VALUE)  # noqa: E731
    ours = threading.Thread(target=after_import, args=(f"{PACKAGE}.module", act))
    ours.start()
    hand.go_on.set()
    importer.join()
    ours.join()
    assert found == ["whole"]


def test_modules_of_an_archive_share_a_loader(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(place / "modules.zip", "w") as archive:
        archive.writestr(f"{PACKAGE}/__init__.py", "")
        archive.writestr(f"{PACKAGE}/first.py", f"import {PACKAGE}.second\nVALUE = 'first'")
        archive.writestr(f"{PACKAGE}/second.py", "VALUE = 'second'")
    monkeypatch.syspath_prepend(place / "modules.zip")
    found = acted("first")
    importlib.import_module(f"{PACKAGE}.first")
    assert found == ["first"]


def test_the_module_has_its_own_loader_and_source(place: Path) -> None:
    package(place, module="VALUE = 'whole'")
    found = acted("module")
    spec = importlib.util.find_spec(f"{PACKAGE}.module")
    assert spec is not None and spec.loader is not None
    assert spec.loader.get_source(spec.name) == "VALUE = 'whole'"  # type: ignore[attr-defined]
    module = importlib.import_module(f"{PACKAGE}.module")
    assert found == ["whole"] and inspect.getsource(module).strip() == "VALUE = 'whole'"
    assert module.__spec__ is not None and module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__module__ == "_frozen_importlib_external"


class Others(MetaPathFinder):
    """Another package's hook, which looks for the spec by itself and wraps what executes the module."""

    def __init__(self) -> None:
        self.executed = 0

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != f"{PACKAGE}.module":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def counted(module: ModuleType) -> None:
            self.executed += 1
            execute(module)

        spec.loader.exec_module = counted  # type: ignore[method-assign]
        return spec


def test_hooks_of_other_packages_work_beside_ours(place: Path) -> None:
    package(place, module="VALUE = 'whole'")
    others = Others()
    sys.meta_path.insert(0, others)
    found, again = acted("module"), acted("module")
    importlib.import_module(f"{PACKAGE}.module")
    assert (others.executed, found, again) == (1, ["whole"], ["whole"])
