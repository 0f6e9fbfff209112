"""Lock-free buffers, driven by hand: nothing is lost, nothing applied twice, nobody reads half of an update."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from types import MappingProxyType

import pytest
import torch

from lightning_ptm.memory.paged_tensor import Extent, PagedTensor, Pages
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.planning.version_policy import Begin
from lightning_ptm.terms import Tier
from lightning_ptm.update.gradient_source import ParameterGradients, Transform
from lightning_ptm.update.lock_free_buffers import Contribution, FlatBuffer, LockFreeBuffers, Origin, combined
from lightning_ptm.update.shadow import GroupValues

NUMEL = 8


def hyper(lr: float = 0.1, decay: float = 0.0) -> GroupValues:
    return GroupValues((MappingProxyType({"lr": lr, "weight_decay": decay}),))


def gradient(step: int, value: float = 1.0, lr: float = 0.1, **transform: torch.Tensor) -> Contribution:
    values = torch.full((NUMEL,), value)
    return Contribution(ParameterGradients([values]), (Origin(step, hyper(lr, decay=step)),), Transform(**transform))  # type: ignore[arg-type]


def pages(tensor_id: int) -> PagedTensor:
    return PagedTensor(tensor_id, f"pages {tensor_id}", NUMEL, torch.bfloat16, Tier.DEVICE)


def put(target: PagedTensor, value: float) -> None:
    """Puts a tensor in memory of its own, filled with a value."""
    target.place(Tier.DEVICE, Pages(NUMEL, [Extent(0, target.nbytes)]), HostRegion(target.nbytes))
    target.tensor().fill_(value)


def value_of(contribution: Contribution) -> float:
    source = contribution.source
    assert isinstance(source, ParameterGradients)
    (tensor,) = (tensor for tensor in source._flat if tensor is not None)
    return float(tensor[0])


@dataclasses.dataclass
class Job:
    flat: FlatBuffer
    contribution: Contribution
    target: PagedTensor


class Bench:
    """Buffers whose jobs end when a test says so; `readers` is what compute holds of each flat."""

    def __init__(
        self,
        flats: int = 1,
        spares: int = 2,
        room: int = 2,
        sizes: Sequence[int] = (),
        can_predict: bool = False,
    ) -> None:
        self.jobs: list[Job] = []
        self.flats = [
            FlatBuffer(f"flat {index}", NUMEL, torch.bfloat16, size=size, can_predict=can_predict)
            for index, size in enumerate(sizes or [1] * flats)
        ]
        self.held = {flat.name: pages(index) for index, flat in enumerate(self.flats)}
        spare = (pages(100 + index) for index in range(spares))
        self.buffers = LockFreeBuffers(self.flats, spare, self._start, room=room)

    def _start(self, begun: Begin[FlatBuffer], contribution: Contribution, target: PagedTensor) -> None:
        self.jobs.append(Job(begun.flat, contribution, target))

    def end(self, job: Job) -> None:
        self.jobs.remove(job)
        self.buffers.finish(job.flat)

    def read(self, flat: FlatBuffer) -> int:
        """Compute takes the newest version, as it does at a unit's first use; returns what it includes."""
        version = flat.slot.collect()
        if version is not None:
            old, self.held[flat.name] = self.held[flat.name], version.pages
            self.buffers.give_back(old)
        return flat.slot.applied


class PapersBuffer:
    """Algorithm 2 as printed: gradients are added to the buffer, which is cleared when the update has ended."""

    def __init__(self) -> None:
        self.buffer = 0.0
        self.applied = 0.0

    def offer(self, value: float) -> None:
        self.buffer += value

    def read(self) -> float:
        return self.buffer

    def finish(self, read: float) -> None:
        self.applied += read
        self.buffer = 0.0


