"""Places in the code that `mutations.py` removes, in the order of files and lines, and the tests of each, in stages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("memory", "runtime", "update", "comm")
ORDERS = {"join", "mark", "order", "record", "record_event", "record_stream", "settle", "synchronize", "wait"}
ORDERS |= {"wait_event", "wait_stream", "record_use", "follow"}
DECORATORS = {"on_compute_stream"}
WHOLE_ROOM = "comm"
"""Package whose code is mutated as a whole, since agreements between ranks use no word of `ORDERS`: every call that is
a statement, every `raise`, every counter, and every `return` that leaves a function early."""
CONTEXTS = {"entered", "_on_stream"}
EARLY = (10, 5, 1)
"""Indexes in fit_cases.CASES: sums and activations in RAM, asynchronous saves, everything on the device and on disk."""
ALL = 19
USERS = (
    "AllAside:host",
    "LooksAside:all on disk",
    "HooksAside:host:host",
    "GoesOnAside:all on disk",
    "UnitsAside:host",
)
"""Cases of users_program.py."""
LEAVING = ("LeavesAside:host", "LeavesAside:device", "LeavesAside:all on disk")
USERS_OF: dict[str, tuple[str, ...]] = {
    "hooks": (
        "UnitsAside:host",
        *LEAVING,
        "StepsAside:all on disk",
        "HooksAside:host:host",
        "PassesOfOneGraph:host",
        "PassesOfOneGraph:device",
    ),
    "offload": ("UnitsAside:host:host", "StepsAside:all on disk:host", "HooksAside:host:host"),
    "saved_tensors": ("UnitsAside:host:host", "StepsAside:host:recomputed", "PassesOfOneGraph:host"),
    "view": ("LooksAside:all on disk", "ChangesAside:all on disk", "AssignsAside:host"),
    "step_gradients": (*LEAVING, "GoesOnAside:host", "ChangesAside:host"),
    "streams": ("UnitsAside:host", "LeavesAside:device", "StepsAside:all on disk:host"),
    "updater": LEAVING,
}
"""Cases that test a file most closely, and therefore run first."""
RANKED = (2, 10, 9)
"""Indexes in fit_cases.CASES_OF_RANKS."""
CLOSEST: dict[str, tuple[str, ...]] = {
    "activation_buffers": ("memory/test_activation_buffers.py",),
    "allocator": ("memory/test_allocator.py", "memory/test_streamed_copies.py"),
    "buffering_thread": (
        "update/test_buffering_thread.py",
        "runtime/updates/test_lock_free.py",
        "update/test_two_drivers_of_waiting.py",
    ),
    "lock_free_buffers": ("update/test_lock_free_buffers.py", "update/test_weight_prediction.py"),
    "clipping": (
        "runtime/updates/test_clipping.py",
        "runtime/test_gradient_norm.py",
        "runtime/test_manual_optimization.py",
    ),
    "agreement": ("ranks/test_agreement.py", "ranks/test_rank_differences.py"),
    "background_group": ("ranks/test_rows_behind.py", "ranks/test_communicator.py"),
    "communicator": ("ranks/test_communicator.py",),
    "uds": ("ranks/test_uds.py", "ranks/test_shm_collectives.py"),
    "intra_node": ("ranks/test_communicator.py", "ranks/test_tensor_exchanges.py"),
    "flat_counters": ("runtime/updates/test_flat_counters.py", "runtime/updates/test_lock_free.py"),
    "user_collectives": ("adversarial/ranks/test_raw_collectives.py", "adversarial/ranks/test_one_rank_alone.py"),
    "store": (
        "runtime/units/test_store.py",
        "runtime/gradients/test_gradient_store.py",
        "runtime/gradients/test_gradient_pages.py",
        "runtime/gradients/test_host_accumulate.py",
        "runtime/updates/test_lock_free.py",
    ),
    "view": (
        "runtime/gradients/test_gradient_view.py",
        "runtime/gradients/test_used_gradients.py",
        "runtime/gradients/test_grad_placeholder.py",
    ),
    "flat_gradient": ("runtime/gradients/test_flat_gradient.py", "runtime/test_manual_optimization.py"),
    "io": ("memory/test_allocator.py", "memory/test_disk.py"),
    "process_groups": ("ranks/test_communicator.py", "ranks/test_rank_failures.py", "ranks/test_rank_exceptions.py"),
    "mesh": ("ranks/test_mesh.py",),
    "shm_collectives": ("ranks/test_shm_collectives.py", "ranks/test_tensor_exchanges.py"),
    "page_rates": ("runtime/test_page_size.py",),
    "deadlock_detector": ("ranks/test_deadlock_detector.py", "ranks/test_tensor_exchanges.py"),
    "page_io": ("runtime/tensors/test_page_io.py", "runtime/test_weights.py"),
    "pipeline": ("update/test_update_pipeline.py",),
    "process_group": ("ranks/test_communicator.py", "ranks/test_token_exchange.py", "ranks/test_tensor_exchanges.py"),
    "step_gradients": ("runtime/engine/test_step_gradients.py", "runtime/test_manual_optimization.py"),
    "raise_on_all_ranks": (
        "runtime/ranks/test_barriers.py",
        "adversarial/ranks/test_one_rank_alone.py",
        "ranks/test_rank_weights.py",
    ),
    "transfer": ("memory/test_streamed_copies.py", "memory/test_allocator.py"),
    "updater": ("update/test_update_pipeline.py", "update/test_buffering_thread.py"),
    "updates": (
        "runtime/updates/test_updates.py",
        "runtime/test_manual_optimization.py",
        "runtime/test_gradient_norm.py",
    ),
    "versions": ("runtime/updates/test_versions.py", "runtime/updates/test_lock_free.py"),
    "gathered_flats": (
        "runtime/relayout/test_gathered_flats.py",
        "ranks/test_rank_weights.py",
        "ranks/test_rank_whole_parameters.py",
    ),
    "work": ("ranks/test_communicator.py",),
}
"""Tests on the CPU that look at a file from near, where they are not those of its own name."""
ON_DEVICE = {
    "memory": ("tests/memory/test_memory_gpu.py", "tests/memory/test_backend.py"),
    "update": ("tests/update/test_update_pipeline.py", "tests/update/test_update_probe.py"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Code on lines [first, last] of a file that orders work and does nothing else: a statement, a decorator, a context
    in a `with`, or a callable that is passed on."""

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
        elif self.text.startswith("argument "):
            left = line.replace(self.text.removeprefix("argument "), "(lambda *_: None)")
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
    collectives: bool = False
    only_expected: bool = False
    """Computes what cases are compared with, and keeps it for later processes."""


