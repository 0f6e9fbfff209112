"""Placement: who lives where, what a budget refuses, and in which words."""

from __future__ import annotations

from time import process_time

import pytest

from lightning_ptm.errors import CapacityError, ConfigError, InternalError
from lightning_ptm.planning.device_demand import AnyOrder
from lightning_ptm.planning.layout import ModelLayout, UnitSpec, build_layout
from lightning_ptm.planning.placement import place
from lightning_ptm.planning.placement_data import Budget, Homes, PassingPages, Placement, PlacementWishes
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.planning.trace import Trace, forward_trace, sequential_trace
from lightning_ptm.terms import BLOCK_BYTES, Tier

from .models import PAGE, even_layout, spec

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
NO_WISHES = PlacementWishes()


def pages(device: int, host: int = 0, disk: int = 0) -> Budget:
    return Budget({DEVICE: device * PAGE, HOST: host * PAGE, DISK: disk * PAGE})


def placed(
    layout: ModelLayout,
    budget: Budget,
    *,
    trace: Trace | None = None,
    wishes: PlacementWishes = NO_WISHES,
    unified: bool | None = None,
    keep_gradients: bool = False,
    sums_gradients: bool = False,
    staging_bytes: int = 0,
    update_on_device: bool = True,
) -> Placement:
    """`place` with master states of 12 bytes per element: six pages for each page of parameters."""
    return place(
        layout,
        [12] * len(layout.flats),
        sequential_trace(layout) if trace is None else trace,
        budget,
        wishes=wishes,
        unified=not budget[HOST] if unified is None else unified,
        keep_gradients=keep_gradients,
        sums_gradients=sums_gradients,
        staging_bytes=staging_bytes,
        update_on_device=update_on_device,
    )


def test_gradients_pass_through_ram_where_it_has_no_room_for_all_of_them() -> None:
    """Master states of ten blocks are updated in RAM: 12 pages each, and 6 of the root; gradients of the root and of four
    blocks are there at once."""
    layout = even_layout([1] + [2] * 10)
    host = 6 + 10 * 12
    wishes = PlacementWishes(DEVICE, HOST)
    whole = placed(layout, pages(40, host + 21), wishes=wishes)
    assert whole.passing_bytes == 0
    tight = pages(40, host + 9)
    found = placed(layout, tight, wishes=wishes)
    assert found.passing_bytes == 9 * PAGE and found.at_home_bytes[HOST] == (host + 9) * PAGE
    assert {each.gradient for each in found.homes} == {HOST}
    trace = sequential_trace(layout)
    simulate(layout, found, schedule(layout, found, trace, tight), trace, tight)
    for budget, keep in ((pages(40, host + 8), False), (tight, True)):
        with pytest.raises(CapacityError, match="the gradients of"):
            placed(layout, budget, wishes=wishes, keep_gradients=keep)


def test_everything_lives_on_a_device_that_holds_it() -> None:
    layout = even_layout([1, 2, 2])
    placement = placed(layout, pages(1000))
    assert set(placement.homes) == {Homes(DEVICE, DEVICE, DEVICE)}
    assert placement.at_home_bytes[DEVICE] == (5 + 30) * PAGE
    assert (placement.at_home_bytes[HOST], placement.at_home_bytes[DISK]) == (0, 0)


def test_master_states_leave_the_device_first_and_those_updated_last_stay() -> None:
    layout = even_layout([1, 2, 2])
    placement = placed(layout, pages(5 + 2 * 3 + 6 + 12, disk=12))
    assert [homes.parameter for homes in placement.homes] == [DEVICE] * 3
    assert [homes.master for homes in placement.homes] == [DEVICE, DEVICE, DISK]
    assert placement.at_home_bytes[DISK] == 12 * PAGE


def test_without_an_optimizer_on_the_device_master_states_live_on_the_host() -> None:
    layout = even_layout([1, 2, 2])
    budget = pages(1000, host=1000)
    assert {homes.master for homes in placed(layout, budget, update_on_device=False).homes} == {HOST}
    assert {homes.master for homes in placed(layout, budget, update_on_device=True).homes} == {DEVICE}


