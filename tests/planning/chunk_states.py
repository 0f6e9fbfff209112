"""Explicit-state model checker of `planning/chunks.py`: every state that a scenario can reach, and what must hold in each.

A state is a tuple; the policy is built anew from it for each step that is tried. Nothing comes by itself: whenever the policy
looks whether a read, a write or a gradient has come, both answers are tried (one that has come stays). So every order of
completions is covered, also between two looks of one `advance`, as threads of disks bring them about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lightning_ptm.planning.chunks import Chunk, Chunks, Job, WantedChunk, even_chunk_bounds

STATES, TARGET, GRADIENT = 1, 2, 4
"""Columns of a chunk, each a buffer. States are read, also before a job is known. The target is a buffer that its job adds, a
gradient one that is read when the job has its gradient."""


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """An update: of which flat, with which columns; `starts`: chunks without a gradient are left out (None: all)."""

    flat: str
    columns: int = STATES
    starts: tuple[int, ...] | None = None
    turn: int = 0

    @property
    def streams(self) -> bool:
        return bool(self.columns)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Events that may happen, in any order that respects that of `jobs`.

    Attributes:
        staging: chunks that hold buffers at once.
        chunks: of each flat.
        jobs: in the order in which they are submitted, each at any time.
        orders: that may be wanted ahead, each at any time and any number of times.
        fronts: any job may be served first, at any time; forgets: what was read ahead may be dropped.
    """

    staging: int
    chunks: dict[str, int]
    jobs: tuple[JobSpec, ...]
    orders: tuple[tuple[str, ...], ...] = ()
    fronts: bool = True
    forgets: bool = False


class ChunkState(NamedTuple):
    flat: str
    start: int
    buffers: int
    all_reads_begun: bool
    reading: bool
    writing: bool


class JobState(NamedTuple):
    index: int
    waiting: tuple[int, ...]
    active: tuple[ChunkState, ...]
    incomplete: tuple[int, ...]
    """Places in `active`."""
    gradient: bool
    predecessor: int | None
    """Index of a job that is not computed."""
    computed: tuple[int, ...]


class State(NamedTuple):
    submitted: int
    queue: tuple[JobState, ...]
    wanted: tuple[tuple[str, int], ...]
    ahead: tuple[ChunkState, ...]
    writing: tuple[ChunkState, ...]
    abandoned: tuple[ChunkState, ...]


EMPTY = State(0, (), (), (), (), ())


