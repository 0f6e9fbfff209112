"""kill -9 at any moment of training and of saving: the newest checkpoint is complete, going on from it equals never having
been killed, and nothing is left behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from killed_run import step_of

from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.sharded import load
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

    def start(self, folder: Path, kind: str, steps: int) -> int:
        """Starts a run; returns its process number."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {kind} {steps}\n")
        self._process.stdin.flush()
        return int(self.line().split()[1])

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
        return said

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


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


def in_shared_memory() -> set[str]:
    """What is there, but for semaphores of Python's multiprocessing: runs make none, tests beside this one do."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def kill_again_and_again(runs: Runs, folder: Path, kind: str, kills: int, seed: int) -> None:
    (folder / "disk").mkdir()
    steps = 6 * kills + 6
    chance = random.Random(seed)
    reached = 0
    shared = in_shared_memory()
    for _ in range(kills):
        process = runs.start(folder, kind, steps)
        # After some steps or before the first one, and then at any moment of the next.
        behind = kind.startswith("async")
        said = [runs.line() for _ in range(chance.randint(0, 3))] if not behind else []
        while behind and not list((folder / "kept").glob(f"{PARTIAL}*")) and "ended" not in said:
            time.sleep(0.001)  # until a save is in progress
        time.sleep(chance.random() * 0.05)
        os.kill(process, signal.SIGKILL)
        said += runs.until_gone()
        newest = check_newest(folder)
        known = [int(line.split()[1]) for line in said if line.startswith("saved")]
        assert newest >= max([reached, *known]), "a checkpoint that was in place is gone"
        reached = newest
        assert os.listdir(folder / "disk") == []
        if "ended" in said:
            break
    assert in_shared_memory() <= shared
    # The last run finds the rest of the others, goes on from the newest, and arrives where nobody was killed.
    runs.start(folder, kind, steps)
    assert runs.until_gone()[-1] == "ended"
    assert not list((folder / "kept").glob(f"{PARTIAL}*"))
    # Complete ones that ModelCheckpoint had no time to remove are Lightning's own business.
    assert {steps - 1, steps} <= set(map(step_of, (folder / "kept").iterdir()))
    never = folder.parent / f"{folder.name}-never"
    (never / "disk").mkdir(parents=True)
    runs.start(never, kind, steps)
    assert runs.until_gone()[-1] == "ended"
    ours, theirs = torch.load(folder / "weights.pt"), torch.load(never / "weights.pt")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("kind", ["full", "sharded", "async"])
def test_killed_now_and_then(runs: Runs, kind: str, tmp_path: Path) -> None:
    kill_again_and_again(runs, tmp_path, kind, kills=3, seed=1)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_killed_run_that_resumes_by_itself_is_one_that_was_resumed_by_hand(
    runs: Runs, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    process = runs.start(tmp_path, f"{kind}+auto", 40)
    said = [runs.line() for _ in range(4)]
    time.sleep(random.random() * 0.05)  # any moment: of a step, of a save
    os.kill(process, signal.SIGKILL)
    said += runs.until_gone()
    assert "ended" not in said
    by_hand = tmp_path / "by_hand"
    (by_hand / "disk").mkdir(parents=True)
    shutil.copytree(tmp_path / "kept", by_hand / "kept")
    for folder, which in ((tmp_path, f"{kind}+auto"), (by_hand, kind)):
        runs.start(folder, which, 12)
        assert runs.until_gone()[-1] == "ended"
    ours, theirs = torch.load(tmp_path / "weights.pt"), torch.load(by_hand / "weights.pt")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
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
