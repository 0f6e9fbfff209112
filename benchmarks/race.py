"""Sides in processes of their own that take turns, so that the two numbers of a ratio are comparable.

Each side is one new process, or one for each rank. It is built and warmed up, and then runs the number of steps that comes
through its pipe; meanwhile the other sides wait on their pipes. So the two numbers of a ratio are taken seconds apart on the
same machine in the same state, while allocator, thread pool and peak memory are each side's own.

Standard library only: sides also run in environments that have no Lightning.

I1: at most one side runs at any moment; the order of the sides is reversed at every second repeat.
I2: a turn ends when its last step has ended and the process's disk traffic has been still for `QUIET_S`, so that no
    side's writes are done in another side's time. The quiet time itself is not counted. A side whose work goes on from step
    to step (lock-free updates) is measured while it is under way: some steps before do not count, and the clock stops with
    the last step, when as much is left to do as when it started.
I3: a side that fails ends the race with that side's traceback. No process outlives `Race`. A side that says that it cannot
    run here (`Baton.refuse`) leaves the race with all its turns, and the others go on.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Any, Self

WORKER = Path(__file__).with_name("worker.py")
QUIET_S = 0.01
LOG_TAIL_LINES = 25
LEAST_REPEATS = 2
TIMEOUT_S = 3600.0
"""Limit of a wait for a side, unless its case may take longer."""
_END_S, _FAILED_END_S = 30.0, 2.0
"""Seconds in which a process has to end by itself: after a race, and after a race that failed or was interrupted."""
_PR_SET_PDEATHSIG = 1


class SkipCase(Exception):
    """The machine cannot run a case; the message says why."""


class SideError(Exception):
    """A side could not be built or failed in a step; the message has its name and what it said last."""


class _RefusedError(Exception):
    """A side has said that it cannot run; the message says why."""


@dataclass(frozen=True, slots=True)
class Side:
    """One thing that is compared: `sides/<module>.py`, run in `ranks` processes.

    `options` are passed to that module's `run(options, baton)` and must be JSON. `memory_group` is the folder of a memory
    control group that the process enters before it imports anything.
    """

    name: str
    module: str
    options: Mapping[str, object]
    ranks: int = 1
    threads: int = 2
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_group: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What a side did in one turn. The peak is since the process began; all others are of this turn.

    Of several ranks: the slowest one's seconds, the largest peak, the sums of CPU time, bytes and page faults, rank 0's loss.
    """

    steps: int
    seconds: float
    cpu_s: float
    loss: float
    peak_rss_bytes: int
    read_bytes: int
    written_bytes: int
    page_faults: int
    extra: Mapping[str, Any]

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True, slots=True)
class Score:
    """All turns of one side, warm-up left out."""

    side: str
    turns: tuple[Turn, ...]

    @property
    def step_s(self) -> float:
        """Median over the turns of the seconds that one step took."""
        return median(turn.step_s for turn in self.turns)

    @property
    def step_cpu_s(self) -> float:
        """Median over the turns of the CPU seconds of one step, of all ranks."""
        return median(turn.cpu_s / turn.steps for turn in self.turns)

    def extra(self, name: str) -> float:
        """Median over the turns of a number that only this side reports."""
        return median(turn.extra[name] for turn in self.turns)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the turns."""
        times = [turn.step_s for turn in self.turns]
        return (max(times) - min(times)) / self.step_s

    @property
    def peak_rss_bytes(self) -> int:
        return max(turn.peak_rss_bytes for turn in self.turns)

    @property
    def traffic_bytes(self) -> float:
        """Median over the turns of the bytes read from and written to disk in one step."""
        return median((turn.read_bytes + turn.written_bytes) / turn.steps for turn in self.turns)

    @property
    def loss(self) -> float:
        return self.turns[-1].loss


# --- The worker's end -----------------------------------------------------------------------------------------------


def peak_rss_bytes() -> int:
    """Most memory that this process had resident at any time so far."""
    return _proc_numbers("status")["VmHWM"] * 1024


def current_rss_bytes() -> int:
    """Memory that this process has resident now."""
    return _proc_numbers("status")["VmRSS"] * 1024


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has (read from, written to) disk so far, page cache hits left out."""
    counters = _proc_numbers("io")
    return counters["read_bytes"], counters["write_bytes"]


