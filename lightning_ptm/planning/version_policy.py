"""Which gradients wait for which job, and which version of a flat may be read (lock-free mode: section 4.3 and Algorithm 2 of
the paper, mended; see ARCHITECTURE.md).

Owns the counts of all that: contributions that wait, are taken by a job, or are in a version; pages for new versions, by
kind; the order of service. Holds no gradients and no pages: each event returns what is to be done with these. A run does it
(update/lock_free_buffers.py, runtime/updates/flat_counters.py), a forecast counts its seconds (shared_cores.py). One
thread at a time.
I1: exactly once. A contribution is counted in one place: waiting, taken by one job, or applied. Nothing is ever cleared, so
    what comes while a job runs waits for the next.
I2: one job at a time for a flat, so its updates follow each other.
I3: a version that is published forecasts what has been received and is not in it, unless it cannot be, or is more than
    `REACH`.
I4: compute cannot be kept waiting for pages: the last spare ones of a kind are taken only for a flat that compute waits
    for, or soon will.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_ptm.errors import InternalError

REACH = 2
"""Steps that are taken one by one, of momentum that a forecast follows, and of updates that are forecast. What lacks more is
used as it is: each step of a forecast costs compute a pass over the parameters. What waits for longer is applied at once."""

_NONE = object()
"""Of no parameters: nothing is added to it."""

_BETWEEN = 2
"""Jobs that are in hand whatever their size, so that reads go on between them."""


class GradientEvent(enum.Enum):
    """What becomes of a flat's gradients."""

    WAITS = "waits"
    ADDED = "added"
    BEGINS = "begins"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class GradientAct:
    """What was decided, for who listens: of which flat, and of how many contributions; `foreseen`: versions forecast them."""

    doing: GradientEvent
    flat: int
    steps: int
    foreseen: bool = False


@dataclass(slots=True)
class _Sum:
    """Contributions that are applied together: of which parameters, from which step on, of how many steps. No steps: the
    parameters are to be published as they are."""

    which: Hashable
    since: int
    steps: int


class Flat:
    """What is on its way for one flat, in numbers: `VersionPolicy` writes them.

    Args:
        kind: of its pages: those of one kind can stand for each other.
        size: what it counts for against `room`.
        foreseeable: its optimizer's updates can be forecast.
    """

    def __init__(self, kind: Hashable, size: int = 1, *, foreseeable: bool = False) -> None:
        self.kind = kind
        self.size = size
        self.foreseeable = foreseeable

        self.place = -1
        """Among all flats."""
        self.sums: list[_Sum] = []
        """That wait, oldest first; more than one where steps had gradients for different parameters."""
        self.taken: _Sum | None = None
        self.received = 0
        self.applied = 0
        self.urgent = False
        self.exact = True
        """Whether the newest version is."""
        self.learned = False
        """Whether there is a forecast."""
        self.late = 0
        """Contributions that had come meanwhile when the last job ended."""

    @property
    def pending(self) -> int:
        """Contributions that no version includes."""
        return sum(each.steps for each in self.sums) + (self.taken.steps if self.taken is not None else 0)

    @property
    def may_begin(self) -> bool:
        """Whether a job may take what waits (I2)."""
        return bool(self.sums) and self.taken is None


F = TypeVar("F", bound=Flat)


@dataclass(frozen=True, slots=True)
class Begin(Generic[F]):
    """A job begins: it takes what waits longest of its flat, and spare pages.

    Attributes:
        steps: contributions that it applies; 0: it publishes exact parameters.
        at_once: in one call of the optimizer, where that can be: too many to take one by one.
        ahead: updates for which momentum is followed in the forecast that it learns; 0: it learns none.
    """

    flat: F
    steps: int
    at_once: bool
    ahead: int


