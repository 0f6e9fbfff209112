"""Tensors on disk that the next allocator goes on with: their bytes stay, nobody has those of others, files end once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptm.errors import PageIOError
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.paged_tensor import Extent, PagedTensor, Pages
from lightning_ptm.memory.reused_extents import ReusedExtents, frames_of, gaps
from lightning_ptm.terms import Tier
from memory.files import CountedFiles, ScriptedFiles

PAGE = 64 * 1024
NUMEL = PAGE // 4

Made = Callable[..., Allocator]


def allocator(
    folders: list[Path], pages: int, reused_extents: ReusedExtents | None = None, files: ScriptedFiles | None = None
) -> Allocator:
    return Allocator(
        page_size=PAGE,
        backend=CpuBackend(),
        sizes={Tier.DEVICE: 8 * PAGE, Tier.DISK: pages * PAGE},
        disk_paths=folders,
        file_ops=files,
        reused_extents=reused_extents,
        poison=True,
    )


def write(there: Allocator, tensor: PagedTensor, value: float) -> None:
    buffer = there.allocate("buffer", tensor.numel, torch.float32, Tier.DEVICE)
    buffer.tensor().fill_(value)
    there.copy(buffer, tensor).wait()
    there.release(buffer)


def read(there: Allocator, tensor: PagedTensor) -> torch.Tensor:
    buffer = there.allocate("buffer", tensor.numel, torch.float32, Tier.DEVICE)
    there.copy(tensor, buffer).wait()
    found = buffer.tensor().clone()
    there.release(buffer)
    return found


def homes(there: Allocator, *sizes: int) -> list[PagedTensor]:
    return [
        there.allocate(f"home {at}", size, torch.float32, Tier.DISK, shared_tail=True) for at, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("paths", [1, 3])
def test_what_is_kept_has_its_bytes_and_what_is_read_keeps_them_meanwhile(tmp_path: Path, paths: int) -> None:
    folders = [tmp_path / str(index) for index in range(paths)]
    for folder in folders:
        folder.mkdir()
    old = allocator(folders, 7)
    kept, moved, also_kept, dead = homes(old, 2 * NUMEL, NUMEL + 1024, 2048, NUMEL)
    for value, tensor in enumerate((kept, moved, also_kept, dead)):
        write(old, tensor, value)
    reused_extents = old.reusable_extents([kept, also_kept], [moved])
    assert reused_extents is not None
    with allocator(folders, 8, reused_extents) as new:
        assert new.capacity_bytes(Tier.DISK) == 8 * PAGE
        here, also_here = new.reused_tensor(kept), new.reused_tensor(also_kept)
        assert new.is_reused(here) and new.is_reused(also_here)
        (fresh,) = homes(new, 4 * NUMEL)
        assert not new.is_reused(fresh)
        write(new, fresh, 9.0)
        assert (read(old, moved) == 1).all(), "nobody has written there"
        old.close()
        assert (read(new, here) == 0).all() and (read(new, also_here) == 2).all() and (read(new, fresh) == 9).all()
        write(new, here, 5.0)
        new.release(fresh)
        assert (read(new, here) == 5).all()
        again = homes(new, 4 * NUMEL)
        assert len(frames_of(again) & frames_of([here, also_here])) == 0


def test_space_of_what_has_moved_comes_back_and_all_of_it_at_the_end(tmp_path: Path) -> None:
    class Given(CountedFiles):
        def __init__(self) -> None:
            super().__init__()
            self.back: list[tuple[int, int]] = []
            self.emptied = 0

        def give_back(self, fd: int, size_bytes: int, start: int) -> None:
            super().give_back(fd, size_bytes, start)
            self.back.append((start // PAGE, size_bytes // PAGE))
            self.left = os.fstat(fd).st_blocks * 512

        def empty(self, fd: int) -> None:
            super().empty(fd)
            self.emptied += 1

    files = Given()
    old = Allocator(
        page_size=PAGE,
        backend=CpuBackend(),
        sizes={Tier.DEVICE: 8 * PAGE, Tier.DISK: 6 * PAGE},
        disk_paths=[tmp_path],
        file_ops=files,
    )
    kept, moved = homes(old, NUMEL, 5 * NUMEL)
    reused_extents = old.reusable_extents([kept], [moved])
    new = Allocator(
        page_size=PAGE,
        backend=CpuBackend(),
        sizes={Tier.DEVICE: 8 * PAGE, Tier.DISK: 3 * PAGE},
        disk_paths=[tmp_path],
        file_ops=files,
        reused_extents=reused_extents,
    )
    assert not files.back
    old.close()
    assert files.back == [(1, 5)] and not files.emptied
    assert files.left <= 4 * PAGE  # a block or two of the file system's own
    new.close()
    assert files.emptied == 1


def test_a_disk_without_room_for_what_is_new_leaves_the_old_pages_as_they_were(tmp_path: Path) -> None:
    files = ScriptedFiles()
    with allocator([tmp_path], 3, files=files) as old:
        (kept,) = homes(old, 2 * NUMEL)
        write(old, kept, 3.0)
        files.fallocate_errno = 28
        with pytest.raises(PageIOError, match="No space left"):
            allocator([tmp_path], 6, old.reusable_extents([kept], []), files)
        assert (read(old, kept) == 3).all()
    assert sorted(files.opened) == sorted(set(files.opened)) and len(files.closed) == 2


@given(
    kept=st.sets(st.integers(0, 20), max_size=8),
    read_too=st.sets(st.integers(0, 20), max_size=8),
    more=st.integers(0, 9),
)
def test_frames_are_those_of_what_is_kept_and_free_ones_side_by_side(
    kept: set[int], read_too: set[int], more: int
) -> None:
    def of(frames: set[int]) -> tuple[PagedTensor, ...]:
        tensors = []
        for frame in frames:
            tensors.append(PagedTensor(frame, "tensor", 4, torch.float32, Tier.DISK))
            tensors[-1].place(Tier.DISK, Pages(PAGE, [Extent(frame * PAGE, frame * PAGE + 4096)]), None)
        return tuple(tensors)

    reused_extents = ReusedExtents(None, 2, of(kept), of(read_too))  # type: ignore[arg-type]
    found = reused_extents.frames(len(kept) + more)
    frames = [frame for each in found for frame in each]
    assert frames == sorted(set(frames)) and len(frames) == len(kept) + more
    fresh = sorted(set(frames) - kept)
    assert not set(fresh) & read_too and fresh == list(range(fresh[0], fresh[0] + more) if fresh else [])
    between = {frame for gap in gaps(found) for frame in gap}
    assert between == set(range(frames[-1] if frames else 0)) - set(frames)
