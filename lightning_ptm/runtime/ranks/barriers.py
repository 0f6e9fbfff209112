"""Barriers between the ranks of a run, with errors on all ranks if they arrive for different things.

Owns this rank's position in its iterations, and whether the run has failed. The order of collectives is decided in
comm/agreement.py; the engine decides what is computed at the barriers.

I1: ranks that arrive for different things all raise; the error says what each did and where it is in the user's code.
I2: once the run has failed, nothing waits for other ranks any more.
I3: ranks that compute one batch and have exchanged different things raise at their next barrier: after each backward pass,
    before a step, at the end of a batch of an evaluation.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lightning_ptm.comm import (
    DIFFERENT,
    OTHER_NUMBER,
    TOGETHER,
    UNLIKE,
    Agreement,
    Boundary,
    Communicator,
    Gathering,
    RankTeams,
    raise_on_all_ranks,
)
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.comm.deadlock_detector import explained
from lightning_ptm.errors import RankError

STEP_ENDS = 1 << 20
"""Position of an optimizer step among the boundaries of an iteration: after all its backward passes."""


class BarrierReason(enum.IntEnum):
    """Reasons for which all ranks wait for each other, as flags of a boundary."""

    COLLECTIVE = 2
    TRAINING_STEP = 4
    USER_CALL = 8
    END_OF_EVALUATION = 16
    TRAINING_BATCH = 32
    END_OF_EPOCH = 64
    END_OF_RUN = 128
    EXCHANGE = 512
    REARRANGED = 1024
    PIPELINE = 8192

    def __str__(self) -> str:
        return _DOING[self]


_DOING = {
    BarrierReason.COLLECTIVE: "is in a collective (a barrier, a reduction)",
    BarrierReason.TRAINING_STEP: "begins a training step",
    BarrierReason.USER_CALL: "reads, edits or saves weights",
    BarrierReason.END_OF_EVALUATION: "has ended its evaluation",
    BarrierReason.TRAINING_BATCH: "goes on to another training batch",
    BarrierReason.END_OF_EPOCH: "has ended its training epoch",
    BarrierReason.END_OF_RUN: "has come to the end of the run",
    BarrierReason.EXCHANGE: "exchanges activations with the ranks that compute its batch",
    BarrierReason.REARRANGED: "has other parameters than those that its pages were laid out for",
    BarrierReason.PIPELINE: "begins to compute a batch in pipeline stages",
}
ANY_REASON = sum(BarrierReason)
"""All of these flags."""
_NOT_ALIKE = OTHER_NUMBER | UNLIKE

_AS_MANY_BATCHES = (
    "give all of them as many training batches (a DistributedSampler(drop_last=True), or limit_train_batches of the "
    "fewest)"
)
_ALIKE = (
    "unfreeze, add, replace or resize parameters, and change the groups of optimizers, on all ranks alike and between the "
    "same batches"
)
_ON_ALL_RANKS = (
    "save_checkpoint and gathered need all ranks: call them on each of them, and look at the rank inside (files are written "
    "by rank 0 alone)"
)


class Barriers:
    """The barriers of one rank.

    Args:
        communicator: of all ranks.
        participate: takes part in a collective that other ranks need and this one does not.
        teams: which ranks take part in what, if not all do.
    """

    def __init__(self, communicator: Communicator, participate: Callable[[Decision], None], teams: RankTeams) -> None:
        self._communicator = communicator
        self.alone = communicator.alone
        """Whether there are no other ranks, so that a step need not ask."""
        self._among = communicator
        """Communicator of the ranks that join this rank's rounds: all, or those of its pipeline stage."""
        self._ranks: Sequence[int] = range(communicator.world_size)
        """These ranks."""
        self.agreement = Agreement(communicator.exchange, participate, communicator.rank, teams, self._explained)
        self.failed = False
        """Whether the run has failed: this rank starts no collective any more. Set by `fail`."""
        self._differences = ""
        """The reason why this rank is about to lay out its pages again; part of the error on the other ranks if these
        are not."""
        self._must_match: dict[str, str] = {}
        """Values that must be equal on all ranks, as text, by description."""
        self._iterations_since = 0
        """Iterations since the last barrier of all ranks: evaluation may have more batches on one rank than on another.
        """

    @contextmanager
    def within(self, communicator: Communicator, ranks: Sequence[int], common_units: Collection[int]) -> Iterator[None]:
        """Context in which this rank waits for the ranks of its pipeline stage alone; all of them are in it.

        Args:
            communicator: of these ranks.
            ranks: numbers of these ranks.
            common_units: units that other ranks hold, too.
        """
        before = self._among, self._ranks
        with self.agreement.among(communicator.exchange, ranks, common_units):
            self._among, self._ranks = communicator, ranks
            try:
                yield
            finally:
                self._among, self._ranks = before

    def iteration_begins(self) -> None:
        """Counts an iteration of this rank."""
        self._iterations_since += 1

    def fail(self, reason: str) -> None:
        """Marks the run as failed, and informs the other ranks."""
        self.failed = True
        self._communicator.fail(reason)

    def meet(self, what: BarrierReason, action: str = "") -> None:
        """Waits for all ranks before a collective operation, unless the run has failed.

        While waiting, this rank takes part in gathers of units by others: in this iteration (ranks with different
        experts have different plans), in batches that this rank does not have, or for a forward of one rank alone.

        Args:
            action: what exactly follows; the same on all ranks.
        """
        if not self.failed:
            self.come_together(what, action)

    def gather_for(self, gathering: Gathering) -> None:
        """Waits before a collective of the user for the ranks that take part in it; the other ranks may be anywhere.

        Raises:
            RankError: some of these ranks cannot come any more.
        """
        self._gather(gathering, BarrierReason.COLLECTIVE)
        if gathering.size == self._communicator.world_size:
            self._iterations_since = 0

    def meet_group(self, group: int, size: int, exchange: str) -> None:
        """Waits for the ranks of a group before they exchange activations; the other ranks may be anywhere.

        Args:
            group: index of the group.
            exchange: description of the exchange; the same on all ranks of the group.

        Raises:
            RankError: some of these ranks cannot come any more.
        """
        number = int.from_bytes(blake2b(exchange.encode(), digest_size=3).digest(), "big")
        self._gather(Gathering(group << 24 | number, size), BarrierReason.EXCHANGE)

    @contextmanager
    def errors_on_all_ranks(self) -> Iterator[None]:
        """Raises an exception of the block on all ranks, if any rank raised one. Collective, at the end of the block."""
        with raise_on_all_ranks(self._communicator, partial(self.meet, BarrierReason.USER_CALL, "results")):
            yield

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Broadcasts a value of one rank to all. Collective."""
        self.meet(BarrierReason.USER_CALL, f"value of rank {source}")
        return self._communicator.broadcast_object(value, source)

    def all_agree(self, yes: bool) -> bool:
        """Whether `yes` is true on all ranks. Collective."""
        self.meet(BarrierReason.USER_CALL, "question")
        refused = torch.tensor([0 if yes else 1], dtype=torch.int64)
        return not self._communicator.all_reduce(refused, maximum=True).item()

    def _gather(self, gathering: Gathering, what: BarrierReason) -> None:
        if self.failed:
            raise RankError(
                "this run has failed, so other ranks may never come to a collective; issue none after the error"
            )
        seen = self.agreement.gather(dataclasses.replace(gathering, flag=what))
        if seen is not None:
            self._check_same_reason(seen, what, str(what))
            self.agreement.give_up(
                f"rank {self._communicator.rank} {what} and another rank is in another one, or in one with other "
                "ranks, so they would wait for each other for ever; issue the same collectives in the same order on "
                "all ranks"
            )

    def check_relayout(self, differences: str) -> None:
        """Waits for all ranks before pages are laid out again because parameters have changed.

        Args:
            differences: how parameters differ from those at the start.

        Raises:
            RankError: the parameters of another rank have not changed, or have changed differently; the error says how.
        """
        self._differences = differences
        self.meet(BarrierReason.REARRANGED, differences)
        self._differences = ""

    def come_together(self, what: BarrierReason, action: str = "", flags: int = 0) -> int:
        """Waits until all ranks have come, and takes part in their collectives until then.

        Returns:
            The union of the flags that ranks came with.

        Raises:
            RankError: other ranks have come for something else.
        """
        if self.alone:
            self._iterations_since = 0
            return what | flags
        number = int.from_bytes(blake2b(action.encode(), digest_size=5).digest(), "big")
        seen = self.agreement.reach(Boundary(TOGETHER + number, what | flags))
        self._iterations_since = 0
        if seen & ANY_REASON & ~what:
            self._check_same_reason(seen, what, str(what))
        if seen & _NOT_ALIKE:
            self._check_alike(seen)
        if seen & DIFFERENT and what is BarrierReason.TRAINING_STEP:
            self.agreement.give_up(
                "optimizers have other hyper-parameters on another rank, and each rank updates its part of the states with "
                "its own; set them alike on all ranks (a scheduler goes by a metric that is reduced: self.log(..., "
                "sync_dist=True))"
            )
        if seen & DIFFERENT:
            remedy = _ALIKE if what is BarrierReason.REARRANGED else _ON_ALL_RANKS
            self.agreement.give_up(
                f"rank {self._communicator.rank} {what} in another way than another rank, so their collectives would "
                f"not match; {remedy}"
            )
        return seen

    def _check_same_reason(self, seen: int, mine: int, doing: str) -> None:
        others = [each for each in BarrierReason if seen & each & ~mine]
        if not others:
            return
        situation = f"rank {self._communicator.rank} {doing} and another rank {others[0]}"
        if seen & BarrierReason.END_OF_EPOCH and seen & (BarrierReason.TRAINING_BATCH | BarrierReason.TRAINING_STEP):
            reason = f"{situation}: they got different numbers of training batches; {_AS_MANY_BATCHES}"
        elif seen & BarrierReason.REARRANGED:
            reason = f"{situation}, so they would wait for each other for ever; {_ALIKE}"
        elif seen & BarrierReason.USER_CALL:
            reason = f"{situation}, so they would wait for each other for ever; {_ON_ALL_RANKS}"
        else:
            reason = (
                f"{situation}, so they would wait for each other for ever; call collectives and step optimizers on all "
                f"ranks, equally often, and {_AS_MANY_BATCHES}"
            )
        self.agreement.give_up(reason)

    def compare(
        self, same_work: Sequence[Sequence[int]], same_loss: Sequence[Sequence[int]], done: Callable[[], int]
    ) -> None:
        """Makes these ranks compare what they have done at each barrier from now on.

        Args:
            same_work: groups of ranks that exchange the same activations.
            same_loss: groups of ranks that compute one loss.
            done: returns a 32-bit digest of what this rank has exchanged.
        """
        self.agreement.compare(same_work, same_loss, done)

    def record_loss(self, loss: float) -> None:
        """Records this rank's loss; the ranks of its tensor group compare theirs at their next barrier."""
        self.agreement.compare_number(loss)
        rank = self._communicator.rank
        group = next(number for number, ranks in enumerate(self.agreement.same_loss) if rank in ranks)
        self._must_match[f"the loss in tensor group {group}"] = f"{loss:.6g}"

    def record_hyper_parameters(self, numbers: Mapping[str, str]) -> str:
        """Records the hyper-parameters that optimizers update with, by description.

        Returns:
            The action of a training step that begins with them, as `come_together` compares it.
        """
        self._must_match.update(numbers)
        return repr(sorted(numbers.items()))

    def _check_alike(self, seen: int) -> None:
        if seen & OTHER_NUMBER:
            self.agreement.give_up(
                "ranks of a tensor group compute one loss, and theirs differ, so their gradients would be of "
                "different losses; compute it alike on all ranks of a group (from the samples that "
                "trainer.strategy.distributed_sampler_kwargs selects, and from no number of the rank)"
            )
        if seen & UNLIKE:
            self.agreement.give_up(
                "ranks that compute one batch have not exchanged the same activations, so what they compute next would be "
                "wrong; run the same layers on the same batches on all of them"
            )

    def _explained(self, reason: str) -> str:
        """Collects reason and position of all ranks in this rank's rounds into one error text. Collective.

        The reason is this rank's, or that of the first rank that gives one. No collective may follow in the run.
        """
        place = f"{self._differences} ({whereabouts()})" if self._differences else whereabouts()
        ours = (reason, place, self._communicator.exchanged(), self._must_match)
        states = [
            self._among.broadcast_object(ours if rank == self._communicator.rank else None, index)
            for index, rank in enumerate(self._ranks)
        ]
        reason = reason or next((each for each, *_ in states if each), "a rank has given up")
        places = ", ".join(f"rank {rank} {place}" for rank, (_, place, *_) in zip(self._ranks, states, strict=True))
        exchanged = {rank: each for rank, (_, _, each, _) in zip(self._ranks, states, strict=True)}
        text = f"{explained(reason, exchanged)}{_differences([each for *_, each in states])} [{places}]"
        self.fail(text)
        return text

    def reach(self, position: int, flags: int = 0) -> int:
        """Waits for the other ranks at a point of this iteration; returns the union of all flags.

        Raises:
            RankError: ranks of a group have exchanged different things.
        """
        if self.alone:
            return flags
        seen = self.agreement.reach(Boundary(self._iterations_since * 2 * STEP_ENDS + position, flags))
        if seen & _NOT_ALIKE:
            self._check_alike(seen)
        return seen

    def reach_step(self, position: int) -> None:
        """Waits for the other ranks in an optimizer step, as `reach`.

        Raises:
            RankError: other ranks are at a barrier for something else.
        """
        seen = self.reach(position)
        if seen & ANY_REASON:
            self._check_same_reason(seen, 0, "is in an optimizer step")


def _differences(values: Sequence[Mapping[str, str]]) -> str:
    """Text of the values that differ between ranks but must be equal.

    Args:
        values: by rank.
    """
    found = []
    for name in dict.fromkeys(name for each in values for name in each):
        found_by_rank = {rank: each[name] for rank, each in enumerate(values) if name in each}
        if len(set(found_by_rank.values())) > 1:
            found.append(f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in found_by_rank.items()))
    return f" ({'; '.join(found[:3])})" if found else ""


_LIBRARIES = frozenset(
    {
        "contextlib",
        "lightning",
        "lightning_fabric",
        "lightning_ptm",
        "lightning_utilities",
        "pytorch_lightning",
        "torch",
        "torchmetrics",
        "typing_extensions",  # wraps functions that torch has deprecated
    }
)


def whereabouts() -> str:
    """The innermost line of the calling thread that is not in a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _LIBRARIES:
            return f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "in no code of the user's"