def page_faults() -> int:
    """Pages that this process has touched for the first time, or again after their memory was given back."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _proc_numbers(name: str) -> dict[str, int]:
    pairs = (line.split(":", 1) for line in Path(f"/proc/self/{name}").read_text().splitlines())
    return {key: int(value.split()[0]) for key, value in pairs if value.split() and value.split()[0].isdigit()}


class Baton:
    """The worker's end of the pipe to the race."""

    def __init__(self, orders: IO[str], reports: IO[str]) -> None:
        self._orders = orders
        self._reports = reports
        self._steps = 0
        self._before = 0
        """Steps of the turn that still do not count."""
        self._in_the_middle = False
        self._started_s = self._started_cpu_s = 0.0
        self._started_bytes = (0, 0)
        self._started_faults = 0
        self._stepped_s = 0.0
        self._stepped_bytes = (0, 0)

    def wait(self) -> int:
        """Waits for this side's turn. Returns the number of steps to run, 0 when the race is over. The clock starts now, or
        after the steps that do not count."""
        before, self._steps = map(int, (self._orders.readline() or "0 0").split())
        self._before, self._in_the_middle = before, before > 0
        self._start_clock()
        return before + self._steps

    def stepped(self) -> bool:
        """Notes that a step has ended. Returns whether it was the last that does not count: the clock starts now."""
        self._stepped_s, self._stepped_bytes = time.perf_counter(), disk_bytes()
        if self._before == 0:
            return False
        self._before -= 1
        if self._before == 0:
            self._start_clock()
        return self._before == 0

    def _start_clock(self) -> None:
        self._started_bytes, self._started_faults = disk_bytes(), page_faults()
        self._started_s, self._started_cpu_s = time.perf_counter(), time.process_time()

    def report(self, loss: float, extra: Mapping[str, Any] | None = None) -> None:
        """Ends the turn (I2) and sends what it took. `extra` holds numbers that only this side has."""
        if self._before:
            raise RuntimeError("this side does not say when its steps end, so none can be left out; call Baton.stepped")
        ended_s, bytes_now, cpu_s = time.perf_counter(), disk_bytes(), time.process_time() - self._started_cpu_s
        faults = page_faults() - self._started_faults
        while time.perf_counter() - ended_s < QUIET_S:
            time.sleep(QUIET_S / 10)
            if (later := disk_bytes()) != bytes_now:
                ended_s, bytes_now = time.perf_counter(), later
        if self._in_the_middle:
            ended_s, bytes_now = self._stepped_s, self._stepped_bytes
        turn = Turn(
            steps=self._steps,
            seconds=ended_s - self._started_s,
            cpu_s=cpu_s,
            loss=loss,
            peak_rss_bytes=peak_rss_bytes(),
            read_bytes=bytes_now[0] - self._started_bytes[0],
            written_bytes=bytes_now[1] - self._started_bytes[1],
            page_faults=faults,
            extra=extra or {},
        )
        self._send(asdict(turn))

    def ready(self) -> None:
        """Reports that the side is built and waits for its first turn."""
        self._send({"ready": True})

    def refuse(self, why: str) -> None:
        """Leaves the race: this side cannot run here, which is no failure."""
        self._send({"refused": why})

    def fail(self) -> None:
        """Sends the traceback of the exception being handled."""
        self._send({"error": traceback.format_exc()})

    def _send(self, message: Mapping[str, object]) -> None:
        self._reports.write(json.dumps(message) + "\n")
        self._reports.flush()


def take_turns(baton: Baton, step: Callable[[], float], extra: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Runs `step`, which returns the loss, as often as the race orders, until it is over. Reports `extra()` too."""
    baton.ready()
    while steps := baton.wait():
        loss = 0.0
        for _ in range(steps):
            loss = step()
            baton.stepped()
        baton.report(loss, extra())


def end_with_parent(number: int) -> None:
    """Makes the kernel send this process a signal when its parent dies. Linux only; does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


# --- The race's end -------------------------------------------------------------------------------------------------


class _Worker:
    """One process of a side, with the pipes to it and a file of what it prints."""

    def __init__(self, side: Side, rank: int, port: int) -> None:
        self.title = side.name if side.ranks == 1 else f"{side.name} (rank {rank})"
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  lives as long as the process
        order_read, order_write = os.pipe()
        report_read, report_write = os.pipe()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(side.threads),
            "MKL_NUM_THREADS": str(side.threads),
            **side.environment,
        }
        if side.ranks > 1:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": side.ranks, "LOCAL_WORLD_SIZE": side.ranks}
            environment.update({name: str(value) for name, value in ranks.items()})
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        command = [side.python, "-P", str(WORKER), side.module, json.dumps(dict(side.options))]
        command += [str(order_read), str(report_write), side.memory_group or ""]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=(order_read, report_write), stdout=self._log, stderr=subprocess.STDOUT
        )
        os.close(order_read)
        os.close(report_write)
        self._orders = os.fdopen(order_write, "w")
        self._reports = os.fdopen(report_read)

    def order(self, before: int, steps: int) -> None:
        try:
            self._orders.write(f"{before} {steps}\n")
            self._orders.flush()
        except BrokenPipeError as error:
            raise SideError(self._with_log("has ended")) from error

    def receive(self, timeout_s: float) -> dict[str, object]:
        readable, _, _ = select.select([self._reports], [], [], timeout_s)
        if not readable:
            raise SideError(self._with_log(f"said nothing for {timeout_s:.0f} s"))
        line = self._reports.readline()
        if not line:
            raise SideError(self._with_log(f"ended with status {self._process.wait()}"))
        message: dict[str, object] = json.loads(line)
        if "error" in message:
            raise SideError(f"{self.title} failed:\n{message['error']}")
        if "refused" in message:
            raise _RefusedError(message["refused"])
        return message

    def release(self) -> None:
        """Closes its orders, which means that the race is over."""
        self._orders.close()

    def stop(self, wait_s: float) -> None:
        """Waits for the end of a released process; kills it if it does not come."""
        try:
            self._process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reports.close()
        self._log.close()

    def _with_log(self, what: str) -> str:
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-LOG_TAIL_LINES:])
        return f"{self.title} {what}; its last lines were:\n{tail}"


