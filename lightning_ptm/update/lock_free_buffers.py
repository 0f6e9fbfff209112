"""Lock-free mode's buffers: gradients that wait for the updater, and parameter versions that wait for compute.

Section 4.3 and Algorithm 2 of the paper, with corrections (see docs/design/lock_free_updates.md). Owns the gradients
and the pages of new versions; planning/version_policy.py decides which job takes which gradients, and which job is
next. Has no thread of its own: one thread calls it (buffering_thread.py; in tests, the test's own). Two threads use
`VersionSlot`, one thread uses all other classes.
I1: a contribution is in one state, as `VersionPolicy` counts it: waiting, taken by one job, or applied.
I2: compute never reads a half-written version. A job writes pages that no other thread reads. They are published together,
    when all are written; the pages that they replace are used again only after compute has given them back.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_ptm.planning.version_policy import Begin, Flat, GradientEvent, VersionPolicy, predicts_all
from lightning_ptm.update.gradient_source import NO_TRANSFORM, GradientSource, ParameterGradients, Transform, add_
from lightning_ptm.update.shadow import GroupValues
from lightning_ptm.update.weight_prediction import WeightPrediction

if TYPE_CHECKING:
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.memory.transfer import Pending


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The optimizer step that a gradient came from: its number, and the hyper-parameters at that step."""

    step: int
    hyper: GroupValues


@dataclasses.dataclass(slots=True, eq=False)
class Contribution:
    """Gradients of one flat from one step, or the sum of those of several steps.

    Attributes:
        source: the gradients; owned by the holder of the contribution.
        origins: the steps, oldest first; empty for a job without a gradient, which publishes the parameters again.
        transform: the transform that is still to be applied to the gradients: clip factor and loss scale of their step, or
            what is left of those after adding.
        after: transfers and reductions that must end before the gradients are complete.
        discard: releases the gradients' memory; called once, after the update.
    """

    source: GradientSource
    origins: tuple[Origin, ...]
    transform: Transform = NO_TRANSFORM
    after: Sequence[Pending] = ()
    discard: Callable[[], None] = lambda: None

    @property
    def step(self) -> int:
        """The oldest step of the contribution; -1 if there is none."""
        return self.origins[0].step if self.origins else -1

    def settle(self) -> None:
        """Waits until the gradients are complete."""
        for pending in self.after:
            pending.wait()
        self.after = ()

    def add(self, other: Contribution) -> None:
        """Adds a later step's gradients of the same parameters, each first transformed by its own step's transform."""
        for contribution in (self, other):
            contribution.settle()
        self.transform = add_(self.source, self.transform, other.source, other.transform)
        self.origins = (*self.origins, *other.origins)
        other.discard()


def combined(contribution: Contribution) -> tuple[tuple[GroupValues, ...], Transform]:
    """Returns how one update applies a contribution: the hyper-parameters of its steps, and the gradient's transform.

    A contribution of one step is applied with that step's hyper-parameters and transform, so the result is bitwise that of a
    synchronous update. A contribution of k steps is applied as k steps of the optimizer, in one pass over the pages, each
    with the hyper-parameters of its own step and with the mean of the k gradients (each clipped by its own step's factor).
    The k steps move as far, decay weights as much and count as many steps as they would one by one. More than `REACH` steps
    of Adam or AdamW are taken in one optimizer call where possible, once the parameters have had some steps
    (merged_steps.py, which states the error): the same holds, except that the second moment of the last step is used for
    all. benchmarks/LOG.md has the loss of other ways.
    """
    origins = contribution.origins
    if len(origins) < 2:
        return tuple(origin.hyper for origin in origins), contribution.transform
    transform = dataclasses.replace(contribution.transform, share=1.0 / len(origins))
    return tuple(origin.hyper for origin in origins), transform


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Version:
    """One version of the compute parameters of a flat's shard.

    Attributes:
        pages: the pages with the values.
        applied: number of contributions that the values include.
        seen: number of contributions that the values include or predict, if they predict any and lack at most `REACH`.
        prediction: weight prediction of the next update; None: there is none.
        exact: whether the values are the master parameters, rounded.
    """

    pages: PagedTensor
    applied: int
    seen: int
    prediction: WeightPrediction | None = None
    exact: bool = True

    def fits(self, received: int) -> bool:
        """Whether the version includes or predicts all of the `received` contributions, as far as prediction reaches."""
        return self.prediction is None or predicts_all(received, self.applied, self.seen)


