"""An allocation above a ceiling fails where it is asked for; the limits that a process had are its own again."""

from __future__ import annotations

import ctypes
import json
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lightning_ptm.memory import memory_limit as module_under_test
from lightning_ptm.memory.memory_limit import MemoryLimit, wanted_bytes

MIB = 1 << 20

PROGRAM = """
import json, sys, threading
import numpy, torch
from lightning_ptm.memory.memory_limit import MemoryLimit, wanted_bytes

torch.set_num_threads(1)
threading.stack_size(256 << 10)  # join() returns before a stack is freed: on a busy machine eight of 8 MiB filled the limit

def run_in_thread():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()

for asks in json.loads(sys.argv[1]):
    ceiling = MemoryLimit()
    ceiling.put(64 << 20)
    try:
        eval(asks)
        print("taken")
    except BaseException as error:
        print(type(error).__name__, ceiling.refused(error), wanted_bytes(error))
    torch.zeros(1 << 20)  # what there is room for
    ceiling.lift()
    torch.zeros(64 << 20)
"""

ASKS = {
    "torch.zeros(32 << 20)": "RuntimeError True 134217728",
    "torch.empty(32 << 20)": "RuntimeError True 134217728",
    "torch.ones(20 << 20) + 1": "RuntimeError True 83886080",
    "torch.ones(10 << 20).double()": "RuntimeError True 83886080",
    "torch.cat([torch.ones(8 << 20)] * 2)": "RuntimeError True 67108864",
    "torch.ones(4096, 4).mm(torch.ones(4, 8192))": "RuntimeError True 134217728",
    "torch.nn.functional.one_hot(torch.zeros(1 << 14, dtype=torch.long), 1024)": "RuntimeError True 134217728",
    "bytearray(100 << 20)": "MemoryError True None",
    "[0] * (16 << 20)": "MemoryError True None",
    "numpy.ones(16 << 20)": "MemoryError True None",
    "[run_in_thread() for _ in range(2000)]": "taken",  # its stack is taken from the limit while it runs
    "torch.zeros(8 << 20)": "taken",
    "1 / 0": "ZeroDivisionError False None",
    "torch.ones(2, 3) @ torch.ones(2, 3)": "RuntimeError False None",
}


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Answers of one process, in which each question sets a ceiling of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(list(ASKS))], capture_output=True, text=True, timeout=120, check=True
    )
    return dict(zip(ASKS, ran.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("asks", ASKS)
def test_what_is_above_it_is_refused(answers: dict[str, str], asks: str) -> None:
    assert answers[asks] == ASKS[asks]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Memory limits of an imagined process."""
    now = {"soft": resource.RLIM_INFINITY, "hard": resource.RLIM_INFINITY}

    def change(what: int, values: tuple[int, int]) -> None:
        assert what == resource.RLIMIT_DATA and values[1] == now["hard"]
        now["soft"] = values[0]

    monkeypatch.setattr(module_under_test.resource, "getrlimit", lambda what: (now["soft"], now["hard"]))
    monkeypatch.setattr(module_under_test.resource, "setrlimit", change)
    monkeypatch.setattr(module_under_test, "_mapped_bytes", lambda: 300 * MIB)
    monkeypatch.setattr(module_under_test, "_returned_heap_bytes", lambda *_: 0)
    yield now


def test_it_is_put_anew_and_lifted(limits: dict[str, int]) -> None:
    made = MemoryLimit()
    made.lift()
    assert limits["soft"] == resource.RLIM_INFINITY
    assert made.left_bytes() is None
    made.put(100 * MIB)
    assert limits["soft"] == 400 * MIB and made.left_bytes() == 100 * MIB
    made.put(50 * MIB)
    assert limits["soft"] == 350 * MIB and made.left_bytes() == 50 * MIB
    made.put(-50 * MIB)  # there is less than is mapped already
    assert limits["soft"] == 300 * MIB
    made.lift()
    assert limits["soft"] == resource.RLIM_INFINITY
    assert not made.refused(MemoryError())


@pytest.mark.parametrize("which", ["soft", "hard"])
def test_a_limit_of_somebody_else_stays(limits: dict[str, int], which: str) -> None:
    limits[which] = 320 * MIB
    made = MemoryLimit()
    made.put(100 * MIB)
    assert limits["soft"] == 320 * MIB
    made.put(10 * MIB)
    assert limits["soft"] == 310 * MIB
    made.lift()
    assert limits["soft"] == (320 * MIB if which == "soft" else resource.RLIM_INFINITY)


def test_where_the_system_does_not_tell_there_is_none(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "_mapped_bytes", lambda: None)
    made = MemoryLimit()
    made.put(100 * MIB)
    assert limits["soft"] == resource.RLIM_INFINITY and not made.refused(MemoryError())


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("could not create a primitive", True),
        ("could not execute a primitive", True),
        ("could not create a primitive descriptor for the matmul primitive", False),
    ],
)
def test_what_onednn_says_of_memory(limits: dict[str, int], words: str, refused: bool) -> None:
    made = MemoryLimit()
    made.put(100 * MIB)
    assert made.refused(RuntimeError(words)) is refused
    made.lift()


def test_an_error_that_names_no_bytes() -> None:
    assert wanted_bytes(MemoryError("x")) is None


def test_the_last_of_two_that_is_lifted_puts_the_limit_back(limits: dict[str, int]) -> None:
    first, second = MemoryLimit(), MemoryLimit()
    first.put(100 * MIB)
    second.put(50 * MIB)
    first.lift()
    assert limits["soft"] == 350 * MIB
    second.lift()
    assert limits["soft"] == resource.RLIM_INFINITY
    second.lift()
    assert limits["soft"] == resource.RLIM_INFINITY


_HOLES = """
import ctypes, sys
from lightning_ptm.memory.malloc import malloc_free_bytes, trim
from lightning_ptm.memory.memory_limit import MemoryLimit, _mapped_bytes, _returned_heap_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
MIB = 1 << 20
blocks = [libc.malloc(64 << 10) for _ in range(64 * 16)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
for block in blocks[:-1]:  # the last one keeps the heap from shrinking
    libc.free(block)
trim()
holes = _returned_heap_bytes()
assert 56 * MIB <= holes <= 72 * MIB, holes
limit = MemoryLimit()
limit.put(96 * MIB)
before = _mapped_bytes()
taken = 0
while taken < 200 * MIB:
    block = libc.malloc(64 << 10)
    if not block:
        break
    ctypes.memset(block, 1, 64 << 10)
    taken += 64 << 10
print(taken // MIB)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc's counters are glibc's")
def test_freed_memory_that_is_used_again_counts() -> None:
    """A heap with 64 MiB of holes that the system has back, and 96 MiB left: not 160 MiB."""
    found = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert 80 <= int(found.stdout) <= 104


_UNUSED = """
import ctypes, mmap
from lightning_ptm.memory.memory_limit import _returned_heap_bytes, freed_resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
MIB = 1 << 20
before = freed_resident_bytes()
pages = mmap.mmap(-1, 512 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
blocks = [libc.malloc(64 << 10) for _ in range(64 * 16)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
for block in blocks[:-1]:  # the last one keeps the heap from shrinking
    libc.free(block)
print(_returned_heap_bytes() // MIB, _returned_heap_bytes(512 * MIB) // MIB)
print((freed_resident_bytes(512 * MIB) - before) // MIB)
libc.malloc_trim(0)
print((freed_resident_bytes(512 * MIB) - before) // MIB)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc's counters are glibc's")
def test_pages_that_are_not_used_yet_are_no_freed_parts_of_the_heap() -> None:
    """64 MiB of the heap are free and have RAM, beside pages of 512 MiB without it."""
    found = subprocess.run([sys.executable, "-c", _UNUSED], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    with_pages, without, resident, trimmed = map(int, found.stdout.split())
    assert with_pages >= 56 and without <= 8 and 56 <= resident <= 72 and trimmed <= 8


def test_a_limit_that_is_not_in_force_has_none_where_another_one_was_forgotten(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "_IN_FORCE", set())
    monkeypatch.setattr(module_under_test, "_SOFT_LIMIT_BEFORE", {})
    for _ in range(9):
        MemoryLimit().put(100 * MIB)
        fresh = MemoryLimit()  # at the same address, if the one before is gone
        assert fresh.left_bytes() is None and not fresh.refused(MemoryError())
        fresh.lift()
        assert limits["soft"] == 400 * MIB
