"""What a rank that waits for long tells the others of its tensor group, or finds out from them: that nobody can come.

Owns how many rounds and exchanges this rank has begun. Knows no tensors, and nothing of what is exchanged but words.

I1: a rank that waits in the round behind this one's last, and has begun fewer exchanges than this one, waits for this rank,
    and so does this one for it, in its exchange. I2: what is told of a round stays true until this rank comes to it, so
    nobody reads it too late. I3: who does not wait for long tells nothing and asks nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from lightning_ptm.errors import RankError

_LONG_S = 5.0
"""So long a rank waits without a word. Others may only be slow: how long it is decides nothing."""

Exchanged = tuple[int, Sequence[str]]
"""The number of a tensor group, and what a rank of it has exchanged since it has met, in words, with what it is at."""

OF_A_BATCH = "batch "
"""So begin, among these, words for what the ranks compute; the others are for exchanges."""

NOTHING: Exchanged = (0, ())
"""Of a rank that exchanges nothing."""


class DeadlockDetector:
    """Of one rank, in one run.

    Args:
        board: keys and values of all ranks, which can be reached while collectives hang.
        key: what the keys begin with; of this run alone.
        rank: this one.
    """

    def __init__(self, board: Any, key: str, rank: int) -> None:
        self._board = board
        self._key = f"{key}/waits"
        self._rank = rank
        # state
        self.exchanged: Callable[[], Exchanged] = lambda: NOTHING
        """What this rank has exchanged; called here, and where ranks explain why they give up."""
        self._rounds = self._exchanges = 0

    def ask(self, exchanged: Callable[[], Exchanged]) -> None:
        """From now on, what this rank has exchanged is what this says."""
        self.exchanged = exchanged

    def in_round(self, work: Any) -> None:
        """Waits for a round of all ranks."""
        self._rounds += 1
        if not _ends(work):
            told = [self._rounds, self._exchanges, self.exchanged()]
            with contextlib.suppress(
                RuntimeError
            ):  # the board is gone with the rank that kept it, and so will the round be
                self._board.set(f"{self._key}/{self._rank}", json.dumps(told))
            work.wait()

    def in_exchange(self, work: Any, ranks: Sequence[int]) -> None:
        """Waits for an exchange of this rank's tensor group.

        Args:
            ranks: of the group.

        Raises:
            RankError: one of them will not come.
        """
        self._exchanges += 1
        while not _ends(work):
            for rank in ranks:
                self._look_at(rank)

    def _look_at(self, rank: int) -> None:
        key, told = f"{self._key}/{rank}", None
        with contextlib.suppress(RuntimeError):
            told = self._board.get(key) if rank != self._rank and self._board.check([key]) else None
        if told is None:
            return
        rounds, exchanges, theirs = json.loads(told)
        if rounds == self._rounds + 1 and exchanges < self._exchanges:  # I1
            reason = (
                f"rank {self._rank} waits in an exchange of its tensor group to which rank {rank} does not come, which waits "
                f"for rank {self._rank} elsewhere"
            )
            raise RankError(explained(reason, dict(sorted({rank: theirs, self._rank: self.exchanged()}.items()))))


def _ends(work: Any) -> bool:
    """Waits for a while; raises what the collective has failed with."""
    try:
        work.wait(timedelta(seconds=_LONG_S))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has just ended, or has failed
    return True


def explained(reason: str, told: Mapping[int, Exchanged]) -> str:
    """A reason why ranks cannot go on, with what two ranks of a tensor group have exchanged differently, if that is known;
    in its place, that they compute different batches.

    Args:
        told: by rank.
    """
    firsts: dict[int, tuple[int, Sequence[str]]] = {}
    for rank, (group, theirs) in told.items():
        first, ours = firsts.setdefault(group, (rank, theirs))
        for one, another in itertools.zip_longest(ours, theirs, fillvalue="no exchange"):
            if one == another:
                continue
            came = f"rank {first} has come to {one} where rank {rank} has come to {another}"
            if one.startswith(OF_A_BATCH) and another.startswith(OF_A_BATCH):
                both = f"ranks {first} and {rank} share the layers of one model and compute different things"
                return f"{both}: {came}; {_SAME}"
            return f"{reason}: {came}; {_SAME_ORDER}"
    return reason


_SAME = (
    "ranks of a tensor group have to get the same batches (a sampler goes by trainer.strategy.distributed_sampler_kwargs) "
    "and to draw the same random numbers: on all of them alike, or from a generator of your own where one rank alone draws"
)
_SAME_ORDER = "layers that are cut have to be computed in the same order on all ranks of a tensor group, and as often"
