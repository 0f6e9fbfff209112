"""Removes every wait, event and order of `lightning_ptm` in turn, and looks which test notices.

    python tests/fake_cuda/mutations.py                         # all: an hour on two cores
    python tests/fake_cuda/mutations.py --only memory/streams   # places whose file has this in its name
    python tests/fake_cuda/mutations.py --quick                 # the first stages alone: who is left is to be looked at again
    python tests/fake_cuda/mutations.py --list

A line that nobody misses either has no test or is not needed. Prints a row for each place, and fails where one was missed.
README.md tells what was found.

Each place has stages, the tests that are likeliest to notice first (`stages_of`), and the first test that fails ends it. Two
servers import what takes seconds (torch, on the fake device or without it; Lightning), and fork for each place: the child
imports `lightning_ptm` with the place removed, and runs stage after stage. Nothing is written to the tree. Stages that fail
with nothing removed end the script.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.machinery
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("memory", "runtime", "update", "comm")
ORDERS = {"join", "mark", "order", "record", "record_event", "record_stream", "settle", "synchronize", "wait"}
ORDERS |= {"wait_event", "wait_stream", "used_here", "follow"}
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--timeout=240", "-q", "-x", "--no-header")
EARLY, ALL = 6, 19
"""So many of fit_cases.CASES, which begin with those that have the most choices."""
LIMIT_S = 600
"""A stage that takes longer waits for what was removed."""


@dataclass(frozen=True, slots=True)
class Place:
    """A statement that orders, and nothing else: lines [first, last] of a file."""

    file: str
    first: int
    last: int
    text: str

    @property
    def removed(self) -> str:
        """The source with `pass` in its place."""
        lines = (ROOT / self.file).read_text().splitlines(keepends=True)
        line = lines[self.first - 1]
        indent = line[: len(line) - len(line.lstrip())]
        return "".join([*lines[: self.first - 1], f"{indent}pass\n", *lines[self.last :]])


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests in one process: `fits` are numbers of cases, else arguments of pytest.

    Attributes:
        server: `fake` or `cpu`.
    """

    name: str
    server: str
    tests: tuple[str, ...] = ()
    fits: tuple[int, ...] = ()


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


def stages_of(place: Place, *, quick: bool) -> list[Stage]:
    """In the order in which they run."""
    room, stem = Path(place.file).parts[1], Path(place.file).stem
    on_cpu = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / room).glob(f"test_*{stem}*.py"))
    if room in ("memory", "update"):
        on_cpu = [f"tests/{room}"]
    elif room == "comm":
        on_cpu = [
            "tests/ranks/test_communicator.py",
            "tests/ranks/test_patience.py",
            "tests/ranks/test_rank_failures.py",
        ]
    stages = [Stage("early fits", "fake", fits=tuple(range(EARLY)))]
    if room in ("memory", "update"):
        stages.insert(0, Stage(f"tests/{room} on the device", "fake", (f"tests/{room}", "-m", "gpu")))
    stages.append(Stage("streams", "fake", ("tests/gpu/test_device_streams.py", "-m", "gpu")))
    if on_cpu:
        stages.append(Stage("tests of the file", "cpu", (*on_cpu, "-m", "not gpu and not slow")))
    if "thread" in place.text or ".wait(_" in place.text or room == "comm":
        stages.sort(key=lambda stage: stage.server != "cpu")
    if not quick:
        stages.append(Stage("runs on the device", "fake", ("tests/gpu/test_cuda.py", "-m", "gpu")))
        stages.append(Stage("all fits", "fake", fits=tuple(range(EARLY, ALL))))
        if room == "runtime":
            stages.append(Stage("runs", "cpu", ("tests/runtime/test_runs.py", "-m", "not gpu and not slow")))
    return stages


# -- in a child -----------------------------------------------------------------------------------------------------------


def remove(place: Place) -> None:
    """From now on this process imports a file without the place."""
    path, source, get_code = str(ROOT / place.file), place.removed, importlib.machinery.SourceFileLoader.get_code

    def without(self: Any, fullname: str) -> Any:
        return compile(source, path, "exec") if self.path == path else get_code(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = without  # type: ignore[method-assign]


def noticed(stage: Stage) -> str | None:
    """What fails; None if nothing does."""
    if stage.fits:
        import fits_program

        with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "told"), "w+") as told:
            with contextlib.redirect_stdout(told):
                fits_program.main(Path(folder), list(stage.fits))
            told.seek(0)
            text = told.read()
        failed = [line for line in text.splitlines() if line.endswith(": failed")]
        return f"{failed[0]} ({text.strip().splitlines()[-1][:90]})" if failed else None
    import pytest

    first: list[str] = []

    class Notes:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed and not first:
                first.append(report.nodeid)

    plugins = (*PLUGINS, "-p", "fake_cuda_plugin") if stage.server == "fake" else PLUGINS
    status = pytest.main([*plugins, *stage.tests], plugins=[Notes()])
    return None if not status else first[0] if first else f"exit status {int(status)}"


