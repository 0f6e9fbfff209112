"""Which elements go from which place of which rank to which, when what lies in shards is laid out anew.

Decides only. Knows stretches of parameters, in elements, and ranks by their number among those that share them; no bytes.

I1: every element that is wanted is moved to its place once, from the rank that holds it. I2: moves come in the order of the
places that they go to, on each rank, so that what is written is written from its beginning to its end. I3: in a round no rank
sends, and none receives, more than a limit; all ranks find the same rounds.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Elements [first, first + numel) of a parameter, from `place` on in the shard of `rank`."""

    parameter: int
    first: int
    numel: int
    rank: int
    place: int

    @property
    def stop(self) -> int:
        return self.first + self.numel


@dataclass(frozen=True, slots=True)
class Move:
    """`numel` elements of a parameter: from `place` on in the shard of rank `source`, to `to` in that of rank `target`."""

    parameter: int
    source: int
    place: int
    target: int
    to: int
    numel: int

    @property
    def local(self) -> bool:
        """Whether they stay on their rank."""
        return self.source == self.target

    def cut(self, start: int, numel: int) -> Move:
        """`numel` of its elements, from its `start`-th on."""
        return replace(self, place=self.place + start, to=self.to + start, numel=numel)


def moves(wanted: Iterable[ShardRange], held: Mapping[int, Sequence[ShardRange]]) -> Iterator[Move]:
    """What brings wanted stretches to their places, in their order.

    Args:
        held: of each parameter that moves, the stretches that there are, in the parameter's order, without gaps; of others
            nothing is moved.
    """
    for stretch in wanted:
        there = held.get(stretch.parameter, ())
        done = stretch.first
        for index in range(bisect.bisect_right(there, done, key=attrgetter("stop")), len(there)):
            source = there[index]
            if done >= stretch.stop:
                break
            numel = min(stretch.stop, source.stop) - done
            yield Move(
                stretch.parameter,
                source.rank,
                source.place + done - source.first,
                stretch.rank,
                stretch.place + done - stretch.first,
                numel,
            )
            done += numel


def rounds(found: Iterable[Move], limit: int) -> Iterator[list[Move]]:
    """Moves in rounds of exchanges (I3), in each by target and place there.

    Args:
        found: in the order of places on each target.
        limit: elements.
    """
    windows: dict[int, list[Move]] = {}
    for move in found:
        for part in _at_borders(move, limit):
            windows.setdefault(part.to // limit, []).append(part)
    for window in sorted(windows):
        sent: Counter[int] = Counter()
        current: list[Move] = []
        for move in sorted(windows[window], key=attrgetter("target", "to")):
            left = move
            while left.numel:
                numel = min(left.numel, limit - sent[left.source])
                if numel:
                    current.append(left.cut(0, numel))
                    sent[left.source] += numel
                    left = left.cut(numel, left.numel - numel)
                else:
                    yield current
                    current, sent = [], Counter()
        if current:
            yield current


def _at_borders(move: Move, step: int) -> Iterator[Move]:
    """A move, cut where it goes over a multiple of `step` in the target's shard."""
    done = 0
    while done < move.numel:
        numel = min(move.numel - done, step - (move.to + done) % step)
        yield move.cut(done, numel)
        done += numel
