"""Order of chunks, without bytes and without seconds: reads and writes end, and gradients come, when a test says so.
With bytes: tests/update/test_update_pipeline.py.

With bytes: tests/update/test_update_pipeline.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from lightning_ptm.planning.chunks import Chunk, ChunkAct, Chunks, Job, WantedChunk, even_chunk_bounds
from lightning_ptm.planning.placement_data import PlacementWishes
from lightning_ptm.planning.update_order import first_to_wait_for, read_ahead, update_order
from lightning_ptm.terms import Tier

from .models import even_layout
from .test_placement import pages, placed

CHUNK = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """What ends when the test says so."""

    done: Callable[[], bool]


@dataclasses.dataclass(slots=True, eq=False)
class HandChunk(Chunk[str]):
    read: bool = False
    landed: bool = False

    @property
    def reads(self) -> Ends:
        return Ends(lambda: self.read)

    @property
    def writes(self) -> Ends:
        return Ends(lambda: self.landed)


class HandJob(Job[str, HandChunk]):
    def __init__(
        self, flat: str, chunks: int = 2, *, gradient: bool = True, streams: bool = True, **options: Any
    ) -> None:
        cuts = even_chunk_bounds(chunks * CHUNK, CHUNK)
        super().__init__(flat, cuts, cuts.starts, Ends(lambda: self.gradient), streams=streams, **options)
        self.gradient = gradient


class Bench:
    """Hands that note what they do, and a disk that a test moves."""

    def __init__(self, staging: int = 4) -> None:
        self.chunks: Chunks[str, HandJob, HandChunk] = Chunks(self, staging=staging)
        self.log: list[ChunkAct[str]] = []
        self.chunks.on_decision = self.log.append
        self.reading: list[HandChunk] = []
        self.writing: list[HandChunk] = []
        self.held: list[HandChunk] = []
        self.ended: list[HandJob] = []

    def chunk(self, flat: str, start: int, numel: int) -> HandChunk:
        return HandChunk(flat, start, numel)

    def read(self, job: HandJob | None, chunk: HandChunk) -> bool:
        if chunk not in self.held:
            self.held.append(chunk)
            self.reading.append(chunk)
        chunk.note_reads(all_reads_begun=job is not None)
        return True

    def update(self, job: HandJob, chunk: HandChunk) -> bool:
        assert job.before.done() and (chunk.read or not job.streams)
        assert not any(other.flat == chunk.flat and other.start == chunk.start for other in self.reading)
        if job.streams:
            self.writing.append(chunk)
        return job.streams

    def free(self, chunk: HandChunk) -> None:
        assert chunk not in self.reading and chunk not in self.writing
        self.held.remove(chunk)

    def end(self, job: HandJob) -> None:
        self.ended.append(job)

    def come(self, count: int = 1) -> None:
        for chunk in self.reading[:count]:
            chunk.read = True
        del self.reading[:count]

    def land(self, count: int = 1) -> None:
        for chunk in self.writing[:count]:
            chunk.landed = True
        del self.writing[:count]

    def run(self) -> list[tuple[str, str, int]]:
        """Does all work that can be done; returns it."""
        self.log.clear()
        moved = True
        while moved:
            idle = self.chunks.idle
            moved = self.chunks.advance()
            assert not (idle and moved)
        return [(act.event.value, act.flat, act.start) for act in self.log]


def test_chunks_are_read_as_staging_allows_and_computed_as_they_come() -> None:
    bench = Bench(staging=3)
    for flat in "ab":
        bench.chunks.enqueue(HandJob(flat))
    assert bench.run() == [("read", "a", 0), ("read", "a", 10), ("read", "b", 0)]
    bench.come(2)
    assert bench.run() == [("computed", "a", 0), ("computed", "a", 10), ("ended", "a", 0)]
    bench.land()
    assert bench.run() == [("written", "a", 0), ("read", "b", 10)]
    bench.come(2)
    bench.run()
    bench.land(3)
    assert not bench.chunks.idle  # what has landed is to be taken back
    bench.run()
    assert not bench.chunks.busy and bench.chunks.idle and not bench.held


def test_jobs_are_served_in_turn_and_those_of_one_turn_as_they_come() -> None:
    bench = Bench()
    for flat, turn in (("c", 2), ("b", 1), ("d", 2), ("a", 0), ("b", 1)):
        bench.chunks.enqueue(HandJob(flat, 1, streams=False, turn=turn))
    assert [flat for doing, flat, _ in bench.run() if doing == "ended"] == ["a", "b", "b", "c", "d"]


def test_what_comes_from_nowhere_but_its_gradient_takes_no_buffers_before_that_is_there() -> None:
    bench = Bench(staging=2)
    first = HandJob("a", gradient=False, reads_ahead=False, turn=0)
    bench.chunks.enqueue(first)
    bench.chunks.enqueue(HandJob("b", 1, reads_ahead=False, turn=1))
    assert bench.run() == [("read", "b", 0)]
    bench.come(1)
    bench.run()
    bench.land(1)
    first.gradient = True
    assert bench.run() == [("written", "b", 0), ("read", "a", 0), ("read", "a", 10)]


def test_a_chunk_is_not_read_before_its_last_write_has_landed() -> None:
    bench = Bench(staging=8)
    bench.chunks.enqueue(HandJob("a"))
    bench.run()
    bench.come(2)
    bench.run()
    bench.chunks.enqueue(HandJob("a"))
    assert bench.run() == []
    bench.land(2)
    assert [each for each in bench.run() if each[0] == "read"] == [("read", "a", 0), ("read", "a", 10)]


@pytest.mark.parametrize("given_up", ["forgotten", "not needed by a job"])
@pytest.mark.parametrize("again", ["by a job", "ahead"])
def test_a_chunk_is_not_read_again_while_a_read_of_it_that_nobody_wants_goes_on(given_up: str, again: str) -> None:
    """The second read may end first, and then the write would meet the first."""
    bench = Bench(staging=8)
    bench.chunks.want([WantedChunk("a", even_chunk_bounds(10, CHUNK))])
    assert bench.run() == [("read", "a", 0)]
    if given_up == "forgotten":
        bench.chunks.drop_read_ahead()
    else:
        bench.chunks.enqueue(HandJob("a", 0))
        bench.run()
    if again == "ahead":
        bench.chunks.want([WantedChunk("a", even_chunk_bounds(10, CHUNK))])
        assert bench.run() == []
    bench.chunks.enqueue(HandJob("a", 1))
    assert bench.run() == []
    assert bench.chunks.awaited(None) is bench.reading[0]
    bench.come()
    assert bench.run() == [("given up", "a", 0), ("read", "a", 0)]
    bench.come()
    assert bench.run() == [("computed", "a", 0), ("ended", "a", 0)]


def test_jobs_of_a_flat_keep_their_order_and_the_first_is_served_with_the_later() -> None:
    bench = Bench()
    other, first, later = HandJob("b", streams=False), HandJob("a", streams=False), HandJob("a", streams=False)
    for job in (other, first, later):
        bench.chunks.enqueue(job)
    bench.chunks.to_front(later)
    bench.run()
    assert bench.ended == [first, later, other]


def test_what_was_read_ahead_becomes_the_jobs_own_and_gives_way_to_what_can_be_computed() -> None:
    bench = Bench(staging=2)
    bench.chunks.want([WantedChunk("a", even_chunk_bounds(20, CHUNK)), WantedChunk("b", even_chunk_bounds(20, CHUNK))])
    assert bench.run() == [("read", "a", 0), ("read", "a", 10)]
    bench.come(2)
    bench.chunks.enqueue(HandJob("b", 1))
    assert bench.run() == [("given up", "a", 10), ("read", "b", 0)]
    bench.chunks.enqueue(HandJob("a"))
    assert bench.run()[:1] == [("computed", "a", 0)]


@pytest.mark.parametrize("asks_with_gradient", [True, False])
def test_a_job_without_its_gradient_gives_way_to_one_that_has_its(asks_with_gradient: bool) -> None:
    bench = Bench(staging=1)
    bench.chunks.enqueue(HandJob("a", 1, gradient=False))
    bench.run()
    bench.come()
    bench.chunks.enqueue(HandJob("b", gradient=asks_with_gradient))
    assert bench.run() == ([("given up", "a", 0), ("read", "b", 0)] if asks_with_gradient else [])


def test_what_is_awaited() -> None:
    bench = Bench(staging=1)
    late, job = HandJob("a", 1, gradient=False, streams=False), HandJob("b")
    bench.chunks.enqueue(late)
    assert bench.chunks.awaited(None) is late
    bench.chunks.enqueue(job)
    bench.run()
    assert bench.chunks.awaited(late) is bench.reading[0]  # others go on meanwhile
    bench.come()
    bench.run()
    assert bench.chunks.awaited(job) is bench.writing[0]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_when_all_is_computed_once_and_no_more_is_held_than_staging(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(staging=chance.randint(1, 5))
    jobs: list[HandJob] = []
    computed: list[tuple[str, int]] = []
    for _ in range(300):
        event = chance.randrange(7)
        if event == 0 and len(jobs) < 12:
            jobs.append(HandJob(chance.choice("abc"), chance.randint(1, 4), gradient=chance.random() < 0.5))
            bench.chunks.enqueue(jobs[-1])
        elif event == 1:
            chance.shuffle(bench.reading)
            bench.come(chance.randint(1, 2))
        elif event == 2:
            bench.land(chance.randint(1, 2))
        elif event == 3 and jobs:
            chance.choice(jobs).gradient = True
        elif event == 4 and bench.chunks.queue:
            bench.chunks.to_front(chance.choice(bench.chunks.queue))
        elif event == 5:
            bench.chunks.want([WantedChunk(flat, even_chunk_bounds(40, CHUNK)) for flat in chance.sample("abc", 2)])
        elif event == 6:
            bench.chunks.drop_read_ahead()
        computed += [(flat, start) for doing, flat, start in bench.run() if doing == "computed"]
        assert len(bench.held) <= bench.chunks.staging
    bench.chunks.drop_read_ahead()
    while bench.chunks.busy:
        for job in jobs:
            job.gradient = True
        bench.come()
        bench.land()
        computed += [(flat, start) for doing, flat, start in bench.run() if doing == "computed"]
    assert sorted(computed) == sorted((job.flat, start) for job in jobs for start in job.cuts.starts)
    assert not bench.held and len(bench.ended) == len(jobs)
    for flat in "abc":
        assert [job for job in bench.ended if job.flat == flat] == [job for job in jobs if job.flat == flat]


def test_compute_waits_for_the_first_unit_where_gradients_of_several_take_too_much() -> None:
    assert first_to_wait_for({3: 10, 2: 10}, 20) is None
    assert first_to_wait_for({3: 10, 2: 11}, 20) == 3
    assert first_to_wait_for({3: 100}, 20) is None and first_to_wait_for({}, 0) is None


@pytest.mark.parametrize("keeps", [False, True])
def test_the_order_of_updates_and_what_is_read_ahead_of_them(keeps: bool) -> None:
    layout = even_layout([1, 2, 2])
    placement = placed(
        layout, pages(100, disk=1000), wishes=PlacementWishes(master=Tier.DISK), unified=True, keep_gradients=keeps
    )
    assert update_order(layout, placement) == ([0, 1, 2] if keeps else [2, 1, 0])
    assert [flat.unit for flat in read_ahead(layout, placement)] == ([] if keeps else [2, 1, 0])
    in_ram = placed(layout, pages(1000), wishes=PlacementWishes(master=Tier.DEVICE), unified=True)
    assert read_ahead(layout, in_ram) == []