def test_what_neither_device_nor_host_holds_goes_to_disk() -> None:
    layout = even_layout([1, 4, 4, 4, 4, 4])
    placement = placed(layout, pages(22, host=60, disk=1000), unified=False)
    parameters = [homes.parameter for homes in placement.homes]
    assert parameters[0] is DEVICE and set(parameters) == {DEVICE, HOST}
    masters = [homes.master for homes in placement.homes]
    assert HOST in masters and DISK in masters
    assert placement.at_home_bytes[DEVICE] + placement.gather_bytes <= 22 * PAGE
    assert placement.at_home_bytes[HOST] <= 60 * PAGE


def test_gradients_live_with_their_parameters_and_cost_bytes_when_kept() -> None:
    layout = even_layout([1, 2])
    wish = PlacementWishes(parameter=HOST, master=DISK)
    budget = pages(100, host=100, disk=100)
    passing, kept = (placed(layout, budget, wishes=wish, unified=False, keep_gradients=keep) for keep in (False, True))
    assert [homes.gradient for homes in passing.homes + kept.homes] == [HOST] * 4
    assert passing.at_home_bytes[HOST] == kept.at_home_bytes[HOST] == 6 * PAGE
    on_device = PlacementWishes(parameter=DEVICE)
    found = [placed(layout, budget, wishes=on_device, unified=False, keep_gradients=keep) for keep in (False, True)]
    assert [each.at_home_bytes[DEVICE] - 6 * 3 * PAGE for each in found] == [
        3 * PAGE,
        6 * PAGE,
    ]  # masters are there, too


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_leave_the_device_for_an_update_elsewhere(keep: bool) -> None:
    """For the host, or for the disk where the host is too small. Placed before the masters, or after them."""
    layout = even_layout([1, 2])
    wish = PlacementWishes(parameter=DEVICE, master=DISK)
    for host, homes in ((100, [HOST, HOST]), (2, [HOST, DISK]), (0, [DISK, DISK])):
        budget = pages(100, host=host, disk=100)
        found = placed(layout, budget, wishes=wish, unified=False, keep_gradients=keep)
        assert [each.gradient for each in found.homes] == homes
        assert found.at_home_bytes[DEVICE] == 3 * PAGE
        assert found.at_home_bytes[HOST] == PAGE * sum(
            pages for pages, home in zip((1, 2), homes, strict=True) if home is HOST
        )
    # The device has no room for the masters of the second unit: it keeps the gradients of the first alone, if any.
    found = placed(layout, pages(18, host=100), unified=False, keep_gradients=keep)
    assert [each.master for each in found.homes] == [DEVICE, HOST]
    assert [each.gradient for each in found.homes] == [DEVICE, HOST]
    assert found.at_home_bytes[DEVICE] == (3 + 6 + keep) * PAGE
    assert found.at_home_bytes[HOST] == (12 + 2) * PAGE
    with pytest.raises(CapacityError, match=r"the gradients of layers\.0 need 128 KiB"):
        placed(
            layout, pages(100, host=18 + 1), wishes=PlacementWishes(DEVICE, HOST), unified=False, keep_gradients=keep
        )


@pytest.mark.parametrize(("keep", "device", "blocks"), [(True, 31, 1), (True, 32, 2), (True, 39, 3), (False, 30, 2)])
def test_states_have_the_room_of_gradients_that_leave_for_the_host(keep: bool, device: int, blocks: int) -> None:
    """A root and eight blocks of one page, whose states take six. Besides nine of parameters, the device has states of the
    root and of blocks, with their gradients if these are kept, and two pages through which others leave."""
    layout = even_layout([1] * 9)
    found = placed(layout, pages(device, host=200), keep_gradients=keep)
    assert [each.master for each in found.homes] == [DEVICE] * (1 + blocks) + [HOST] * (8 - blocks)
    assert [each.gradient for each in found.homes] == [DEVICE] * (1 + blocks) + [HOST] * (8 - blocks)
    assert found.at_home_bytes[DEVICE] == (9 + (6 + keep) * (1 + blocks)) * PAGE
    assert found.at_home_bytes[HOST] == 7 * (8 - blocks) * PAGE
    budget = pages(device, host=200)
    plan = schedule(layout, found, sequential_trace(layout), budget)
    simulate(layout, found, plan, sequential_trace(layout), budget)


