"""Rated endurance of disks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.endurance import (
    DAY_S,
    DiskLife,
    disk_life,
    disk_size,
    duration,
    parse_duration,
    rated_bytes,
    written_in_words,
)

TB, GB = 10**12, 10**9


def test_steps_and_seconds_of_a_rating() -> None:
    life = DiskLife(written_bytes=100 * GB, rated_bytes=600 * TB, given=True)
    assert (life.steps, life.seconds(2.0), life.rating) == (6000, 12_000.0, "600 TB (disk_tbw)")


def test_a_rating_that_is_not_given_follows_the_size() -> None:
    assert rated_bytes(None, 2 * TB) == 1200 * TB and rated_bytes(7 * TB, 2 * TB) == 7 * TB
    assert (
        DiskLife(1, 1200 * TB, given=False).rating == "1200 TB (600 times the disk's size, since no disk_tbw is given)"
    )


def test_folders_of_one_file_system_wear_one_disk(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    status = os.statvfs(tmp_path)
    assert disk_size(tmp_path) == status.f_blocks * status.f_frsize
    assert disk_life(folders, [GB, 2 * GB], 600 * TB) == DiskLife(3 * GB, 600 * TB, given=True)
    assert disk_life(folders, [0, GB], None) == DiskLife(GB, 600 * status.f_blocks * status.f_frsize, given=False)
    assert disk_life(folders, [0, 0], 600 * TB) is None


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a file system in memory at /dev/shm")
def test_memory_does_not_wear(tmp_path: Path) -> None:
    assert disk_size(Path("/dev/shm")) is None
    assert disk_life([Path("/dev/shm"), tmp_path], [5 * GB, GB], TB) == DiskLife(GB, TB, given=True)


@pytest.mark.parametrize(("text", "days"), [("3y", 1095), ("26w", 182), ("90d", 90), (" 0.5 Y", 182.5)])
def test_durations_are_read(text: str, days: float) -> None:
    assert parse_duration(text, name="endurance") == days * DAY_S


@pytest.mark.parametrize("text", ["3", "y", "0d", "-1y", "3 months", ""])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^endurance is '{text}'; give years, weeks or days: '3y', '26w' or '90d'$"):
        parse_duration(text, name="endurance")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (90, "1.5 minutes"),
        (6600, "110 minutes"),
        (5.5 * 3600, "5.5 hours"),
        (19 * DAY_S, "19 days"),
        (400 * DAY_S, "400 days"),
        (3.2 * 365 * DAY_S, "3.2 years"),
        (1e12, "more than 100 years"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_bytes_of_a_step_and_of_a_token() -> None:
    assert written_in_words(4 << 20, 2048) == "4 MiB a step, 2 KiB a token"
    assert written_in_words(4 << 20, None) == "4 MiB a step"
