"""The states of one moment, cell by cell, with threads in the order that the test says. Many orders, and Ctrl-C:
test_async_save.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.runtime.full_params.snapshot import Snapshot, SnapshotPart, stretches
from lightning_ptm.runtime.tensors import page_io
from lightning_ptm.runtime.tensors.page_io import PageIOBuffers
from lightning_ptm.terms import Tier

CELL = 4096
WAIT_S = 60


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    with Allocator(page_size=64 * 1024, backend=CpuBackend(), sizes={Tier.DEVICE: 1 << 20}) as made:
        yield made


class Taking:
    """Two tensors of three cells and a half each, of which a snapshot is made; `taken` by (tensor, first element)."""

    def __init__(self, allocator: Allocator) -> None:
        self.tensors = [self._filled(allocator, index) for index in range(2)]
        self.taken: list[tuple[int, int]] = []
        self.values: dict[tuple[int, int], Tensor] = {}
        self.before_put: Callable[[int, int], None] = lambda index, start: None
        parts = [
            SnapshotPart(paged, lambda start, values, index=index: self._put(index, start, values))
            for index, paged in enumerate(self.tensors)
        ]
        self.snapshot = Snapshot(allocator, parts, CELL, PageIOBuffers(allocator, []))

    def _filled(self, allocator: Allocator, index: int) -> PagedTensor:
        paged = allocator.allocate("states", 3 * CELL + CELL // 2, torch.float32, Tier.DEVICE)
        paged.tensor().copy_(torch.arange(paged.numel) + index * 1e6)
        return paged

    def _put(self, index: int, start: int, values: Tensor) -> None:
        self.before_put(index, start)
        self.taken.append((index, start // CELL))
        self.values[index, start // CELL] = values.clone()

    def update(self, index: int, cell: int) -> None:
        """Updates a cell, as the updater does."""
        values = self.tensors[index].tensor()[cell * CELL : (cell + 1) * CELL]
        self.snapshot.before_write(self.tensors[index], cell * CELL, values)
        values.fill_(torch.nan)

    def assert_all(self) -> None:
        """Each cell once, of the moment at which the snapshot was made."""
        cells = [(index, cell) for index in range(2) for cell in range(4)]
        assert sorted(self.taken) == cells
        for index, cell in cells:
            stop = min((cell + 1) * CELL, 3 * CELL + CELL // 2)
            assert torch.equal(self.values[index, cell], torch.arange(cell * CELL, stop) + index * 1e6)


def test_in_order_when_nobody_updates(allocator: Allocator) -> None:
    taking = Taking(allocator)
    taking.snapshot.copy_all()
    taking.assert_all()
    assert taking.taken == sorted(taking.taken)
    taking.snapshot.copy_all()
    taking.update(1, 2)
    taking.assert_all()


def test_an_update_that_announces_a_part_of_a_cell_is_an_error(allocator: Allocator) -> None:
    taking = Taking(allocator)
    taking.snapshot.before_write(taking.tensors[1], CELL, taking.tensors[1].tensor()[CELL : CELL + CELL // 2])
    with pytest.raises(InternalError, match="elements 4096 to 6144 of a state"):
        taking.snapshot.copy_all()


def test_what_was_announced_is_not_taken_again(allocator: Allocator) -> None:
    taking = Taking(allocator)
    for index, cell in ((1, 3), (0, 0), (1, 3), (0, 2)):
        taking.update(index, cell)
    assert taking.taken == [(1, 3), (0, 0), (0, 2)]
    taking.snapshot.copy_all()
    taking.assert_all()


def test_a_tensor_that_is_no_part_may_change(allocator: Allocator) -> None:
    taking = Taking(allocator)
    other = allocator.allocate("gradient", CELL, torch.float32, Tier.DEVICE)
    taking.snapshot.before_write(other, 0, other.tensor())
    assert taking.taken == []


def test_an_update_waits_for_the_cell_that_is_being_taken(allocator: Allocator) -> None:
    taking = Taking(allocator)
    begun, go_on, written = threading.Event(), threading.Event(), threading.Event()

    def hold(index: int, start: int) -> None:
        if (index, start) == (0, CELL):
            begun.set()
            assert go_on.wait(WAIT_S)

    def update() -> None:
        taking.update(0, 1)
        written.set()

    taking.before_put = hold
    taker = threading.Thread(target=taking.snapshot.copy_all)
    taker.start()
    assert begun.wait(WAIT_S)
    updater = threading.Thread(target=update)
    updater.start()
    updater.join(0.05)  # it may need longer to come to the cell, never to get past it
    assert not written.is_set()
    go_on.set()
    taker.join(WAIT_S)
    updater.join(WAIT_S)
    assert written.is_set()
    taking.assert_all()


def test_it_ends_when_the_last_cell_is_out_of_the_updaters_hands(allocator: Allocator) -> None:
    taking = Taking(allocator)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold(index: int, start: int) -> None:
        if (index, start) == (1, 3 * CELL):
            begun.set()
            assert go_on.wait(WAIT_S)

    def take() -> None:
        taking.snapshot.copy_all()
        ended.set()

    taking.before_put = hold
    updater = threading.Thread(target=taking.update, args=(1, 3))
    updater.start()
    assert begun.wait(WAIT_S)
    taker = threading.Thread(target=take)
    taker.start()
    taker.join(0.05)
    assert not ended.is_set()
    go_on.set()
    updater.join(WAIT_S)
    taker.join(WAIT_S)
    assert ended.is_set()
    taking.assert_all()


def test_given_up_by_somebody_else(allocator: Allocator) -> None:
    """Nothing is taken any more, updates go on, and the first reason is told each time."""
    taking = Taking(allocator)
    taking.update(0, 3)
    taking.snapshot.fail(OSError("no disk"))
    taking.snapshot.fail(OSError("no network"))
    taking.update(0, 1)
    for _ in range(2):
        with pytest.raises(OSError, match="no disk"):
            taking.snapshot.copy_all()
    assert taking.taken == [(0, 3)]


@pytest.mark.parametrize("by_updater", [False, True])
def test_a_failure_is_told_where_all_are_taken(allocator: Allocator, by_updater: bool) -> None:
    taking = Taking(allocator)

    def fail(index: int, start: int) -> None:
        if (index, start) == (0, 2 * CELL):
            raise OSError("no room")

    taking.before_put = fail
    if by_updater:
        taking.update(0, 1)
        taking.update(0, 2)
        assert taking.tensors[0].tensor()[2 * CELL].isnan()  # it went on
    with pytest.raises(OSError, match="no room"):
        taking.snapshot.copy_all()
    taking.update(1, 1)
    assert taking.taken == ([(0, 1)] if by_updater else [(0, 0), (0, 1)])


def test_values_that_cannot_be_copied_to_ram_fail_the_snapshot(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updater has claimed the cell, so `copy_all` would wait for it for ever."""
    taking = Taking(allocator)

    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(page_io, "elements_of", fail)
        taking.update(0, 2)
    assert taking.tensors[0].tensor()[2 * CELL].isnan()  # the update goes on
    raised: list[BaseException] = []

    def take() -> None:
        try:
            taking.snapshot.copy_all()
        except RuntimeError as error:
            raised.append(error)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    taker.join(WAIT_S)
    assert not taker.is_alive()
    assert [str(error) for error in raised] == ["out of memory"]


