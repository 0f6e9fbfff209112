"""Contents of pyproject.toml, compared with the folders."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


REQUIRED = {
    canonicalize_name(each.name): each for each in (Requirement(text) for text in PROJECT["project"]["dependencies"])
}
(PROJECT_BUILD,) = PROJECT["build-system"]["requires"]
OPTIONAL = {
    "apex": "used where the user's own optimizers or kernels are Apex's",
    "matplotlib": "the extra `plots`, without which there are no pictures",
    "numpy": "its random numbers are looked after where it is there, and matplotlib brings it",
}
"""Imported modules that no dependency brings, and why a run goes on without."""


def test_what_is_imported_is_declared() -> None:
    """A package that comes with a dependency today may not come with it tomorrow."""
    files = [path for folder in ("lightning_ptm", "callbacks") for path in (ROOT / folder).rglob("*.py")]
    imported = {name: path for path in files for name in _imports(path)}
    brings = packages_distributions()
    undeclared = {
        name: str(path.relative_to(ROOT))
        for name, path in imported.items()
        if name not in (*OPTIONAL, "lightning_ptm", *sys.stdlib_module_names)
        and not {canonicalize_name(each) for each in brings.get(name, [name])} & REQUIRED.keys()
    }
    assert not undeclared
    assert set(OPTIONAL) <= imported.keys()


@pytest.mark.parametrize(("name", "extra"), [("run", "plots"), ("test", "dev")])
def test_locked_versions_are_allowed_and_have_hashes(name: str, extra: str) -> None:
    """The versions of `make run LOCKED=1` and `make test LOCKED=1`."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", "")
    pins: dict[str, list[str]] = {}
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=sha256:")
        pin = Requirement(requirement)
        assert hashes, pin
        (specifier,) = pin.specifier
        assert specifier.operator == "==", pin
        pins.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    assert "torch" not in pins and not [each for each in pins if each.startswith(("nvidia-", "cuda-"))]
    wanted = [*REQUIRED.values(), *_of_extra(extra), Requirement(PROJECT_BUILD)]
    for each in wanted:
        if each.name != "torch":
            versions = pins[canonicalize_name(each.name)]
            assert all(map(each.specifier.contains, versions)), f"{each}: run .ci/lock"


def _of_extra(name: str) -> list[Requirement]:
    """The requirements of an extra, and of the extras of this package that it names."""
    found = []
    for each in map(Requirement, PROJECT["project"]["optional-dependencies"][name]):
        if each.name == PROJECT["project"]["name"]:
            found += [inner for extra in each.extras for inner in _of_extra(extra)]
        else:
            found.append(each)
    return found


def _imports(path: Path) -> set[str]:
    """Top-level modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize(
    ("version", "allowed"),
    [
        ("2.5.6", False),
        ("2.6.0", False),
        ("2.6.1", True),
        ("2.6.2", False),
        ("2.6.3", False),
        ("2.6.6", True),
        ("2.7.0", False),
    ],
)
def test_releases_that_somebody_else_uploaded_are_not_installed(name: str, version: str, allowed: bool) -> None:
    """GHSA-w37p-236h-pfx3. `lightning` brings `pytorch-lightning` in any version, so it is excluded by its own name, too."""
    assert REQUIRED[name].specifier.contains(version) is allowed


def test_no_extra_allows_what_the_dependencies_exclude() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    named = {canonicalize_name(Requirement(text).name) for extra in extras for text in extra}
    assert not named & {"lightning", "pytorch-lightning"}


def test_the_versions_that_are_tested_are_read_from_all_dependencies() -> None:
    """.ci/versions takes each apart with this pattern."""
    pattern = re.search(r're\.fullmatch\(r"(.*)", each\)', (ROOT / ".ci" / "versions").read_text())
    assert pattern is not None
    read = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["plots"]
    assert not [each for each in read if not re.fullmatch(pattern[1], each)]


def test_a_wheel_says_that_it_is_typed_and_has_the_configs(tmp_path: Path) -> None:
    """Built of a copy: setuptools leaves a folder behind."""
    tree = tmp_path / "tree"
    for name in ("lightning_ptm", "callbacks", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "import setuptools.build_meta as build; print(build.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (wheel,) = tree.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {"lightning_ptm/py.typed", "lightning_ptm/configs/gpt.yaml", "lightning_ptm/callbacks/__init__.py"} <= files
    assert "lightning_ptm/pytorch_lightning/callbacks.pyi" in files
    metadata = zipfile.ZipFile(wheel).read(next(name for name in files if name.endswith("/METADATA"))).decode()
    assert "Classifier: Typing :: Typed" in metadata and "\nProject-URL: Paper, https://arxiv.org/" in metadata


def test_urls_are_those_that_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not [url for url in PROJECT["project"]["urls"].values() if url not in readme]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = PROJECT["project"]
    for field, value in (("version", project["version"]), ("license", project["license"])):
        assert citation[field] == value
    assert citation["abstract"].rstrip(".") == project["description"]
    assert citation["references"][0]["url"] == project["urls"]["Paper"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # the format requires them


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
    """Where a reader looks for them: under the module's name, or the room's and the module's where rooms share a name."""

    def has_tests(path: Path) -> bool:
        names = f"test_{path.name}", f"test_{path.parent.name.rstrip('s')}_{path.name}"
        return any((tests / path.with_name(name)).exists() for name in names)

    runtime = ROOT / "lightning_ptm" / "runtime"
    modules = [path.relative_to(runtime) for path in runtime.rglob("*.py") if path.stem != "__init__"]
    tests = ROOT / "tests" / "runtime"
    assert not [path for path in modules if not has_tests(path)]


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


def _imports_of(tree: ast.AST, modules: Collection[str]) -> set[str]:
    """The `modules` that code imports, in any way, those for type checkers included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            found |= {f"{source}.{each.name}" if f"{source}.{each.name}" in modules else source for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return found & set(modules)


def _package_imports() -> dict[str, set[str]]:
    """By module, the modules of the package that it imports."""
    files = {
        ".".join(path.with_suffix("").relative_to(ROOT).parts).removesuffix(".__init__"): path
        for path in (ROOT / "lightning_ptm").rglob("*.py")
    }
    return {module: _imports_of(ast.parse(path.read_text()), files) - {module} for module, path in files.items()}


def _in_circles(imports: Mapping[str, set[str]]) -> set[str]:
    """The modules that import each other in a circle, and those between two circles."""
    left = dict(imports)
    while ends := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in ends:
            del left[module]
    # What only imports a circle goes, too.
    while starts := left.keys() - set().union(*left.values()):
        for module in starts:
            del left[module]
    return set(left)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither at run time nor for type checkers."""
    assert not _in_circles(_package_imports())


def test_circles_are_found() -> None:
    names = ("p.a", "p.b", "p.c", "p.d")
    texts = {
        "p.a": "from p.b import x",
        "p.b": "def f():\n    import p.c",
        "p.c": "def f():\n    importlib.import_module('p.a')",
        "p.d": "from p import a",
    }
    imports = {module: _imports_of(ast.parse(text), names) for module, text in texts.items()}
    assert imports == {"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}, "p.d": {"p.a"}}
    assert _in_circles(imports) == {"p.a", "p.b", "p.c"}
    assert not _in_circles({**imports, "p.c": set()})
