"""Lock-free mode's buffers: gradients that wait for the updater, and parameter versions that wait for compute
(section 4.3 and Algorithm 2 of the paper, mended: see ARCHITECTURE.md).

Passive, and driven by one thread (buffering.py; by hand in tests). Only a `VersionSlot` has two sides.
I1: exactly once. A contribution is in one place: waiting, taken by one job, or counted as applied. A job takes what waits
    by leaving nothing in its place; nothing is ever cleared, so what comes meanwhile waits for the next job.
I2: no half updates. A job writes pages that nobody reads. They are published at once, when all are written; the pages
    that they replace are used again only after compute has given them back.
I3: one job at a time for a flat, so its updates follow each other.
I4: a version that is published forecasts what has been received and is not in it (forecast.py), unless it cannot be, or is
    more than `REACH`.
I5: compute cannot be kept waiting for pages: the last spare ones of a kind are taken only for a flat that compute waits
    for, or soon will, and while compute waits it collects the versions of all flats that it is not using, and gives their
    old pages back.
I6: what is held back is applied when its pass is asked for (pace.py), when compute waits for it, or when more comes that it
    cannot be added to.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_ptm.errors import InternalError
from lightning_ptm.update.forecast import REACH, Forecast
from lightning_ptm.update.gradient import NO_TRANSFORM, GradientSource, ParameterGradients, Transform, add_
from lightning_ptm.update.job import Pending
from lightning_ptm.update.shadow import HyperParameters

if TYPE_CHECKING:
    from lightning_ptm.memory.paged import PagedTensor


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The optimizer step that a gradient came from: its number, and the hyper-parameters as they were then."""

    step: int
    hyper: HyperParameters


@dataclasses.dataclass(slots=True, eq=False)
class Contribution:
    """Gradients of one flat, from one step or, once added up, from several.

    Attributes:
        source: the gradients; owned by whoever has the contribution.
        origins: a step each, oldest first; none: there is no gradient, the parameters are to be published again.
        transform: still to be done to the gradients: the clip factor and loss scale of their step, or what sums need.
        after: what the gradients wait for.
        discard: gives their memory back; called once, after the update.
    """

    source: GradientSource
    origins: tuple[Origin, ...]
    transform: Transform = NO_TRANSFORM
    after: Sequence[Pending] = ()
    discard: Callable[[], None] = lambda: None

    def goes_with(self, other: Contribution) -> bool:
        """Whether both have gradients for the same parameters, so that one update can apply their sum."""
        return self.source.which == other.source.which

    @property
    def step(self) -> int:
        """The oldest step in it."""
        return self.origins[0].step if self.origins else -1

    def settle(self) -> None:
        """Wait until the gradients are there."""
        for pending in self.after:
            pending.wait()
        self.after = ()

    def add(self, other: Contribution) -> None:
        """Take in a later step's gradients of the same parameters. Each step's transform is done to its own first."""
        for contribution in (self, other):
            contribution.settle()
        self.transform = add_(self.source, self.transform, other.source, other.transform)
        self.origins = (*self.origins, *other.origins)
        other.discard()


def combined(contribution: Contribution) -> tuple[tuple[HyperParameters, ...], Transform]:
    """How one update applies a contribution: the hyper-parameters of its steps, and what is done to the gradient first.

    From a single step: with that step's hyper-parameters and transform, so the bits are those of a synchronous update.
    From k steps: as k steps of the optimizer, in one pass over the pages, each with the hyper-parameters of its own step and
    with the mean of the k gradients (each clipped by its own step's factor). So they go as far, decay weights as much and
    count as many steps as they would have one by one. Of more than `REACH` steps, those of Adam and AdamW are taken in one
    call where that can be, once there have been some (merged.py, which says how near it comes): all that is said here holds
    but that the second moment of the last step is used for all. benchmarks/lock_free_loss.py compares rules.
    """
    origins = contribution.origins
    if len(origins) < 2:
        return tuple(origin.hyper for origin in origins), contribution.transform
    transform = dataclasses.replace(contribution.transform, share=1.0 / len(origins))
    return tuple(origin.hyper for origin in origins), transform


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Version:
    """Compute parameters of a flat's shard.

    Attributes:
        pages: they are in.
        applied: contributions that they include.
        seen: contributions that they include or forecast, where they forecast any and lack no more than `REACH`.
        forecast: of the next update; None: there is none.
        exact: they are the master parameters, rounded.
    """

    pages: PagedTensor
    applied: int
    seen: int
    forecast: Forecast | None = None
    exact: bool = True

    def fits(self, received: int) -> bool:
        """Whether it forecasts all of so many contributions, as far as can be."""
        return self.forecast is None or self.seen >= received or received - self.applied > REACH


