"""Policy of lock-free updates: which gradients each update job applies, and which version of a flat may be read.

Implements section 4.3 and Algorithm 2 of the paper, with corrections (see docs/design/lock_free_updates.md). Owns the counts:
contributions that are pending, taken by a job, or contained in a version; pages for new versions, by kind; the order of
jobs. Holds no gradients and no pages: each event returns what has to be done with them. A run does it
(update/lock_free_buffers.py, runtime/updates/flat_counters.py), a virtual run counts its seconds (shared_cores.py). One
thread at a time uses it.

A *contribution* is one gradient of a flat. A *prediction* of parameters follows momentum for updates that have
not run yet.

I1: exactly once. A contribution is counted in one place: pending, taken by one job, or applied. Nothing is ever
    cleared, so a contribution that arrives while a job runs waits for the next job.
I2: a flat has one job at a time, so its updates are sequential.
I3: a published version predicts the contributions that were received and that it does not contain, unless it cannot,
    or there are more than `REACH`.
I4: compute never waits for pages: the last spare pages of a kind are taken only for a flat that compute waits for, or
    soon will.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_ptm.errors import InternalError

REACH = 2
"""Maximum number of steps that a job applies one by one, and that a prediction covers.

A prediction follows momentum for at most so many updates. A version that lacks more is used without a prediction: each step
of a prediction costs compute a pass over the parameters. If more contributions are pending, one job applies them in one
step.
"""

_NONE = object()
"""Parameter set of an empty contribution: no other contribution is added to it."""

_BETWEEN = 2
"""Number of jobs that may run whatever their size, so that one reads while another computes."""


class GradientEvent(enum.Enum):
    """Events of a flat's gradients."""

    WAITS = "waits"
    ADDED = "added"
    BEGINS = "begins"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class GradientAct:
    """One event in a flat's queue of contributions, as reported to listeners.

    Attributes:
        event: kind of the event.
        flat: index of the flat.
        steps: number of contributions that arrive (WAITS, ADDED), that a job takes (BEGINS) or has applied (PUBLISHED).
        is_predicted: WAITS, ADDED: whether compute will read the newest version with this contribution predicted;
            PUBLISHED: whether the version is used with a prediction of the pending contributions.
    """

    event: GradientEvent
    flat: int
    steps: int
    is_predicted: bool = False


@dataclass(slots=True)
class _Sum:
    """Contributions that are applied together.

    Attributes:
        which: the set of parameters that they are for.
        since: the first step.
        steps: number of contributions; 0: the parameters are to be published as they are.
    """

    which: Hashable
    since: int
    steps: int


class Flat:
    """Counts of one flat's pending work; `VersionPolicy` writes them.

    Args:
        kind: kind of its pages: pages of one kind are interchangeable.
        size: what it counts against `room`.
        can_predict: whether its optimizer's updates can be predicted.
    """

    def __init__(self, kind: Hashable, size: int = 1, *, can_predict: bool = False) -> None:
        self.kind = kind
        self.size = size
        self.can_predict = can_predict

        self.place = -1
        """Index among all flats."""
        self.sums: list[_Sum] = []
        """Pending contributions, oldest first; more than one sum where steps had gradients for different parameters."""
        self.taken: _Sum | None = None
        self.received = 0
        self.applied = 0
        self.urgent = False
        self.exact = True
        """Whether the newest version is exact: contains no prediction."""
        self.learned = False
        """Whether a prediction exists."""
        self.late = 0
        """Number of contributions that were pending when the last job ended."""

    @property
    def pending(self) -> int:
        """Number of contributions that no version contains."""
        return sum(each.steps for each in self.sums) + (self.taken.steps if self.taken is not None else 0)

    @property
    def may_begin(self) -> bool:
        """Whether a job may take pending contributions (I2)."""
        return bool(self.sums) and self.taken is None


F = TypeVar("F", bound=Flat)


@dataclass(frozen=True, slots=True)
class Begin(Generic[F]):
    """The start of a job: it takes the oldest pending sum of its flat, and spare pages.

    Attributes:
        steps: number of contributions that it applies; 0: it publishes exact parameters.
        at_once: apply them in one call of the optimizer, where possible: there are too many to apply one by one.
        ahead: number of updates for which the job's prediction follows momentum; 0: it makes no prediction.
    """

    flat: F
    steps: int
    at_once: bool
    ahead: int


