"""kill -9 at any moment of training and of saving, of one rank or all: the newest checkpoint is complete, and nothing is left
behind. Going on from it equals never having been killed, or, where the number of ranks changes, going on by hand from the
same checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from killed_run import step_of
from kit.real_networks import Node, two_nodes

from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.sharded import load
from lightning_ptm.storage.folder import remove_stale
from lightning_ptm.storage.index import PARTIAL, is_sharded


class Runs:
    """The process that forks runs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("killed_run.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._running: list[int] = []

    def start(self, folder: Path, kind: str, steps: int, ranks: int = 1) -> list[int]:
        """Starts a run; returns the process numbers of its ranks."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {kind} {steps} {ranks}\n")
        self._process.stdin.flush()
        self._running = [int(number) for number in self.line().split()[1:]]
        return self._running

    def line(self) -> str:
        """The next thing that is said."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def until_gone(self) -> list[str]:
        """All that a run says until it has ended."""
        said: list[str] = []
        while (line := self.line()) != "gone":
            assert line or self._process.poll() is None, "the process that forks has died"
            said.append(line)
        self._running = []
        return said

    def to_the_end(self, folder: Path, kind: str, steps: int, ranks: int = 1) -> list[str]:
        """All that a run says that nobody kills."""
        self.start(folder, kind, steps, ranks)
        said = self.until_gone()
        assert said[-1] == "ended"
        return said

    def close(self) -> None:
        """Ends it, and a run that hangs."""
        kill(self._running)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def kill(processes: Iterable[int]) -> None:
    """Kills those processes that still run."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.close()


def check_newest(folder: Path) -> int:
    """Every checkpoint loads and verifies; returns the newest one's step, 0 without any."""
    newest = 0
    for path in (folder / "kept").glob("*.ckpt"):
        assert not path.name.startswith(PARTIAL)
        if path.is_dir():
            assert is_sharded(path)
            checkpoint = load(path)
        else:
            checkpoint = FileCheckpointIO().load_checkpoint(path)
        assert checkpoint["global_step"] == step_of(path)
        assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())
        newest = max(newest, step_of(path))
    return newest


def check_weights(folder: Path, other: Path) -> None:
    """Checks that the weights of two runs are equal, to the bit."""
    ours, theirs = torch.load(folder / "weights.pt"), torch.load(other / "weights.pt")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def in_shared_memory() -> set[str]:
    """Lists shared memory, except semaphores of Python's multiprocessing: runs make none, parallel tests do."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def kill_again_and_again(runs: Runs, folder: Path, kind: str, kills: int, seed: int) -> None:
    (folder / "disk").mkdir()
    steps = 6 * kills + 6
    chance = random.Random(seed)
    reached = 0
    shared = in_shared_memory()
    for _ in range(kills):
        processes = runs.start(folder, kind, steps)
        # After some steps or before the first one, and then at any moment of the next.
        behind = kind.startswith("async")
        said = [runs.line() for _ in range(chance.randint(0, 3))] if not behind else []
        while behind and not list((folder / "kept").glob(f"{PARTIAL}*")) and "ended" not in said:
            time.sleep(0.001)  # until a save is in progress
        time.sleep(chance.random() * 0.05)
        kill(processes)
        said += runs.until_gone()
        newest = check_newest(folder)
        known = [int(line.split()[1]) for line in said if line.startswith("saved")]
        assert newest >= max([reached, *known]), "a checkpoint that was in place is gone"
        reached = newest
        assert os.listdir(folder / "disk") == []
        if "ended" in said:
            break
    assert in_shared_memory() <= shared
    # The last run removes what killed runs have left, resumes from the newest checkpoint, and has the weights of a run that
    # was never killed. A partial folder without a lock file is removed only when it is old, so these are made old.
    for partial in (folder / "kept").glob(f"{PARTIAL}*"):
        os.utime(partial, (0, 0))
    runs.to_the_end(folder, kind, steps)
    assert not list((folder / "kept").glob(f"{PARTIAL}*"))
    # Complete ones that ModelCheckpoint had no time to remove are Lightning's own business.
    assert {steps - 1, steps} <= set(map(step_of, (folder / "kept").iterdir()))
    never = folder.parent / f"{folder.name}-never"
    (never / "disk").mkdir(parents=True)
    runs.to_the_end(never, kind, steps)
    check_weights(folder, never)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full", "sharded")), "async"]
)
def test_killed_now_and_then(runs: Runs, kind: str, tmp_path: Path) -> None:
    kill_again_and_again(runs, tmp_path, kind, kills=3, seed=1)


@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_killed_run_that_resumes_by_itself_is_one_that_was_resumed_with_ckpt_path(
    runs: Runs, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    processes = runs.start(tmp_path, f"{kind}+auto", 40)
    said = [runs.line() for _ in range(4)]
    time.sleep(random.random() * 0.05)  # any moment: of a step, of a save
    kill(processes)
    said += runs.until_gone()
    assert "ended" not in said
    by_hand = tmp_path / "by_hand"
    (by_hand / "disk").mkdir(parents=True)
    shutil.copytree(tmp_path / "kept", by_hand / "kept")
    runs.to_the_end(tmp_path, f"{kind}+auto", 12)
    runs.to_the_end(by_hand, kind, 12)
    check_weights(tmp_path, by_hand)
    assert sorted(map(step_of, (tmp_path / "kept").glob("*.ckpt")))[-2:] == [11, 12]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["full+auto", "sharded+auto", "async+auto"])
def test_killed_thirty_times_and_resumed_by_itself(runs: Runs, kind: str, tmp_path: Path) -> None:
    kill_again_and_again(runs, tmp_path, kind, kills=30, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["full", "sharded", "async"])
def test_killed_fifty_times(runs: Runs, kind: str, tmp_path: Path) -> None:
    kill_again_and_again(runs, tmp_path, kind, kills=50, seed=2)


# -- several ranks ----------------------------------------------------------------------------------------------------------


def began(said: list[str]) -> list[int]:
    """At which steps."""
    return [int(line.split()[1]) for line in said if line.startswith("began")]


def began_with(said: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the number of ranks and the step of each beginning."""
    return [(int(line.split()[3]), int(line.split()[1])) for line in said if line.startswith("began")]


