"""Detects that ranks that exchange activations wait for each other, by notes that waiting ranks post in a shared store.

Owns how many rounds and exchanges this rank has begun. Knows no tensors, and of the exchanges only words that describe
them.

I1: if another rank waits in the round after this rank's last one, and has not begun the exchange that this rank waits for,
    that rank waits for this one in the round, and this one waits for it in an exchange: a deadlock.
I2: a note about a round stays true until this rank comes to that round, so it can never be read too late.
I3: a rank that does not wait long posts nothing and reads nothing.
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
"""Seconds that a rank waits before it uses the store. The others may only be slow, so the value decides nothing."""

Exchanged = tuple[int, Sequence[str]]
"""Index of the group of ranks that make the same exchanges, and descriptions of those since it last gathered."""

OF_A_BATCH = "batch "
"""Prefix of words that describe what the ranks compute; all other words describe exchanges."""

NOTHING: Exchanged = (0, ())
"""`Exchanged` of a rank that exchanges nothing."""


class DeadlockDetector:
    """Detects, on one rank, that it and another rank that makes the same exchanges wait for each other: one in an
    exchange, the other in a round of all ranks.

    Args:
        store: a store of keys and values of all ranks, which works while collectives hang.
        key: prefix of the keys, unique to this run.
        rank: this rank.
    """

    def __init__(self, store: Any, key: str, rank: int) -> None:
        self._store = store
        self._key = f"{key}/waits"
        self._rank = rank
        self.exchanged: Callable[[], Exchanged] = lambda: NOTHING
        """Returns what this rank has exchanged. Used here and in errors."""
        # state
        self._rounds = self._exchanges = 0

    def ask(self, exchanged: Callable[[], Exchanged]) -> None:
        """Sets the function that returns what this rank has exchanged."""
        self.exchanged = exchanged

    def in_round(self, work: Any) -> None:
        """Waits for a round of all ranks."""
        self._rounds += 1
        if not _wait_briefly(work):
            note = [self._rounds, self._exchanges, self.exchanged()]
            with contextlib.suppress(RuntimeError):  # the rank that hosts the store is gone; the round will raise
                self._store.set(f"{self._key}/{self._rank}", json.dumps(note))
            work.wait()

    def begin_exchange(self) -> int:
        """Counts an exchange of activations that has begun; returns its number."""
        self._exchanges += 1
        return self._exchanges

    def in_exchange(self, work: Any, ranks: Sequence[int], number: int | None = None) -> None:
        """Waits for an exchange of activations.

        Args:
            work: the exchange's handle.
            ranks: the ranks that take part in it.
            number: the result of `begin_exchange`; None: it begins now.

        Raises:
            RankError: one of them will not come.
        """
        if number is None:
            number = self.begin_exchange()
        while not _wait_briefly(work):
            for rank in ranks:
                self._check_note(rank, number)

    def _check_note(self, rank: int, number: int) -> None:
        key, note = f"{self._key}/{rank}", None
        with contextlib.suppress(RuntimeError):
            note = self._store.get(key) if rank != self._rank and self._store.check([key]) else None
        if note is None:
            return
        rounds, exchanges, theirs = json.loads(note)
        if rounds == self._rounds + 1 and exchanges < number:  # I1
            reason = (
                f"rank {self._rank} waits for rank {rank} in an exchange of activations, and rank {rank} waits for "
                f"rank {self._rank} elsewhere"
            )
            raise RankError(explained(reason, dict(sorted({rank: theirs, self._rank: self.exchanged()}.items()))))


def _wait_briefly(work: Any) -> bool:
    """Waits for a while; whether the collective has ended. Raises its error if it failed."""
    try:
        work.wait(timedelta(seconds=_LONG_S))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended after the timeout, or failed: this call raises its error
    return True


def explained(reason: str, exchanged_by_rank: Mapping[int, Exchanged]) -> str:
    """Returns `reason` with the first difference between the exchanges of two ranks of a group, if there is one.

    If the ranks computed different batches, that is the cause and replaces the reason.

    Args:
        reason: why ranks cannot go on.
        exchanged_by_rank: by rank, what it has exchanged.
    """
    firsts: dict[int, tuple[int, Sequence[str]]] = {}
    for rank, (group, theirs) in exchanged_by_rank.items():
        first, ours = firsts.setdefault(group, (rank, theirs))
        for one, another in itertools.zip_longest(ours, theirs, fillvalue="no exchange"):
            if one == another:
                continue
            came = f"rank {first} has come to {one} where rank {rank} has come to {another}"
            if one.startswith(OF_A_BATCH) and another.startswith(OF_A_BATCH):
                both = f"ranks {first} and {rank} have to compute the same batch and compute different things"
                return f"{both}: {came}; {_SAME}"
            return f"{reason}: {came}; {_SAME_ORDER}"
    return reason


_SAME = (
    "give these ranks the same batches (build samplers from trainer.strategy.distributed_sampler_kwargs) "
    "and the same random numbers: draw on all of them, or use a generator of your own if only one rank draws"
)
_SAME_ORDER = "call the same layers in the same order, and as often, on all ranks that compute one batch"
