from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from lightning_ptm.memory import malloc
from lightning_ptm.memory.malloc import give_freed_memory_back, keep_freed_memory, malloc_in_use_bytes, trim
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


PRELUDE = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("malloc", sys.argv[2])
malloc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(malloc)
settings = {
    "give_freed_memory_back": malloc.give_freed_memory_back,
    "give_small_back": lambda: malloc.give_freed_memory_back(and_small=True),
    "keep_freed_memory": malloc.keep_freed_memory,
    "end_settings": malloc.end_settings,
    "keep_all_but_large": lambda: malloc.keep_freed_memory(but_large=True),
}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for setting in sys.argv[1].split("+"):
    assert setting == "default" or settings[setting]()
def take(size):
    address = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(address, 1, size)
    return address
"""

KEEPS = (
    PRELUDE
    + """
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
)

LEFT = (
    PRELUDE
    + """
def resident_mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) // 1024
before = resident_mib()
for size in (1 << 20, 64 << 20):
    blocks = [0] * ((192 << 20) // size)  # of its length at once: it would lie among them, and outlive those below it
    for place in range(len(blocks)):
        blocks[place] = take(size)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
print(resident_mib() - before)
"""
)

FAULTS = (
    PRELUDE
    + """
import resource
def step():
    for block in [take(64 << 20) for _ in range(3)]:
        libc.free(ctypes.c_void_p(block))
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
)


def in_a_process(script: str, settings: str) -> int:
    """The number that it prints; processes of their own, because the settings stay."""
    command = [sys.executable, "-c", script, settings, malloc.__file__]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@needs_glibc
def test_freed_activations_leave_the_process() -> None:
    """Small blocks that live on keep the freed ones below them resident."""
    assert in_a_process(KEEPS, "default") > 80
    assert in_a_process(KEEPS, "give_freed_memory_back") < 10
    assert in_a_process(KEEPS, "keep_freed_memory+give_freed_memory_back") < 10


@needs_glibc
def test_freed_blocks_below_4_mib_leave_the_process_where_ram_is_short() -> None:
    small = KEEPS.replace("20 << 20", "1 << 20").replace("range(6)", "range(64)")
    once = small.replace("step()\nbefore = resident_mib()\nstep()", "before = resident_mib()\nstep()")
    assert in_a_process(once, "give_freed_memory_back") > 40
    assert in_a_process(once, "give_freed_memory_back+give_small_back") < 10


@needs_glibc
def test_freed_activations_are_there_for_the_next_step() -> None:
    """Each 64 MiB block that goes back to the system is faulted in again, 4 KiB at a time."""
    assert in_a_process(FAULTS, "default") > 100_000
    assert in_a_process(FAULTS, "keep_freed_memory") < 1_000
    assert in_a_process(FAULTS, "give_freed_memory_back+keep_freed_memory") < 1_000


@needs_glibc
def test_all_but_large_blocks_are_there_for_the_next_step() -> None:
    """Blocks of 20 MiB stay, those of 64 MiB go, whatever was set before."""
    for before in ("", "keep_freed_memory+", "give_freed_memory_back+"):
        assert in_a_process(FAULTS.replace("64 << 20", "20 << 20"), before + "keep_all_but_large") < 1_000
        assert in_a_process(FAULTS, before + "keep_all_but_large") > 100_000


@needs_glibc
def test_what_is_freed_after_a_run_goes_as_in_a_process_without_one() -> None:
    for run in ("give_freed_memory_back", "keep_freed_memory", "keep_all_but_large"):
        # glibc keeps 64 MiB at most, but for what Python by chance takes above them; without the end it is more each time.
        assert any(in_a_process(LEFT, f"{run}+end_settings") < 70 for _ in range(3))
    assert in_a_process(LEFT, "keep_freed_memory") > 150
    assert in_a_process(FAULTS.replace("64 << 20", "8 << 20"), "give_freed_memory_back+end_settings") < 1_000


def test_calls_do_no_harm_where_they_have_no_effect() -> None:
    assert isinstance(trim(), bool)
    assert malloc_in_use_bytes() >= 0
    assert callable(give_freed_memory_back) and callable(keep_freed_memory)