@pytest.mark.parametrize(
    ("device", "host", "gradients", "masters"), [(26, 13, "DDHHHHHHH", "DDHkkkkkk"), (39, 17, "DDDDHHHHH", "DDDDHHkkk")]
)
def test_what_is_on_disk_moves_to_ram_that_states_have_left_for_the_device(
    device: int, host: int, gradients: str, masters: str
) -> None:
    """First gradients, then states."""
    layout = even_layout([1] * 9)
    budget = pages(device, host=host, disk=200)
    found = placed(layout, budget, keep_gradients=True)
    letters = {DEVICE: "D", HOST: "H", DISK: "k"}
    assert "".join(letters[each.gradient] for each in found.homes) == gradients
    assert "".join(letters[each.master] for each in found.homes) == masters
    assert found.at_home_bytes[HOST] == host * PAGE
    on_disk = gradients.count("k") + 6 * masters.count("k")
    assert found.at_home_bytes[DISK] == on_disk * PAGE
    trace = sequential_trace(layout)
    simulate(layout, found, schedule(layout, found, trace, budget), trace, budget)


@pytest.mark.parametrize(("device", "blocks"), [(11, 7), (12, 8)])
def test_parameters_have_the_room_of_gradients_that_wait_in_ram(device: int, blocks: int) -> None:
    """The same model with kept gradients. In 12 pages all parameters are on the device, and three pages are left to gradients
    that leave; gradients of so many parameters had no room there."""
    layout, budget = even_layout([1] * 9), pages(device, host=200)
    found = placed(layout, budget, keep_gradients=True)
    at_home = [DEVICE] * (1 + blocks) + [HOST] * (8 - blocks)
    assert found.homes == tuple(Homes(home, HOST, HOST) for home in at_home)
    assert found.at_home_bytes[DEVICE] == (1 + blocks) * PAGE
    assert found.at_home_bytes[HOST] == (9 * 7 + 8 - blocks) * PAGE
    plan = schedule(layout, found, sequential_trace(layout), budget)
    simulate(layout, found, plan, sequential_trace(layout), budget)


def test_where_the_device_is_ram_passing_gradients_are_not_written_to_disk() -> None:
    layout = even_layout([1, 2])
    wish = PlacementWishes(parameter=DISK, master=DISK)
    assert {homes.gradient for homes in placed(layout, pages(100, disk=100), wishes=wish).homes} == {DEVICE}
    kept = placed(layout, pages(100, disk=100), wishes=wish, keep_gradients=True)
    assert {homes.gradient for homes in kept.homes} == {DISK}