def check_resumed_by_hand(runs: Runs, folder: Path, kind: str, starts: list[tuple[int, int]], steps: int) -> None:
    """A run whose starts had so many ranks and began at such a step has the weights of one that was resumed by hand there."""
    by_hand = folder.parent / f"{folder.name}-by-hand"
    (by_hand / "disk").mkdir(parents=True)
    ends = [*(step for _, step in starts[1:]), steps]
    for (ranks, step), end in zip(starts, ends, strict=True):
        assert end >= step, "an older checkpoint than before was gone on from"
        if end > step:
            assert began(runs.to_the_end(by_hand, kind, end, ranks)) == [step]
    check_weights(folder, by_hand)


def check_nothing_left(folder: Path, shared: set[str]) -> None:
    """Checks that nothing is left but checkpoints under their names."""
    assert os.listdir(folder / "disk") == []
    # One whose writer was killed while it removed or committed it has no lock, and is taken for a dead one's when it is old.
    for partial in (folder / "kept").glob(f"{PARTIAL}*"):
        assert not (partial / "writer.lock").exists()
        os.utime(partial, (0, 0))
    remove_stale(folder / "kept")
    assert all(re.fullmatch(r"step=\d+\.ckpt", entry.name) for entry in (folder / "kept").iterdir())
    assert in_shared_memory() <= shared


def kill_ranks_again_and_again(runs: Runs, folder: Path, kind: str, kills: int, seed: int) -> None:
    """Other numbers of ranks at each start; one rank or all are killed, at any moment from the first on."""
    (folder / "disk").mkdir(parents=True)
    chance = random.Random(seed)
    steps = 4 * kills
    starts: list[tuple[int, int]] = []
    shared = in_shared_memory()
    for _ in range(kills):
        ranks = chance.randint(1, 3)
        processes = runs.start(folder, f"{kind}+auto", steps, ranks)
        # Who waits for a rank that never came is ended by what has started them, or by the strategy's timeout.
        early = chance.random() < 0.2
        said = [] if early else [runs.line()]
        time.sleep(chance.random())
        kill(processes if early or chance.random() < 0.3 else [chance.choice(processes)])
        said += runs.until_gone()
        starts += [(ranks, step) for step in began(said)]
        assert os.listdir(folder / "disk") == []
        check_newest(folder)
    ranks = chance.randint(1, 3)
    starts += [(ranks, step) for step in began(runs.to_the_end(folder, f"{kind}+auto", steps, ranks))]
    check_nothing_left(folder, shared)
    check_resumed_by_hand(runs, folder, kind, starts, steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["full", "sharded", "async"])
