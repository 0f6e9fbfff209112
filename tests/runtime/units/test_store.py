"""The states of a full flat and of a unit: what is bound when, and that what does not fit changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import NUMEL, Model, OnePage, Parts, parts

from lightning_ptm.errors import CapacityError, InternalError, UsageError
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.fetch_policy import Among
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.runtime.units.store import DevicePages, FlatStore, FullState
from lightning_ptm.terms import Tier

RELEASED, FETCHING, LIVE = FullState.RELEASED, FullState.FETCHING, FullState.LIVE


def is_bound(flat: FlatStore, made: Parts) -> bool:
    """Whether every parameter is what the flat's home holds; else none of them has values of its own."""
    if not flat.binding.bound:
        with torch._C.DisableTorchFunctionSubclass():
            assert all(p.isnan().all() and isinstance(p, GuardedParameter) for p in flat.binding.parameters)
        return False
    for slot, parameter in enumerate(flat.binding.parameters):
        assert torch.equal(parameter, flat.binding.arrangement.view(flat.full(), slot))
        assert parameter.data_ptr() == flat.binding.arrangement.view(flat.full(), slot).data_ptr()
    assert flat.layout.world_size > 1 or torch.equal(flat.full(), made.values[flat.layout.index])
    return True


def fetch(flat: FlatStore) -> None:
    flat.take()
    flat.fill()


