"""Removes every wait, event and order of `lightning_ptm` in turn, and looks whether a test on the fake device notices.

    python tests/fake_cuda/mutations.py                         # all, hours on two cores
    python tests/fake_cuda/mutations.py --only memory/streams   # places whose file has this in its name
    python tests/fake_cuda/mutations.py --list

A line that nobody misses either has no test or is not needed. Works on a copy of the tree; prints a row for each place, and
fails where one was missed. Tests that fail without a removal end it.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("memory", "runtime", "update", "comm")
ORDERS = {"join", "mark", "order", "record", "record_event", "record_stream", "settle", "synchronize", "wait"}
ORDERS |= {"wait_event", "wait_stream"}
PLUGINS = ("-p", "fake_cuda_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly")
KILLERS = (
    ("tests/memory", "-m", "gpu"),
    ("tests/update", "-m", "gpu"),
    ("tests/gpu/test_cuda.py", "-m", "gpu"),
)
"""Tests that run on the fake device, the quick ones first; a removal that one notices is not shown to the next."""
LIMIT_S = 900
"""A test process that takes longer waits for what was removed."""


@dataclass(frozen=True, slots=True)
class Place:
    """A statement that orders, and nothing else: lines [first, last] of a file."""

    file: str
    first: int
    last: int
    text: str

    def removed_from(self, source: str) -> str:
        """The source with `pass` in its place."""
        lines = source.splitlines(keepends=True)
        indent = lines[self.first - 1][: -len(lines[self.first - 1].lstrip())]
        return "".join([*lines[: self.first - 1], f"{indent}pass\n", *lines[self.last :]])


def places(root: Path = ROOT) -> Iterator[Place]:
    """Every place, in the order of files and lines."""
    for room in ROOMS:
        for path in sorted((root / "lightning_ptm" / room).rglob("*.py")):
            found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)]
            for node in sorted(found, key=lambda node: node.lineno):
                call = node.value
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ORDERS:
                    assert node.end_lineno is not None
                    yield Place(str(path.relative_to(root)), node.lineno, node.end_lineno, ast.unparse(node))


def noticed_by(tree: Path) -> str | None:
    """The first of the killers that fails in a tree, and how; None if all pass."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAKE_CUDA_DEFER": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(tree / "tests/fake_cuda"), str(tree)))
    for killer in KILLERS:
        command = [sys.executable, "-m", "pytest", "-q", "-x", *PLUGINS, *killer]
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"{killer[0]}: no end"
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return failed[0] if failed else f"{killer[0]}: exit status {done.returncode}"
    return None


def main() -> None:
    """Remove, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="places whose file or text has this in it")
    parser.add_argument("--list", action="store_true", help="print the places and end")
    args = parser.parse_args()
    chosen = [place for place in places() if args.only in f"{place.file}:{place.first} {place.text}"]
    if args.list:
        for place in chosen:
            print(f"{place.file}:{place.first}: {place.text}")
        return
    missed = 0
    with tempfile.TemporaryDirectory(prefix="lightning_ptm_mutations_") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info"))
        if (why := noticed_by(tree)) is not None:
            raise SystemExit(f"with nothing removed: {why}")
        for place in chosen:
            path = tree / place.file
            source = path.read_text()
            path.write_text(place.removed_from(source))
            begun = time.perf_counter()
            noticed = noticed_by(tree)
            path.write_text(source)
            missed += noticed is None
            told = noticed or "MISSED BY ALL"
            print(
                f"{place.file}:{place.first}: {place.text[:60]}: {told[:150]} ({time.perf_counter() - begun:.0f} s)",
                flush=True,
            )
    raise SystemExit(f"{missed} of {len(chosen)} are missed by all tests" if missed else 0)


if __name__ == "__main__":
    main()
