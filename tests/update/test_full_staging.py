"""An updater whose staging is all held by chunks that are not served first goes on, whoever does the work.

Which of all states these are: tests/planning/test_chunk_states.py. Whole runs: tests/adversarial/test_least_staging.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_training import Twin, make_allocator, make_twin, plain_step, random_gradients
from test_update_pipeline import HandPending, adamw

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.chunks import Chunks
from lightning_ptm.terms import Tier
from lightning_ptm.update.buffering_thread import BufferingThread, LockFreeFlat
from lightning_ptm.update.lock_free_buffers import Contribution, FlatBuffer, Origin

WHO = pytest.mark.parametrize("who", ["caller", "thread"])
SOON_S = 20.0


class Siblings:
    """Flats behind one updater that has staging for one chunk."""

    def __init__(self, disk: Path, count: int, **settings: Any) -> None:
        self.allocator = make_allocator(disk, device_mib=12, disk_mib=24)
        homes = {"home": Tier.DISK, "target_home": Tier.DISK, "staging": 1, **settings}
        self.twins = [make_twin(adamw, self.allocator, **homes) for _ in range(count)]
        self.updater = self.twins[0].updater
        for twin in self.twins[1:]:
            twin.updater.close()
            twin.updater = self.updater

    def submit(self, place: int, after: HandPending | None = None) -> Any:
        job = self.twins[place].job(gradients(place), after=() if after is None else (after,))
        return self.updater.submit(job)

    def read(self) -> None:
        """Begins what can be read, and waits for it."""
        self.updater.pump()
        policy = self.updater._pipeline.policy
        for chunk in [*policy._ahead, *(chunk for job in policy.queue for chunk in job.active)]:
            for transfer in chunk.reads.all:
                transfer.wait()

    def finish(self, who: str, handles: list[Any]) -> None:
        """Ends within a moment, or fails."""
        if who == "thread":
            self.updater.run_in_thread()
            for handle in handles:
                assert handle.block(SOON_S), "the thread waits for nothing that comes"
        for handle in handles:
            self.updater.finish(handle)
        self.updater.drain()
        self.updater.stop()

    def assert_equal(self) -> None:
        for place, twin in enumerate(self.twins):
            plain_step(twin, gradients(place))
            twin.assert_equal()


def gradients(place: int) -> list[torch.Tensor | None]:
    return random_gradients(place, torch.bfloat16)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    groups: list[Siblings] = []

    def make(count: int, **settings: Any) -> Siblings:
        groups.append(Siblings(tmp_path, count, **settings))
        return groups[-1]

    yield make
    for group in groups:
        group.updater.close()
        group.allocator.close()


@WHO
@pytest.mark.parametrize("staging", [1, 2])
@pytest.mark.parametrize("gradient_home", [None, Tier.DISK])
def test_a_job_gets_what_was_read_ahead_for_it_though_it_is_not_first(
    made: Any, who: str, staging: int, gradient_home: Tier | None
) -> None:
    """The job that is served lacks the target, or the gradient, too; and the first in the queue has no room."""
    both = made(2, staging=staging, gradient_home=gradient_home)
    both.updater.prefetch([both.twins[1].states])
    both.read()
    handles = [both.submit(0), both.submit(1)]
    both.finish(who, handles)
    both.assert_equal()


@WHO
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_a_job_whose_gradient_came_after_another_was_put_first_gets_it(
    made: Any, who: str, first: int, count: int
) -> None:
    each = made(count, gradient_home=Tier.DISK)
    late = [HandPending() for _ in range(count)]
    handles = [each.submit(place, pending) for place, pending in enumerate(late)]
    each.read()  # the first holds the only buffers, without its gradient
    each.updater.promote(handles[-1])
    for pending in reversed(late) if first else late:
        pending.come()
    each.finish(who, handles[::-1])
    each.assert_equal()


@WHO
def test_a_job_that_only_copies_takes_what_was_read_ahead_of_it(made: Any, who: str) -> None:
    """States of its optimizer were read, too, which it does not need."""
    alone = made(1)
    twin = alone.twins[0]
    alone.updater.prefetch([twin.states])
    alone.read()
    handle = alone.updater.submit(twin.job([None] * len(gradients(0)), fresh_target=True))
    alone.finish(who, [handle])
    twin.assert_equal()


@WHO
@pytest.mark.parametrize("by", ["finish", "drain"])
def test_a_policy_that_is_stuck_is_an_error_and_no_wait_for_ever(
    made: Any, who: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunks, "_issue", lambda chunks: False)
    alone = made(1)
    if who == "thread":
        alone.updater.run_in_thread()
    handle = alone.submit(0)
    with pytest.raises(InternalError, match="neither advance nor has"):
        alone.updater.finish(handle) if by == "finish" else alone.updater.drain()


def test_lock_free_compute_hears_of_a_policy_that_is_stuck(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunks, "_issue", lambda chunks: False)
    alone = made(1)
    twin: Twin = alone.twins[0]
    shard = twin.target
    spares = [alone.allocator.allocate("spare", shard.numel, shard.dtype, Tier.DEVICE) for _ in range(2)]
    buffer = FlatBuffer("flat", shard.numel, shard.dtype, len(twin.order))
    buffering = BufferingThread(
        alone.updater, [LockFreeFlat(buffer, twin.states, twin.shadow)], spares, room=1, cores=1
    )
    buffering.start()
    job = twin.job(gradients(0))
    buffering.offer(0, Contribution(job.gradient, (Origin(0, job.hyper),)))
    with pytest.raises(InternalError, match="neither advance nor has"):
        buffering.wait(lambda: buffering.applied(0) == 1)
    buffering.stop()