class Race:
    """A context in which the sides' processes run. Owns them.

    `timeout_s` bounds each wait for a side: its build and each of its turns.
    """

    def __init__(self, sides: Sequence[Side], *, timeout_s: float = TIMEOUT_S) -> None:
        self.sides = tuple(sides)
        self._timeout_s = timeout_s
        self._workers: dict[str, list[_Worker]] = {}

    def __enter__(self) -> Self:
        try:
            for side in self.sides:  # one after the other: building in parallel could exhaust the memory
                self._start(side)
        except BaseException:
            self._stop(_FAILED_END_S)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(_END_S if error is None else _FAILED_END_S)

    def run(
        self,
        *,
        repeats: int,
        steps: int,
        warmup: int,
        before: Mapping[str, int] | None = None,
        longer: Mapping[str, int] | None = None,
        limit_s: float = math.inf,
    ) -> dict[str, Score]:
        """Has each side take `repeats` turns of `steps` steps, after one of `warmup` steps that does not count.

        Returns the scores of the sides that have not left (I3).

        Args:
            before: by side: steps at the beginning of each turn that do not count (I2).
            longer: by side: how many times as many steps a turn has.
            limit_s: after so many seconds, and two repeats, no other repeat begins.
        """
        before, longer = before or {}, longer or {}
        turns: dict[str, list[Turn]] = {side.name: [] for side in self.sides}
        began_s = time.perf_counter()
        for repeat in range(-1 if warmup else 0, repeats):
            if repeat >= LEAST_REPEATS and time.perf_counter() - began_s > limit_s:
                print(f"  {repeat} of {repeats} repeats: the {limit_s:.0f} s of this case are over", flush=True)
                break
            here = [side for side in self.sides if side.name in self._workers]
            for side in here if repeat % 2 == 0 else reversed(here):
                where = "warm-up" if repeat < 0 else f"repeat {repeat + 1} of {repeats}"
                try:
                    if repeat < 0:
                        turn = self._turn(side, before=0, steps=warmup)
                    else:
                        count = steps * longer.get(side.name, 1)
                        turn = self._turn(side, before=before.get(side.name, 0), steps=count)
                        turns[side.name].append(turn)
                except _RefusedError as why:
                    print(f"  {where}: {side.name} is refused: {why}", flush=True)
                    self._leave(side)
                else:
                    print(f"  {where}: {side.name} {turn.step_s:.4f} s a step", flush=True)
        return {name: Score(name, tuple(taken)) for name, taken in turns.items() if name in self._workers}

    def _start(self, side: Side) -> None:
        print(f"  building: {side.name}", flush=True)
        port = _free_port()
        self._workers[side.name] = []
        for rank in range(side.ranks):
            self._workers[side.name].append(_Worker(side, rank, port))
        try:
            for worker in self._workers[side.name]:
                worker.receive(self._timeout_s)
        except _RefusedError as why:
            print(f"  {side.name} is refused: {why}", flush=True)
            self._leave(side)

    def _leave(self, side: Side) -> None:
        for worker in (workers := self._workers.pop(side.name)):
            worker.release()
        for worker in workers:
            worker.stop(_END_S)

    def _turn(self, side: Side, *, before: int, steps: int) -> Turn:
        workers = self._workers[side.name]
        for worker in workers:
            worker.order(before, steps)
        turns = [Turn(**worker.receive(self._timeout_s)) for worker in workers]  # type: ignore[arg-type]
        return replace(
            turns[0],
            seconds=max(turn.seconds for turn in turns),
            cpu_s=sum(turn.cpu_s for turn in turns),
            peak_rss_bytes=max(turn.peak_rss_bytes for turn in turns),
            read_bytes=sum(turn.read_bytes for turn in turns),
            written_bytes=sum(turn.written_bytes for turn in turns),
            page_faults=sum(turn.page_faults for turn in turns),
        )

    def _stop(self, wait_s: float) -> None:
        workers = [worker for workers in self._workers.values() for worker in workers]
        for worker in workers:  # all first: ranks end together
            worker.release()
        for worker in workers:
            worker.stop(wait_s)
        self._workers.clear()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
