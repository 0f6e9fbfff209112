"""Where the ranks of a run wait for each other, and what all of them are told where they cannot meet.

Owns at which point of its iterations this rank is, and whether the run has failed. In which order collectives go is
comm/agreement.py's; what is computed at these points, the engine's.

I1: ranks that come together for different things all raise, with what each did and where it is in the user's code. I2: of a
run that has failed, nothing waits for other ranks any more. I3: ranks of a tensor group that have exchanged different things
raise where they next wait for each other: behind each backward pass, before a step, at the end of a batch of an evaluation.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Together(enum.IntEnum):
    """What ranks do all at once; a flag of the boundary at which they wait for each other."""

    COLLECTIVE = 2
    TRAINING_STEP = 4
    BY_HAND = 8
    END_OF_EVALUATION = 16
    TRAINING_BATCH = 32
    END_OF_EPOCH = 64
    END_OF_RUN = 128
    EXCHANGE = 512
    REARRANGED = 1024

    def __str__(self) -> str:
        return _DOING[self]


_DOING = {
    Together.COLLECTIVE: "is in a collective (a barrier, a reduction)",
    Together.TRAINING_STEP: "begins a training step",
    Together.BY_HAND: "reads, edits or saves weights",
    Together.END_OF_EVALUATION: "has ended its evaluation",
    Together.TRAINING_BATCH: "goes on to another training batch",
    Together.END_OF_EPOCH: "has ended its training epoch",
    Together.END_OF_RUN: "has come to the end of the run",
    Together.EXCHANGE: "exchanges activations with its tensor group",
    Together.REARRANGED: "has other parameters than those that its pages were laid out for",
}
ANY_TOGETHER = sum(Together)
"""All flags of these."""

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
    """The meeting points of one rank.

    Args:
        communicator: of all ranks.
        participate: takes part in a collective that other ranks need and this one does not.
        teams: which ranks have a part in what, where not all have.
    """

    def __init__(self, communicator: Communicator, participate: Callable[[Decision], None], teams: RankTeams) -> None:
        self._communicator = communicator
        self.agreement = Agreement(communicator.exchange, participate, communicator.rank, teams, self._explained)
        self.failed = False
        """Nothing collective happens here any more; set by `fail`."""
        self._differences = ""
        """What this rank lays its pages out anew for; others are told of it where they do not."""
        self._told: dict[str, str] = {}
        """What ranks have to have alike, in words: by what it is of."""
        self._since = 0
        """Iterations since all ranks were last together: evaluation may have more batches on one rank than on another."""

    def iteration_begins(self) -> None:
        """One of this rank's."""
        self._since += 1

    def fail(self, reason: str) -> None:
        """The run has failed here: the others are told."""
        self.failed = True
        self._communicator.fail(reason)

    def meet(self, what: Together, deed: str = "") -> None:
        """Before what all ranks do together: others may still gather units, in this iteration (ranks with different experts
        have different plans), in batches that this rank has not, or for a forward of one rank alone.

        Args:
            deed: what exactly follows; the same on all ranks.
        """
        if not self.failed:
            self.come_together(what, deed)

    def gather_for(self, gathering: Gathering) -> None:
        """Before a collective that is none of ours, on its ranks: as `meet`, but they may be some of all, and the others
        anywhere.

        Raises:
            RankError: not all of them can come any more.
        """
        self._gather(gathering, Together.COLLECTIVE)
        if gathering.size == self._communicator.world_size:
            self._since = 0

    def meet_group(self, group: int, size: int, exchange: str) -> None:
        """Before a tensor group exchanges activations, on its ranks; the others may be anywhere.

        Args:
            group: its number among the groups.
            exchange: which one it is; the same on all of the group.

        Raises:
            RankError: not all of them can come any more.
        """
        number = int.from_bytes(blake2b(exchange.encode(), digest_size=3).digest(), "big")
        self._gather(Gathering(group << 24 | number, size), Together.EXCHANGE)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What the block raises on one rank raises on all of them. Collective, at the end of the block."""
        with raise_on_all_ranks(self._communicator, partial(self.meet, Together.BY_HAND, "results")):
            yield

    def told(self, value: Any, source: int = 0) -> Any:
        """A value of one rank, on all of them. Collective."""
        self.meet(Together.BY_HAND, f"value of rank {source}")
        return self._communicator.broadcast_object(value, source)

    def all_say(self, yes: bool) -> bool:
        """Whether all ranks say yes. Collective."""
        self.meet(Together.BY_HAND, "question")
        refused = torch.tensor([0 if yes else 1], dtype=torch.int64)
        return not self._communicator.all_reduce(refused, maximum=True).item()

    def _gather(self, gathering: Gathering, what: Together) -> None:
        if self.failed:
            raise RankError("this run has failed, so other ranks may never come to a collective; issue none afterwards")
        seen = self.agreement.gather(dataclasses.replace(gathering, flag=what))
        if seen is not None:
            self._check_nobody_else(seen, what, str(what))
            self.agreement.give_up(
                f"rank {self._communicator.rank} {what} and another rank in another one, or of other ranks, "
                f"so they would wait for each other for ever; issue the same ones in the same order on all ranks"
            )

    def rearranged(self, differences: str) -> None:
        """Before pages are laid out anew, for parameters that differ from those of the start by these.

        Raises:
            RankError: those of another rank do not, or by others; it says by which.
        """
        self._differences = differences
        self.meet(Together.REARRANGED, differences)
        self._differences = ""

    def come_together(self, what: Together, deed: str = "", flags: int = 0) -> int:
        """Waits until all ranks have come, taking part in what they do before; returns the flags that any came with.

        Raises:
            RankError: other ranks have come for something else.
        """
        number = int.from_bytes(blake2b(deed.encode(), digest_size=5).digest(), "big")
        seen = self.agreement.reach(Boundary(TOGETHER + number, what | flags))
        self._since = 0
        self._check_nobody_else(seen, what, str(what))
        self._check_alike(seen)
        if seen & DIFFERENT and what is Together.TRAINING_STEP:
            self.agreement.give_up(
                "optimizers have other hyper-parameters on another rank, and each rank updates its part of the states with "
                "its own; set them alike on all ranks (a scheduler goes by a metric that is reduced: self.log(..., "
                "sync_dist=True))"
            )
        if seen & DIFFERENT:
            remedy = _ALIKE if what is Together.REARRANGED else _ON_ALL_RANKS
            self.agreement.give_up(f"rank {self._communicator.rank} {what} in another way than another rank; {remedy}")
        return seen

    def _check_nobody_else(self, seen: int, mine: int, doing: str) -> None:
        others = [each for each in Together if seen & each & ~mine]
        if not others:
            return
        told = f"rank {self._communicator.rank} {doing} and another rank {others[0]}"
        if seen & Together.END_OF_EPOCH and seen & (Together.TRAINING_BATCH | Together.TRAINING_STEP):
            reason = f"{told}: they got different numbers of training batches; {_AS_MANY_BATCHES}"
        elif seen & Together.REARRANGED:
            reason = f"{told}, so they would wait for each other for ever; {_ALIKE}"
        elif seen & Together.BY_HAND:
            reason = f"{told}, so they would wait for each other for ever; {_ON_ALL_RANKS}"
        else:
            reason = (
                f"{told}, so they would wait for each other for ever; call collectives and step optimizers on all ranks, "
                f"as often, and {_AS_MANY_BATCHES}"
            )
        self.agreement.give_up(reason)

    def compare(self, ranks: Sequence[Sequence[int]], done: Callable[[], int]) -> None:
        """From here on, wherever these ranks wait for each other they compare what they have done.

        Args:
            ranks: those of each tensor group.
            done: a word of 32 bits for what this rank has exchanged.
        """
        self.agreement.compare(ranks, done)

    def loss_is(self, loss: float) -> None:
        """Of this rank. Where its tensor group waits next, its ranks compare theirs."""
        self.agreement.compare_number(loss)
        rank = self._communicator.rank
        group = next(number for number, ranks in enumerate(self.agreement.compared) if rank in ranks)
        self._told[f"the loss in tensor group {group}"] = f"{loss:.6g}"

    def hyper_parameters_are(self, numbers: Mapping[str, str]) -> str:
        """What optimizers update with, by what each is of.

        Returns:
            The deed of a training step that begins with them, as `come_together` compares it.
        """
        self._told.update(numbers)
        return repr(sorted(numbers.items()))

    def _check_alike(self, seen: int) -> None:
        if seen & OTHER_NUMBER:
            self.agreement.give_up(
                "ranks of a tensor group compute one loss, and theirs differ, so their gradients would be of different "
                "losses; compute it alike on all ranks of a group (from what trainer.strategy.distributed_sampler_kwargs "
                "gives them, and from no number of the rank)"
            )
        if seen & UNLIKE:
            self.agreement.give_up(
                "ranks of a tensor group have not exchanged the same, and would go on with what they mixed up"
            )

    def _explained(self, reason: str) -> str:
        """Collective: why this rank gives up, or the first that does, and where all of them are. Nothing else that is
        collective follows."""
        ranks = range(self._communicator.world_size)
        place = f"{self._differences} ({whereabouts()})" if self._differences else whereabouts()
        ours = (reason, place, self._communicator.exchanged(), self._told)
        told = [
            self._communicator.broadcast_object(ours if rank == self._communicator.rank else None, rank)
            for rank in ranks
        ]
        reason = reason or next((each for each, *_ in told if each), "a rank has given up")
        places = ", ".join(f"rank {rank} {place}" for rank, (_, place, *_) in enumerate(told))
        exchanged = {rank: each for rank, (_, _, each, _) in enumerate(told)}
        text = f"{explained(reason, exchanged)}{_differences([each for *_, each in told])} [{places}]"
        self.fail(text)
        return text

    def reach(self, position: int, flags: int = 0) -> int:
        """Waits for the other ranks at a point of this iteration; returns the flags that any came with.

        Raises:
            RankError: ranks of a tensor group have exchanged something else.
        """
        seen = self.agreement.reach(Boundary(self._since * 2 * STEP_ENDS + position, flags))
        self._check_alike(seen)
        return seen

    def reach_step(self, position: int) -> None:
        """As `reach`, in an optimizer step.

        Raises:
            RankError: other ranks have come together for something else.
        """
        self._check_nobody_else(self.reach(position), 0, "is in an optimizer step")


def _differences(told: Sequence[Mapping[str, str]]) -> str:
    """What ranks have otherwise of what they have to have alike, in words.

    Args:
        told: by rank.
    """
    found = []
    for name in dict.fromkeys(name for each in told for name in each):
        values = {rank: each[name] for rank, each in enumerate(told) if name in each}
        if len(set(values.values())) > 1:
            found.append(f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in values.items()))
    return f" ({'; '.join(found[:3])})" if found else ""


_LIBRARIES = frozenset(
    {
        "contextlib",
        "lightning",
        "lightning_ptm",
        "lightning_utilities",
        "torch",
        "torchmetrics",
        "typing_extensions",  # around functions that torch has deprecated
    }
)


def whereabouts() -> str:
    """The innermost line of the calling thread that is none of the libraries'."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _LIBRARIES:
            return f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "in no code of the user's"
