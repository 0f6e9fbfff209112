"""Detects that ranks wait for each other, by notes that waiting ranks post in a shared store.

Ranks wait in rounds of agreement, in exchanges of activations, and for hidden states of other pipeline stages. Owns how
many of these this rank has begun, and how many hidden states it has sent. Knows no tensors, and of the exchanges only
words that describe them.

A note says what its rank waits for, and what it has begun so far. A rank waits for those that have not begun the same
round or exchange, or have not sent it the hidden states.

I1: a rank waits for itself, by its own counts and the notes of others: that is a deadlock. The last note on the way is
    true, since its rank waits for this one, which has done nothing since; so is the note before it, and so on.
I2: a rank that does not wait long posts nothing and reads nothing.
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

_Wait = list[Any]
"""What a rank waits for: "round", "exchange" or "receive", the ranks concerned, and its number."""
_Note = dict[str, Any]


class DeadlockDetector:
    """Detects, on one rank, that it waits for ranks that wait for it.

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
        self._rounds: dict[str, int] = {}
        """Rounds begun, by the ranks that join them."""
        self._exchanges = 0
        self._sent: dict[str, int] = {}
        """Hidden states sent, by receiver."""
        self._received: dict[str, int] = {}
        """Receives of hidden states begun, by sender."""

    def ask(self, exchanged: Callable[[], Exchanged]) -> None:
        """Sets the function that returns what this rank has exchanged."""
        self.exchanged = exchanged

    def in_round(self, work: Any, ranks: Sequence[int]) -> None:
        """Waits for a round of agreement.

        Args:
            ranks: the ranks that join it.
        """
        name = str(list(ranks))
        self._rounds[name] = self._rounds.get(name, 0) + 1
        if not _wait_briefly(work):
            self._post(["round", list(ranks), self._rounds[name]])
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
        self._wait(work, ["exchange", list(ranks), self.begin_exchange() if number is None else number])

    def sends(self, ranks: Sequence[int]) -> None:
        """Counts hidden states that this rank has begun to send to these ranks."""
        for rank in ranks:
            self._sent[str(rank)] = self._sent.get(str(rank), 0) + 1

    def in_receive(self, work: Any, rank: int) -> None:
        """Waits for hidden states of another rank.

        Raises:
            RankError: it will not send them.
        """
        number = self._received[str(rank)] = self._received.get(str(rank), 0) + 1
        self._wait(work, ["receive", [rank], number])

    def _wait(self, work: Any, what: _Wait) -> None:
        while not _wait_briefly(work):
            note = self._post(what)
            for rank in what[1]:
                if rank != self._rank:
                    self._check(rank, note)

    def _post(self, what: _Wait) -> _Note:
        note: _Note = {
            "waits": what,
            "rounds": self._rounds,
            "exchanges": self._exchanges,
            "sent": self._sent,
            "exchanged": self.exchanged(),
        }
        with contextlib.suppress(RuntimeError):  # the rank that hosts the store is gone; the wait will raise
            self._store.set(f"{self._key}/{self._rank}", json.dumps(note))
        return note

    def _note(self, rank: int) -> _Note | None:
        key, note = f"{self._key}/{rank}", None
        with contextlib.suppress(RuntimeError):
            note = self._store.get(key) if self._store.check([key]) else None
        return None if note is None else json.loads(note)

    def _check(self, first: int, ours: _Note) -> None:
        """Looks for a way from this rank over `first` back to this rank (I1)."""
        notes: dict[int, _Note | None] = {self._rank: ours, first: self._note(first)}
        if not _waits_for(ours, self._rank, first, notes[first]):
            return
        ways: list[tuple[int, ...]] = [(first,)]
        while ways:
            way = ways.pop()
            last = notes[way[-1]]
            if last is None:
                continue
            for rank in last["waits"][1]:
                known = rank in notes
                other = notes[rank] if known else notes.setdefault(rank, self._note(rank))
                if rank == way[-1] or (known and rank != self._rank) or not _waits_for(last, way[-1], rank, other):
                    continue
                if rank == self._rank:
                    raise RankError(self._explained(way, notes, ours))
                ways.append((*way, rank))

    def _explained(self, way: Sequence[int], notes: Mapping[int, _Note | None], ours: _Note) -> str:
        first = way[0]
        if len(way) == 1:
            kind = ours["waits"][0]
            place = "in an exchange of activations" if kind == "exchange" else "for its hidden states"
            theirs = notes[first]
            reason = (
                f"rank {self._rank} waits for rank {first} {place}, and rank {first} waits for rank {self._rank} "
                f"elsewhere"
            )
            if kind == "exchange" and theirs is not None:
                exchanged = {first: theirs["exchanged"], self._rank: ours["exchanged"]}
                return explained(reason, dict(sorted(exchanged.items())))
            return f"{reason}; {_SAME_ORDER}"
        names = " and ".join(f"rank {rank}" for rank in way)
        return f"rank {self._rank} waits for {names}, one for the other, and the last one for it; {_SAME_ORDER}"


def _waits_for(note: _Note, waiting: int, rank: int, other: _Note | None) -> bool:
    """Whether `note` of the rank `waiting` says that it waits for `rank`, whose own note is `other`."""
    if other is None:
        return False
    kind, ranks, number = note["waits"]
    if kind == "round":
        return bool(other["rounds"].get(str(ranks), 0) == number - 1)
    if kind == "exchange":
        return bool(other["exchanges"] < number)
    return bool(other["sent"].get(str(waiting), 0) < number)


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
