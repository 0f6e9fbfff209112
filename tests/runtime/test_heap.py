"""What becomes of freed memory: which settings a run makes, and when. That memory goes: test_lockfree_memory.py."""

from __future__ import annotations

import pytest

from lightning_ptm.runtime import heap
from lightning_ptm.runtime.heap import Heap

GIB = 1 << 30


class Library:
    """The C library's part and the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.free_bytes = 8 * GIB
        self.looks = 0
        self.now_s = 0.0
        for name in ("keep_freed_memory", "give_freed_memory_back", "trim"):
            monkeypatch.setattr(heap, name, lambda name=name: self.done.append(name))
        monkeypatch.setattr(heap, "free_host_bytes", self.free)
        monkeypatch.setattr(heap, "monotonic", lambda: self.now_s)

    def free(self) -> int:
        self.looks += 1
        return self.free_bytes

    def since(self) -> list[str]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


def test_kept_while_there_is_room(library: Library) -> None:
    kept = Heap(keep=True)
    assert library.since() == ["keep_freed_memory"]
    for free_bytes in (8 * GIB, GIB):
        library.free_bytes = free_bytes
        kept.between_steps()
        assert library.since() == []
        library.now_s += 0.6
    assert library.looks == 2


def test_looked_for_twice_a_second(library: Library) -> None:
    kept = Heap(keep=True)
    for _ in range(40):
        kept.between_steps()
        library.now_s += 0.1
    assert 6 <= library.looks <= 9


def test_given_back_from_the_first_step_on_that_finds_little(library: Library) -> None:
    kept = Heap(keep=True)
    library.since()
    library.free_bytes = GIB - 1
    kept.between_steps()
    assert library.since() == ["give_freed_memory_back", "trim"]
    library.free_bytes = 8 * GIB
    kept.between_steps()
    assert library.since() == ["trim"]


def test_never_kept(library: Library) -> None:
    returned = Heap(keep=False)
    returned.between_steps()
    returned.between_steps()
    assert library.since() == ["give_freed_memory_back", "trim", "trim"]


@pytest.mark.parametrize("keep", [False, True])
def test_at_the_end_it_leaves_in_any_case(library: Library, keep: bool) -> None:
    ended = Heap(keep=keep)
    library.since()
    ended.close()
    assert library.since() == ["trim"]