def test_what_comes_during_an_update_is_lost_by_the_papers_clear_and_not_here() -> None:
    """In slow motion: gradient 1 comes, an update begins, gradient 2 comes, the update ends, and one more runs."""
    paper = PapersBuffer()
    paper.offer(1.0)
    read = paper.read()
    paper.offer(2.0)
    paper.finish(read)
    paper.finish(paper.read())
    assert paper.applied == 1.0  # of 3.0

    bench = Bench()
    (flat,) = bench.flats
    bench.buffers.offer(flat, gradient(0, 1.0))
    first = bench.jobs[0]
    bench.buffers.offer(flat, gradient(1, 2.0))
    assert (flat.received, flat.applied, flat.pending) == (2, 0, 2)
    assert value_of(first.contribution) == 1.0  # what is being applied does not change any more
    bench.end(first)
    assert bench.read(flat) == 1
    assert (flat.applied, flat.pending) == (1, 1)
    (second,) = bench.jobs
    assert value_of(second.contribution) == 2.0
    bench.end(second)
    assert (flat.received, flat.applied, flat.pending) == (2, 2, 0)


def test_an_update_writes_pages_that_nobody_reads() -> None:
    bench = Bench()
    (flat,) = bench.flats
    bench.buffers.offer(flat, gradient(0))
    (job,) = bench.jobs
    before = bench.held[flat.name]
    assert job.target is not before
    assert bench.read(flat) == 0 and bench.held[flat.name] is before  # not half of it
    bench.end(job)
    assert bench.held[flat.name] is before  # not while it is read
    assert bench.read(flat) == 1 and bench.held[flat.name] is job.target


def test_a_version_that_nobody_took_is_replaced_and_its_pages_are_used_again() -> None:
    bench = Bench(spares=2)
    (flat,) = bench.flats
    for step in range(6):
        bench.buffers.offer(flat, gradient(step))
        bench.buffers.prioritize(flat, step + 1)
        bench.end(bench.jobs[0])
    assert bench.buffers.idle
    assert bench.read(flat) == 6


def test_gradients_that_wait_are_added_and_one_update_applies_them() -> None:
    bench = Bench()
    (flat,) = bench.flats
    bench.buffers.offer(flat, gradient(0))
    for step, value in ((1, 2.0), (2, 4.0), (3, 8.0)):
        bench.buffers.offer(flat, gradient(step, value))
    bench.end(bench.jobs[0])
    bench.read(flat)
    (job,) = bench.jobs
    assert value_of(job.contribution) == 14.0
    assert [origin.step for origin in job.contribution.origins] == [1, 2, 3]
    assert (flat.received, flat.applied, flat.pending) == (4, 1, 3)


def test_gradients_of_other_parameters_wait_apart() -> None:
    """One update of both would apply two steps' learning rates to half of one step's gradient."""
    bench = Bench()
    (flat,) = bench.flats
    bench.buffers.offer(flat, gradient(0))
    for step in (1, 2, 3):
        source = ParameterGradients([torch.ones(NUMEL), None if step == 2 else torch.ones(NUMEL)])
        bench.buffers.offer(flat, Contribution(source, (Origin(step, hyper()),)))
    steps = []
    while bench.jobs:
        steps.append([origin.step for origin in bench.jobs[0].contribution.origins])
        bench.end(bench.jobs[0])
        bench.read(flat)
    assert steps == [[0], [1], [2], [3]]
    assert (flat.received, flat.applied, flat.pending) == (4, 4, 0)


def test_a_request_that_was_overtaken_asks_for_nothing() -> None:
    bench = Bench(flats=3, spares=2)
    flat = bench.flats[0]
    bench.buffers.offer(flat, gradient(0))
    bench.end(bench.jobs[0])
    bench.buffers.offer(flat, gradient(1))
    assert not bench.buffers.prioritize(flat, 1)
    assert bench.jobs == []  # the last spare pages are not for it


def test_each_step_clips_and_unscales_its_own_gradient() -> None:
    first = gradient(0, 8.0, clip=torch.tensor(0.5))
    first.add(gradient(1, 8.0, clip=torch.tensor(0.25), unscale=torch.tensor(2.0)))
    first.add(gradient(2, 1.0))
    assert value_of(first) == 4.0 + 4.0 + 1.0
    assert combined(first)[1] == Transform(share=1 / 3)