class Answers:
    """Whether what is outstanding has come, look by look: the given answers first, then `rest`."""

    def __init__(self, given: Sequence[bool] = (), *, rest: bool = False) -> None:
        self.given = list(given)
        self.rest = rest
        self.looks = 0

    def ask(self) -> bool:
        self.looks += 1
        return self.given[self.looks - 1] if self.looks <= len(self.given) else self.rest


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Transfers or a gradient in progress; `done` returns whether they have ended."""

    done: Callable[[], bool]


@dataclasses.dataclass(slots=True, eq=False)
class ModelChunk(Chunk[str]):
    model: Model | None = None
    buffers: int = 0
    reading: bool = False
    writing: bool = False

    @property
    def reads(self) -> Asked:
        return Asked(self._have_read)

    @property
    def writes(self) -> Asked:
        return Asked(self._have_written)

    def _have_read(self) -> bool:
        assert self.model is not None
        self.reading = self.reading and not self.model.answers.ask()
        return not self.reading

    def _have_written(self) -> bool:
        assert self.model is not None
        self.writing = self.writing and not self.model.answers.ask()
        return not self.writing

    def frozen(self) -> ChunkState:
        return ChunkState(self.flat, self.start, self.buffers, self.all_reads_begun, self.reading, self.writing)


class ModelJob(Job[str, ModelChunk]):
    def __init__(self, index: int, model: Model) -> None:
        self.spec = spec = model.scenario.jobs[index]
        cuts = model.cuts[spec.flat]
        starts = cuts.starts if spec.starts is None else spec.starts
        ahead = bool(spec.columns & STATES)
        has_gradient = Asked(self._has_gradient)
        super().__init__(spec.flat, cuts, starts, has_gradient, streams=spec.streams, reads_ahead=ahead, turn=spec.turn)
        self.index, self.model = index, model
        self.starts = tuple(starts)
        self.gradient = False
        self.done: list[int] = []

    def _has_gradient(self) -> bool:
        self.gradient = self.gradient or self.model.answers.ask()
        return self.gradient

    def frozen(self) -> JobState:
        return JobState(
            self.index,
            tuple(self.waiting),
            tuple(chunk.frozen() for chunk in self.active),
            tuple(place for place, chunk in enumerate(self.active) if chunk in self.incomplete),
            self.gradient,
            None if self.predecessor is None else self.predecessor.index,
            tuple(sorted(self.done)),
        )


class Model:
    """The policy in one state, and hands that check what it does."""

    def __init__(self, scenario: Scenario, state: State) -> None:
        self.scenario = scenario
        self.cuts = {flat: even_chunk_bounds(count, 1) for flat, count in scenario.chunks.items()}
        self.answers = Answers()
        self.policy: Chunks[str, ModelJob, ModelChunk] = Chunks(self, staging=scenario.staging)
        self.submitted = state.submitted
        policy = self.policy
        policy._wanted = [WantedChunk(flat, self.cuts[flat], place) for flat, place in state.wanted]
        policy._ahead = [self._thawed(chunk) for chunk in state.ahead]
        policy._writing = [self._thawed(chunk) for chunk in state.writing]
        policy._abandoned = [self._thawed(chunk) for chunk in state.abandoned]
        jobs: dict[int, ModelJob] = {}
        for each in state.queue:
            job = jobs[each.index] = ModelJob(each.index, self)
            job.waiting = list(each.waiting)
            job.active = [self._thawed(chunk) for chunk in each.active]
            job.incomplete = [job.active[place] for place in each.incomplete]
            job.gradient, job.done = each.gradient, list(each.computed)
        for each in state.queue:
            jobs[each.index].predecessor = None if each.predecessor is None else jobs[each.predecessor]
        policy.queue = list(jobs.values())
        policy._held = sum(1 for _ in self.holders())

    def _thawed(self, state: ChunkState) -> ModelChunk:
        chunk = ModelChunk(state.flat, state.start, 1, state.all_reads_begun)
        chunk.model, chunk.buffers, chunk.reading, chunk.writing = self, state.buffers, state.reading, state.writing
        return chunk

    def frozen(self) -> State:
        policy = self.policy
        return State(
            self.submitted,
            tuple(job.frozen() for job in policy.queue),
            tuple((wanted.flat, wanted.place) for wanted in policy._wanted),
            tuple(chunk.frozen() for chunk in policy._ahead),
            tuple(chunk.frozen() for chunk in policy._writing),
            tuple(chunk.frozen() for chunk in policy._abandoned),
        )

    def holders(self) -> Iterator[ModelChunk]:
        """Chunks that hold buffers."""
        policy = self.policy
        for chunks in (policy._ahead, policy._writing, policy._abandoned):
            yield from chunks
        for job in policy.queue:
            if job.streams:
                yield from job.active

    def all_comes(self) -> None:
        """All that is outstanding has ended."""
        for chunk in self.holders():
            chunk.reading = chunk.writing = False
        for job in self.policy.queue:
            job.gradient = True

    def check(self) -> None:
        """Checks what holds between any two steps."""
        policy = self.policy
        held = list(self.holders())
        assert policy._held == len(held) <= self.scenario.staging, "more chunks hold buffers than there are"
        stretches = [(chunk.flat, chunk.start) for chunk in held]
        assert len(set(stretches)) == len(stretches), "two chunks of one stretch are in hand"
        for job in policy.queue:
            parts = sorted([*job.waiting, *(chunk.start for chunk in job.active), *job.done])
            assert parts == sorted(job.starts), f"job {job.index} has lost a chunk, or has one twice"
            assert all(chunk in job.active for chunk in job.incomplete)

    # Hands.

    def chunk(self, flat: str, start: int, numel: int) -> ModelChunk:
        chunk = ModelChunk(flat, start, numel)
        chunk.model = self
        return chunk

    def read(self, job: ModelJob | None, chunk: ModelChunk) -> bool:
        for other in self.holders():
            assert other is chunk or (other.flat, other.start) != (chunk.flat, chunk.start), "I2"
        assert not chunk.writing
        columns = STATES if job is None else job.spec.columns
        wanted = columns if job is None or job.before.done() else columns & ~GRADIENT
        missing = wanted & ~chunk.buffers
        chunk.buffers |= missing
        chunk.reading = chunk.reading or bool(missing & (STATES | GRADIENT))
        chunk.note_reads(all_reads_begun=job is not None and chunk.buffers & columns == columns)
        return bool(missing)

    def update(self, job: ModelJob, chunk: ModelChunk) -> bool:
        assert job.gradient, "computed before its gradient was there"
        assert not chunk.reading and not chunk.writing, "computed in the middle of a transfer"
        assert chunk.buffers & job.spec.columns == job.spec.columns, "computed before all of it was read"
        assert chunk.start not in job.done, "computed twice"
        earlier = [other for other in self.policy.queue if other.flat == job.flat and other.index < job.index]
        assert all(other.computed for other in earlier), "computed before an earlier job of its flat"
        job.done.append(chunk.start)
        chunk.writing = bool(job.spec.columns & (STATES | TARGET))
        return chunk.writing

    def free(self, chunk: ModelChunk) -> None:
        assert not chunk.reading and not chunk.writing, "buffers were taken in the middle of a transfer"
        assert chunk.buffers, "buffers were taken back twice"
        chunk.buffers = 0

    def end(self, job: ModelJob) -> None:
        assert sorted(job.done) == sorted(job.starts), "ended before all of it was computed"


Event = tuple[str, object]


@dataclasses.dataclass(frozen=True)
class Step:
    """One that can be taken: `of_itself` without a command from outside."""

    event: Event
    to: State
    of_itself: bool


def _advances(scenario: Scenario, state: State) -> Iterator[tuple[Step, bool]]:
    """One `advance` for every way in which its looks can be answered; and whether it says that anything moved."""
    left: list[list[bool]] = [[]]
    while left:
        given = left.pop()
        model = Model(scenario, state)
        model.answers = Answers(given)
        idle = model.policy.idle
        moved = model.policy.advance()
        assert not (idle and moved), "an idle policy did something"
        model.check()
        for place in range(len(given), model.answers.looks):
            left.append([*given, *[False] * (place - len(given)), True])
        yield Step(("advance", tuple(given)), model.frozen(), True), moved


def _commanded(scenario: Scenario, state: State) -> Iterator[Step]:
    def after(event: Event, act: Callable[[Model], object]) -> Step:
        model = Model(scenario, state)
        act(model)
        model.check()
        return Step(event, model.frozen(), False)

    if state.submitted < len(scenario.jobs):

        def submit(model: Model) -> None:
            model.policy.enqueue(ModelJob(state.submitted, model))
            model.submitted += 1

        yield after(("submit", state.submitted), submit)
    if scenario.fronts:
        for place, job in enumerate(state.queue):
            if place:
                yield after(
                    ("to front", job.index), lambda model, at=place: model.policy.to_front(model.policy.queue[at])
                )  # type: ignore[misc]
    for order in scenario.orders:
        yield after(
            ("want", order),
            lambda model, flats=order: model.policy.want([WantedChunk(flat, model.cuts[flat]) for flat in flats]),  # type: ignore[misc]
        )
    if scenario.forgets and (state.ahead or state.wanted):
        yield after(("forget", None), lambda model: model.policy.drop_read_ahead())


def _check_progress(scenario: Scenario, state: State) -> None:
    """While anything is unfinished, something can be done, or named that comes for certain."""
    model = Model(scenario, state)
    if not model.policy.busy:
        assert not state.queue
        return
    leads = [None, *range(len(state.queue))]
    if not model.policy.advance():
        assert model.frozen() == state, "something changed, and `advance` does not say so"
        for lead in leads:
            model = Model(scenario, state)
            found = model.policy.awaited(None if lead is None else model.policy.queue[lead])
            assert found is not None, "nothing can go on, and nothing is named to wait for"
            outstanding = not found.gradient if isinstance(found, ModelJob) else found.reading or found.writing
            assert outstanding, "what is named to wait for has come"
    else:
        assert model.frozen() != state, "`advance` says that something moved, and nothing did"
    model = Model(scenario, state)
    model.all_comes()
    assert model.policy.advance(), "all reads, writes and gradients have come, and nothing can go on"


class Stuck(AssertionError):
    """A condition that must hold does not; names the way to the state."""


@dataclasses.dataclass
class Found:
    states: int
    steps: int


def explore(scenario: Scenario, most: int = 1_000_000) -> Found:
    """Visits every state.

    Raises:
        Stuck: what must hold does not; with the shortest way there.
    """
    came_from: dict[State, tuple[State, Event] | None] = {EMPTY: None}
    of_itself: dict[State, list[State]] = {}
    left = [EMPTY]
    steps = 0
    event: Event | None = None
    for state in left:
        try:
            event = None
            _check_progress(scenario, state)
            following = []
            for step, moved in _advances(scenario, state):
                event = step.event
                if step.to != state:
                    following.append(step.to)
                assert not moved or step.to != state, "`advance` goes round in a circle"
                steps += 1
                if step.to not in came_from:
                    came_from[step.to] = (state, step.event)
                    left.append(step.to)
            of_itself[state] = following
            for step in _commanded(scenario, state):
                steps += 1
                if step.to not in came_from:
                    came_from[step.to] = (state, step.event)
                    left.append(step.to)
        except AssertionError as error:
            raise Stuck(f"{error}\n{_way(came_from, state)}\nthen {event}\nstate {state}") from error
        assert len(left) <= most, f"more than {most} states"
    _check_ends(of_itself)
    return Found(len(left), steps)


def _check_ends(of_itself: dict[State, list[State]]) -> None:
    """Checks that no cycle of states exists without commands: in whatever order events come, all jobs end."""
    done: set[State] = set()
    for first in of_itself:
        way: list[tuple[State, Iterator[State]]] = [(first, iter(of_itself[first]))]
        on_way = {first}
        while way:
            state, after = way[-1]
            following = next(after, None)
            if following is None:
                way.pop()
                on_way.discard(state)
                done.add(state)
            elif following in on_way:
                raise Stuck(f"a circle through {following}")
            elif following not in done:
                way.append((following, iter(of_itself[following])))
                on_way.add(following)


def _way(came_from: dict[State, tuple[State, Event] | None], state: State) -> str:
    events = []
    while (before := came_from[state]) is not None:
        state, event = before
        events.append(event)
    return "\n".join(str(event) for event in reversed(events))
