"""Lock-free updates as compute sees them: gradients go, newer parameters come, and neither waits for the disk
(section 4.3 of the paper, mended: see ARCHITECTURE.md).

Owns how many gradients each flat has produced, and which flats have been read in the micro-batch in progress. The buffers
are the buffering thread's (update/buffering.py).

I1: a unit that is read for the first time in a micro-batch gets the newest version there is, and keeps it until the
    micro-batch ends: forward, recomputed forward and backward see one version.
I2: what is read lacks the gradients of at most `max_staleness` steps; compute waits for the rest.
    In the warm-up it lacks none: the numbers are those of a synchronous run.
    Where it was forecast, the version forecasts all of these.
I3: at a drain, produced == applied + skipped for every flat.
I4: where updates are held back (planning/pace.py), a gradient waits here or in the buffers; nobody waits for it.
I5: of a flat that is read, gradients of one kind wait at most: those that cannot be added to one another (of different
    parameters) are applied before, while versions can still be adopted. So while compute waits for gradient pages,
    there are flats that wait with more and are read no longer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from functools import partial

from torch.optim import Optimizer

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory import PagedTensor
from lightning_ptm.planning.cuts import cuts_of
from lightning_ptm.planning.pace import Pace
from lightning_ptm.planning.waiting import Reading, follows_sums
from lightning_ptm.runtime.store import UnitStore
from lightning_ptm.runtime.updates import FlatUpdate, UpdateScheduler
from lightning_ptm.update import HyperParameters, Transform, Updater
from lightning_ptm.update.buffering import Buffering, LockFreeFlat
from lightning_ptm.update.buffers import Contribution, FlatBuffer, Origin, Version, foresee
from lightning_ptm.update.forecast import Forecast, can_forecast

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateAudit:
    """What became of the gradients of one flat: each was produced by one step.

    Attributes:
        name: the flat, by its unit and its first parameter.
        produced: gradients that steps have produced.
        applied: those that an update has applied.
        pending: those that wait for one.
        skipped: those of steps that were not taken: inf or NaN under a loss scale.
    """

    name: str
    produced: int
    applied: int
    pending: int
    skipped: int

    @property
    def balanced(self) -> bool:
        """Whether none was lost and none was applied twice."""
        return self.produced == self.applied + self.pending + self.skipped


@dataclasses.dataclass(slots=True)
class StalenessStats:
    """Staleness of the units read in training since the run began, in steps, and how many steps there were."""

    reads: int = 0
    total: int = 0
    maximum: int = 0
    steps: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.reads if self.reads else 0.0


@dataclasses.dataclass(slots=True, kw_only=True)
class _Clock(Reading):
    """A flat's gradients as compute counts them. `received` are those that were handed over, or are held."""

    flat: FlatUpdate
    skipped: int = 0
    forecast: Forecast | None = None
    exact: bool = True
    """Whether nothing is forecast in it."""
    held: Contribution | None = None
    """Gradients that were not handed over yet (I4)."""

    offers: int = 0
    """Contributions that were handed over, each as one, whatever it was added up from."""
    changed: int = 0
    """How many these were when the last came that could not be added to the one before."""
    which: tuple[bool, ...] | None = None
    """The parameters that the last was for."""
    needed: int = 0
    """Contributions that the version that is read next must include, whatever the bound (I5)."""
    hurried: int = 0
    """Those that the buffering thread was last asked for."""

    @property
    def produced(self) -> int:
        """Gradients of steps, those that were not taken included."""
        return self.received + self.skipped

    @property
    def held_steps(self) -> int:
        return len(self.held.origins) if self.held is not None else 0

    @property
    def offered(self) -> int:
        """Contributions that the buffering thread knows of, or soon will."""
        return self.received - self.held_steps

    def take(self, version: Version) -> None:
        """Compute reads this one from now on."""
        self.adopt(version.applied, version.seen, learned=version.forecast is not None)
        self.forecast, self.exact = version.forecast, version.exact


