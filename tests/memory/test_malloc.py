from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from lightning_ptm.memory import malloc
from lightning_ptm.memory.malloc import malloc_in_use_bytes, set_malloc_thresholds, trim
from lightning_ptm.memory.region import HostRegion

MIB = 1 << 20
IS_GLIBC = hasattr(ctypes.CDLL(None), "mallinfo2")
needs_glibc = pytest.mark.skipif(not IS_GLIBC, reason="needs glibc 2.33 or later")


@needs_glibc
def test_in_use_counts_tensors_and_not_regions() -> None:
    before = malloc_in_use_bytes()
    tensor = torch.ones(8 * MIB, dtype=torch.uint8)
    assert 8 * MIB <= malloc_in_use_bytes() - before < 9 * MIB
    region = HostRegion(64 * MIB)
    assert malloc_in_use_bytes() - before < 9 * MIB
    region.close()
    del tensor
    assert malloc_in_use_bytes() - before < MIB


KEEPS = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("malloc", sys.argv[2])
malloc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(malloc)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "set":
    assert malloc.set_malloc_thresholds()
def take(size):
    address = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(address, 1, size)
    return address
def resident_mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) // 1024
def step():
    for activation in [(take(20 << 20), take(100_000))[0] for _ in range(6)]:
        libc.free(ctypes.c_void_p(activation))
step()
before = resident_mib()
step()
print(resident_mib() - before)
"""


@needs_glibc
def test_freed_activations_leave_the_process() -> None:
    """Small blocks that live on keep the freed ones below them resident; in processes of their own: settings stay."""
    kept_mib = {}
    for mode in ("default", "set"):
        script = [sys.executable, "-c", KEEPS, mode, malloc.__file__]
        kept_mib[mode] = int(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    assert kept_mib["default"] > 80
    assert kept_mib["set"] < 10


def test_calls_do_no_harm_where_they_have_no_effect() -> None:
    assert isinstance(trim(), bool)
    assert malloc_in_use_bytes() >= 0
    assert callable(set_malloc_thresholds)
