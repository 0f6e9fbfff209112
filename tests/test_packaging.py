"""What pyproject.toml says, against what is in the folders."""

from __future__ import annotations

import subprocess
import sysconfig
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_installed() -> None:
    inside = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "lightning_ptm").rglob("*.py")}
    mapped = {"lightning_ptm.callbacks", "lightning_ptm.configs"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == inside | mapped


def test_test_modules_have_names_of_their_own() -> None:
    """Outside of packages pytest imports a test module by its name alone, and of two it refuses the second."""
    loose = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.stem for path in loose if path.stem != "conftest")
    assert not [name for name, count in names.items() if count > 1]


def test_every_module_of_the_runtime_has_tests_of_its_own() -> None:
    """Where a reader looks for them: at the same path under tests/."""
    modules = [path.stem for path in (ROOT / "lightning_ptm" / "runtime").glob("*.py") if path.stem != "__init__"]
    assert not [name for name in modules if not (ROOT / "tests" / "runtime" / f"test_{name}.py").exists()]


def test_mapped_folders_exist() -> None:
    for folder in PROJECT["tool"]["setuptools"]["package-dir"].values():
        assert (ROOT / folder).is_dir(), folder


def test_installing_does_not_fetch_torch_to_build() -> None:
    assert not [requirement for requirement in PROJECT["build-system"]["requires"] if "torch" in requirement]


def test_callbacks_are_part_of_the_installed_package() -> None:
    from lightning_ptm.callbacks import Throughput

    assert Throughput.__module__ == "lightning_ptm.callbacks.throughput"


def test_imports_point_down_only() -> None:
    lint_imports = Path(sysconfig.get_path("scripts"), "lint-imports")
    if not lint_imports.exists():
        pytest.skip("import-linter is not installed (extra `dev`)")
    check = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert check.returncode == 0, check.stdout + check.stderr
