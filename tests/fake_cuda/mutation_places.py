"""What `mutations.py` removes, and which tests look at it: places in the order of files and lines, and stages of each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("memory", "runtime", "update", "comm")
ORDERS = {"join", "mark", "order", "record", "record_event", "record_stream", "settle", "synchronize", "wait"}
ORDERS |= {"wait_event", "wait_stream", "used_here", "follow"}
DECORATORS = {"on_compute_stream"}
CONTEXTS = {"entered", "_on_stream"}
EARLY = (10, 5, 1)
"""Of fit_cases.CASES: sums and activations in RAM, saves behind training, everything on the device and on disk."""
ALL = 19
USERS = (
    "AllAside:host",
    "LooksAside:all on disk",
    "HooksAside:host:host",
    "GoesOnAside:all on disk",
    "UnitsAside:host",
)
"""Of users_program.py."""
RANKED = (2, 10, 9)
"""Of fit_cases.CASES_OF_RANKS."""
CLOSEST: dict[str, tuple[str, ...]] = {
    "activations": ("memory/test_activations.py",),
    "allocator": ("memory/test_allocator.py", "memory/test_streamed_copies.py"),
    "buffering": ("update/test_buffering.py", "runtime/test_lockfree.py", "update/test_two_drivers_of_waiting.py"),
    "buffers": ("update/test_buffers.py", "update/test_forecast.py"),
    "clipping": ("runtime/test_clipping.py", "runtime/test_gradient_norm.py", "runtime/test_manual_optimization.py"),
    "copier": ("memory/test_streamed_copies.py", "memory/test_allocator.py"),
    "flat_clock": ("runtime/test_flat_clock.py", "runtime/test_lockfree.py"),
    "gradient_pages": ("runtime/test_gradient_pages.py", "runtime/test_lockfree.py"),
    "gradients": ("runtime/test_gradients.py", "runtime/test_manual_optimization.py"),
    "handing_over": ("runtime/test_handing_over.py", "runtime/test_lockfree.py"),
    "io": ("memory/test_allocator.py", "memory/test_disk.py"),
    "jobs": ("memory/test_disk.py", "memory/test_allocator.py"),
    "patience": ("ranks/test_patience.py", "ranks/test_tensor_exchanges.py"),
    "pieces": ("runtime/test_pieces.py", "runtime/test_weights.py"),
    "pipeline": ("update/test_update_pipeline.py",),
    "process_group": ("ranks/test_communicator.py",),
    "stepping": ("runtime/test_stepping.py", "runtime/test_manual_optimization.py"),
    "transfer": ("memory/test_streamed_copies.py", "memory/test_allocator.py"),
    "updater": ("update/test_update_pipeline.py", "update/test_buffering.py"),
    "updates": ("runtime/test_updates.py", "runtime/test_manual_optimization.py", "runtime/test_gradient_norm.py"),
    "versions": ("runtime/test_versions.py", "runtime/test_lockfree.py"),
}
"""Tests on the CPU that look at a file from near, where they are not those of its own name."""
ON_DEVICE = {
    "memory": ("tests/memory/test_memory_gpu.py", "tests/memory/test_backend.py"),
    "update": ("tests/update/test_update_pipeline.py", "tests/update/test_update_probe.py"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """What orders, and nothing else, on lines [first, last] of a file: a statement, a decorator, or a context in a `with`."""

    file: str
    first: int
    last: int
    text: str

    @property
    def removed(self) -> str:
        """The source without it."""
        lines = (ROOT / self.file).read_text().splitlines(keepends=True)
        line = lines[self.first - 1]
        if self.text.startswith("with "):
            left = line.replace(self.text.removeprefix("with "), '__import__("contextlib").nullcontext()')
            assert left != line
        else:
            left = "\n" if self.text.startswith("@") else line[: len(line) - len(line.lstrip())] + "pass\n"
        return "".join([*lines[: self.first - 1], left, *lines[self.last :]])


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests in one process: `fits` are numbers of cases, `users` names of theirs, else arguments of pytest.

    Attributes:
        server: `fake` or `cpu`; `ranks` are two processes of their own on the fake device, with numbers of cases of ranks.
    """

    name: str
    server: str
    tests: tuple[str, ...] = ()
    fits: tuple[int, ...] = ()
    users: tuple[str, ...] = ()
    only_expected: bool = False
    """Computes what cases are compared with, and keeps it for later processes."""


def places(root: Path = ROOT) -> Iterator[Place]:
    """Every place, in the order of files and lines."""
    for room in ROOMS:
        for path in sorted((root / "lightning_ptm" / room).rglob("*.py")):
            found = [
                Place(str(path.relative_to(root)), node.lineno, node.end_lineno or node.lineno, text)
                for node in ast.walk(ast.parse(path.read_text()))
                for node, text in _of(node)
            ]
            yield from sorted(found, key=lambda place: (place.first, place.text))


def _of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Expr):
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ORDERS:
            yield node, ast.unparse(node)
    elif isinstance(node, ast.FunctionDef):
        yield from (
            (each, f"@{each.id}")
            for each in node.decorator_list
            if isinstance(each, ast.Name) and each.id in DECORATORS
        )
    elif isinstance(node, ast.With):
        for each in (item.context_expr for item in node.items):
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in CONTEXTS:
                yield each, f"with {ast.unparse(each)}"


def stages_of(place: Place, *, quick: bool) -> list[Stage]:
    """In the order in which they run."""
    room, stem = Path(place.file).parts[1], Path(place.file).stem
    closest = [f"tests/{name}" for name in CLOSEST.get(stem, (f"{room}/test_{stem}.py",))]
    closest = [name for name in closest if (ROOT / name).exists()]
    stages = []
    if closest:  # seconds
        stages.append(Stage("tests of the file", "cpu", (*closest, "-m", "not gpu and not slow")))
    if room in ON_DEVICE:
        stages.append(Stage(f"tests/{room} on the device", "fake", (*ON_DEVICE[room], "-m", "gpu")))
    if room == "comm" or any(word in place.text for word in ("communicator", "_shard_pending", "arriving.work")):
        stages.append(Stage("fits of two ranks", "ranks", fits=RANKED))
    if room != "comm":
        stages.append(Stage("streams", "fake", ("tests/gpu/test_device_streams.py", "-m", "gpu")))
        if room == "runtime":
            stages.append(Stage("users", "fake", users=USERS))
        stages.append(Stage("early fits", "fake", fits=EARLY))
    if not quick:
        stages.append(Stage("runs on the device", "fake", ("tests/gpu/test_cuda.py", "-m", "gpu")))
        stages.append(Stage("all fits", "fake", fits=tuple(number for number in range(ALL) if number not in EARLY)))
        if room == "runtime":
            stages.append(Stage("runs", "cpu", ("tests/runtime/test_runs.py", "-m", "not gpu and not slow")))
    return stages