def test_gradients_that_are_still_on_their_way_are_awaited_before_they_are_added() -> None:
    waited: list[str] = []

    @dataclasses.dataclass
    class OnItsWay:
        name: str

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            waited.append(self.name)

    one, other = gradient(0), gradient(1)
    one.after, other.after = (OnItsWay("one"),), (OnItsWay("other"),)
    discarded: list[int] = []
    other.discard = lambda: discarded.append(1)
    one.add(other)
    assert waited == ["one", "other"] and discarded == [1] and not one.after


def test_gradients_that_are_still_on_their_way_are_awaited_before_they_are_foreseen() -> None:
    told: list[str] = []

    class Told:
        """On its way, or what is expected of it."""

        def __init__(self, name: str) -> None:
            self.name = name

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            told.append(self.name)

        def add_(self, *_: object) -> None:
            told.append("added")

    one = gradient(1)
    one.after = (Told("one"),)
    flat, target = FlatBuffer("flat", NUMEL, torch.bfloat16), pages(0)
    flat.prediction = Told("prediction")  # type: ignore[assignment]
    put(target, 0.0)
    flat.predict_weights(target, one)
    assert told == ["one", "added"] and not one.after


def test_one_steps_gradient_is_applied_with_that_steps_hyper_parameters() -> None:
    clip = torch.tensor(0.5)
    contribution = gradient(3, lr=0.3, clip=clip)
    assert combined(contribution) == ((hyper(0.3, decay=3),), Transform(clip=clip))


def test_several_steps_are_applied_as_steps_of_their_own_with_the_mean_of_their_gradients() -> None:
    contribution = gradient(3, lr=0.25)
    contribution.add(gradient(4, lr=0.5))
    steps, transform = combined(contribution)
    assert steps == (hyper(0.25, decay=3), hyper(0.5, decay=4))
    assert transform == Transform(share=0.5)
    values = torch.full((2,), 6.0)
    transform.apply_(values)
    assert values.tolist() == [3.0, 3.0]


def test_the_oldest_gradients_come_first_but_for_what_compute_waits_for() -> None:
    bench = Bench(flats=5, spares=5)
    for step, index in ((0, 0), (0, 1), (5, 2), (3, 3), (4, 4)):
        bench.buffers.offer(bench.flats[index], gradient(step))
    assert [job.flat.name for job in bench.jobs] == ["flat 0", "flat 1"]  # two are in hand
    assert bench.buffers.prioritize(bench.flats[4], 1)
    assert bench.jobs[-1].flat is bench.flats[4]
    bench.end(bench.jobs[0])
    bench.end(bench.jobs[0])
    assert [job.flat.name for job in bench.jobs][:2] == ["flat 4", "flat 3"]


def test_jobs_are_started_as_far_as_there_is_room() -> None:
    bench = Bench(flats=6, spares=7, room=4)
    for flat in bench.flats:
        bench.buffers.offer(flat, gradient(0))
    assert len(bench.jobs) == 4


def test_the_last_spare_pages_are_for_what_compute_waits_for() -> None:
    """Versions that compute cannot take yet, because it is using the old ones, must not leave it without pages."""
    bench = Bench(flats=3, spares=2)
    for flat in bench.flats:
        bench.buffers.offer(flat, gradient(0))
    (job,) = bench.jobs
    bench.end(job)
    assert bench.jobs == []  # one spare is left, and the version of flat 0 is not taken
    bench.buffers.prioritize(bench.flats[2], 1)
    (job,) = bench.jobs
    assert job.flat is bench.flats[2]
    bench.end(job)
    assert bench.read(bench.flats[2]) == 1
    assert bench.jobs == []
    bench.read(bench.flats[0])
    assert [job.flat for job in bench.jobs] == [bench.flats[1]]


