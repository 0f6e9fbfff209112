"""What is told of ticks and stalls, and what is not where nobody listens."""

from __future__ import annotations

from lightning_ptm.events import Event, EventKind, Events
from lightning_ptm.runtime.fetching.compute_timing import ComputeTiming
from lightning_ptm.terms import Mode, Phase

F, B = Phase.FORWARD, Phase.BACKWARD


class Driven:
    def __init__(self) -> None:
        self.events = Events()
        self.told: list[Event] = []
        self.bytes = (0, 0)
        self.asked = 0
        self.it = ComputeTiming(self.events, self.used_bytes)

    def used_bytes(self) -> tuple[int, ...]:
        self.asked += 1
        return self.bytes


def test_a_tick_is_told_once_when_it_is_over_with_the_most_bytes_at_its_ends() -> None:
    its = Driven()
    with its.events.subscribed(its.told.append):
        its.bytes = (5, 1)
        its.it.begin_tick("block", F, 3, Mode.TRAIN)
        assert its.told == []
        its.bytes = (2, 4)
        its.it.end_tick()
        its.it.end_tick()
        its.it.begin_tick("", B, 4, Mode.FORWARD)
        its.it.end_tick()
    told = [(each.kind, each.track, each.name, each.index, each.tier_bytes) for each in its.told]
    assert told == [
        (EventKind.TICK, "train", "block forward", 3, (5, 4)),
        (EventKind.TICK, "forward", "root backward", 4, (2, 4)),
    ]
    assert its.told[0].begin_s <= its.told[0].end_s <= its.told[1].begin_s


def test_outside_of_an_iteration_and_where_nobody_listens_nothing_is_measured() -> None:
    its = Driven()
    its.it.begin_tick("block", F, 0, Mode.TRAIN)
    its.it.end_tick()
    with its.events.subscribed(its.told.append):
        its.it.begin_tick("block", F, 0, None)
        its.it.end_tick()
    assert its.told == [] and its.asked == 0


def test_a_tick_that_failed_is_not_told() -> None:
    its = Driven()
    with its.events.subscribed(its.told.append):
        its.it.begin_tick("block", F, 0, Mode.TRAIN)
        its.it.drop_tick()
        its.it.end_tick()
    assert its.told == []


def test_lost_seconds_are_added_up_by_cause_and_told_where_they_are_a_stall() -> None:
    its = Driven()
    with its.events.subscribed(its.told.append):
        its.it.stalled("fetch", "block", 1.0, 3.0)
        its.it.stalled("update", "", 3.0, 3.5)
        its.it.stalled("fetch", "block", 4.0, 4.000001)
    its.it.stalled("fetch", "block", 5.0, 6.0)
    assert its.it.stall_s == {"fetch": 2.0 + (4.000001 - 4.0) + 1.0, "update": 0.5}
    assert [(each.kind, each.track, each.name, each.begin_s, each.end_s) for each in its.told] == [
        (EventKind.STALL, "fetch", "block", 1.0, 3.0),
        (EventKind.STALL, "update", "root", 3.0, 3.5),
    ]
