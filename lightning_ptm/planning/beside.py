"""How long steps take while updates go on in a thread of their own, on the cores that compute (lock-free mode on a CPU).

Owns the clock of some steps in a row. Replays update/buffers.py and update/pipeline.py by their rules, chunk by chunk: a
gradient waits until its flat has no job and there are spare pages for the new version; these come back when compute adopts
the version, which it does only while it is not reading the one before; what waits meanwhile is added up, and taken at once.
Each second of the thread's arithmetic makes compute longer by `loss` seconds, for its cores work in lockstep.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Phase

_REACH = 2
"""Updates that a forecast reaches, and steps that are taken one by one (update/forecast.py)."""
_MERGED_PASSES = 1.4
"""Passes that more steps take at once: one of 28 bytes an element, and a correction that reads and writes a moment and reads
a gradient, 12 bytes (update/merged.py)."""
_STEPS = 12
"""Steps that count, at least; before them as many, and as many as parameters may lack."""
_MOST_STEPS = 96
"""A bound beyond that hardly changes a mean."""


@dataclass(frozen=True, slots=True)
class BesideRates:
    """Of the thread, beside compute; elements and bytes a second.

    Args:
        update_bytes_per_s: of master states twice, gradients and compute parameters once.
        loss: seconds by which compute gets longer for each second of it.
        learn_numel_per_s: what a forecast takes beyond; None: nothing.
        forecast_numel_per_s: to which a forecast is added; None: it takes no time.
        sum_bytes_per_s: of gradients that are added up: two read, one written.
        disk_bytes_per_s: reads and writes together.
    """

    update_bytes_per_s: float
    loss: float
    learn_numel_per_s: float | None
    forecast_numel_per_s: float | None
    sum_bytes_per_s: float
    disk_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class BesideFlat:
    """A trainable flat of this rank: its pages are of one kind with those of other flats of the same `kind`."""

    unit: int
    numel: int
    bytes_per_element: int
    master_bytes_per_element: int
    on_disk: bool
    kind: Hashable


@dataclass(frozen=True, slots=True)
class BesideTiming:
    """Means of a step: seconds, those of them that compute waited for versions, and how often a flat was updated."""

    seconds: float
    stall_s: float
    updates: float


@dataclass(slots=True, eq=False)
class _Chunk:
    job: _Job
    numel: int
    ready_s: float


@dataclass(slots=True, eq=False)
class _Job:
    flat: _Flat
    steps: int
    unread: list[int]
    """Elements of the chunks that have no buffers yet."""
    left: int
    """Chunks that are not computed yet."""


@dataclass(slots=True, eq=False)
class _Flat:
    is_: BesideFlat
    chunks: list[int]
    received: int = 0
    waiting: int = 0
    waits_since: int = 0
    due: int = 1
    """Waiting contributions with which an update begins."""
    job: _Job | None = None
    applied: int = 0
    """Contributions in the newest version."""
    adopted: int = 0
    seen: int = 0
    published: bool = False
    learned: bool = False
    read: bool = False
    urgent: bool = False
    written_s: float = 0.0


@dataclass(slots=True)
class _State:
    now_s: float = 0.0
    stall_s: float = 0.0
    thread_free_s: float = 0.0
    disk_free_s: float = 0.0
    longer_s: float = 0.0
    """By which the tick in progress gets longer."""
    updates: int = 0
    jobs: list[_Job] = field(default_factory=list)
    chunks: list[_Chunk] = field(default_factory=list)
    landing: list[float] = field(default_factory=list)


class Beside:
    """One run.

    Args:
        flats: all trainable ones.
        spares: pages for versions in the making, by kind.
        rates: of this rank.
        chunk_numel: elements that travel together; staging: chunks that hold buffers at once.
        max_staleness: steps whose gradients a parameter in use may lack; forecast: they are forecast.
        paced_steps: steps between two updates of a flat, one flat after the other (update/pace.py); 1: as soon as they can.
    """

    def __init__(
        self,
        flats: Sequence[BesideFlat],
        spares: Mapping[Hashable, int],
        rates: BesideRates,
        *,
        chunk_numel: int,
        staging: int,
        max_staleness: int,
        forecast: bool,
        paced_steps: int = 1,
    ) -> None:
        # Configuration.
        self._rates = rates
        self._staging = staging
        self._max_staleness = max_staleness
        self._forecast = forecast
        self._paced_steps = paced_steps
        self._total = dict(spares)
        # State.
        self._flats = [
            _Flat(flat, [min(chunk_numel, flat.numel - start) for start in range(0, flat.numel, chunk_numel)])
            for flat in flats
        ]
        for place, each in enumerate(self._flats):
            each.due = 1 + place * (paced_steps - 1) // len(self._flats)
        self._of_unit: dict[int, list[_Flat]] = {}
        for flat in self._flats:
            self._of_unit.setdefault(flat.is_.unit, []).append(flat)
        self._free = dict(spares)
        self._at = _State()

    def run(self, trace: Trace, *, micro_batches: int = 1, step_s: float = 0.0) -> BesideTiming:
        """Steps of these ticks, one after the other.

        Args:
            trace: with seconds; step_s: what a step takes beside its ticks.
        """
        last = {tick.unit: index for index, tick in enumerate(trace.ticks) if tick.phase is Phase.BACKWARD}
        counted = max(_STEPS, min(self._paced_steps, _MOST_STEPS))
        steps = 2 * counted + min(self._max_staleness, _MOST_STEPS)
        began_s, stalled_s, updated = 0.0, 0.0, 0
        for step in range(steps):
            if step == steps - counted:
                began_s, stalled_s, updated = self._at.now_s, self._at.stall_s, self._at.updates
            for micro_batch in range(micro_batches):
                self._let_go()
                for index, tick in enumerate(trace.ticks):
                    if tick.phase is Phase.FORWARD:
                        self._read(tick.unit)
                    self._compute(tick.seconds)
                    if last.get(tick.unit) == index and micro_batch == micro_batches - 1:
                        self._hand_over(tick.unit, step)
            self._let_go()
            self._compute(step_s)
        flats = max(1, len(self._flats))
        return BesideTiming(
            (self._at.now_s - began_s) / counted,
            (self._at.stall_s - stalled_s) / counted,
            (self._at.updates - updated) / counted / flats,
        )

    # -- compute -------------------------------------------------------------------------------------------------------

    def _compute(self, seconds: float) -> None:
        at = self._at
        left = seconds + at.longer_s
        at.longer_s = 0.0
        while True:
            starts_s = self._next_s()
            if starts_s >= at.now_s + left:
                at.now_s += left
                return
            left -= max(0.0, starts_s - at.now_s)
            at.now_s = max(at.now_s, starts_s)
            self._work()
            left += at.longer_s
            at.longer_s = 0.0

    def _read(self, unit: int) -> None:
        for flat in self._flats:
            if not flat.read:
                self._adopt(flat)
        flats = self._of_unit.get(unit, ())
        for flat in flats:
            while flat.received - flat.applied > self._max_staleness:
                flat.urgent = True
                self._feed()
                starts_s = self._next_s()
                if starts_s == float("inf"):
                    break
                self._at.stall_s += max(0.0, starts_s - self._at.now_s)
                self._at.now_s = max(self._at.now_s, starts_s)
                self._work()
                waits_s = max(0.0, self._at.thread_free_s - self._at.now_s)
                self._at.stall_s += waits_s
                self._at.now_s += waits_s
                self._at.longer_s = 0.0
                for other in self._flats:
                    if not other.read:
                        self._adopt(other)
            flat.read = True

    def _let_go(self) -> None:
        """Nothing is being read any more."""
        for flat in self._flats:
            flat.read = False
            self._adopt(flat)

    def _adopt(self, flat: _Flat) -> None:
        if flat.published:
            flat.published = False
            flat.adopted, flat.seen = flat.applied, flat.received
            self._free[flat.is_.kind] += 1
            self._feed()

    def _hand_over(self, unit: int, step: int) -> None:
        for flat in self._of_unit.get(unit, ()):
            at, numel = self._at, flat.is_.numel
            foresees = flat.learned and flat.seen == flat.received and not flat.published
            if foresees and flat.received + 1 - flat.adopted <= min(self._max_staleness, _REACH):
                at.longer_s += self._forecast_s(numel)
                flat.seen += 1
            flat.received += 1
            if flat.published and flat.learned and flat.received - flat.applied <= _REACH:
                at.longer_s += self._rates.loss * self._forecast_s(numel)
            if flat.waiting:
                size = 3 * numel * flat.is_.bytes_per_element
                at.longer_s += self._rates.loss * size / self._rates.sum_bytes_per_s
            else:
                flat.waits_since = step
            flat.waiting += 1
        self._feed()

    # -- updates -------------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Start jobs as far as there is room (update/buffers.py)."""
        jobs = self._at.jobs
        ready = [
            flat
            for flat in self._flats
            if flat.job is None and (flat.waiting >= flat.due or (flat.waiting and flat.urgent))
        ]
        ready.sort(key=lambda flat: (not flat.urgent, flat.waits_since))
        for flat in ready:
            held = sum(len(job.flat.chunks) for job in jobs)
            if not flat.urgent and len(jobs) >= 2 and held + len(flat.chunks) > self._staging:
                break
            kind = flat.is_.kind
            if self._free[kind] > (0 if flat.urgent or self._total[kind] == 1 else 1):
                self._free[kind] -= 1
                flat.job = _Job(flat, flat.waiting, list(reversed(flat.chunks)), len(flat.chunks))
                flat.waiting, flat.due = 0, self._paced_steps
                jobs.insert(0, flat.job) if flat.urgent else jobs.append(flat.job)
        self._fetch()

    def _fetch(self) -> None:
        at = self._at
        at.landing = [end_s for end_s in at.landing if end_s > at.now_s]
        for job in at.jobs:
            while job.unread:
                flat = job.flat.is_
                if flat.on_disk and len(at.chunks) + len(at.landing) >= self._staging:
                    return
                numel = job.unread.pop()
                ready_s = at.now_s
                if flat.on_disk:
                    ready_s = self._transfer(numel * flat.master_bytes_per_element, job.flat.written_s)
                at.chunks.append(_Chunk(job, numel, ready_s))

    def _transfer(self, size: int, begin_s: float) -> float:
        at = self._at
        at.disk_free_s = max(at.disk_free_s, at.now_s, begin_s) + size / self._rates.disk_bytes_per_s
        return at.disk_free_s

    def _next_s(self) -> float:
        """When the thread goes on."""
        self._fetch()
        at = self._at
        if not at.chunks:
            return min(at.landing) if at.landing and any(job.unread for job in at.jobs) else float("inf")
        return max(at.thread_free_s, min(chunk.ready_s for chunk in at.chunks))

    def _work(self) -> None:
        """The arithmetic of the chunk that is ready first, and what comes of it."""
        at = self._at
        if not at.chunks:
            return
        chunk = min(at.chunks, key=lambda chunk: chunk.ready_s)
        at.chunks.remove(chunk)
        job, flat = chunk.job, chunk.job.flat
        element_bytes = 2 * (flat.is_.master_bytes_per_element + flat.is_.bytes_per_element)
        passes = job.steps if job.steps <= _REACH else _MERGED_PASSES
        seconds = passes * chunk.numel * element_bytes / self._rates.update_bytes_per_s
        if self._forecast and job.steps <= _REACH and self._rates.learn_numel_per_s is not None:
            seconds += chunk.numel / self._rates.learn_numel_per_s
        at.thread_free_s = max(at.now_s, at.thread_free_s) + seconds
        at.longer_s += self._rates.loss * seconds
        if flat.is_.on_disk:
            flat.written_s = self._transfer(chunk.numel * flat.is_.master_bytes_per_element, at.thread_free_s)
            at.landing.append(flat.written_s)
        job.left -= 1
        if not job.left:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        flat = job.flat
        self._at.jobs.remove(job)
        self._at.updates += 1
        flat.job, flat.urgent = None, False
        flat.applied += job.steps
        flat.learned = self._forecast and (flat.learned or job.steps <= _REACH)
        if flat.learned and 0 < flat.waiting <= _REACH:
            self._at.longer_s += self._rates.loss * self._forecast_s(flat.is_.numel)
        if flat.published:
            self._free[flat.is_.kind] += 1
        flat.published = True
        self._feed()

    def _forecast_s(self, numel: int) -> float:
        rate = self._rates.forecast_numel_per_s
        return 0.0 if rate is None else numel / rate
