"""Rated endurance of disks: the bytes that may be written to one, and how many steps and how long that is.

An SSD has a rating of terabytes written (TBW) in its data sheet. Knows numbers and texts; the bytes of a step are counted
elsewhere (runtime/engine/disk_writes.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ptm.errors import ConfigError, format_bytes
from lightning_ptm.memory.disk import MEMORY_FILE_SYSTEMS, file_system_type

WRITES_OF_ITS_SIZE = 600
"""How often a disk may be written as a whole, where its rating is not given: 600 TB for 1 TB, as consumer SSDs with three
bits a cell are rated (Samsung 990 PRO: 600, 1200 and 2400 TB for 1, 2 and 4 TB). Those with four bits a cell have less than
half of that, those of data centres (one write a day for five years) three times as much."""
DAY_S = 86_400
MONTH_S = 30 * DAY_S
_YEAR_S = 365 * DAY_S
_UNITS = {"d": DAY_S, "w": 7 * DAY_S, "y": _YEAR_S}


@dataclass(frozen=True, slots=True)
class DiskLife:
    """Lifetime of a disk that a run writes to.

    Attributes:
        written_bytes: bytes that all ranks of a machine write to it in an optimizer step.
        rated_bytes: bytes that may be written to it, by its rating.
        given: whether the rating was given; else it is `WRITES_OF_ITS_SIZE` times its size.
    """

    written_bytes: int
    rated_bytes: int
    given: bool

    @property
    def steps(self) -> int:
        """Steps until the rating is used up, on a new disk."""
        return self.rated_bytes // self.written_bytes

    def seconds(self, step_s: float) -> float:
        """Returns the seconds until the rating is used up, on a new disk."""
        return self.rated_bytes / self.written_bytes * step_s

    @property
    def rating(self) -> str:
        """The rating in words, such as `600 TB (disk_tbw)`."""
        how = "disk_tbw" if self.given else f"{WRITES_OF_ITS_SIZE} times the disk's size, since no disk_tbw is given"
        return f"{self.rated_bytes / 1e12:.4g} TB ({how})"


def rated_bytes(given: int | None, size_bytes: int) -> int:
    """Returns the rating of a disk: what was given, or else a multiple of its size."""
    return WRITES_OF_ITS_SIZE * size_bytes if given is None else given


def disk_size(path: Path) -> int | None:
    """Returns the bytes of the file system of a folder; None if it is memory, or cannot be read."""
    try:
        if file_system_type(path) in MEMORY_FILE_SYSTEMS:
            return None
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def disk_life(paths: Sequence[Path], written_bytes: Sequence[int], given: int | None) -> DiskLife | None:
    """Returns the life of the disk that wears out first; None if nothing is written to a disk.

    Folders of one file system are one disk.

    Args:
        paths: folders on this machine.
        written_bytes: bytes written to each in a step, by all ranks of this machine.
        given: the rating of each disk; None: by its size.
    """
    written: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for path, count in zip(paths, written_bytes, strict=True):
        size = disk_size(path)
        if size and count:
            device = os.stat(path).st_dev
            written[device] = written.get(device, 0) + count
            sizes[device] = size
    lives = [DiskLife(count, rated_bytes(given, sizes[device]), given is not None) for device, count in written.items()]
    return min(lives, key=lambda life: life.rated_bytes / life.written_bytes, default=None)


def parse_duration(text: str, *, name: str) -> float:
    """Reads `"3y"`, `"26w"` or `"90d"`, in seconds.

    Raises:
        ConfigError: the text is no such duration.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([dwy])\s*", str(text).lower())
    seconds = float(match.group(1)) * _UNITS[match.group(2)] if match else 0.0
    if not seconds:
        raise ConfigError(f"{name} is {text!r}; give years, weeks or days: '3y', '26w' or '90d'")
    return seconds


def duration(seconds: float) -> str:
    """Returns a duration in words: `5.5 hours`, `19 days`, `3.2 years`."""
    for unit, unit_s, most_s in (
        ("minutes", 60, 2 * 3600),
        ("hours", 3600, 3 * DAY_S),
        ("days", DAY_S, 2 * _YEAR_S),
    ):
        if seconds < most_s:
            return f"{seconds / unit_s:.2g} {unit}" if seconds < 100 * unit_s else f"{seconds / unit_s:.0f} {unit}"
    years = seconds / _YEAR_S
    return f"{years:.2g} years" if years < 100 else "more than 100 years"


def written_in_words(written_bytes: float, tokens: float | None) -> str:
    """Returns the bytes of a step, with those of a token if it has tokens: `4 MiB a step, 2 KiB a token`."""
    return f"{format_bytes(written_bytes)} a step" + (
        f", {format_bytes(written_bytes / tokens)} a token" if tokens else ""
    )