def test_cells_of_their_own_are_taken_whole_whoever_takes_them(allocator: Allocator) -> None:
    """Longer ones, too, than are read at once."""
    values = torch.arange(6 * CELL, dtype=torch.float32)
    tensors = [allocator.allocate("states", values.numel(), torch.float32, Tier.DEVICE) for _ in range(2)]
    starts, taken = [0, 3 * CELL, 4 * CELL], [torch.full_like(values, torch.nan) for _ in tensors]
    parts = []
    for paged, into in zip(tensors, taken, strict=True):
        paged.tensor().copy_(values)

        def put(start: int, given: Tensor, into: Tensor = into) -> None:
            assert given.numel() and torch.isnan(into[start : start + given.numel()]).all(), "each once"
            into[start : start + given.numel()] = given

        parts.append(SnapshotPart(paged, put, starts))
    snapshot = Snapshot(allocator, parts, CELL, PageIOBuffers(allocator, []))
    for start, end in ((0, 3 * CELL), (4 * CELL, 4 * CELL), (4 * CELL, 6 * CELL)):
        changing = tensors[0].tensor()[start:end]
        snapshot.before_write(tensors[0], start, changing)
        changing.fill_(torch.nan)
    snapshot.copy_all()
    tensors[1].tensor()[: 3 * CELL].fill_(torch.nan)
    assert all(torch.equal(into, values) for into in taken)


def test_a_part_that_says_how_much_is_taken_at_once_is_taken_so(allocator: Allocator) -> None:
    taken: list[tuple[int, int]] = []
    tensors = [allocator.allocate("states", 3 * CELL, torch.float32, Tier.DEVICE) for _ in range(2)]
    parts = [
        SnapshotPart(paged, lambda start, values: taken.append((start, values.numel())), at_once=at_once)
        for paged, at_once in zip(tensors, (2 * CELL, None), strict=True)
    ]
    Snapshot(allocator, parts, CELL, PageIOBuffers(allocator, [])).copy_all()
    assert taken == [(0, 2 * CELL), (2 * CELL, CELL), (0, CELL), (CELL, CELL), (2 * CELL, CELL)]


def test_who_waits_before_a_put_holds_up_nobody_and_hears_of_a_failure(allocator: Allocator) -> None:
    """The updater waits before it takes the last cell; meanwhile the saving thread takes the others, until it fails."""
    paged = allocator.allocate("states", 3 * CELL, torch.float32, Tier.DEVICE)
    taken: list[int] = []
    waits, failed = threading.Event(), threading.Event()

    def before_put(start: int) -> None:
        if start == 2 * CELL:
            waits.set()
            assert failed.wait(30)

    def put(start: int, values: Tensor) -> None:
        taken.append(start)
        if start == CELL:
            raise OSError("the disk is full")

    part = SnapshotPart(paged, put, before_put=before_put)
    snapshot = Snapshot(allocator, [part], CELL, PageIOBuffers(allocator, []), failed.set)
    last = paged.tensor()[2 * CELL :]
    updater = threading.Thread(target=snapshot.before_write, args=(paged, 2 * CELL, last))
    updater.start()
    assert waits.wait(30)
    with pytest.raises(OSError, match="full"):
        snapshot.copy_all()
    updater.join(30)
    assert not updater.is_alive()
    assert taken[:2] == [0, CELL]


def test_stretches_are_cells_or_equal_lengths_and_of_long_cells_several() -> None:
    assert list(stretches(10, None, 4)) == [(0, 4), (4, 4), (8, 2)]
    assert list(stretches(10, [0, 3, 9], 4)) == [(0, 3), (3, 4), (7, 2), (9, 1)]
    assert list(stretches(0, None, 4)) == []
