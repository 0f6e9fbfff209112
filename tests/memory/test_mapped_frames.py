"""What adjacent addresses of scattered pages cost on a CPU (docs/design/frames.md; `-m slow -s` prints seconds and ratios).

A unit of the device tier is a tensor in adjacent pages. Here its pages are scattered in a file in memory (memfd) and mapped
to adjacent addresses at each fetch, as cuMemMap would on a GPU, and compared with pages that stay where they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
PAGES = 128
"""Pages of the tier."""
UNIT_PAGES = 16
REPEATS = 41
_MAP_FIXED, _MAP_POPULATE = 0x10, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def _mmap(address: int | None, numel: int, protection: int, flags: int, file: int, offset: int) -> int:
    found = _libc.mmap(address, numel, protection, flags, file, offset)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


def tensor_at(address: int, numel: int) -> Tensor:
    """An fp32 tensor in memory that others own."""
    return torch.frombuffer((ctypes.c_float * numel).from_address(address), dtype=torch.float32)


class MappedUnit:
    """Adjacent addresses for the pages of a unit."""

    def __init__(self, file: int) -> None:
        self._file, self._bytes = file, UNIT_PAGES * PAGE_BYTES
        self._anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = _mmap(None, self._bytes, 0, self._anonymous, -1, 0)
        self.flat = tensor_at(self.address, self._bytes // 4)

    def map(self, frames: list[int]) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        for number, frame in enumerate(frames):
            place = self.address + number * PAGE_BYTES
            _mmap(place, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._file, frame * PAGE_BYTES)

    def unmap(self) -> None:
        _mmap(self.address, self._bytes, 0, self._anonymous | _MAP_FIXED, -1, 0)


def seconds_of(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


@pytest.mark.slow
def test_a_fetch_that_maps_pages_takes_longer() -> None:
    file = os.memfd_create("pages")
    os.ftruncate(file, PAGES * PAGE_BYTES)
    chosen = random.Random(0)
    home = torch.randn(UNIT_PAGES * PAGE_BYTES // 4)
    planned = torch.zeros_like(home)
    unit = MappedUnit(file)
    width = 1024
    rows = torch.randn(512, width)
    found: dict[str, list[float]] = {name: [] for name in ("map", "copy", "product", "planned_copy", "planned_product")}

    def product(flat: Tensor) -> Callable[[], object]:
        return lambda: rows @ flat.view(-1, width).T

    for _ in range(REPEATS):
        frames = chosen.sample(range(PAGES), UNIT_PAGES)
        found["planned_copy"].append(seconds_of(lambda: planned.copy_(home)))
        found["planned_product"].append(seconds_of(product(planned)))
        mapping_s = seconds_of(lambda frames=frames: unit.map(frames))  # type: ignore[misc]
        found["copy"].append(seconds_of(lambda: unit.flat.copy_(home)))
        found["product"].append(seconds_of(product(unit.flat)))
        assert torch.equal(unit.flat, home)
        found["map"].append(mapping_s + seconds_of(unit.unmap))
    os.close(file)
    middle = {name: median(each) for name, each in found.items()}
    ratios = {
        "fetch": (middle["map"] + middle["copy"]) / middle["planned_copy"],
        "product": middle["product"] / middle["planned_product"],
    }
    print({"seconds": middle, "ratios": ratios})
    assert ratios["fetch"] > 1.1