class Interleaving(Bench):
    """Random events, with a model beside them: every contribution is a power of two, so a sum tells which are in it.

    In every other run gradients are of one parameter or another, so that not all of them can be added.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        super().__init__(self.random.randint(1, 4), 2, self.random.randint(1, 3))
        self.offered: dict[str, list[float]] = {flat.name: [] for flat in self.flats}
        self.done: dict[str, list[float]] = {flat.name: [] for flat in self.flats}
        self.used: set[str] = set()
        self.requests: list[tuple[FlatBuffer, int]] = []
        self.bound = self.random.randint(0, 3)
        self.kinds = 1 + seed % 2

    def offer_one(self, flat: FlatBuffer) -> None:
        offered = self.offered[flat.name]
        offered.append(2.0 ** len(offered))
        values: list[torch.Tensor | None] = [None, None]
        values[self.random.randrange(self.kinds)] = torch.full((NUMEL,), offered[-1])
        source = ParameterGradients(values)
        contribution = Contribution(source, (Origin(len(offered) - 1, hyper()),))
        self.buffers.offer(flat, contribution)

    def end_one(self) -> None:
        if self.jobs:
            job = self.random.choice(self.jobs)
            self.done[job.flat.name].append(value_of(job.contribution))
            self.end(job)

    def check(self) -> None:
        in_use = [*self.held.values(), *(job.target for job in self.jobs)]
        in_use += [flat.slot._published.pages for flat in self.flats if flat.slot._published is not None]
        assert len({tensor.id for tensor in in_use}) == len(in_use), "pages have two owners"
        for flat in self.flats:
            assert flat.received == len(self.offered[flat.name]) == flat.applied + flat.pending
            assert flat.slot.applied == flat.applied

    def run(self, events: int) -> None:
        for _ in range(events):
            flat = self.random.choice(self.flats)
            event = self.random.choice(
                ("offer", "offer", "end", "end", "prefetch", "prefetch", "use", "next", "deliver")
            )
            if event == "offer" and len(self.offered[flat.name]) < 20:
                self.offer_one(flat)
            elif event == "end":
                self.end_one()
            elif event == "prefetch":
                self.prefetch(flat)
            elif event == "use":
                self.use(flat)
            elif event == "next":
                self.used.clear()
            elif event == "deliver":
                self.deliver(1)
            self.check()
        self.drain()
        for flat in self.flats:
            # Each contribution is in one update: the updates' sums are disjoint, and make up all that was offered.
            assert sum(self.done[flat.name]) == sum(self.offered[flat.name])
            bits = [int(value) for value in self.done[flat.name]]
            assert all(one & other == 0 for index, one in enumerate(bits) for other in bits[:index])
            assert flat.pending == 0 and flat.applied == len(self.offered[flat.name])

    def too_stale(self, flat: FlatBuffer) -> bool:
        return len(self.offered[flat.name]) - flat.slot.applied > self.bound

    def prioritize(self, flat: FlatBuffer) -> None:
        """A request travels to the buffering thread, which may be told of other things first."""
        self.requests.append((flat, len(self.offered[flat.name]) - self.bound))

    def deliver(self, count: int) -> None:
        for flat, needed in self.requests[:count]:
            self.buffers.prioritize(flat, needed)
        del self.requests[:count]

    def prefetch(self, flat: FlatBuffer) -> None:
        """Compute would like to have the flat and does not wait for it."""
        if flat.name in self.used:
            return
        if self.too_stale(flat):
            self.prioritize(flat)
        else:
            self.used.add(flat.name)
            self.read(flat)

    def use(self, flat: FlatBuffer) -> None:
        """Compute waits for the flat. What it uses already keeps its pages."""
        rounds = 0
        while flat.name not in self.used and self.too_stale(flat):
            self.prioritize(flat)
            self.deliver(len(self.requests))
            for other in self.flats:
                if other.name not in self.used:
                    self.read(other)
            assert self.jobs, "compute would wait for ever"
            self.end_one()
            rounds += 1
            assert rounds < 1000
        self.prefetch(flat)

    def drain(self) -> None:
        """Drains as at a validation: nothing is in use."""
        self.used.clear()
        while not self.buffers.idle:
            for flat in self.flats:
                self.read(flat)
            assert self.jobs, "the drain would wait for ever"
            self.end_one()
            self.check()


@pytest.mark.slow_unless("1", "2")
@pytest.mark.parametrize("block", range(4))
def test_thousands_of_interleavings(block: int) -> None:
    for seed in range(block * 1000, (block + 1) * 1000):
        Interleaving(seed).run(40)


def test_a_job_takes_what_comes_until_it_begins() -> None:
    bench = Bench(flats=3, spares=4)
    for flat in bench.flats:
        bench.buffers.offer(flat, gradient(0))
    last = bench.flats[2]
    assert last.taken is None  # two are in hand
    bench.buffers.offer(last, gradient(1))
    bench.end(bench.jobs[0])
    assert bench.jobs[-1].flat is last
    assert len(bench.jobs[-1].contribution.origins) == 2


def test_gradients_that_cannot_be_added_are_jobs_of_their_own() -> None:
    bench = Bench()
    (flat,) = bench.flats
    for step, which in enumerate(([8], [8], [8, None], [8, None])):
        source = ParameterGradients([size and torch.ones(size) for size in which])
        bench.buffers.offer(flat, Contribution(source, (Origin(step, GroupValues(())),)))
    applied = []
    while bench.jobs:
        (job,) = bench.jobs
        applied.append([origin.step for origin in job.contribution.origins])
        bench.end(job)
        bench.read(flat)
    assert applied == [[0], [1], [2, 3]]


# -- float16 under a loss scale ---------------------------------------------------------------------------------------


def scaled(step: int, value: float, scale: float, clip: float = 1.0, clamp: float | None = None) -> Contribution:
    """A gradient of `value` as the backward pass leaves it: in float16, times the loss scale."""
    gradients = ParameterGradients([torch.full((NUMEL,), value * scale, dtype=torch.float16)])
    transform = Transform(torch.tensor(1 / scale), torch.tensor(clip), clamp)
    return Contribution(gradients, (Origin(step, hyper()),), transform)


def applied_value(contribution: Contribution) -> float:
    """Returns the sum of an update, before it takes the mean of its steps."""
    values = torch.tensor([value_of(contribution)])
    dataclasses.replace(combined(contribution)[1], share=1.0).apply_(values)
    return float(values)


@pytest.mark.parametrize("value", [1e-8, 1e-4, 0.9])
def test_scaled_gradients_of_many_steps_are_added_without_loss(value: float) -> None:
    """Alone, 1e-8 is nothing in float16, and the sum of 0.9 times the scale is more than float16 holds."""
    bench = Bench(flats=1)
    (flat,) = bench.flats
    bench.buffers.offer(flat, scaled(-1, value, 1.0))  # its job is in hand
    expected = 0.0
    for step in range(16):
        scale = 2.0**16 if step < 10 else 2.0**15  # it has overflowed meanwhile
        clip = 1.0 if step % 3 else 0.01
        expected += value * clip
        bench.buffers.offer(flat, scaled(step, value, scale, clip))
    (waiting,) = flat.waiting
    assert len(waiting.origins) == 16
    assert applied_value(waiting) == pytest.approx(expected, rel=4e-3)


def test_scaled_gradients_are_clipped_by_value_one_by_one() -> None:
    first = scaled(0, 0.5, 1024.0, clamp=0.25)
    first.add(scaled(1, -0.125, 2048.0, clamp=0.25))
    assert applied_value(first) == pytest.approx(0.125, rel=1e-3)
    first.add(scaled(2, -3.0, 2048.0, clip=0.5, clamp=0.25))
    assert applied_value(first) == pytest.approx(-0.125, rel=4e-3)
    nothing = scaled(0, 0.5, 1024.0, clip=0.0)
    nothing.add(scaled(1, 0.5, 1024.0, clip=0.0))
    assert applied_value(nothing) == 0.0


def test_scaled_gradients_are_clipped_again_one_by_one() -> None:
    first = scaled(0, 0.5, 1024.0, clamp=0.25)
    further = (Transform(clip=torch.tensor(0.5)), Transform(clamp=0.1))
    first.transform = dataclasses.replace(first.transform, then=further)
    first.add(scaled(1, -0.01, 2048.0))
    assert applied_value(first) == pytest.approx(0.09, rel=4e-3)