def places(root: Path = ROOT) -> Iterator[Place]:
    """Every place, in the order of files and lines."""
    for room in ROOMS:
        for path in sorted((root / "lightning_ptm" / room).rglob("*.py")):
            found = [
                Place(str(path.relative_to(root)), node.lineno, node.end_lineno or node.lineno, text)
                for node in ast.walk(ast.parse(path.read_text()))
                for node, text in (*_of(node), *(_of_whole_room(node) if room == WHOLE_ROOM else ()))
            ]
            found = list(dict.fromkeys(found))
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
    elif isinstance(node, ast.Call):
        for argument in node.args:
            if isinstance(argument, ast.Attribute) and argument.attr in ORDERS:
                yield argument, f"argument {ast.unparse(argument)}"


def _of_whole_room(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Raise | ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, ast.unparse(node)
    elif isinstance(node, ast.If) and isinstance(last := node.body[-1], ast.Return) and not node.orelse:
        yield last, f"{ast.unparse(last)} if {ast.unparse(node.test)}"


def stages_of(place: Place, *, quick: bool) -> list[Stage]:
    """In the order in which they run."""
    room, stem = Path(place.file).parts[1], Path(place.file).stem
    closest = [f"tests/{name}" for name in CLOSEST.get(stem, (f"{room}/test_{stem}.py",))]
    closest = [name for name in closest if (ROOT / name).exists()]
    stages = []
    if closest:  # seconds
        more = ("--timeout=100",) if room == WHOLE_ROOM else ()  # ranks that lack something wait for each other
        stages.append(Stage("tests of the file", "cpu", (*closest, "-m", "not gpu and not slow", *more)))
    if room in ON_DEVICE:
        stages.append(Stage(f"tests/{room} on the device", "fake", (*ON_DEVICE[room], "-m", "gpu")))
    if stem == "process_group":
        stages.append(Stage("collectives on the device", "ranks", collectives=True))
    if room == "comm" or any(word in place.text for word in ("communicator", "_shard_pending", "arriving.work")):
        stages.append(Stage("fits of two ranks", "ranks", fits=RANKED))
    if room != "comm":
        if stem in USERS_OF:
            stages.append(Stage("users of the file", "fake", users=USERS_OF[stem]))
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
