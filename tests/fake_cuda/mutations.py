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
import contextlib
import functools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mutation_places import ROOT, Place, Stage, places, stages_of

PLUGINS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--timeout=200", "-q", "-x", "--no-header")
LIMIT_S = 600
"""A stage that takes longer waits for what was removed."""


# -- in a child -----------------------------------------------------------------------------------------------------------


def remove(place: Place) -> None:
    """From now on this process, and those that it starts, import a file without the place."""
    folder = ROOT / "tests/fake_cuda/everywhere"
    os.environ["MUTATIONS_REMOVED"] = json.dumps([str(ROOT / place.file), place.removed])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_path(str(folder / "sitecustomize.py"))


def know_expected(program: Any, *, keep: bool) -> None:
    """Keeps the expected values of cases, which take half of a case's time and are computed with nothing removed."""
    folder = Path(os.environ["MUTATIONS_EXPECTED"])
    compute = program.expected

    @functools.cache
    def expected(what: Any) -> Any:
        import torch

        rank, name = os.environ.get("RANK", "0"), what if isinstance(what, str) else "_".join(what)
        path = folder / f"{program.__name__} of rank {rank} of {os.environ.get('WORLD_SIZE', '1')}: {name}"
        if not path.exists():
            found = compute(what)
            if keep:
                torch.save(
                    found if isinstance(found, tuple) else ([loss.cpu() for loss in found.losses], found.state_dict()),
                    path,
                )
            return found
        kept = torch.load(path)
        if isinstance(what, str):
            return kept
        net = program.Net(what[0])
        net.losses = kept[0]
        net.load_state_dict(kept[1])
        return net

    program.expected = expected


def noticed(stage: Stage) -> str | None:
    """Returns the first failure; None if everything passes."""
    if stage.collectives:
        import collectives_program

        for name, _, check in collectives_program.checks():
            try:
                check()
            except BaseException as error:
                return f"{name}: {type(error).__name__}: {str(error).strip()[:90]}"
        return None
    if stage.fits:
        import fits_program

        fits_program.prepare()
        know_expected(fits_program, keep=stage.only_expected)
        if stage.only_expected:
            for number in stage.fits:
                fits_program.expected(fits_program.training_of(number))
            return None
        with contextlib.ExitStack() as undo:
            shared = os.environ.get("MUTATIONS_RANKS")
            folder = shared or undo.enter_context(tempfile.TemporaryDirectory())
            for number in stage.fits:
                try:
                    fits_program.check(number, Path(folder) / str(number))
                except BaseException as error:
                    return f"case {number}: {type(error).__name__}: {str(error).strip()[:90]}"
        return None
    if stage.users:
        import users_program

        users_program.prepare()
        know_expected(users_program, keep=stage.only_expected)
        if stage.only_expected:
            for case in stage.users:
                users_program.expected(case.split(":")[0])
            return None
        with tempfile.TemporaryDirectory() as folder:
            for case in stage.users:
                try:
                    users_program.check(case, Path(folder))
                except BaseException as error:
                    return f"{case}: {type(error).__name__}: {str(error).strip()[:90]}"
        return None
    import pytest

    first: list[str] = []

    class Notes:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed and not first:
                ended = "Timeout" not in report.longreprtext
                first.append(
                    report.nodeid if ended else f"{report.nodeid} (no end, which a busy machine may be the cause of)"
                )

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
        stages = [_stage(each) for each in asked["stages"]]
        answers.write(json.dumps(_in_child(place, stages)) + "\n")


def _stage(told: dict[str, Any]) -> Stage:
    return Stage(**{key: tuple(value) if isinstance(value, list) else value for key, value in told.items()})


def _in_ranks(place: Place | None, stage: Stage) -> str | None:
    """Runs a stage in two ranks, as `_in_child` in one process."""
    sys.path.insert(0, str(ROOT / "tests/gpu"))
    from fake_process import ORDERS, ranks_on_fake

    told = json.dumps({"place": place and asdict(place), "stage": asdict(stage)})
    try:
        with tempfile.TemporaryDirectory() as folder:
            more = {**ORDERS["late"], "MUTATIONS_RANKS": folder}
            ranks = ranks_on_fake(__file__, "--rank", told, limit_s=LIMIT_S, world_size=2, **more)
    except subprocess.TimeoutExpired:
        return f"{stage.name}: no end"
    failed = [done for done in ranks if done.returncode]
    return f"{stage.name}: {(failed[0].stdout.strip().splitlines() or ['at once'])[-1]}" if failed else None


def be_a_rank(told: str) -> None:
    """One of two, on the fake device."""
    asked = json.loads(told)
    sys.path[:0] = [str(ROOT / "tests/fake_cuda"), str(ROOT / "tests/gpu"), str(ROOT / "tests"), str(ROOT)]
    if asked["place"]:
        remove(Place(**asked["place"]))
    found = noticed(_stage(asked["stage"]))
    if found is not None:
        print(found, flush=True)
        os._exit(1)  # the other may wait for this one


def _in_child(place: Place | None, stages: Sequence[Stage]) -> str | None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reader)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they start behind them ignore it
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
    """Server processes, one per kind (`Stage.server`) except `ranks`, each started by the first `ask` that needs it."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}

    def ask(self, place: Place | None, stages: Sequence[Stage]) -> str | None:
        """Stages of one server. What fails; None if nothing does."""
        if stages[0].server == "ranks":
            return next((found for stage in stages if (found := _in_ranks(place, stage)) is not None), None)
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
    parser.add_argument("--closest", action="store_true", help="the tests of the file alone, on the CPU")
    parser.add_argument("--list", action="store_true", help="print the places and end")
    parser.add_argument("--serve", choices=("fake", "cpu"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        be_a_rank(args.rank)
        return
    if args.serve:
        serve(args.serve)
        return
    wanted = args.only.split(",")
    chosen = [place for place in places() if any(each in f"{place.file}:{place.first} {place.text}" for each in wanted)]
    if args.list:
        for place in chosen:
            print(f"{place.file}:{place.first}: {place.text}")
        return
    stages_for = {place: stages_of(place, quick=args.quick) for place in chosen}
    if args.closest:
        stages_for = {place: [each for each in stages if each.server == "cpu"] for place, stages in stages_for.items()}
    servers, missed = Servers(), 0
    expected = tempfile.TemporaryDirectory()
    os.environ["MUTATIONS_EXPECTED"] = expected.name
    try:
        every = {stage: None for place in chosen for stage in stages_for[place]}
        for name in () if args.sure else ("fake", "cpu", "ranks"):
            begun = time.perf_counter()
            if (why := found_by(servers, None, [stage for stage in every if stage.server == name])) is not None:
                raise SystemExit(f"with nothing removed: {why}")
            print(f"nothing removed, all stages of {name}: {time.perf_counter() - begun:.0f} s", flush=True)
        for stage in every:
            if stage.fits or stage.users:
                servers.ask(None, [replace(stage, only_expected=True)])
        for place in chosen:
            begun = time.perf_counter()
            found = found_by(servers, place, stages_for[place])
            missed += found is None
            seconds = time.perf_counter() - begun
            print(
                f"{place.file}:{place.first}: {place.text[:70]}: {found or 'MISSED BY ALL'} ({seconds:.0f} s)",
                flush=True,
            )
    finally:
        servers.close()
        expected.cleanup()
    raise SystemExit(f"{missed} of {len(chosen)} are missed by all tests" if missed else 0)


if __name__ == "__main__":
    main()