def test_frozen_parameters_have_parameters_only() -> None:
    units = [UnitSpec("root", (spec("frozen", PAGE // 2, trainable=False), spec("weight", PAGE // 2)))]
    layout = build_layout(units, page_size=PAGE, world_size=1)
    assert placed(layout, pages(100), keep_gradients=True).at_home_bytes[DEVICE] == (2 + 1 + 6) * PAGE


def test_room_for_a_fetch_ahead_is_kept_while_everything_finds_a_home() -> None:
    layout = even_layout([1, 4, 4, 4, 4, 4])
    wish = PlacementWishes(master=DISK)
    # All on the device would take 21 pages, and 5 for the gradients of a block and of the root.
    roomy = placed(layout, pages(22, disk=1000), wishes=wish)
    assert [homes.parameter for homes in roomy.homes].count(DISK) == 3
    # This disk holds master states and two blocks: the device has to take three, and copies arrive at their need.
    tight = placed(layout, pages(22, disk=21 * 6 + 8), wishes=wish)
    assert [homes.parameter for homes in tight.homes].count(DISK) == 2
    with pytest.raises(CapacityError):
        placed(layout, pages(21, disk=21 * 6 + 8), wishes=wish)


def test_shards_of_several_ranks_cost_their_share() -> None:
    layout = even_layout([4, 8, 8], world_size=4)
    assert placed(layout, pages(1000)).at_home_bytes[DEVICE] == (5 + 30) * PAGE


def test_small_states_are_charged_what_they_cost_in_any_order() -> None:
    units = [UnitSpec(f"unit{index}", (spec(f"{index}", 64),)) for index in range(4)]
    layout = build_layout(units, page_size=PAGE, world_size=1)
    # In whole blocks: parameters, and three tensors of master states. A tier of its own is not rounded up to pages.
    assert placed(layout, pages(1000)).at_home_bytes[DEVICE] == PAGE >= 4 * (1 + 3) * BLOCK_BYTES
    disk = placed(layout, pages(1000, disk=100), wishes=PlacementWishes(master=DISK)).at_home_bytes[DISK]
    assert disk == 4 * 3 * BLOCK_BYTES


def test_homes_gathers_and_staging_share_the_device() -> None:
    layout = even_layout([1, 4, 4])
    placement = placed(layout, pages(50, disk=1000), staging_bytes=PAGE + 1)
    assert placement.staging_bytes == 2 * PAGE
    total = placement.at_home_bytes[DEVICE] + placement.gather_bytes + placement.staging_bytes
    assert total <= 50 * PAGE


def test_a_large_device_is_not_taken_whole() -> None:
    layout = even_layout([1, 4, 4])
    placement = placed(layout, pages(10**6))
    assert placement.at_home_bytes[DEVICE] + placement.gather_bytes < 200 * PAGE


def test_evaluation_needs_no_gradients() -> None:
    layout = even_layout([1, 4, 4])
    budget = pages(5, disk=1000)
    wish = PlacementWishes(parameter=DISK, master=DISK)
    assert placed(layout, budget, wishes=wish, trace=forward_trace(layout)).gather_bytes == 5 * PAGE
    with pytest.raises(CapacityError):
        placed(layout, budget, wishes=wish)


def test_the_most_demanding_tick_is_named() -> None:
    layout = even_layout([1, 2, 4, 3])
    wish = PlacementWishes(parameter=DISK, master=DISK)
    # Backward of layers.1: it and the root, and the gradients of both.
    assert placed(layout, pages(10, disk=1000), wishes=wish).gather_bytes == 10 * PAGE
    with pytest.raises(
        CapacityError,
        match=r"tick 5 \(layers.1 backward\) needs 10 pages at once \(640 KiB\) in addition to 0 B .* take 576 KiB of RAM; "
        r"raise host_memory or use smaller units",
    ):
        placed(layout, pages(9, disk=1000), wishes=wish)


def test_states_without_a_home_are_named_with_the_setting_to_raise() -> None:
    layout = even_layout([1, 2, 2])
    with pytest.raises(
        CapacityError, match=r"master states of 3 units \(root to layers.1\).*host_memory or give a disk_path"
    ):
        placed(layout, pages(10), update_on_device=True)
    with pytest.raises(CapacityError, match=r"host tier has .* left of 640 KiB; raise host_memory or give a disk_path"):
        placed(layout, pages(100, host=10), update_on_device=False)
    with pytest.raises(CapacityError, match="disk_memory"):
        placed(layout, pages(10, disk=20))
    with pytest.raises(CapacityError, match=r"parameters of .* raise disk_memory, or give a disk_path with more room"):
        placed(layout, pages(100, disk=3), wishes=PlacementWishes(parameter=DISK))


def test_a_refusal_tells_what_has_the_bytes() -> None:
    layout = even_layout([1, 2, 2])
    told = (
        r"raise host_memory or give a disk_path \(the host tier is for master states \d+ KiB, staging buffers 64 KiB\)$"
    )
    with pytest.raises(CapacityError, match=told):
        placed(layout, pages(100, host=10), update_on_device=False, staging_bytes=PAGE)
    told = r"\(the host tier is for parameters and gradients 640 KiB\)$"
    with pytest.raises(CapacityError, match=told):
        placed(layout, pages(100, host=10), wishes=PlacementWishes(parameter=Tier.HOST), update_on_device=False)
    with pytest.raises(CapacityError, match=r"raise host_memory or give a disk_path \("):
        placed(layout, pages(4), update_on_device=True)
    told = r"raise host_memory or use smaller units \(RAM is for staging buffers 64 KiB\)$"
    with pytest.raises(CapacityError, match=told):
        placed(
            layout,
            pages(4, disk=1000),
            wishes=PlacementWishes(parameter=DISK, master=DISK),
            staging_bytes=PAGE,
            unified=True,
        )


@pytest.mark.parametrize(
    ("wishes", "budget", "unified", "message"),
    [
        (
            PlacementWishes(parameter=DISK),
            pages(100),
            True,
            "offload_parameters='disk', and pages may take 0 bytes on disk; raise disk_memory, or give",
        ),
        (
            PlacementWishes(master=HOST),
            pages(100, disk=100),
            True,
            "offload_optimizer='host', and pages may take 0 bytes in RAM; raise host_memory",
        ),
        (PlacementWishes(master=DEVICE), pages(100, host=100), False, "the optimizer cannot update in a device tier"),
    ],
)
def test_homes_that_do_not_exist_are_refused(
    wishes: PlacementWishes, budget: Budget, unified: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(even_layout([1, 1]), budget, wishes=wishes, unified=unified, update_on_device=False)


def test_a_host_tier_beside_a_device_tier_in_ram_is_a_bug() -> None:
    with pytest.raises(InternalError, match="the device tier is RAM, and a host tier has 64 KiB"):
        placed(even_layout([1, 1]), pages(100, host=1), unified=True, update_on_device=False)


def test_each_flat_needs_the_size_of_its_master_states() -> None:
    layout = even_layout([1, 1])
    with pytest.raises(InternalError, match="1 sizes of master states were given for 2 flats"):
        place(
            layout,
            [12],
            sequential_trace(layout),
            pages(100),
            unified=True,
            keep_gradients=False,
            staging_bytes=0,
            update_on_device=True,
        )


@pytest.mark.parametrize(("home", "ranks", "more"), [(DISK, 1, 3), (HOST, 1, 0), (DISK, 2, 0)])
def test_sums_that_wait_without_addresses_take_their_pages_again_where_they_are_added_to(
    home: Tier, ranks: int, more: int
) -> None:
    """Once more the gradients of the largest unit. What ranks have reduced is added to in the place of whole gradients."""
    layout = even_layout([1, 2, 3], world_size=ranks)

    def least(sums: bool) -> int:
        for device in range(1, 40):
            budget = pages(device, host=1000, disk=1000)
            try:
                placement = placed(
                    layout, budget, wishes=PlacementWishes(home, home), keep_gradients=True, sums_gradients=sums
                )
            except CapacityError:
                continue
            plan = schedule(layout, placement, sequential_trace(layout), budget)
            simulate(layout, placement, plan, sequential_trace(layout), budget)
            return device
        raise AssertionError("no device is large enough")

    assert least(True) - least(False) == more


def test_units_that_go_to_disk_are_counted_with_what_their_gradients_need() -> None:
    """Sums of gradients on disk pass through a buffer on the device; those in RAM, which has room for one unit, do not."""
    layout = even_layout([1, 2, 4])
    trace = sequential_trace(layout)
    for device in range(1, 40):
        budget = pages(device, host=2, disk=1000)
        try:
            found = placed(
                layout, budget, wishes=PlacementWishes(master=DISK), keep_gradients=True, sums_gradients=True
            )
        except CapacityError:
            continue
        assert DISK in {each.gradient for each in found.homes}
        simulate(layout, found, schedule(layout, found, trace, budget), trace, budget)
        return
    raise AssertionError("no budget is large enough")


def test_many_kinds_of_units_are_counted_in_a_moment() -> None:
    """The pages of 4,000 units of as many sizes, in the order that needs the most: the last one after the one before it."""
    found = AnyOrder()
    found.add(0, 1, 0, PassingPages(0, 0))
    for unit in range(1, 4001):
        found.add(unit, unit, 0, PassingPages(0, unit))
    started = process_time()
    assert found.pages() == 1 + 4000 + 3999
    assert process_time() - started < 0.3
    found.add(1, 4000, 0, PassingPages(0, 4000))
    assert found.pages() == 1 + 4000 + 4000


@pytest.mark.parametrize(("widths", "host"), [((1, 2, 1, 2), 20), ((1, 4, 2, 4), 40), ((1, 4, 4, 2), 40)])
def test_more_device_memory_is_never_refused(widths: tuple[int, ...], host: int) -> None:
    """Gradients of units that are updated in RAM leave through further pages, so less may be left than if they stayed."""
    layout = even_layout(widths)
    trace, fits = sequential_trace(layout), list[bool]()
    for device in range(2, 40):
        budget = pages(device, host)
        try:
            made = place(
                layout,
                [4] * len(widths),
                trace,
                budget,
                unified=False,
                keep_gradients=True,
                staging_bytes=0,
                update_on_device=True,
            )
        except CapacityError:
            fits.append(False)
            continue
        fits.append(True)
        simulate(layout, made, schedule(layout, made, trace, budget), trace, budget)
    assert fits == sorted(fits) and len(set(fits)) == 2, fits