class VersionPolicy(Generic[F]):
    """All flats, and which job comes next. After each event `next_jobs` is to be asked.

    Args:
        flats: in the order in which a forward pass uses them.
        spares: kinds of the pages for new versions, each as often as there are such pages.
        room: jobs are started until this much is in hand, and two at least.
        learns: whether jobs learn forecasts from the first on.

    Attributes:
        learns_from: jobs of this step's gradients, and of later ones, learn forecasts; None: no job does.
    """

    def __init__(
        self,
        flats: Sequence[F],
        spares: Iterable[Hashable],
        *,
        room: int,
        learns: bool = True,
    ) -> None:
        self.flats = list(flats)
        for place, flat in enumerate(self.flats):
            flat.place = place
        self._free = Counter(spares)
        self._total = Counter(self._free)
        self._room = room
        self.learns_from = 0 if learns else None
        self._in_hand: list[F] = []

        self.told: Callable[[GradientAct], None] | None = None
        """Told of what is decided, in order."""

    def offer(self, flat: F, step: int, which: Hashable = None, *, unseen: int | None = None) -> GradientAct:
        """A contribution has come.

        Args:
            step: that it is of.
            which: the parameters that it is for; those of the same can be added.
            unseen: contributions that the newest version includes, where compute cannot have seen it and will see it with
                this one forecast (I3).
        """
        flat.received += 1
        foreseen = unseen is not None and flat.received - unseen <= REACH
        if unseen is not None:
            flat.exact = False
        last = flat.sums[-1] if flat.sums else None
        if last is not None and last.which == which:
            last.steps += 1
            return self._tell(GradientAct(GradientEvent.ADDED, flat.place, 1, foreseen))
        flat.sums.append(_Sum(which, step, 1))
        return self._tell(GradientAct(GradientEvent.WAITS, flat.place, 1, foreseen))

    def hurry(self, flat: F, needed: int) -> None:
        """Compute waits until a version of this flat includes `needed` contributions.

        A request that has been overtaken by that version asks for nothing: the last spare pages are not for it (I4).
        """
        flat.urgent = flat.applied < needed

    def give_back(self, kind: Hashable) -> None:
        """Pages of this kind are spare again."""
        self._free[kind] += 1

    def finish(self, flat: F, *, learned: bool) -> GradientAct:
        """A flat's job has ended: its version is to be published.

        Args:
            learned: a forecast of the next update.
        """
        taken, flat.taken = flat.taken, None
        if taken is None:
            raise InternalError(f"flat {flat.place} has no job that could be finished")
        self._in_hand.remove(flat)
        flat.urgent = False
        flat.applied += taken.steps
        flat.late = flat.pending
        flat.learned = flat.learned or learned
        foreseen = flat.learned and bool(flat.sums) and flat.late <= REACH
        flat.exact = not learned and not foreseen
        return self._tell(GradientAct(GradientEvent.PUBLISHED, flat.place, taken.steps, foreseen))

    def want_exact(self) -> list[F]:
        """Nothing waits: jobs are to publish the parameters of these flats, whose newest versions are forecasts."""
        inexact = [flat for flat in self.flats if not flat.exact]
        for flat in inexact:
            flat.sums.append(_Sum(_NONE, -1, 0))
        return inexact

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in hand."""
        return not self._in_hand and not any(flat.sums for flat in self.flats)

    def next_jobs(self) -> list[Begin[F]]:
        """Jobs that begin now, as far as there is room: what compute waits for first, then the oldest gradients."""
        ready = [flat for flat in self.flats if flat.may_begin]
        ready.sort(key=lambda flat: (not flat.urgent, flat.sums[0].since))
        begun = []
        for flat in ready:
            held = sum(other.size for other in self._in_hand)
            if not flat.urgent and len(self._in_hand) >= _BETWEEN and held + flat.size > self._room:
                break
            # Where a kind has several spare pages, the last are for what is urgent (I4).
            if self._free[flat.kind] > (0 if flat.urgent or self._total[flat.kind] == 1 else 1):
                self._free[flat.kind] -= 1
                self._in_hand.append(flat)
                flat.taken = flat.sums.pop(0)
                steps = flat.taken.steps
                learns = self.learns_from is not None and flat.taken.since >= self.learns_from
                learns = learns and flat.foreseeable and 0 < steps <= REACH
                ahead = min(max(1, flat.late), REACH) if learns else 0
                begun.append(Begin(flat, steps, steps > REACH, ahead))
                self._tell(GradientAct(GradientEvent.BEGINS, flat.place, steps))
        return begun

    def _tell(self, act: GradientAct) -> GradientAct:
        if self.told is not None:
            self.told(act)
        return act


def forecasts_all(received: int, applied: int, seen: int) -> bool:
    """Whether a version that includes `applied` contributions, and includes or forecasts `seen`, forecasts all of so many,
    as far as forecasts reach."""
    return seen >= received or received - applied > REACH


@dataclass(slots=True)
class Reading:
    """A flat as compute has it, in numbers.

    Attributes:
        received: contributions that it has produced.
        adopted: those in the version that it reads; seen: those that this includes or forecasts.
        learned: whether it can forecast more.
    """

    received: int = 0
    adopted: int = 0
    seen: int = 0
    learned: bool = False

    def adopt(self, applied: int, seen: int, *, learned: bool) -> None:
        """Another version is read from now on."""
        self.adopted, self.seen, self.learned = applied, seen, learned

    def may_read(self, max_staleness: int) -> bool:
        """Whether the version may be read: it lacks no more, and where it forecasts, it forecasts all it lacks."""
        lacks = self.received - self.adopted
        return lacks <= max_staleness and (not self.learned or forecasts_all(self.received, self.adopted, self.seen))

    def foresees(self, max_staleness: int, *, published: bool) -> bool:
        """Whether the version is brought to where the contribution that comes now will take it.

        Not where the next to be read is another, which is `published`: that forecasts it itself.
        """
        lacks = self.received + 1 - self.adopted
        return self.learned and not published and self.seen == self.received and lacks <= min(max_staleness, REACH)
