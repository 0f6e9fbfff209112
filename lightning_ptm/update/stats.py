"""Counters of the updater: bytes moved, seconds of arithmetic, seconds waited by cause."""

from __future__ import annotations

import dataclasses
import enum


class Stall(enum.Enum):
    """What an update waited for."""

    READ = "read"
    WRITE = "write"
    GRADIENT = "gradient"
    SAVE = "save"


@dataclasses.dataclass(slots=True)
class UpdateStats:
    """Totals since the updater was made. Written by the thread that does the arithmetic; others may read at any time."""

    bytes_read: int = 0
    bytes_written: int = 0
    chunks: int = 0
    arithmetic_s: float = 0.0
    read_stall_s: float = 0.0
    write_stall_s: float = 0.0
    gradient_stall_s: float = 0.0
    save_stall_s: float = 0.0

    def add_stall(self, cause: Stall, seconds: float) -> None:
        """Count time waited."""
        if cause is Stall.READ:
            self.read_stall_s += seconds
        elif cause is Stall.WRITE:
            self.write_stall_s += seconds
        elif cause is Stall.SAVE:
            self.save_stall_s += seconds
        else:
            self.gradient_stall_s += seconds
