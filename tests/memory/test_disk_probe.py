"""The number of I/O threads is found by trying the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_ptm.memory import disk_probe
from lightning_ptm.memory.disk import DiskRegion, FileOps
from lightning_ptm.memory.disk_probe import DEFAULT_THREADS, threads_per_path

PAGE = 64 * 1024


class Lanes(FileOps):
    """A disk that serves `lanes` transfers at once, each in four milliseconds."""

    def __init__(self, lanes: int) -> None:
        self._free = threading.Semaphore(lanes)
        self.calls = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._serve(buffers)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._serve(buffers)

    def _serve(self, buffers: Sequence[memoryview]) -> int:
        with self._free:
            self.calls += 1
            time.sleep(0.004)
        return sum(map(len, buffers))


@pytest.mark.parametrize("lanes", [4, 8])
def test_as_many_threads_as_the_disk_serves(lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "_LEAST_BYTES", PAGE)
    monkeypatch.setattr(disk_probe, "_TRIAL_BYTES", 64 * PAGE)
    disk = DiskRegion([tmp_path], page_size=PAGE, total_frames=100, file_ops=Lanes(lanes))
    found = sorted(threads_per_path(disk) for _ in range(3))
    disk.close()
    assert found[1] == lanes  # a busy machine may mislead one of them


def test_a_small_tier_is_not_tried(tmp_path: Path) -> None:
    files = Lanes(4)
    disk = DiskRegion([tmp_path], page_size=PAGE, total_frames=100, file_ops=files)
    assert threads_per_path(disk) == DEFAULT_THREADS
    assert files.calls == 0
    disk.close()


def test_several_paths_and_a_real_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "_LEAST_BYTES", PAGE)
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        path.mkdir()
    disk = DiskRegion(paths, page_size=PAGE, total_frames=64)
    assert threads_per_path(disk) in (4, 8)
    disk.close()
