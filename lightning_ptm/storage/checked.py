"""One safetensors file of a sharded checkpoint, read against the checksums of those that wrote it.

I1: every byte of every tensor was written by somebody, or opening it raises.
I2: no byte is handed out before the range that it was written in has been compared with its checksum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.archive import PIECE_BYTES
from lightning_ptm.storage.folder import StateFile
from lightning_ptm.storage.tensors import Stored, read_layout
from lightning_ptm.storage.writer import Range, read_range, read_ranges


class CheckedFile:
    """See the file's contract.

    Args:
        folder: the checkpoint.
        file: what its index says of this file.
        ranges: what was written of it, in order.

    Raises:
        CheckpointError: it is no such file, was cut short, or bytes of it were written by nobody.
    """

    def __init__(self, folder: Path, file: StateFile, ranges: Sequence[Range]) -> None:
        self.path = folder / file.name
        self.layout = read_layout(self.path)
        self._ranges = ranges
        self._starts = [each.start for each in ranges]
        position = self.layout.tensors[0].start if self.layout.tensors else file.size_bytes
        for each in ranges:
            if each.start != position:
                raise CheckpointError(f"{self.path}: nobody has written bytes {position} to {each.start}")
            position = each.stop
        if position != self.layout.size_bytes or self.layout.size_bytes != file.size_bytes:
            raise CheckpointError(
                f"{self.path} has {self.layout.size_bytes} bytes, of {file.size_bytes} that were written"
            )
        # The range that was read last: neighbours lie in one, and whoever reads goes forward.
        self._held: Range | None = None
        self._bytes = memoryview(bytearray())

    def check(self, seen: Callable[[int], None] = lambda count: None) -> None:
        """Compare all of it. `seen` is told how many more bytes were read.

        Raises:
            CheckpointError: with the file, the tensor and the range that differ.
        """
        bad = read_ranges(self.path, self._ranges, seen)
        if bad is not None:
            raise self._damage(bad)

    def pieces(self, stored: Stored) -> Iterator[Tensor]:
        """A tensor's elements in order, as 1-D tensors of at most PIECE_BYTES; each is good until the next is asked for.

        Raises:
            CheckpointError: as `check`, of what this tensor needs.
        """
        buffer = memoryview(bytearray(min(PIECE_BYTES, stored.stop - stored.start)))
        with self.path.open("rb", buffering=0) as file:
            for start in range(stored.start, stored.stop, PIECE_BYTES):
                view = buffer[: min(PIECE_BYTES, stored.stop - start)]
                self._fill(file.fileno(), view, start)
                yield torch.frombuffer(view, dtype=stored.dtype)

    def let_go(self) -> None:
        """Give back the memory of what was read last."""
        self._held, self._bytes = None, memoryview(bytearray())

    def _fill(self, descriptor: int, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            each = self._ranges[bisect_right(self._starts, start + done) - 1]
            if each is not self._held:
                self._hold(descriptor, each)
            count = min(each.stop - start - done, len(view) - done)
            begin = start + done - each.start
            view[done : done + count] = self._bytes[begin : begin + count]
            done += count

    def _hold(self, descriptor: int, each: Range) -> None:
        size = each.stop - each.start
        if len(self._bytes) < size:
            self._bytes = memoryview(bytearray(size))
        self._held = None
        if not read_range(descriptor, self.path, each, self._bytes[:size]):
            raise self._damage(each)
        self._held = each

    def _damage(self, bad: Range) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: bytes {bad.start} to {bad.stop}, in {self.layout.tensor_at(bad.start)}, are not those that were "
            f"written (their checksum differs); use an earlier checkpoint, and check that disk"
        )
