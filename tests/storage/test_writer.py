"""Ranges of files, written past the page cache: every byte where it belongs, and every failure found."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import xxhash

from lightning_ptm.errors import CheckpointError
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.storage import writer as writing
from lightning_ptm.storage.ranges import read_ranges
from lightning_ptm.storage.writer import RangeWriter, SaveOps


@pytest.fixture(params=[4096, 16384])
def small_buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(writing, "BUFFER_BYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_ranges_in_any_order_and_of_any_length(
    tmp_path: Path, small_buffers: int, seed: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_LONG_BYTES", 10_000)
    chance = random.Random(seed)
    content = {name: bytearray(chance.randbytes(chance.randint(0, 200_000))) for name in ("a", "b", "c")}
    cuts = []
    for name, whole in content.items():
        borders = sorted({0, len(whole), *(chance.randint(0, len(whole)) for _ in range(12))})
        cuts += [(name, start, stop) for start, stop in itertools.pairwise(borders)]
    if seed % 2:
        chance.shuffle(cuts)
    writer = RangeWriter(tmp_path)
    for name, whole in content.items():
        writer.create(name, b"head", len(whole))
    for name, start, stop in cuts:
        writer.put(name, start, torch.frombuffer(content[name], dtype=torch.uint8)[start:stop], stays=stays)
    ranges = writer.finish()
    for name, whole in content.items():
        assert (tmp_path / name).read_bytes() == whole or (not whole and (tmp_path / name).stat().st_size == 4)
        mine = [each for each in ranges if each.file == name]
        assert sum(each.stop - each.start for each in mine) == len(whole)
        assert all(each.checksum == xxhash.xxh3_64_intdigest(whole[each.start : each.stop]) for each in mine)
        assert read_ranges(tmp_path / name, mine) is None


def test_long_stretches_that_stay_are_written_from_where_they_are(
    tmp_path: Path, small_buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_LONG_BYTES", 10_000)
    stretch = HostRegion(writing.BUFFER_BYTES * 50)
    values = stretch.tensor
    values.copy_(torch.randint(0, 256, values.shape, dtype=torch.uint8))
    begin, length = values.data_ptr(), values.numel()
    addresses: list[tuple[int, int]] = []

    class Watching(SaveOps):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            address = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()
            if begin <= address < begin + length:
                addresses.append((address - begin, len(buffers[0])))
            return super().pwritev(fd, buffers, offset)

    writer = RangeWriter(tmp_path, Watching())
    writer.create("a", b"", length + 4096 + 100)
    writer.put("a", 100, values[100:4096], stays=True)  # short
    writer.put("a", 4096, values[4096 : length - 7], stays=True)
    writer.put("a", length - 7, torch.full((107,), 3, dtype=torch.uint8))
    ranges = writer.finish()
    written = (tmp_path / "a").read_bytes()
    assert written[100 : length - 7] == bytes(values[100 : length - 7].tolist())
    assert written[length - 7 : length + 100] == bytes([3] * 107)
    assert read_ranges(tmp_path / "a", ranges) is None
    assert sum(count for _, count in addresses) == (length - 7) // 4096 * 4096 - 4096
    stretch.close()


def test_ragged_ends_are_written_when_all_whole_blocks_are_and_neighbours_at_once(
    tmp_path: Path, small_buffers: int
) -> None:
    direct: set[int] = set()
    calls: list[tuple[bool, int]] = []

    class Watching(SaveOps):
        def open(self, path: str, flags: int, mode: int) -> int:
            fd = super().open(path, flags, mode)
            if flags & os.O_DIRECT:
                direct.add(fd)
            return fd

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            calls.append((fd in direct, offset))
            return super().pwritev(fd, buffers, offset)

    whole = torch.randint(0, 256, (400_000,), dtype=torch.uint8)
    writer = RangeWriter(tmp_path, Watching())
    writer.create("a", b"", whole.numel())
    borders = [0, 100_000, 200_000, 300_000, 400_000]
    for start, stop in sorted(itertools.pairwise(borders), key=lambda pair: pair[0] % 200_000):  # no two neighbours
        writer.put("a", start, whole[start:stop])
    writer.finish()
    assert (tmp_path / "a").read_bytes() == bytes(whole.tolist())
    short = [offset for is_direct, offset in calls if not is_direct]
    assert [is_direct for is_direct, _ in calls].index(False) == len(calls) - len(short)
    assert len(short) == 4  # three borders, and the end


@pytest.mark.parametrize("disk_wants", [512, 4096])
def test_a_disk_that_takes_whole_blocks_of_memory_only_gets_copies_of_others(
    tmp_path: Path, small_buffers: int, disk_wants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_LONG_BYTES", 10_000)
    stretch = HostRegion(100 * writing.BUFFER_BYTES)
    values = stretch.tensor[512:]
    values.copy_(torch.randint(0, 256, values.shape, dtype=torch.uint8))
    begin, stop = values.data_ptr(), values.data_ptr() + values.numel()
    in_place: list[bool] = []
    refused: list[int] = []

    class Picky(SaveOps):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            address = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                if address % disk_wants:
                    refused.append(offset)
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                in_place.append(begin <= address < stop)
            return super().pwritev(fd, buffers, offset)

    writer = RangeWriter(tmp_path, Picky())
    writer.create("a", b"", values.numel())
    half = 50 * writing.BUFFER_BYTES
    for start, part in ((0, values[:half]), (half, values[half:])):
        writer.put("a", start, part, stays=True)
    writer.finish()
    assert (tmp_path / "a").read_bytes() == bytes(values.tolist())
    assert any(in_place) is (disk_wants == 512)
    assert bool(refused) is (disk_wants == 4096)
    assert max(refused, default=0) < half  # it has learnt
    stretch.close()


def test_what_waits_is_dropped_when_all_is_given_up(tmp_path: Path) -> None:
    may_write = threading.Event()
    written = 0

    class Slow(SaveOps):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            nonlocal written
            may_write.wait()
            written += len(buffers[0])
            return super().pwritev(fd, buffers, offset)

    stretch = HostRegion(writing._IN_PLACE * writing.BUFFER_BYTES)  # `put` waits when there are more
    writer = RangeWriter(tmp_path, Slow())
    writer.create("a", b"", stretch.tensor.numel())
    writer.put("a", 0, stretch.tensor, stays=True)
    threading.Timer(0.2, may_write.set).start()
    writer.abort()
    assert written < stretch.tensor.numel() // 2
    stretch.close()


def test_a_flipped_bit_is_found(tmp_path: Path, small_buffers: int) -> None:
    writer = RangeWriter(tmp_path)
    writer.create("a", b"", 50_000)
    writer.put("a", 0, torch.arange(50_000).to(torch.uint8))
    ranges = writer.finish()
    raw = bytearray((tmp_path / "a").read_bytes())
    raw[30_000] ^= 1
    (tmp_path / "a").write_bytes(raw)
    bad = read_ranges(tmp_path / "a", ranges)
    assert bad is not None and bad.start <= 30_000 < bad.stop
    raw[30_000] ^= 1
    (tmp_path / "a").write_bytes(raw[:40_000])
    with pytest.raises(CheckpointError, match="cut short"):
        read_ranges(tmp_path / "a", ranges)


class Failing(SaveOps):
    """A disk on which one call fails."""

    def __init__(self, call: str, number: int = errno.EIO, after: int = 0) -> None:
        self._call = call
        self._number = number
        self._left = after

    def _fail(self, call: str) -> None:
        if call == self._call:
            self._left -= 1
            if self._left < 0:
                raise OSError(self._number, os.strerror(self._number))

    def open(self, path: str, flags: int, mode: int) -> int:
        if not flags & os.O_DIRECT:
            self._fail("open")
        return super().open(path, flags, mode)

    def fallocate(self, fd: int, size_bytes: int, start: int = 0) -> None:
        self._fail("fallocate")
        super().fallocate(fd, size_bytes, start)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        self._fail("fsync")
        super().fsync(fd)


@pytest.mark.parametrize(
    ("call", "after", "number"),
    [
        ("open", 0, errno.EACCES),
        ("open", 1, errno.EIO),
        ("fallocate", 0, errno.ENOSPC),
        ("pwritev", 0, errno.EIO),
        ("pwritev", 5, errno.ENOSPC),
        ("fsync", 0, errno.EIO),
    ],
)
def test_every_failure_is_found(tmp_path: Path, small_buffers: int, call: str, after: int, number: int) -> None:
    writer = RangeWriter(tmp_path, Failing(call, number, after))
    try:
        with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
            writer.create("a", b"head", 200_000)
            for start in range(0, 200_000, 10_000):
                writer.put("a", start, torch.zeros(10_000, dtype=torch.uint8))
            writer.finish()
        assert str(tmp_path / "a") in str(caught.value)
    finally:
        writer.abort()
    writer.abort()


def test_short_writes_are_continued(tmp_path: Path, small_buffers: int) -> None:
    whole = torch.randint(0, 256, (123_457,), dtype=torch.uint8)

    class Halves(SaveOps):
        def open(self, path: str, flags: int, mode: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return super().open(path, flags, mode)

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().pwritev(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)

    writer = RangeWriter(tmp_path, Halves())
    writer.create("a", b"", 123_457)
    writer.put("a", 0, whole)
    writer.finish()
    assert (tmp_path / "a").read_bytes() == bytes(whole.tolist())