def serve(name: str) -> None:
    """Reads places and stages, a line each, and answers each with a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    sys.path[:0] = [str(ROOT / "tests/fake_cuda"), str(ROOT / "tests/gpu"), str(ROOT / "tests"), str(ROOT)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if name == "fake":
        import fake_device  # noqa: F401 before torch
    import lightning.pytorch  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    answers.write("ready\n")
    for line in sys.stdin:
        asked = json.loads(line)
        place = Place(**asked["place"]) if asked["place"] else None
        stages = [
            Stage(**{**each, "tests": tuple(each["tests"]), "fits": tuple(each["fits"])}) for each in asked["stages"]
        ]
        answers.write(json.dumps(_in_child(place, stages)) + "\n")


def _in_child(place: Place | None, stages: Sequence[Stage]) -> str | None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reader)
        with contextlib.suppress(BaseException):
            if place is not None:
                remove(place)
            for stage in stages:
                os.write(writer, f"\n{stage.name}".encode())
                found = noticed(stage)
                if found is not None:
                    os.write(writer, f": {found}".encode())
                    os._exit(1)
            os._exit(0)
        os.write(writer, f": {type(sys.exc_info()[1]).__name__}".encode())
        os._exit(2)
    os.close(writer)
    told, ends_s = b"", time.monotonic() + LIMIT_S
    while time.monotonic() < ends_s:
        ready, _, _ = select.select([reader], [], [], max(0.0, ends_s - time.monotonic()))
        part = os.read(reader, 4096) if ready else b""
        if ready and not part:
            break
        if b"\n" in part:
            ends_s = time.monotonic() + LIMIT_S  # the next stage
        told += part
    else:
        told += b": no end"
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    last = told.decode().strip().splitlines()[-1] if told else "at once"
    if ": " in last:
        return last
    crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL
    return (
        f"{last}: {signal.Signals(os.WTERMSIG(status)).name}"
        if crashed
        else None
        if status == 0
        else f"{last}: {status}"
    )


# -- who asks -------------------------------------------------------------------------------------------------------------


class Servers:
    """One of each kind, from the first place on that needs it."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}

    def ask(self, place: Place | None, stages: Sequence[Stage]) -> str | None:
        """Stages of one server. What fails; None if nothing does."""
        server = self._server(stages[0].server)
        assert server.stdin is not None and server.stdout is not None
        asked = {"place": place and asdict(place), "stages": [asdict(stage) for stage in stages]}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        answer: str | None = json.loads(server.stdout.readline())
        return answer

    def _server(self, name: str) -> subprocess.Popen[str]:
        if name not in self._running:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAKE_CUDA_DEFER": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            paths = (ROOT / "tests/fake_cuda", ROOT / "tests", ROOT) if name == "fake" else (ROOT,)
            environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
            server = self._running[name] = subprocess.Popen(
                [sys.executable, __file__, "--serve", name],
                cwd=ROOT,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert server.stdout is not None
            if server.stdout.readline() != "ready\n":
                raise SystemExit(f"the server of {name} did not start")
        return self._running[name]

    def close(self) -> None:
        for server in self._running.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait()


def found_by(servers: Servers, place: Place | None, stages: Sequence[Stage]) -> str | None:
    """The first stage that notices, and how."""
    left = list(stages)
    while left:
        together = 1
        while together < len(left) and left[together].server == left[0].server:
            together += 1
        answer = servers.ask(place, left[:together])
        if answer is not None:
            return answer
        del left[:together]
    return None


def main() -> None:
    """Remove, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="places whose file, line or text has one of these in it, by comma")
    parser.add_argument("--sure", action="store_true", help="without the run in which nothing is removed")
    parser.add_argument("--quick", action="store_true", help="the first stages alone")
    parser.add_argument("--list", action="store_true", help="print the places and end")
    parser.add_argument("--serve", choices=("fake", "cpu"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    wanted = args.only.split(",")
    chosen = [place for place in places() if any(each in f"{place.file}:{place.first} {place.text}" for each in wanted)]
    if args.list:
        for place in chosen:
            print(f"{place.file}:{place.first}: {place.text}")
        return
    servers, missed = Servers(), 0
    try:
        every = {stage: None for place in chosen for stage in stages_of(place, quick=args.quick)}
        for name in () if args.sure else ("fake", "cpu"):
            begun = time.perf_counter()
            if (why := found_by(servers, None, [stage for stage in every if stage.server == name])) is not None:
                raise SystemExit(f"with nothing removed: {why}")
            print(f"nothing removed, all stages of {name}: {time.perf_counter() - begun:.0f} s", flush=True)
        for place in chosen:
            begun = time.perf_counter()
            found = found_by(servers, place, stages_of(place, quick=args.quick))
            missed += found is None
            seconds = time.perf_counter() - begun
            print(
                f"{place.file}:{place.first}: {place.text[:70]}: {found or 'MISSED BY ALL'} ({seconds:.0f} s)",
                flush=True,
            )
    finally:
        servers.close()
    raise SystemExit(f"{missed} of {len(chosen)} are missed by all tests" if missed else 0)


if __name__ == "__main__":
    main()