STEPS: dict[str, Callable[[FlatStore], None]] = {
    "take": FlatStore.take,
    "finish": FlatStore.finish_fetch,
    "release": FlatStore.release,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", list(FullState))
def test_every_state_with_every_step(state: FullState, step: str) -> None:
    following = {
        (RELEASED, "take"): FETCHING,
        (FETCHING, "finish"): LIVE,
        (FETCHING, "release"): RELEASED,
        (LIVE, "release"): RELEASED,
    }
    with parts(OnePage(), ()) as made:
        (flat,) = made.flats
        if state is not RELEASED:
            fetch(flat)
        if state is LIVE:
            flat.finish_fetch()
        free = made.device_pages_free
        if (state, step) in following:
            STEPS[step](flat)
            assert flat.state is following[state, step]
        else:
            with pytest.raises(InternalError, match=f"flat 0 cannot go from {state.value} to "):
                STEPS[step](flat)
            assert (flat.state, made.device_pages_free) == (state, free)
        assert flat.binding.bound == (flat.state is LIVE)  # I1
        assert made.device_pages_free == made.free_at_first - (flat.state is not RELEASED)


@pytest.mark.parametrize("home", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_flat_is_bound_while_it_is_live(disk: Path, home: Tier, world_size: int) -> None:
    with parts(OnePage(double=world_size > 1), (), home=home, disk=disk, world_size=world_size) as made:
        (flat,) = made.flats
        for _ in range(2):
            assert not is_bound(flat, made)
            with pytest.raises(InternalError, match="flat 0 is released, not live"):
                flat.full()
            flat.take()
            flat.fill()
            assert not is_bound(flat, made)
            flat.finish_fetch()
            assert is_bound(flat, made)
            assert torch.equal(flat.full()[: flat.layout.shard_numel], made.values[0])
            flat.release()
            flat.evict_shard()
            assert made.device_pages_free == made.free_at_first


def test_a_resident_flat_is_its_own_full_flat() -> None:
    with parts(OnePage(), (), home=Tier.DEVICE) as made:
        (flat,) = made.flats
        assert flat.resident and flat.state is LIVE and is_bound(flat, made) and flat.full_bytes == 0
        flat.release()
        flat.evict_shard()
        assert is_bound(flat, made)
        assert flat.full().data_ptr() == flat.home.tensor().data_ptr()
        other = made.paged(torch.arange(flat.layout.shard_numel, dtype=torch.float32), Tier.DEVICE)
        old = flat.adopt(other)
        assert torch.equal(old.tensor(), made.values[0])
        assert flat.binding.parameters[0].data_ptr() == other.tensor().data_ptr()


def test_what_autograd_reads_counts_its_own_writes() -> None:
    with parts(OnePage(), ()) as made:
        (flat,) = made.flats
        fetch(flat)
        flat.finish_fetch()
        saved = flat.binding.unpack(flat.binding.name(1, flat.binding.parameters[1]), copied=False)
        before = saved._version
        flat.full()[:64] += 1  # as an update of another unit's pages does, which are parts of the same memory
        assert saved._version == before
        assert torch.equal(saved, flat.binding.parameters[1])


def test_a_home_is_not_replaced_while_its_full_flat_is_read() -> None:
    with parts(OnePage(), ()) as made:
        (flat,) = made.flats
        home = flat.home
        other = made.paged(torch.ones(flat.layout.shard_numel), Tier.HOST)
        for advance in (lambda: fetch(flat), flat.finish_fetch):
            advance()
            with pytest.raises(InternalError, match=f"flat 0 is {flat.state.value} while its home is replaced"):
                flat.adopt(other)
            assert flat.home is home
        flat.release()
        assert flat.adopt(other) is home
        fetch(flat)
        flat.finish_fetch()
        assert flat.full().eq(1).all()


def fill_device_except(made: Parts, frames: list[int]) -> None:
    """Allocates all free device pages except those at `frames`."""
    tensors = [made.paged(torch.ones(16384), Tier.DEVICE) for _ in range(made.device_pages_free)]
    for tensor in tensors:
        if tensor.pages.frames[0] in frames:
            made.allocator.release(tensor)


@pytest.mark.parametrize(
    ("free", "refusal"),
    [
        ([], "flat 0 full"),
        ([1], "flat 0 full"),
        ([0, 2, 4], "flat 0 full needs 2 pages .*3 of 6 pages free, 1 of them side by side; raise device_memory"),
        ([0, 1], "flat 0 shard"),
    ],
    ids=["nothing", "one page", "scattered", "no page for the shard"],
)
def test_what_does_not_fit_changes_nothing(free: list[int], refusal: str) -> None:
    with parts(OnePage(double=True), (), world_size=2, device_pages=6) as made:
        (flat,) = made.flats
        fill_device_except(made, free)
        with pytest.raises(CapacityError, match=refusal):
            flat.take()
        assert (flat.state, made.device_pages_free, flat.has_spare_shard) == (RELEASED, len(free), False)
        assert not is_bound(flat, made)
        assert made.communicator.issued == []


def test_a_shard_that_an_all_gather_reads_stays_until_it_is_done() -> None:
    with parts(OnePage(double=True), (), world_size=2) as made:
        (flat,) = made.flats
        flat.fetch_shard()
        flat.fetch_shard()  # once
        assert made.device_pages_free == made.free_at_first - 1 and flat.has_spare_shard
        fetch(flat)
        assert not flat.has_spare_shard
        flat.evict_shard()
        assert made.device_pages_free == made.free_at_first - 3
        flat.finish_fetch()
        assert made.device_pages_free == made.free_at_first - 2  # carried out now
        assert is_bound(flat, made) and not flat.full().isnan().any()
        flat.release()
        fetch(flat)
        flat.evict_shard()
        flat.release()  # before it was live: the all-gather is waited for, and both are given up
        assert (flat.state, made.device_pages_free) == (RELEASED, made.free_at_first)


def test_a_shard_that_is_not_gathered_is_released_when_its_fetch_ends(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of the shard go to another tensor then, with no copy in flight."""
    with parts(OnePage(double=True), (), home=Tier.DISK, disk=disk, world_size=2) as made:
        (flat,) = made.flats
        asked, may_read, read = threading.Event(), threading.Event(), FileOps.preadv

        def gated(self: FileOps, *args: Any) -> int:
            asked.set()
            assert may_read.wait(30)
            return read(*args)

        monkeypatch.setattr(FileOps, "preadv", gated)
        flat.fetch_shard()
        assert asked.wait(30)
        timer = threading.Timer(0.1, may_read.set)
        timer.start()
        flat.evict_shard()
        timer.join()
        assert may_read.is_set() and made.device_pages_free == made.free_at_first


def test_one_rank_has_no_shard_apart() -> None:
    with parts(OnePage(), ()) as made:
        made.flats[0].fetch_shard()
        assert not made.flats[0].has_spare_shard and made.device_pages_free == made.free_at_first


@pytest.mark.parametrize("room", [True, False])
def test_contributing_keeps_nothing(room: bool) -> None:
    with parts(OnePage(double=True), (), world_size=2, device_pages=2) as made:
        (flat,) = made.flats
        if not room:
            fill_device_except(made, [])
        free = made.device_pages_free
        read: list[Any] = []
        flat.contribute(lambda home: read.append(home) or made.read(home))
        assert made.communicator.issued == ["gather 0"]
        assert read == ([] if room else [flat.home])
        assert (flat.state, made.device_pages_free) == (RELEASED, free)


def test_contributing_leaves_a_shard_that_was_there() -> None:
    with parts(OnePage(double=True), (), world_size=2) as made:
        (flat,) = made.flats
        flat.fetch_shard()
        flat.contribute(made.read)
        assert flat.has_spare_shard


def test_what_was_lent_is_bound_again_with_its_new_values() -> None:
    with parts(OnePage(), ()) as made:
        (flat,) = made.flats
        changed = torch.full((flat.layout.padded_numel,), 7.0)
        fetch(flat)
        flat.finish_fetch()
        flat.rebind(None)
        assert is_bound(flat, made)
        flat.rebind(changed)
        assert flat.full().eq(7).all() and flat.binding.bound
        flat.release()
        flat.rebind(changed)
        assert not is_bound(flat, made)


# -- units ----------------------------------------------------------------------------------------------------------------


class Mixed(OnePage):
    """A unit of two flats, of a page each (two pages where it is `double`): one trained, one frozen."""

    def __init__(self, double: bool = False) -> None:
        super().__init__(double)
        self.frozen = torch.nn.Parameter(torch.randn(16384 * (1 + double)), requires_grad=False)


def test_a_unit_is_fetched_and_released_as_a_whole() -> None:
    with parts(Mixed(), ()) as made:
        (store,) = made.stores
        assert len(store.flats) == 2 and not store.resident and not store.readable and store.sharded == ()
        assert store.full_bytes == 2 * 65536
        states = [(store.fetched, store.live, store.movable)]
        store.start_fetch(None)
        states.append((store.fetched, store.live, store.movable))
        store.finish_fetch()
        states.append((store.fetched, store.live, store.movable))
        store.release()
        states.append((store.fetched, store.live, store.movable))
        nothing = (False, False, False)
        assert states == [nothing, (True, False, True), (True, True, True), nothing]


def test_a_unit_of_which_one_flat_does_not_fit_takes_none() -> None:
    with parts(Mixed(), (), device_pages=1) as made:
        (store,) = made.stores
        asked: list[int] = []
        with pytest.raises(CapacityError):
            store.start_fetch(lambda: asked.append(1))
        assert not store.movable and made.device_pages_free == 1 and asked == []


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_unit_of_which_one_flat_does_not_fit_keeps_no_shard_of_another(is_ahead: bool) -> None:
    with parts(Mixed(double=True), (), home=Tier.HOST, world_size=2, device_pages=4) as made:
        (store,) = made.stores
        if is_ahead:  # for a later all-gather: it stays
            store.flats[0].fetch_shard()
        before = made.device_pages_free
        with pytest.raises(CapacityError):
            store.start_fetch(None)
        assert made.device_pages_free == before and store.has_spare_shards == is_ahead


def test_ranks_agree_once_the_pages_are_there_and_before_the_all_gather() -> None:
    with parts(Model(1, double=True), world_size=2) as made:
        store = made.stores[1]
        seen: list[tuple[bool, list[str]]] = []
        store.start_fetch(lambda: seen.append((store.fetched, list(made.communicator.issued))))
        assert seen == [(True, [])] and made.communicator.issued == ["gather 0"]
        store.start_fetch(lambda: seen.append((True, [])))  # on its way already: nothing to agree on
        assert len(seen) == 1 and made.communicator.issued == ["gather 0"]


def test_parameters_that_close_are_open_while_somebody_uses_them() -> None:
    with parts(OnePage(), (), home=Tier.DEVICE, closes=True) as made:
        (store,) = made.stores
        assert store.closing and store.resident and not store.readable
        with pytest.raises(UsageError, match="weight was read or written outside of its module's forward"):
            made.module.weight + 1
        store.open()
        assert not (made.module.weight + 1).isnan().any()
        store.close()
        with pytest.raises(UsageError, match="weight was read or written"):
            made.module.weight.sum()


def test_lent_parameters_are_told() -> None:
    with parts(OnePage(), (), home=Tier.DEVICE) as made:
        (store,) = made.stores
        assert store.readable and not store.summoned
        store.flats[0].binding.summon([parameter.detach().clone() for parameter in store.flats[0].binding.parameters])
        assert store.summoned
        store.flats[0].rebind(None)
        assert not store.summoned


def test_who_writes_to_a_home_is_told_of_copies_of_it_that_are_under_way(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4. That the unit was given up does not end them for whoever writes."""
    with parts(OnePage(), (), home=Tier.DISK, disk=disk) as made:
        (flat,) = made.flats
        assert flat.reads() == ()
        may_read = threading.Event()
        read = FileOps.preadv

        def gated(self: FileOps, *args: Any) -> int:
            assert may_read.wait(30)
            return read(*args)

        monkeypatch.setattr(FileOps, "preadv", gated)
        fetch(flat)
        (copy,) = flat.reads()
        assert not copy.done()
        may_read.set()
        flat.await_reads()
        assert copy.done()
        assert flat.reads() == ()
        flat.finish_fetch()
        assert is_bound(flat, made)


def test_pages_lie_in_a_row_or_are_not_taken() -> None:
    with parts(OnePage(), (), device_pages=4) as made:
        pages = DevicePages(made.allocator)
        taken = [pages.take(f"page {at}", NUMEL, torch.float32, 0) for at in range(4)]
        assert made.device_pages_free == 0
        with pytest.raises(CapacityError):
            pages.take("more", NUMEL, torch.float32, 0)
        for each in (taken[0], taken[2]):
            made.allocator.release(each)
        told = "two needs 2 pages .*, and the device tier has 2 of 4 pages free, 1 of them side by side; raise device_memory"
        with pytest.raises(CapacityError, match=told):
            pages.take("two", 2 * NUMEL, torch.float32, 0)
        assert made.device_pages_free == 2
        made.allocator.release(taken[1])
        two = pages.take("two", 2 * NUMEL, torch.float32, 0)
        assert two.tensor().numel() == 2 * NUMEL and made.device_pages_free == 1


def test_root_blocks_and_units_outside_of_plans_have_their_own_ends_of_the_pages() -> None:
    """Page 0 is of a home, pages 1 to 4 are of plans, and 5 and 6 of unit 3, which is in no plan."""
    with parts(OnePage(), (), device_pages=7) as made:
        pages = DevicePages(made.allocator, 1, 4, {3})

        def place(unit: int, among: Among = Among.ANY, frame: int | None = None) -> int:
            return pages.take("page", NUMEL, torch.float32, unit, frame, among=among).pages.frames[0]

        assert [place(0), place(1), place(3)] == [1, 4, 6]
        assert [place(1, Among.OWN), place(1, Among.PLANNED, 1)] == [3, 2]
        for among, frame in ((Among.OWN, None), (Among.PLANNED, 1)):
            with pytest.raises(CapacityError):
                place(1, among, frame)
        assert [place(1), place(3)] == [5, 0]
    with parts(OnePage(), (), device_pages=2) as made:
        pages = DevicePages(made.allocator)  # without units outside of plans, all pages are of plans
        assert [place(0, Among.OWN), place(1, Among.OWN)] == [0, 1]


def test_blocks_leave_adjacent_pages_for_gradients_as_long_as_they_can() -> None:
    """Of nine pages the root has one; gradients take up to three."""
    with parts(OnePage(), (), device_pages=9) as made:
        pages = DevicePages(made.allocator, root_pages=1, gradient_pages=3)

        def place(count: int, unit: int = 1, frame: int | None = None, among: Among = Among.OWN) -> PagedTensor:
            return pages.take("pages", count * NUMEL, torch.float32, unit, frame, among=among)

        leaving = place(1, unit=0)
        assert list(leaving.pages.frames) == [0]
        with pytest.raises(CapacityError):
            place(1, unit=0)  # the root waits for its own page
        made.allocator.release(leaving)
        assert list(place(1, unit=0).pages.frames) == [0]
        high = place(2)
        assert list(high.pages.frames) == [7, 8] and not pages.divides(high)
        low = place(4)
        assert list(low.pages.frames) == [1, 2, 3, 4] and not pages.divides(low)
        made.allocator.release(low)
        middle = place(4, frame=3, among=Among.PLANNED)
        assert pages.divides(middle)
        made.allocator.release(middle)
        lower = place(2, frame=3, among=Among.PLANNED)
        assert not pages.divides(lower)
        with pytest.raises(CapacityError):
            place(3)
        made.allocator.release(high)
        assert list(place(3, among=Among.ANY).pages.frames) == [6, 7, 8]


def test_beside_experts_blocks_take_any_pages_of_plans() -> None:
    """No order is promised there, and a rank that leaves pages free would not join what others gather."""
    with parts(OnePage(), (), device_pages=9) as made:
        pages = DevicePages(made.allocator, planned=6, by_need=[2], root_pages=1, gradient_pages=3)
        block = pages.take("pages", 4 * NUMEL, torch.float32, 1, among=Among.OWN)
        assert list(block.pages.frames) == [2, 3, 4, 5] and not pages.divides(block)


def test_pages_may_be_partly_those_of_plans_and_partly_those_of_experts() -> None:
    with parts(OnePage(), (), device_pages=4) as made:
        for unit, expected in ((1, range(1, 4)), (2, range(1, 4)), (0, range(3))):
            pages = DevicePages(made.allocator, planned=2, by_need={2})
            three = pages.take("three", 3 * NUMEL, torch.float32, unit)
            assert list(three.pages.frames) == list(expected)
            made.allocator.release(three)
            with pytest.raises(CapacityError):
                pages.take("three", 3 * NUMEL, torch.float32, 1, among=Among.OWN)
