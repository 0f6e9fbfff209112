"""Simulation of lock-free updates on a CPU: step times when the update thread and compute share the cores.

Owns the clock of consecutive steps. The same classes as in a real run (planning/version_policy.py, planning/chunks.py)
decide which gradients wait for which job, which version compute may read and which chunk is next. Compute adopts a new
version of a flat only while it does not read the previous one. Each second of the update thread's arithmetic makes
compute longer by `loss` seconds, since the cores that compute uses wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ptm.forecasting.timed_chunks import Moment, TimedChunk, TimedJob, comes_s
from lightning_ptm.forecasting.update_extras import UpdateExtra
from lightning_ptm.planning.chunks import ChunkBounds, Chunks, even_chunk_bounds
from lightning_ptm.planning.trace import Trace
from lightning_ptm.planning.version_policy import Begin, Flat, GradientEvent, Reading, VersionPolicy
from lightning_ptm.terms import Phase

_MERGED_PASSES = 1.4
"""Passes over the states that several merged steps take (update/merged_steps.py): one of 28 bytes an element, and a
correction of 12 bytes an element, which reads and writes a moment and reads a gradient."""
_NO_EXTRA = UpdateExtra()
_STEPS = 12
"""Steps whose mean is taken; before them as many are run, plus `max_staleness` steps."""
_MOST_STEPS = 96
"""Upper bound for the latter; more would hardly change the mean."""


@dataclass(frozen=True, slots=True)
class SharedCoreRates:
    """Rates of the updating thread while compute runs, in elements and bytes per second.

    Args:
        update_bytes_per_s: rate of updates, counting master states twice, gradients and compute parameters once.
        loss: seconds by which compute gets longer for each second of the thread's arithmetic.
        learn_numel_per_s: rate at which an update learns a weight prediction, in addition; None: it takes no time.
        prediction_numel_per_s: rate at which a weight prediction is added to parameters; None: it takes no time.
        sum_bytes_per_s: rate of sums of gradients: two read, one written.
        disk_bytes_per_s: rate of disk reads and writes together.
    """

    update_bytes_per_s: float
    loss: float
    learn_numel_per_s: float | None
    prediction_numel_per_s: float | None
    sum_bytes_per_s: float
    disk_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class SharedCoreFlat:
    """A trainable flat of this rank.

    Attributes:
        unit: unit of the flat.
        numel: elements of the shard.
        bytes_per_element, master_bytes_per_element: bytes of compute parameters, and of master states, per element.
        on_disk: whether master states are on disk.
        kind: flats of the same kind share spare pages.
        can_predict: whether its updates are predicted (weight prediction).
        cuts: bounds of its chunks; None: even ones.
        extra: work of its updates in addition to a pass over bytes.
    """

    unit: int
    numel: int
    bytes_per_element: int
    master_bytes_per_element: int
    on_disk: bool
    kind: Hashable
    can_predict: bool = False
    cuts: ChunkBounds | None = None
    extra: UpdateExtra | None = None


@dataclass(frozen=True, slots=True)
class SharedCoreTiming:
    """Means per step: seconds, seconds in which compute waited for versions, and updates per flat."""

    seconds: float
    stall_s: float
    updates: float


class _Job(TimedJob["_Flat"]):
    def __init__(self, begun: Begin[_Flat], now: Moment) -> None:
        super().__init__(begun.flat, begun.flat.cuts, now, 0.0, streams=begun.flat.is_.on_disk)
        self.begun = begun


class _Flat(Flat):
    def __init__(self, flat: SharedCoreFlat, chunk_numel: int) -> None:
        self.cuts = flat.cuts or even_chunk_bounds(flat.numel, chunk_numel)
        super().__init__(flat.kind, len(self.cuts.starts), can_predict=flat.can_predict)
        self.is_ = flat
        self.have = Reading()
        self.published = False
        """Whether a version is published that compute has not adopted."""
        self.read = False
        """Whether compute is reading the flat."""
        self.job: _Job | None = None


@dataclass(slots=True)
class _State:
    now_s: float = 0.0
    """Time of compute."""
    stall_s: float = 0.0
    thread: Moment = field(default_factory=Moment)
    """Time until which the thread is busy, or waits for the disk."""
    disk_free_s: float = 0.0
    longer_s: float = 0.0
    """Seconds by which the current tick gets longer."""
    updates: int = 0
    ended: deque[tuple[float, _Job]] = field(default_factory=deque)
    """Jobs whose last chunk is computed, with the time of that."""


class SharedCores:
    """Simulation of one run; `run` returns the means of its steps.

    Args:
        flats: all trainable flats.
        spares: by kind, number of spare sets of pages for new versions.
        rates: rates of this rank.
        chunk_numel: elements of a chunk.
        staging: most chunks that have buffers at once.
        max_staleness: most steps whose gradients parameters in use may lack.
    """

    def __init__(
        self,
        flats: Sequence[SharedCoreFlat],
        spares: Mapping[Hashable, int],
        rates: SharedCoreRates,
        *,
        chunk_numel: int,
        staging: int,
        max_staleness: int,
    ) -> None:
        # Configuration.
        self._rates = rates
        self._max_staleness = max_staleness
        # State.
        self._flats = [_Flat(flat, chunk_numel) for flat in flats]
        kinds = [kind for kind, count in spares.items() for _ in range(count)]
        self.waiting = VersionPolicy(self._flats, kinds, room=staging)
        self._of_unit: dict[int, list[_Flat]] = {}
        for flat in self._flats:
            self._of_unit.setdefault(flat.is_.unit, []).append(flat)
        self._at = _State()
        self.chunks: Chunks[_Flat, _Job, TimedChunk[_Flat]] = Chunks(self, staging=staging)

    def run(self, trace: Trace, *, micro_batches: int = 1, step_s: float = 0.0) -> SharedCoreTiming:
        """Runs steps of these ticks until their mean is steady, and returns it.

        Args:
            trace: ticks of a micro-batch, with their seconds.
            micro_batches: micro-batches in a step.
            step_s: seconds of a step in addition to its ticks.
        """
        last = {tick.unit: index for index, tick in enumerate(trace.ticks) if tick.phase is Phase.BACKWARD}
        steps = 2 * _STEPS + min(self._max_staleness, _MOST_STEPS)
        began_s, stalled_s, updated = 0.0, 0.0, 0
        for step in range(steps):
            if step == steps - _STEPS:
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
        return SharedCoreTiming(
            (self._at.now_s - began_s) / _STEPS,
            (self._at.stall_s - stalled_s) / _STEPS,
            (self._at.updates - updated) / _STEPS / flats,
        )

    # -- compute -------------------------------------------------------------------------------------------------------

    def _compute(self, seconds: float) -> None:
        at, left = self._at, seconds
        while left or at.longer_s:
            until_s = at.now_s + left + at.longer_s
            at.longer_s = 0.0
            self._work_until(until_s)
            at.now_s, left = until_s, 0.0

    def _read(self, unit: int) -> None:
        self._adopt_all()
        for flat in self._of_unit.get(unit, ()):
            while not flat.have.may_read(self._max_staleness):
                self._catch_up(flat)
                if not self._work_for_news():
                    break
                self._adopt_all()
            flat.read = True

    def _let_go(self) -> None:
        """Marks all flats as no longer read by compute, and adopts published versions."""
        for flat in self._flats:
            flat.read = False
        self._adopt_all()

    def _adopt_all(self) -> None:
        for flat in self._flats:
            if flat.published and not flat.read:
                self._adopt(flat)

    def _adopt(self, flat: _Flat) -> None:
        flat.published = False
        flat.have.adopt(flat.applied, flat.received, learned=flat.learned)
        self.waiting.give_back(flat.kind)
        self._feed()

    def _catch_up(self, flat: _Flat) -> None:
        self._prioritize(flat, flat.have.received - self._max_staleness)

    def _hand_over(self, unit: int, step: int) -> None:
        for flat in self._of_unit.get(unit, ()):
            if flat.have.should_predict(self._max_staleness, published=flat.published):
                self._at.longer_s += self._forecast_s(flat)
                flat.have.see(1)
            flat.have.receive()
            self._offer(flat, step)

    # -- gradients and versions ----------------------------------------------------------------------------------------

    def _offer(self, flat: _Flat, step: int) -> None:
        offered = self.waiting.offer(flat, step, unseen=flat.applied if flat.published and flat.learned else None)
        if offered.is_predicted:
            self._at.longer_s += self._rates.loss * self._forecast_s(flat)
        if offered.event is GradientEvent.ADDED:
            size = 3 * flat.is_.numel * flat.is_.bytes_per_element
            self._at.longer_s += self._rates.loss * size / self._rates.sum_bytes_per_s
        self._feed()

    def _prioritize(self, flat: _Flat, needed: int) -> None:
        self.waiting.prioritize(flat, needed)
        self._feed()
        if flat.job is not None and not flat.job.computed and flat.urgent:
            self.chunks.to_front(flat.job)

    def _feed(self) -> None:
        for begun in self.waiting.next_jobs():
            job = begun.flat.job = _Job(begun, self._at.thread)
            self.chunks.enqueue(job)
            if begun.flat.urgent:
                self.chunks.to_front(job)

    def _finish(self, job: _Job) -> None:
        flat = job.flat
        flat.job = None
        self._at.updates += 1
        if self.waiting.finish(flat, learned=bool(job.begun.ahead)).is_predicted:
            self._at.longer_s += self._rates.loss * self._forecast_s(flat)
        if flat.published:
            self.waiting.give_back(flat.kind)
        flat.published = True
        self._feed()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work_until(self, until_s: float) -> None:
        """Does the thread's work that begins before `until_s`."""
        at = self._at
        while True:
            while at.ended and at.ended[0][0] <= min(at.thread.s, until_s):
                self._finish(at.ended.popleft()[1])
            if at.thread.s >= until_s:
                return
            if not self.chunks.advance():
                awaited = self.chunks.awaited(None)
                at.thread.go_to(until_s if awaited is None else comes_s(awaited))

    def _work_for_news(self) -> bool:
        """Lets compute wait until a job has ended; returns False if there is none."""
        at = self._at
        longer_s = at.longer_s
        while not at.ended:
            at.thread.go_to(max(at.thread.s, at.now_s))
            if not self.chunks.advance():
                awaited = self.chunks.awaited(None)
                if awaited is None:
                    return False
                at.thread.go_to(comes_s(awaited))
        ends_s, job = at.ended.popleft()
        at.stall_s += max(0.0, ends_s - at.now_s)
        at.now_s = max(at.now_s, ends_s)
        at.longer_s = longer_s  # compute stood still, so no tick got longer
        self._finish(job)
        return True

    def chunk(self, flat: _Flat, start: int, numel: int) -> TimedChunk[_Flat]:
        """Makes a chunk of which nothing has been read."""
        return TimedChunk(flat, start, numel, now=self._at.thread)

    def read(self, job: _Job | None, chunk: TimedChunk[_Flat]) -> bool:
        """Reads a chunk's master states."""
        chunk.read_until(self._transfer(chunk))
        chunk.note_reads(all_reads_begun=True)
        return True

    def update(self, job: _Job, chunk: TimedChunk[_Flat]) -> bool:
        """Does a chunk's arithmetic in the thread, which makes compute longer; then starts its writes."""
        flat, begun, rates = chunk.flat.is_, job.begun, self._rates
        element_bytes = 2 * (flat.master_bytes_per_element + flat.bytes_per_element)
        passes = _MERGED_PASSES if begun.at_once else begun.steps
        extra, share = flat.extra or _NO_EXTRA, chunk.numel / flat.numel
        size = passes * (chunk.numel * element_bytes + 2 * extra.more_bytes * share)
        seconds = size / rates.update_bytes_per_s + extra.cpu_s * share
        if begun.ahead and rates.learn_numel_per_s is not None:
            seconds += chunk.numel / rates.learn_numel_per_s
        self._at.thread.pass_by(seconds)
        self._at.longer_s += rates.loss * seconds
        if flat.on_disk:
            chunk.write_until(self._transfer(chunk))
        return flat.on_disk

    def free(self, chunk: TimedChunk[_Flat]) -> None:
        """Does nothing: buffers are only counted."""

    def end(self, job: _Job) -> None:
        """Records the end of a job; it takes effect once compute's time has reached the thread's."""
        self._at.ended.append((self._at.thread.s, job))

    def _transfer(self, chunk: TimedChunk[_Flat]) -> float:
        at = self._at
        size = chunk.numel * chunk.flat.is_.master_bytes_per_element
        at.disk_free_s = max(at.disk_free_s, at.thread.s) + size / self._rates.disk_bytes_per_s
        return at.disk_free_s

    def _forecast_s(self, flat: _Flat) -> float:
        rate = self._rates.prediction_numel_per_s
        return 0.0 if rate is None else flat.is_.numel / rate