class VersionSlot:
    """Slot in which the buffering thread publishes the newest version of one flat and compute collects it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: Version | None = None
        self.applied = 0
        """Contributions in the newest version, published or collected before."""

    def publish(self, version: Version) -> Version | None:
        """Publishes a version. Returns the one that it replaces if compute has not collected that, and now never will."""
        with self._lock:
            replaced, self._published = self._published, version
            self.applied = version.applied
        return replaced

    @property
    def published(self) -> bool:
        """Whether a version can be collected."""
        return self._published is not None

    def peek(self, received: int) -> Version | None:
        """The version that `collect` would return now, or soon."""
        version = self._published
        return version if version is not None and version.fits(received) else None

    def collect(self, received: int = 0) -> Version | None:
        """Takes the newest version, or None if it was taken before. The caller owns the version.

        Args:
            received: number of contributions that the version must include or predict.
        """
        with self._lock:
            version = self._published
            if version is None or not version.fits(received):
                return None
            self._published = None
        return version


class FlatBuffer(Flat):
    """Waiting gradients of one flat, and the pages that its job writes.

    Compute shares `slot` and reads `offers`; the rest belongs to the buffering thread.

    Args:
        name: name of the flat in messages and audits.
        numel, dtype: elements and dtype of the shard's compute parameters.
        parameters: number of parameters in the flat.
        size, can_predict: see `Flat`.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        parameters: int = 1,
        *,
        size: int = 1,
        can_predict: bool = False,
    ) -> None:
        super().__init__((numel, dtype), size, can_predict=can_predict)
        self.name = name
        self.parameters = parameters
        self.slot = VersionSlot()

        self.waiting: list[Contribution] = []
        """Contributions that wait for a job, one for each of `sums`."""
        self.applying: Contribution | None = None
        self.target: PagedTensor | None = None
        """Pages that the job of `applying` writes."""
        self.offers = 0
        """Contributions that the buffering thread has processed; compute reads it."""
        self.prediction: WeightPrediction | None = None
        """The newest weight prediction."""

    def predict_weights(self, pages: PagedTensor, contribution: Contribution) -> None:
        """Changes parameters as the update with a contribution is expected to change them."""
        if self.prediction is not None and contribution.origins:
            contribution.settle()
            predict_weights(self.prediction, pages.tensor(), contribution)


def predict_weights(prediction: WeightPrediction, values: torch.Tensor, contribution: Contribution) -> None:
    """Calls `WeightPrediction.add_` with a contribution whose gradients are complete."""
    prediction.add_(values, contribution.source, contribution.transform, len(contribution.origins))


Submit = Callable[[Begin[FlatBuffer], Contribution, "PagedTensor"], None]


class LockFreeBuffers:
    """The buffers of all flats.

    Args:
        flats: the flats' buffers, in the order in which a forward pass uses the flats.
        spares: pages for new versions.
        submit: starts a flat's job, which writes the pages; the caller calls `finish` when the job has ended.
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
        """Takes in a step's reduced gradient."""
        # A published version that compute has not collected is taken back, so that it can predict this contribution, too.
        unseen = flat.slot.collect() if flat.learned else None
        offered = self.policy.offer(
            flat,
            contribution.step,
            contribution.source.which,
            unseen=None if unseen is None else unseen.applied,
        )
        if unseen is not None:
            if offered.is_predicted:
                flat.predict_weights(unseen.pages, contribution)
            flat.slot.publish(dataclasses.replace(unseen, seen=flat.received, prediction=flat.prediction, exact=False))
        if offered.event is GradientEvent.ADDED:
            flat.waiting[-1].add(contribution)
        else:
            flat.waiting.append(contribution)
        flat.offers += 1
        self._feed()

    def learn(self, step: int) -> None:
        """Lets jobs with gradients of this step and later steps learn weight predictions."""
        self.policy.learn(step)

    def prioritize(self, flat: FlatBuffer, needed: int) -> bool:
        """Serves a flat first, as compute waits for a version that includes `needed` contributions.

        Returns:
            Whether a job of the flat is running.
        """
        self.policy.prioritize(flat, needed)
        self._feed()
        return flat.taken is not None

    def give_back(self, pages: PagedTensor) -> None:
        """Takes back pages that compute has replaced and reads no more."""
        self._take_back(pages)
        self._feed()

    def finish(self, flat: FlatBuffer, prediction: WeightPrediction | None = None) -> None:
        """Publishes the pages that a flat's job has written.

        Args:
            prediction: the weight prediction that the job has learned, if any.
        """
        ended = self.policy.finish(flat, learned=prediction is not None)
        applied, target = flat.applying, flat.target
        assert applied is not None and target is not None
        flat.applying = flat.target = None
        applied.discard()
        flat.prediction = prediction or flat.prediction
        if ended.is_predicted:
            for contribution in flat.waiting:
                flat.predict_weights(target, contribution)
        version = Version(target, flat.applied, flat.received, flat.prediction, flat.exact)
        unseen = flat.slot.publish(version)
        if unseen is not None:
            self._take_back(unseen.pages)
        self._feed()

    def publish_exact(self) -> bool:
        """Starts to publish the master parameters of flats whose newest version is a prediction. No gradient may wait.

        Returns:
            Whether there are such flats.
        """
        inexact = self.policy.want_exact()
        for flat in inexact:
            flat.waiting.append(Contribution(ParameterGradients([None] * flat.parameters), ()))
        self._feed()
        return bool(inexact)

    @property
    def idle(self) -> bool:
        """Whether no contribution waits and no job is running."""
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
