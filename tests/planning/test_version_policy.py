"""Assignment of gradients to jobs, in numbers alone. With gradients and pages:
tests/update/test_lock_free_buffers.py."""

from __future__ import annotations

import pytest

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.version_policy import REACH, Begin, Flat, GradientEvent, Reading, VersionPolicy


def waiting_of(count: int = 1, spares: int = 2, room: int = 2, **more: bool) -> tuple[VersionPolicy[Flat], list[Flat]]:
    flats = [Flat("a kind", **more) for _ in range(count)]  # type: ignore[arg-type]
    return VersionPolicy(flats, ["a kind"] * spares, room=room), flats


def begun(jobs: list[Begin[Flat]]) -> list[tuple[int, int]]:
    return [(job.flat.place, job.steps) for job in jobs]


def test_of_several_spare_pages_the_last_are_for_what_compute_waits_for() -> None:
    waiting, flats = waiting_of(count=3, spares=2)
    for flat in flats:
        waiting.offer(flat, 0)
    assert begun(waiting.next_jobs()) == [(0, 1)]
    waiting.prioritize(flats[2], 1)
    assert begun(waiting.next_jobs()) == [(2, 1)]
    assert not waiting.next_jobs()
    waiting.give_back("another kind")
    assert not waiting.next_jobs()
    waiting.give_back("a kind")
    waiting.give_back("a kind")
    assert begun(waiting.next_jobs()) == []  # two are in hand


def test_of_a_single_flat_the_only_spare_pages_are_taken() -> None:
    waiting, (flat,) = waiting_of(spares=1)
    waiting.offer(flat, 0)
    assert begun(waiting.next_jobs()) == [(0, 1)]


def test_two_jobs_are_in_hand_whatever_their_size_and_more_as_far_as_there_is_room() -> None:
    flats = [Flat("a kind", size) for size in (10, 20, 5, 5)]
    waiting = VersionPolicy(flats, ["a kind"] * 5, room=35)
    for flat in flats:
        waiting.offer(flat, 0)
    assert begun(waiting.next_jobs()) == [(0, 1), (1, 1), (2, 1)]


def test_what_is_of_other_parameters_waits_apart() -> None:
    waiting, (flat,) = waiting_of()
    assert waiting.offer(flat, 0, "all").event is GradientEvent.WAITS
    assert waiting.offer(flat, 1, "all").event is GradientEvent.ADDED
    assert waiting.offer(flat, 2, "some").event is GradientEvent.WAITS
    assert begun(waiting.next_jobs()) == [(0, 2)]
    assert not waiting.next_jobs() and flat.pending == 3
    waiting.finish(flat, learned=False)
    waiting.give_back("a kind")
    assert begun(waiting.next_jobs()) == [(0, 1)]


@pytest.mark.parametrize("steps", range(1, REACH + 3))
def test_what_is_too_much_for_a_forecast_is_applied_at_once_and_learns_none(steps: int) -> None:
    waiting, (flat,) = waiting_of(can_predict=True)
    for step in range(steps):
        waiting.offer(flat, step)
    (job,) = waiting.next_jobs()
    assert (job.at_once, job.ahead) == ((False, 1) if steps <= REACH else (True, 0))


def test_what_is_of_steps_before_the_first_forecast_learns_none() -> None:
    flats = [Flat("a kind", can_predict=True) for _ in range(2)]
    waiting = VersionPolicy(flats, ["a kind"] * 4, room=2, learns=False)
    waiting.offer(flats[0], 6)
    waiting.learn(7)
    waiting.offer(flats[1], 7)
    assert [job.ahead for job in waiting.next_jobs()] == [0, 1]


def test_a_forecast_is_for_as_many_as_came_meanwhile() -> None:
    waiting, (flat,) = waiting_of(can_predict=True)
    for late in (1, REACH, REACH + 1):
        waiting.offer(flat, 0)
        waiting.next_jobs()
        for step in range(late):
            waiting.offer(flat, step)
        ended = waiting.finish(flat, learned=True)
        assert ended.is_predicted == (late <= REACH) and flat.exact == (late == 0)
        waiting.give_back("a kind")
        flat.sums[0].steps = 1
        (job,) = waiting.next_jobs()
        assert job.ahead == min(late, REACH)
        waiting.finish(flat, learned=True)
        waiting.give_back("a kind")


def test_exact_parameters_are_wanted_where_the_newest_version_forecasts() -> None:
    waiting, (flat,) = waiting_of(can_predict=True)
    waiting.offer(flat, 0)
    waiting.next_jobs()
    waiting.finish(flat, learned=True)
    assert waiting.idle and waiting.want_exact() == [flat]
    waiting.give_back("a kind")
    (job,) = waiting.next_jobs()
    assert (job.steps, job.ahead, flat.pending) == (0, 0, 0)
    assert not waiting.finish(flat, learned=False).is_predicted
    assert waiting.idle and waiting.want_exact() == []
    waiting.offer(flat, 1, unseen=1)  # published, and seen by nobody: it is brought to where this one takes it
    assert not flat.exact


def test_a_job_that_never_began_cannot_end() -> None:
    waiting, (flat,) = waiting_of()
    with pytest.raises(InternalError, match="no job"):
        waiting.finish(flat, learned=False)


def test_what_may_be_read() -> None:
    have = Reading(received=3, adopted=1)
    assert [have.may_read(bound) for bound in (0, 1, 2)] == [False, False, True]
    have.adopt(1, 2, learned=True)
    assert not have.may_read(16)  # it lacks a weight prediction that it could have
    have.received = 1 + REACH + 1
    assert have.may_read(16)  # so far ahead nothing is forecast


def test_what_compute_forecasts_itself() -> None:
    have = Reading(received=1, adopted=1, seen=1, learned=True)
    assert have.should_predict(16, published=False)
    assert not have.should_predict(0, published=False)
    assert not have.should_predict(16, published=True)
    have.received += REACH
    assert not have.should_predict(16, published=False)
    have.seen = have.received
    assert not have.should_predict(16, published=False)