class LockFreeUpdates(UpdateScheduler):
    """Hands gradients over and never waits for what becomes of them, but to keep staleness bounded.

    Args:
        units: stores by unit; flats: all trainable flats, by unit; optimizers: the user's.
        updater: not running yet; the buffering thread has the use of it until `close`.
        spares: pages for versions in the making, as `Waiting` counts them.
        max_staleness: steps whose gradients a parameter in use may lack.
        warmup: steps of the training in which it may lack none; they end with an iteration.
        room: chunks of master states in flight.
        cores: CPU cores that updates may use.
        forecast: parameters in use forecast the updates that they lack (update/forecast.py); reach: as many at most.
        paced: updates are held back as far as the bound allows (planning/pace.py).
        adds: compute adds up gradients that are held back: the buffering thread would only take cores from it.
    """

    def __init__(
        self,
        units: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        optimizers: Sequence[Optimizer],
        updater: Updater,
        spares: Sequence[PagedTensor],
        *,
        max_staleness: int,
        warmup: int,
        room: int,
        cores: int,
        forecast: bool,
        reach: int,
        paced: bool,
        adds: bool,
    ) -> None:
        super().__init__(flats, optimizers)
        self._units = units
        self._max_staleness = max_staleness
        self._warmup = warmup
        self._batch_began = 0
        """After how many steps the training batch in progress began."""
        self._most_steps = 0
        """That a batch has taken; 0: none has ended with a step."""
        self._bound = 0 if warmup else max_staleness
        """Steps whose gradients a parameter in use may lack now."""
        self._clocks = [_Clock(flat=flat, reach=reach) for of_unit in flats for flat in of_unit]
        place = iter(range(len(self._clocks)))
        self._places = [[next(place) for _ in of_unit] for of_unit in flats]
        self._place_of = {id(clock.flat): place for place, clock in enumerate(self._clocks)}
        self._read: set[int] = set()
        """Flats, by place, that the micro-batch in progress has read."""
        self._given: set[int] = set()
        """Flats, by place, whose gradients of the step in progress have gone: no graph of its own needs them any more."""
        self._steps = 0
        self._training = False
        self._drained = True
        """Whether parameters in use are the master parameters, rounded."""
        self._graph_open = False
        """Whether a forward of training may still have its backward before it."""
        self.stats = StalenessStats()
        self.last_audit: tuple[UpdateAudit, ...] = ()
        """As it was at the last drain."""
        self._buffering = Buffering(
            updater,
            [
                LockFreeFlat(_buffer(clock.flat, updater, forecast), clock.flat.states, self.shadow(clock.flat))
                for clock in self._clocks
            ],
            spares,
            room=room,
            cores=cores,
            learns=not warmup,
            reach=reach,
        )
        sizes = [clock.flat.store.layout.shard_numel for clock in self._clocks]
        self._pace = Pace(max_staleness, sizes) if paced else None
        self._adds = adds

    # -- gradients go -------------------------------------------------------------------------------------------------

    def _update(self, unit: int, flat: FlatUpdate, hyper: HyperParameters, transform: Transform) -> None:
        # A step's gradients stay until zero_grad where the user may use them again.
        gradient = flat.gradient
        source, after, discard = gradient.duplicate() if gradient.route.outlives_step else gradient.detach()
        place = self._place_of[id(flat)]
        if self._staleness(place) > self._bound:
            # Steps without a forward in between: with a bound of 0 each must be an update of its own.
            self._catch_up([place])
        contribution = Contribution(source, (Origin(self._steps, hyper),), transform, after, discard)
        self._foresee(unit, place, contribution)
        self._clocks[place].received += 1
        self._drained = False
        self._given.add(place)
        if self._pace is None:
            self._offer(place, contribution, begin=True)
            return
        begin = self._pace.came(place, self._buffering.applied(place))
        self._hold(place, contribution)
        for each in begin:
            self._hand_on(each, begin=True)
        if self._warmup:
            self._begin_now([place])

    def _offer(self, place: int, contribution: Contribution, *, begin: bool) -> None:
        clock = self._clocks[place]
        clock.offers += 1
        if contribution.source.which != clock.which:
            clock.which, clock.changed = contribution.source.which, clock.offers
        self._buffering.offer(place, contribution, begin=begin)

    def _hold(self, place: int, contribution: Contribution) -> None:
        """A gradient waits: here, or with those that wait in the buffers."""
        clock = self._clocks[place]
        held = clock.held
        if held is not None and held.goes_with(contribution):
            held.add(contribution)
            return
        if held is not None:
            self._offer(place, held, begin=False)
        clock.held = contribution
        # A flat's gradients wait in one place, or they would take twice the memory.
        if not self._adds or not clock.flat.gradient.in_place or self._buffering.waiting(place):
            self._hand_on(place, begin=False)

    def _hand_on(self, place: int, *, begin: bool) -> None:
        clock = self._clocks[place]
        held, clock.held = clock.held, None
        if held is not None:
            self._offer(place, held, begin=begin)
        elif begin:
            self._buffering.begin(place)

    def _begin_now(self, places: Iterable[int]) -> None:
        """Nothing of these flats is held back any longer: somebody waits."""
        if self._pace is None:
            return
        for place in places:
            if self._pace.waiting(place):
                self._pace.begin(place)
                self._hand_on(place, begin=True)

    def _foresee(self, unit: int, place: int, contribution: Contribution) -> None:
        """Brings the parameters that compute has to where this contribution is expected to take them."""
        clock = self._clocks[place]
        published = self._buffering.published(place)
        if clock.forecast is None or not clock.foresees(self._bound, published=published):
            return
        if not clock.flat.store.resident:
            self._units[unit].release()
            self._units[unit].evict()
        self._add_forecast(clock, contribution, self._earlier(place, contribution))

    def _earlier(self, place: int, contribution: Contribution) -> Contribution | None:
        """The sum that a contribution will be added to, where forecasts follow its momentum; None: there is none, or it may
        be taken by an update meanwhile."""
        clock = self._clocks[place]
        if self._pace is None or not follows_sums(clock.reach):
            return None
        held = clock.held
        if held is None and self._pace.waiting(place):
            self._buffering.wait(lambda: self._buffering.offers(place) >= clock.offers)
            held = self._buffering.held(place)
            # What was begun is never newer than what was not: with no more steps than these, all of it is held back.
            if held is not None and len(held.origins) > self._pace.waiting(place):
                held = None
        return held if held is not None and held.goes_with(contribution) else None

    @staticmethod
    def _add_forecast(clock: _Clock, contribution: Contribution, earlier: Contribution | None = None) -> None:
        """On pages that nobody reads now."""
        assert clock.forecast is not None
        store = clock.flat.store
        contribution.settle()
        store.await_reads()
        foresee(clock.forecast, store.home.tensor(), contribution, earlier)
        clock.seen += len(contribution.origins)
        clock.exact = False

    def _handed_over(self) -> None:
        return None

    def _stepped(self, optimizer: int) -> None:
        self._steps += 1
        self.stats.steps += 1
        self._graph_open = False
        # In manual optimization the iteration goes on: what it reads of these flats from now on may be newer. Graphs over
        # those of other optimizers may still be alive.
        self._read -= {place for place, clock in enumerate(self._clocks) if clock.flat.optimizer == optimizer}
        self._given.clear()
        self._adopt_all()  # so that updates of what no graph needs any more have pages again

    def skip(self, optimizer: int) -> None:
        for _, flat in self.groups.flats_of(optimizer):
            if flat.gradient.any:
                clock = self._clocks[self._place_of[id(flat)]]
                clock.skipped += 1
        self._graph_open = False
        self._given.clear()
        super().skip(optimizer)

    def abandon(self) -> None:
        super().abandon()
        self._graph_open = False  # its backward will never come
        self._read.clear()
        self._given.clear()

    # -- parameters come ----------------------------------------------------------------------------------------------

    def begin_iteration(self, *, training: bool) -> None:
        self._read.clear()
        self._training = self._graph_open = training
        if self._warmup and training:
            self._warm_up(self.number_of_step())
        if not training and not self._drained:
            self.finish_all()  # what is evaluated is what was trained
        else:
            self._adopt_all()

    def _warm_up(self, step: int) -> None:
        self._most_steps = max(self._most_steps, self._steps - self._batch_began)
        self._batch_began = self._steps
        if step >= self._warmup:
            self._catch_up(range(len(self._clocks)))
            self._buffering.learn(self._steps)
            self._warmup, self._bound = 0, self._max_staleness
            if self._pace is not None:
                self._pace.drained()
        elif self._most_steps and step + self._most_steps >= self._warmup:
            # What comes of its last step's gradients is read behind the warm-up, and may forecast the next.
            self._buffering.learn(self._steps + self._most_steps - 1)

    def pending(self, unit: int) -> bool:
        unread = self._unread(unit)
        late = self._too_stale(unread)
        self._hurry(late)
        if unread and not late:
            self._renew(unit, unread)
        return bool(late)

    def finish(self, unit: int) -> None:
        unread = self._unread(unit)
        if unread:
            self._catch_up(unread)
            self._renew(unit, unread)

    def _unread(self, unit: int) -> list[int]:
        return [place for place in self._places[unit] if place not in self._read]

    def _catch_up(self, places: Sequence[int]) -> None:
        """Waits until the newest versions of these flats are new enough (I2)."""
        while late := self._too_stale(places):
            self._hurry(late)
            # The next versions may need the pages of what nobody uses now.
            self._adopt_all()
            self._buffering.wait(partial(self._has_news, late))

    def _hurry(self, places: Sequence[int]) -> None:
        # Others only lack a forecast, which comes without a pass.
        self._begin_now(place for place in places if self._buffering.applied(place) < self._needed(self._clocks[place]))
        for place in places:
            clock = self._clocks[place]
            clock.hurried = self._needed(clock)
            self._buffering.hurry(place, clock.hurried)

    def _needed(self, clock: _Clock) -> int:
        """Contributions that the version that is read next must include."""
        return max(clock.received - self._bound, clock.needed)

    def _has_news(self, late: Sequence[int]) -> bool:
        if len(self._too_stale(late)) < len(late):
            return True
        if any(self._needed(self._clocks[place]) > self._clocks[place].hurried for place in late):
            return True  # to be asked for
        unread = (place for unit in range(len(self._places)) for place in self._unread(unit))
        # Only what can be collected: one that still lacks a forecast would be news again and again.
        return any(self._buffering.peek(place, self._clocks[place].offered) is not None for place in unread)

    def finish_all(self) -> None:
        newer = [clock for place, clock in enumerate(self._clocks) if place in self._read and self._has_newer(place)]
        if self._graph_open and newer:
            raise UsageError(
                f"weights are gathered, a state dict is made, or a parameter has changed groups, between a forward and its "
                f"backward, and the forward has read {newer[0].flat.store.layout.slots[0].spec.name} as it was before, or is "
                f"expected to be after, the updates of the last steps; with lock_free=True do this before the forward or "
                f"after the backward"
            )
        self._read.clear()
        self._begin_now(range(len(self._clocks)))
        self._buffering.drain(self._adopt_all)
        if self._pace is not None:
            self._pace.drained()
        self._drained = True
        self._check_audit()

    def _has_newer(self, place: int) -> bool:
        clock = self._clocks[place]
        return clock.received > clock.adopted or not clock.exact

    def graph_ended(self) -> None:
        self._graph_open = False

    def progress(self) -> None:
        self._buffering.check()
        self._adopt_all()

    def make_room(self) -> None:
        self._buffering.check()
        self._read -= self._given
        # Only these: pages of others come back when the buffering thread has added up what was handed over.
        piled = [place for place in range(len(self._clocks)) if self._buffering.waiting(place) > 1]
        piled = [place for place in piled if place not in self._read]
        for place in piled:
            self._need_one_more(place)
        self._hurry(piled)
        self._adopt_all()

    def start(self) -> None:
        self._buffering.start()

    def close(self) -> None:
        self._buffering.stop()

    @property
    def updates_per_step(self) -> float:
        """How often a flat was updated for each step that had a gradient for it, so far."""
        possible = sum(clock.received for clock in self._clocks)
        return self._buffering.updates / possible if possible else 0.0

    def audit(self) -> tuple[UpdateAudit, ...]:
        """What became of each flat's gradients, this rank's shards of them, up to now. Waits for the buffering thread."""
        return tuple(
            UpdateAudit(count.name, clock.produced, count.applied, count.pending + clock.held_steps, clock.skipped)
            for clock, count in zip(self._clocks, self._buffering.counts(), strict=True)
        )

    def _check_audit(self) -> None:
        self.last_audit = audits = self.audit()
        for audit in audits:
            if not audit.balanced or audit.pending:
                raise InternalError(f"gradients were lost or applied twice: {audit}")
        log.debug(
            "lock-free updates: %d gradients produced, %d applied, %d skipped",
            *(sum(getattr(audit, name) for audit in audits) for name in ("produced", "applied", "skipped")),
        )

    def _too_stale(self, places: Sequence[int]) -> list[int]:
        return [place for place in places if not self._fits(place)]

    def _fits(self, place: int) -> bool:
        """Whether there is a version that may be read."""
        clock = self._clocks[place]
        if self._buffering.offers(place) < clock.changed:
            return False  # it is not known what waits
        if self._buffering.waiting(place) > 1:
            self._need_one_more(place)
        newer = self._buffering.peek(place, clock.offered)
        if (newer.applied if newer is not None else clock.adopted) < clock.needed:
            return False
        if newer is not None:
            return clock.received - newer.applied <= self._bound
        return clock.may_read(self._bound)

    def _need_one_more(self, place: int) -> None:
        """What waits longest of a flat has to be in the version that is read next (I5)."""
        clock = self._clocks[place]
        clock.needed = max(clock.needed, min(clock.received, self._buffering.applied(place) + 1))

    def _staleness(self, place: int) -> int:
        """Steps whose gradients the newest version lacks."""
        return self._clocks[place].received - self._buffering.applied(place)

    def _renew(self, unit: int, places: Sequence[int]) -> None:
        """The micro-batch reads these flats of a unit for the first time (I1)."""
        self._adopt(unit)
        self._read.update(places)
        if self._training:
            staleness = max(self._clocks[place].received - self._clocks[place].adopted for place in places)
            self.stats.reads += 1
            self.stats.total += staleness
            self.stats.maximum = max(self.stats.maximum, staleness)

    def _adopt_all(self) -> None:
        for unit in range(len(self._places)):
            self._adopt(unit)

    def _adopt(self, unit: int) -> None:
        """Puts the newest versions of a unit's flats in the place of older ones, but for those that are being read (I1)."""
        store = self._units[unit]
        for place in self._unread(unit):
            clock = self._clocks[place]
            version = self._buffering.collect(place, clock.offered)
            if version is None:
                continue
            flat = clock.flat.store
            if not flat.resident:
                store.release()
                store.evict()
            self._buffering.give_back(flat.adopt(version.pages))
            clock.take(version)
            held = clock.held
            if held is not None and clock.forecast is not None and clock.received - clock.adopted <= clock.reach:
                self._add_forecast(clock, held)


def _buffer(flat: FlatUpdate, updater: Updater, forecast: bool) -> FlatBuffer:
    layout = flat.store.layout
    return FlatBuffer(
        f"{layout.slots[0].spec.name}...",
        layout.shard_numel,
        flat.store.binding.dtype,
        len(layout.slots),
        size=len(cuts_of(layout, updater.chunk_numel).starts),
        foreseeable=forecast and can_forecast(flat.states.traits),
    )