class VersionPolicy(Generic[F]):
    """All flats, and the choice of the next jobs. Callers call `next_jobs` after each event.

    Args:
        flats: in the order in which a forward pass uses them.
        spares: kinds of the spare pages for new versions, one entry per page set.
        room: jobs are started until their sizes reach this; at least two run.
        learns: whether jobs make predictions from the first step on.

    Attributes:
        learns_from: the first step whose jobs make predictions; None: no job does.
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
        self._running: list[F] = []

        self.on_decision: Callable[[GradientAct], None] | None = None
        """Listener for decisions, called in order."""

    def offer(self, flat: F, step: int, which: Hashable = None, *, unseen: int | None = None) -> GradientAct:
        """Records a contribution.

        Args:
            step: the step that it belongs to.
            which: the set of parameters that it is for; contributions for the same set can be added.
            unseen: number of contributions that the newest version contains, if compute has not read that version yet
                and will read it with this contribution predicted (I3).
        """
        flat.received += 1
        is_predicted = unseen is not None and flat.received - unseen <= REACH
        if unseen is not None:
            flat.exact = False
        last = flat.sums[-1] if flat.sums else None
        if last is not None and last.which == which:
            last.steps += 1
            return self._report(GradientAct(GradientEvent.ADDED, flat.place, 1, is_predicted))
        flat.sums.append(_Sum(which, step, 1))
        return self._report(GradientAct(GradientEvent.WAITS, flat.place, 1, is_predicted))

    def learn(self, step: int) -> None:
        """Makes jobs of this step's gradients, and of later ones, learn predictions."""
        self.learns_from = step

    def prioritize(self, flat: F, needed: int) -> None:
        """Marks the flat as urgent: compute waits until a version of it contains `needed` contributions.

        A request that the newest version already satisfies has no effect: the last spare pages are not for it (I4).
        """
        flat.urgent = flat.applied < needed

    def give_back(self, kind: Hashable) -> None:
        """Returns pages of this kind to the spare ones."""
        self._free[kind] += 1

    def finish(self, flat: F, *, learned: bool) -> GradientAct:
        """Records the end of a flat's job: its version is to be published.

        Args:
            learned: whether the job made a prediction of the next update.
        """
        taken, flat.taken = flat.taken, None
        if taken is None:
            raise InternalError(f"the end of a job of flat {flat.place} was reported, but the flat has no job")
        self._running.remove(flat)
        flat.urgent = False
        flat.applied += taken.steps
        flat.late = flat.pending
        flat.learned = flat.learned or learned
        is_predicted = flat.learned and bool(flat.sums) and flat.late <= REACH
        flat.exact = not learned and not is_predicted
        return self._report(GradientAct(GradientEvent.PUBLISHED, flat.place, taken.steps, is_predicted))

    def want_exact(self) -> list[F]:
        """Requests jobs that publish exact parameters where the newest version is a prediction; returns these flats.

        To be called when no contribution is pending.
        """
        inexact = [flat for flat in self.flats if not flat.exact]
        for flat in inexact:
            flat.sums.append(_Sum(_NONE, -1, 0))
        return inexact

    @property
    def idle(self) -> bool:
        """Whether no contribution is pending and no job runs."""
        return not self._running and not any(flat.sums for flat in self.flats)

    def next_jobs(self) -> list[Begin[F]]:
        """Returns the jobs that begin now, as far as there is room.

        Flats that compute waits for come first, then those with the oldest gradients.
        """
        ready = [flat for flat in self.flats if flat.may_begin]
        ready.sort(key=lambda flat: (not flat.urgent, flat.sums[0].since))
        begun = []
        for flat in ready:
            held = sum(other.size for other in self._running)
            if not flat.urgent and len(self._running) >= _BETWEEN and held + flat.size > self._room:
                break
            # Where a kind has several spare page sets, the last is for urgent flats (I4).
            if self._free[flat.kind] > (0 if flat.urgent or self._total[flat.kind] == 1 else 1):
                self._free[flat.kind] -= 1
                self._running.append(flat)
                flat.taken = flat.sums.pop(0)
                steps = flat.taken.steps
                learns = self.learns_from is not None and flat.taken.since >= self.learns_from
                learns = learns and flat.can_predict and 0 < steps <= REACH
                ahead = min(max(1, flat.late), REACH) if learns else 0
                begun.append(Begin(flat, steps, steps > REACH, ahead))
                self._report(GradientAct(GradientEvent.BEGINS, flat.place, steps))
        return begun

    def _report(self, act: GradientAct) -> GradientAct:
        if self.on_decision is not None:
            self.on_decision(act)
        return act


def predicts_all(received: int, applied: int, seen: int) -> bool:
    """Returns whether a version predicts all of `received` contributions, as far as predictions reach.

    Args:
        applied: contributions that the version contains.
        seen: contributions that it contains or predicts.
    """
    return seen >= received or received - applied > REACH


@dataclass(slots=True)
class Reading:
    """State of a flat as compute reads it, in counts.

    Attributes:
        received: contributions that it has produced.
        adopted: contributions contained in the version that it reads.
        seen: contributions that this version contains or predicts.
        learned: whether the version can predict more.
    """

    received: int = 0
    adopted: int = 0
    seen: int = 0
    learned: bool = False

    def receive(self) -> None:
        """Records a contribution."""
        self.received += 1

    def see(self, contributions: int) -> None:
        """Records that the version in use was advanced by a prediction of `contributions` more."""
        self.seen += contributions

    def adopt(self, applied: int, seen: int, *, learned: bool) -> None:
        """Records that another version is read from now on."""
        self.adopted, self.seen, self.learned = applied, seen, learned

    def may_read(self, max_staleness: int) -> bool:
        """Returns whether the version may be read.

        It may lack at most `max_staleness` contributions, and if it has a prediction, it must predict all that it lacks.
        """
        lacks = self.received - self.adopted
        return lacks <= max_staleness and (not self.learned or predicts_all(self.received, self.adopted, self.seen))

    def should_predict(self, max_staleness: int, *, published: bool) -> bool:
        """Returns whether the version in use is to be advanced by a prediction of the contribution that arrives now.

        It is not if a newer version has been `published`, which contains or predicts that contribution itself.
        """
        lacks = self.received + 1 - self.adopted
        return self.learned and not published and self.seen == self.received and lacks <= min(max_staleness, REACH)
