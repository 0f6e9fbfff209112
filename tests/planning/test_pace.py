"""When passes over flats begin: as late as the bound allows and no later, one after the other, whatever the disk takes."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lightning_ptm.planning.pace import Pace, paced_steps


@dataclasses.dataclass
class Pass:
    place: int
    left: float
    takes: int = 0


class Disk:
    """Compute in steps, and a disk that makes a pass over all flats in `round_steps` of them, one flat after the other.

    Of those begun, the flat with the oldest gradients comes first; its pass takes what has come by then.
    """

    def __init__(self, bound: int, sizes: list[int], round_steps: float) -> None:
        self.bound = bound
        self.sizes = sizes
        self.speed = sum(sizes) / round_steps if round_steps else float("inf")
        self.pace = Pace(bound, sizes)
        self.received = [0] * len(sizes)
        self.applied = [0] * len(sizes)
        self.passes: list[Pass] = []
        self.begun = 0
        self.waits = 0
        self.most = 0

    def step(self) -> int:
        """Returns how many elements passes were begun for."""
        begun = 0
        # Flats are read in the forward pass; compute waits for what lacks too much.
        for place in range(len(self.sizes)):
            while self.received[place] - self.applied[place] > self.bound:
                self.waits += 1
                self.work(self.speed)
            self.most = max(self.most, self.received[place] - self.applied[place])
        for place in reversed(range(len(self.sizes))):
            self.received[place] += 1
            for each in self.pace.came(place, self.applied[place]):
                if all(known.place != each or known.takes for known in self.passes):
                    self.passes.append(Pass(each, self.sizes[each]))
                begun += self.sizes[each]
                self.begun += 1
            self.work(self.speed / len(self.sizes))
        return begun

    def work(self, elements: float) -> None:
        while self.passes and elements > 0:
            if not self.passes[0].takes:
                self.passes.sort(key=lambda known: self.applied[known.place])
            first = self.passes[0]
            first.takes = first.takes or self.received[first.place]
            done = min(first.left, elements)
            first.left -= done
            elements -= done
            if first.left <= 0:
                self.applied[first.place] = first.takes
                self.passes.pop(0)


SIZES = [39, *[7] * 12]
"""As those of a small GPT: the embedding is a third of it."""


@pytest.mark.parametrize("bound", [8, 16, 40])
@pytest.mark.parametrize("sizes", [SIZES, [1], [5, 5], [1] * 30, [100, 1, 1, 1]])
def test_beside_a_fast_disk_passes_are_few_and_even(bound: int, sizes: list[int]) -> None:
    disk = Disk(bound, sizes, 0.0)
    steps = 12 * bound
    begun = [disk.step() for _ in range(steps)]
    period = steps * len(sizes) / disk.begun
    expected = min(paced_steps(bound), bound - 3)  # a gradient comes before a pass is seen to have ended
    assert 0.9 * expected <= period <= bound
    assert disk.waits == 0 and disk.most <= bound
    # Never a burst: what begins within any few steps is what they have earned, and one flat more.
    window = max(2, bound // 4)
    most = max(sum(begun[start : start + window]) for start in range(steps - window))
    assert most <= sum(sizes) * (window + 1) / expected + max(sizes)


class AtOnce(Pace):
    """A pass begins with each gradient."""

    def came(self, place: int, applied: int) -> list[int]:
        return [place]


def most_and_waits(round_steps: float, pace: type[Pace]) -> tuple[int, int]:
    disk = Disk(16, SIZES, round_steps)
    disk.pace = pace(16, SIZES)
    for _ in range(300):
        disk.step()
    return disk.most, disk.waits


@pytest.mark.parametrize("round_steps", [0.5, 3.0, 7.0, 9.0, 10.0, 11.0, 12.0])
def test_compute_does_not_wait_for_a_disk_that_is_fast_enough(round_steps: float) -> None:
    most, waits = most_and_waits(round_steps, Pace)
    assert waits == 0 and most <= 16
    at_once, its_waits = most_and_waits(round_steps, AtOnce)
    assert its_waits == 0 and at_once <= most  # what pace costs in staleness is not nothing


@pytest.mark.parametrize("round_steps", [13.0, 14.0, 20.0])
def test_beside_a_disk_that_is_too_slow_nothing_is_lost_by_pace(round_steps: float) -> None:
    """Compute waits for the disk, as often as it would if passes began at once."""
    most, waits = most_and_waits(round_steps, Pace)
    assert most == 16
    assert 0 < waits <= 1.2 * most_and_waits(round_steps, AtOnce)[1] + 2


@pytest.mark.parametrize("seed", range(20))
def test_disks_that_slow_down(seed: int) -> None:
    """From one step to the next a round takes four times as long, and later a quarter again."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 40) for _ in range(chance.randint(2, 20))]
    fast = chance.uniform(0.1, 2.0)
    disk = Disk(16, sizes, fast)
    for factor in (1, 4, 1, 4):
        disk.speed = sum(sizes) / (fast * factor)
        for _ in range(chance.randint(10, 60)):
            disk.step()
    assert disk.waits == 0


def test_a_flat_near_the_bound_begins_whatever_has_been_earned() -> None:
    pace = Pace(8, [1, 1000])
    assert pace.came(1, 0) == [1]  # costs many steps of the other
    begins = [bool(pace.came(0, 0)) for _ in range(8)]
    assert begins.index(True) == 8 - 2  # the seventh: two more may come while its pass is made


def test_after_a_drain_all_begins_anew() -> None:
    pace = Pace(16, [1, 1])
    assert [pace.came(0, 0), pace.came(1, 0), pace.came(0, 1)] == [[0], [], []]
    pace.drained()
    assert [pace.waiting(0), pace.waiting(1)] == [0, 0]
    assert pace.came(1, 1) == [1]


@pytest.mark.parametrize("every", [2, 5, 30])
def test_a_flat_that_has_gradients_in_few_steps_is_not_forgotten(every: int) -> None:
    """No gradient waits for more steps than the bound, and passes over such flats are as few as they can be."""
    bound, steps, sizes = 16, 300, [10] * 12
    pace = Pace(bound, sizes)
    waits_since: dict[int, int] = {}
    came = [0] * len(sizes)
    taken = [0] * len(sizes)
    passes = [0] * len(sizes)
    for step in range(steps):
        for place in reversed(range(len(sizes))):
            if place >= 6 and step % every != place % every:
                continue
            came[place] += 1
            waits_since.setdefault(place, step)
            for each in pace.came(place, taken[place]):
                assert came[each] > taken[each]
                taken[each] = came[each]
                passes[each] += 1
                del waits_since[each]
        assert all(step - since < bound for since in waits_since.values())
    assert sum(taken) >= sum(came) - bound * len(sizes)
    for count in passes[:6]:
        assert 0.9 * paced_steps(bound) <= steps / count <= bound
    for count in passes[6:]:
        assert max(every, 0.8 * paced_steps(bound)) <= steps / count + 1