class VersionSlot:
    """Hands the newest version of one flat from the buffering thread to compute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: Version | None = None
        self.applied = 0
        """Contributions in the newest version, published or collected before."""

    def publish(self, version: Version) -> Version | None:
        """Put a version there. Returns the one that it replaces, which compute has not seen and now never will."""
        with self._lock:
            replaced, self._published = self._published, version
            self.applied = version.applied
        return replaced

    @property
    def published(self) -> bool:
        """Whether there is a version to collect."""
        return self._published is not None

    def peek(self, received: int) -> Version | None:
        """What `collect` would return now, or soon."""
        version = self._published
        return version if version is not None and version.fits(received) else None

    def collect(self, received: int = 0) -> Version | None:
        """Take the newest version, if there is one that was not taken before: from now on it is the caller's.

        Args:
            received: contributions that it must include or forecast.
        """
        with self._lock:
            version = self._published
            if version is None or not version.fits(received):
                return None
            self._published = None
        return version


class SparePages:
    """Pages for versions in the making, by number of elements and dtype.

    Args:
        pages: all there are.
    """

    def __init__(self, pages: Iterable[PagedTensor]) -> None:
        self._free: dict[tuple[int, torch.dtype], list[PagedTensor]] = {}
        for tensor in pages:
            self.give_back(tensor)
        self._total = Counter({kind: len(tensors) for kind, tensors in self._free.items()})

    def take(self, numel: int, dtype: torch.dtype, *, urgent: bool) -> PagedTensor | None:
        """Spare pages, or None. Where a kind has several, the last is for `urgent` (I5)."""
        kind = (numel, dtype)
        free = self._free.get(kind, [])
        if len(free) > (0 if urgent or self._total[kind] == 1 else 1):
            return free.pop()
        return None

    def give_back(self, tensor: PagedTensor) -> None:
        self._free.setdefault((tensor.numel, tensor.dtype), []).append(tensor)


class FlatBuffer:
    """What is on its way for one flat. `slot` is shared with compute; the rest is the buffering thread's.

    Args:
        name: for messages and audits.
        numel, dtype: of the shard's compute parameters.
        parameters: how many there are in the flat.
    """

    def __init__(self, name: str, numel: int, dtype: torch.dtype, parameters: int = 1) -> None:
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self.parameters = parameters
        self.slot = VersionSlot()

        self.waiting: list[Contribution] = []
        """Oldest first; more than one where steps had gradients for different parameters."""
        self.taken: Contribution | None = None
        self.target: PagedTensor | None = None
        """Pages that the job of `taken` writes."""
        self.offers = 0
        """Calls of `hold` that have ended; compute looks at it."""
        self.received = 0
        self.applied = 0
        self.due = 0
        """Contributions that need not be held back, counted from the first (I6)."""
        self.urgent = False
        self.exact = True
        """Whether the newest version is."""
        self.forecast: Forecast | None = None
        """The newest."""
        self.late = 0
        """Contributions that had come meanwhile when the last job ended."""

    @property
    def pending(self) -> int:
        """Contributions that no version includes."""
        held = [*self.waiting, *([self.taken] if self.taken is not None else [])]
        return sum(len(contribution.origins) for contribution in held)

    @property
    def may_begin(self) -> bool:
        """Whether a job may take what waits (I3, I6)."""
        if not self.waiting or self.taken is not None:
            return False
        return self.urgent or self.applied < self.due or len(self.waiting) > 1 or not self.waiting[0].origins

    def hold(self, contribution: Contribution) -> None:
        """A new contribution waits, added to what waits already if that goes."""
        self.received += len(contribution.origins)
        version = self.slot.collect() if self.forecast is not None else None
        if version is not None:  # compute has not seen it, and shall see this contribution in it (I4)
            if self.received - version.applied <= REACH:
                self._add_forecast(version.pages, contribution)
            self.slot.publish(dataclasses.replace(version, seen=self.received, forecast=self.forecast, exact=False))
            self.exact = False
        if self.waiting and self.waiting[-1].goes_with(contribution):
            self.waiting[-1].add(contribution)
        else:
            self.waiting.append(contribution)
        self.offers += 1

    def take(self, target: PagedTensor) -> Contribution:
        """A job takes what waits and will write `target` (I1)."""
        if not self.waiting or self.taken is not None:
            raise InternalError(f"{self.name} has nothing that a job could take")
        self.taken = self.waiting.pop(0)
        self.target = target
        return self.taken

    def finish(self, forecast: Forecast | None) -> Version | None:
        """The job has written its target: publish it. Returns a version that nobody has seen and nobody will.

        Args:
            forecast: what the job has learned of the next update.
        """
        taken, target = self.taken, self.target
        if taken is None or target is None:
            raise InternalError(f"{self.name} has no job that could be finished")
        self.taken = self.target = None
        self.urgent = False
        self.applied += len(taken.origins)
        taken.discard()
        self.late = self.pending
        self.exact = forecast is None
        self.forecast = forecast or self.forecast
        for contribution in self.waiting if self.forecast is not None and self.pending <= REACH else ():
            self._add_forecast(target, contribution)
            self.exact = False
        return self.slot.publish(Version(target, self.applied, self.received, self.forecast, self.exact))

    def _add_forecast(self, pages: PagedTensor, contribution: Contribution) -> None:
        if self.forecast is not None and contribution.origins:
            contribution.settle()
            steps = len(contribution.origins)
            self.forecast.add_(pages.tensor(), contribution.source, contribution.transform, steps)


Submit = Callable[[FlatBuffer, Contribution, "PagedTensor"], None]


class Buffers:
    """All flats' buffers, and which job comes next.

    Args:
        flats: in the order in which a forward pass uses them.
        spares: pages for new versions.
        submit: starts a flat's job; `finish` is to be called when it has ended.
        size_of: what a flat counts for against `room`.
        room: jobs are started until this much is in hand, and two at least, so that reads go on between them.
    """

    def __init__(
        self,
        flats: Sequence[FlatBuffer],
        spares: SparePages,
        submit: Submit,
        *,
        size_of: Callable[[FlatBuffer], int] = lambda flat: 1,
        room: int = 2,
    ) -> None:
        self.flats = list(flats)
        self._spares = spares
        self._submit = submit
        self._size_of = size_of
        self._room = room
        self._in_hand: list[FlatBuffer] = []

    def offer(self, flat: FlatBuffer, contribution: Contribution, *, begin: bool = True) -> None:
        """A reduced, eligible gradient has come; it is held back unless the flat's pass may `begin`."""
        flat.hold(contribution)
        if begin:
            self.begin(flat)
        else:
            self.feed()

    def begin(self, flat: FlatBuffer) -> None:
        """What has come for a flat is held back no longer."""
        flat.due = flat.received
        self.feed()

    def hurry(self, flat: FlatBuffer, needed: int) -> bool:
        """Compute waits until a version of this flat includes `needed` contributions; returns whether a job is in hand.

        A request that has been overtaken by that version asks for nothing: the last spare pages are not for it (I5).
        """
        flat.urgent = flat.applied < needed
        self.feed()
        return flat.taken is not None

    def give_back(self, pages: PagedTensor) -> None:
        """Compute has replaced these pages and reads them no more."""
        self._spares.give_back(pages)
        self.feed()

    def finish(self, flat: FlatBuffer, forecast: Forecast | None = None) -> None:
        """A flat's job has ended, and has learned this."""
        replaced = flat.finish(forecast)
        self._in_hand.remove(flat)
        if replaced is not None:
            self._spares.give_back(replaced.pages)
        self.feed()

    def publish_exact(self) -> bool:
        """Nothing waits: start to publish master parameters as they are, of flats whose newest version is a forecast.

        Returns:
            Whether there are any.
        """
        inexact = [flat for flat in self.flats if not flat.exact]
        for flat in inexact:
            flat.waiting.append(Contribution(ParameterGradients([None] * flat.parameters), ()))
        self.feed()
        return bool(inexact)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in hand."""
        return not self._in_hand and not any(flat.waiting for flat in self.flats)

    def feed(self) -> None:
        """Start jobs as far as there is room: what compute waits for first, then the oldest gradients."""
        ready = [flat for flat in self.flats if flat.may_begin]
        ready.sort(key=lambda flat: (not flat.urgent, flat.waiting[0].step))
        for flat in ready:
            held = sum(map(self._size_of, self._in_hand))
            if not flat.urgent and len(self._in_hand) >= 2 and held + self._size_of(flat) > self._room:
                return
            target = self._spares.take(flat.numel, flat.dtype, urgent=flat.urgent)
            if target is not None:
                self._in_hand.append(flat)
                self._submit(flat, flat.take(target), target)