def test_ranks_killed_thirty_times_and_resumed_by_themselves(runs: Runs, kind: str, tmp_path: Path) -> None:
    kill_ranks_again_and_again(runs, tmp_path / "it", kind, kills=30, seed=5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sharded", "async"])
def test_one_of_two_ranks_of_torchrun_is_killed_and_others_go_on(runs: Runs, kind: str, tmp_path: Path) -> None:
    folder, kills = tmp_path / "it", 3
    (folder / "disk").mkdir(parents=True)
    chance = random.Random(6)
    shared = in_shared_memory()
    program = [str(Path(__file__).with_name("killed_run.py")), str(folder), f"{kind}+auto", "60", "2"]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={kills}"]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/launching.md says why
    agent = subprocess.Popen(
        [sys.executable, *command, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **variables},
    )
    processes: list[int] = []
    starts: list[tuple[int, int]] = []
    try:
        assert agent.stdout is not None
        for line in agent.stdout:
            if line.startswith("process"):
                processes.append(int(line.split()[1]))
            starts += [(2, step) for step in began([line])]
            if line.startswith("began") and len(starts) <= kills:
                time.sleep(chance.random() * 0.5)
                kill([chance.choice(processes[-2:])])
        assert agent.wait(60) == 0 and len(starts) == kills + 1
    finally:
        agent.terminate()  # and with it what it has started
        agent.wait(60)
        assert agent.stdout is not None
        agent.stdout.close()
    check_nothing_left(folder, shared)
    for ranks, steps in ((1, 63), (3, 66)):
        starts += [(ranks, step) for step in began(runs.to_the_end(folder, f"{kind}+auto", steps, ranks))]
    check_nothing_left(folder, shared)
    check_resumed_by_hand(runs, folder, kind, starts, 66)


# -- several machines -------------------------------------------------------------------------------------------------------


class Agents:
    """torchrun on two machines, which meet at the first one's."""

    def __init__(self, folder: Path, kind: str, steps: int) -> None:
        self._folder = folder
        program = Path(__file__).with_name("killed_run.py")
        self._run = [program, folder, f"{kind}+auto", steps, 1]
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, node: Node, host: Node) -> subprocess.Popen[bytes]:
        """The agent of a machine, which starts one rank there."""
        first = node == host
        waits = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        rendezvous = f"--rdzv-conf=is_host={int(first)},{waits}"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=9",
        ]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={host.address}:29511", "--rdzv-id=two", rendezvous]
        command += [f"--local-addr={node.address}"]
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "KILLED_RUN_STEP_S": "0.5"}
        variables["GLOO_SOCKET_IFNAME"] = node.interface
        with (
            (self._folder / f"{node.name}.said").open("ab") as said,
            (self._folder / f"{node.name}.log").open("ab") as log,
        ):
            agent = subprocess.Popen(
                node.command(*command, *self._run), stdout=said, stderr=log, env={**os.environ, **variables}
            )
        self._started.append(agent)
        return agent

    def said(self) -> list[str]:
        """Returns rank 0's lines about beginnings, on whatever machine it ran, in the order of steps, which never
        decreases."""
        lines = [line for path in self._folder.glob("*.said") for line in path.read_text().splitlines()]
        return sorted((line for line in lines if line.startswith("began")), key=lambda line: int(line.split()[1]))

    def until(self, ranks: int, starts: int) -> None:
        """So many starts have been made, the last one with `ranks`."""
        end = time.monotonic() + 120
        while not (len(found := began_with(self.said())) >= starts and found[-1][0] == ranks):
            assert time.monotonic() < end, [path.read_text()[-3000:] for path in self._folder.glob("*.log")]
            time.sleep(0.05)

    def reap(self) -> None:
        """Waits for the agents of machines that have been powered off."""
        for agent in self._started:
            agent.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sharded", "async"])
def test_one_of_two_machines_goes_and_comes_back(runs: Runs, kind: str, tmp_path: Path) -> None:
    folder, steps = tmp_path / "it", 60
    (folder / "disk").mkdir(parents=True)
    shared = in_shared_memory()
    with two_nodes() as (stays, goes):
        agents = Agents(folder, kind, steps)
        try:
            first = agents.start(stays, stays)
            agents.start(goes, stays)
            agents.until(2, 1)
            time.sleep(0.5)
            goes.power_off()
            agents.until(1, 2)
            time.sleep(0.5)
            agents.start(goes, stays)
            agents.until(2, 3)
            assert first.wait(240) == 0
        finally:
            for node in (stays, goes):
                node.power_off()
            agents.reap()
        starts = began_with(agents.said())
    assert [ranks for ranks, _ in starts][:2] == [2, 1] and starts[-1][0] == 2
    check_nothing_left(folder, shared)
    check_resumed_by_hand(runs, folder, kind, starts, steps)
