"""Lock-free mode's buffers: gradients that wait for the updater, and parameter versions that wait for compute
(section 4.3 and Algorithm 2 of the paper, mended: see ARCHITECTURE.md).

Owns the gradients and the pages; what waits for which job, and which comes next, is decided in
planning/version_policy.py. Passive,
and driven by one thread (buffering_thread.py; by hand in tests). Only a `VersionSlot` has two sides.
I1: a contribution is in one place, as `VersionPolicy` counts it: waiting, taken by one job, or applied.
I2: no half updates. A job writes pages that nobody reads. They are published at once, when all are written; the pages
    that they replace are used again only after compute has given them back.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_ptm.planning.version_policy import Begin, Flat, GradientEvent, VersionPolicy, forecasts_all
from lightning_ptm.update.gradient_source import NO_TRANSFORM, GradientSource, ParameterGradients, Transform, add_
from lightning_ptm.update.shadow import GroupValues
from lightning_ptm.update.update_job import Pending
from lightning_ptm.update.weight_prediction import WeightPrediction

if TYPE_CHECKING:
    from lightning_ptm.memory.paged_tensor import PagedTensor


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The optimizer step that a gradient came from: its number, and the hyper-parameters as they were then."""

    step: int
    hyper: GroupValues


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


def combined(contribution: Contribution) -> tuple[tuple[GroupValues, ...], Transform]:
    """How one update applies a contribution: the hyper-parameters of its steps, and what is done to the gradient first.

    From a single step: with that step's hyper-parameters and transform, so the bits are those of a synchronous update.
    From k steps: as k steps of the optimizer, in one pass over the pages, each with the hyper-parameters of its own step and
    with the mean of the k gradients (each clipped by its own step's factor). So they go as far, decay weights as much and
    count as many steps as they would have one by one. Of more than `REACH` steps, those of Adam and AdamW are taken in one
    call where that can be, once there have been some (merged_steps.py, which says how near it comes): all that is
    said here holds
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
    forecast: WeightPrediction | None = None
    exact: bool = True

    def fits(self, received: int) -> bool:
        """Whether it forecasts all of so many contributions, as far as can be."""
        return self.forecast is None or forecasts_all(received, self.applied, self.seen)


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


class FlatBuffer(Flat):
    """The gradients, and the pages in the making, of one flat. `slot` is shared with compute; the rest is the buffering
    thread's.

    Args:
        name: for messages and audits.
        numel, dtype: of the shard's compute parameters.
        parameters: how many there are in the flat.
        size, can_forecast: see `Flat`.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        parameters: int = 1,
        *,
        size: int = 1,
        can_forecast: bool = False,
    ) -> None:
        super().__init__((numel, dtype), size, can_forecast=can_forecast)
        self.name = name
        self.parameters = parameters
        self.slot = VersionSlot()

        self.waiting: list[Contribution] = []
        """One for each of `sums`."""
        self.applying: Contribution | None = None
        self.target: PagedTensor | None = None
        """Pages that the job of `applying` writes."""
        self.offers = 0
        """Contributions that the thread has come to; compute looks at it."""
        self.forecast: WeightPrediction | None = None
        """The newest."""

    def predict_weights(self, pages: PagedTensor, contribution: Contribution) -> None:
        """Bring parameters to where a contribution is expected to take them."""
        if self.forecast is not None and contribution.origins:
            contribution.settle()
            predict_weights(self.forecast, pages.tensor(), contribution)


def predict_weights(forecast: WeightPrediction, values: torch.Tensor, contribution: Contribution) -> None:
    """`WeightPrediction.add_` of a contribution that has settled."""
    forecast.add_(values, contribution.source, contribution.transform, len(contribution.origins))


Submit = Callable[[Begin[FlatBuffer], Contribution, "PagedTensor"], None]


class LockFreeBuffers:
    """All flats' buffers.

    Args:
        flats: in the order in which a forward pass uses them.
        spares: pages for new versions.
        submit: starts a flat's job, which writes the pages; `finish` is to be called when it has ended.
        room, learns: see `VersionPolicy`.
    """

    def __init__(
        self,
        flats: Sequence[FlatBuffer],
        spares: Iterable[PagedTensor],
        submit: Submit,
        *,
        room: int = 2,
        learns: bool = True,
    ) -> None:
        self._submit = submit
        self._spares: dict[Hashable, list[PagedTensor]] = {}
        for tensor in spares:
            self._spares.setdefault((tensor.numel, tensor.dtype), []).append(tensor)
        kinds = [kind for kind, tensors in self._spares.items() for _ in tensors]
        self.policy = VersionPolicy(flats, kinds, room=room, learns=learns)

    def offer(self, flat: FlatBuffer, contribution: Contribution) -> None:
        """A reduced, eligible gradient of a step has come."""
        # Taken back: compute has not seen it, and shall see this contribution in it.
        unseen = flat.slot.collect() if flat.learned else None
        offered = self.policy.offer(
            flat,
            contribution.step,
            contribution.source.which,
            unseen=None if unseen is None else unseen.applied,
        )
        if unseen is not None:
            if offered.is_forecast:
                flat.predict_weights(unseen.pages, contribution)
            flat.slot.publish(dataclasses.replace(unseen, seen=flat.received, forecast=flat.forecast, exact=False))
        if offered.event is GradientEvent.ADDED:
            flat.waiting[-1].add(contribution)
        else:
            flat.waiting.append(contribution)
        flat.offers += 1
        self._feed()

    def learn(self, step: int) -> None:
        """Jobs of this step's gradients, and of later ones, learn forecasts."""
        self.policy.learn(step)

    def hurry(self, flat: FlatBuffer, needed: int) -> bool:
        """Compute waits until a version of this flat includes `needed` contributions; returns whether a job is in hand."""
        self.policy.hurry(flat, needed)
        self._feed()
        return flat.taken is not None

    def give_back(self, pages: PagedTensor) -> None:
        """Compute has replaced these pages and reads them no more."""
        self._take_back(pages)
        self._feed()

    def finish(self, flat: FlatBuffer, forecast: WeightPrediction | None = None) -> None:
        """A flat's job has written its target, and has learned this: it is published."""
        ended = self.policy.finish(flat, learned=forecast is not None)
        applied, target = flat.applying, flat.target
        assert applied is not None and target is not None
        flat.applying = flat.target = None
        applied.discard()
        flat.forecast = forecast or flat.forecast
        if ended.is_forecast:
            for contribution in flat.waiting:
                flat.predict_weights(target, contribution)
        version = Version(target, flat.applied, flat.received, flat.forecast, flat.exact)
        unseen = flat.slot.publish(version)
        if unseen is not None:
            self._take_back(unseen.pages)
        self._feed()

    def publish_exact(self) -> bool:
        """Nothing waits: start to publish master parameters as they are, of flats whose newest version is a forecast.

        Returns:
            Whether there are any.
        """
        inexact = self.policy.want_exact()
        for flat in inexact:
            flat.waiting.append(Contribution(ParameterGradients([None] * flat.parameters), ()))
        self._feed()
        return bool(inexact)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in hand."""
        return self.policy.idle

    def _take_back(self, pages: PagedTensor) -> None:
        kind = (pages.numel, pages.dtype)
        self._spares.setdefault(kind, []).append(pages)
        self.policy.give_back(kind)

    def _feed(self) -> None:
        for job in self.policy.next_jobs():
            flat = job.flat
            flat.applying = contribution = flat.waiting.pop(0)
            flat.target = target = self._spares[flat.kind].pop()
            self._submit(job, contribution, target)
