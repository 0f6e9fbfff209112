"""Counters of the updater: bytes moved, seconds of arithmetic, and seconds waited by cause."""

from __future__ import annotations

import dataclasses
import enum


class Wait(enum.Enum):
    """Causes for which an update waits."""

    READ = "read"
    WRITE = "write"
    GRADIENT = "gradient"
    SAVE = "save"


@dataclasses.dataclass(slots=True)
class UpdateStats:
    """Totals since the updater was made. Written by the thread that does the arithmetic; any thread may read them."""

    bytes_read: int = 0
    bytes_written: int = 0
    chunks: int = 0
    arithmetic_s: float = 0.0
    read_stall_s: float = 0.0
    write_stall_s: float = 0.0
    gradient_stall_s: float = 0.0
    save_stall_s: float = 0.0

    def add_read(self, size: int) -> None:
        """Counts bytes of master states read."""
        self.bytes_read += size

    def add_written(self, size: int) -> None:
        """Counts bytes of master states written."""
        self.bytes_written += size

    def add_chunk(self, arithmetic_s: float) -> None:
        """Counts a chunk that was computed."""
        self.arithmetic_s += arithmetic_s
        self.chunks += 1

    def add_stall(self, cause: Wait, seconds: float) -> None:
        """Counts time waited."""
        name = f"{cause.value}_stall_s"
        setattr(self, name, getattr(self, name) + seconds)
