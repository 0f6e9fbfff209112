"""Moves of elements between ranks when shards get a new layout: source rank and offset, target rank and offset.

Decides only. Knows ranges of parameters, in elements, and ranks by their number among those that share them; no bytes.

I1: every wanted element is moved to its place once, from the rank that holds it.
I2: moves of each rank are in the order of their target offsets, so that the target is written sequentially.
I3: in a round no rank sends or receives more than a limit; all ranks compute the same rounds.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Elements [first, first + numel) of a parameter, at offset `place` of the shard of `rank`."""

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
    """A copy of `numel` elements of a parameter between two shards, or within one.

    The source is at offset `place` of rank `source`'s shard, the target at offset `to` of rank `target`'s shard.
    """

    parameter: int
    source: int
    place: int
    target: int
    to: int
    numel: int

    @property
    def local(self) -> bool:
        """Whether the elements stay on their rank."""
        return self.source == self.target

    def cut(self, start: int, numel: int) -> Move:
        """Returns the part of the move with `numel` elements, beginning with its `start`-th."""
        return replace(self, place=self.place + start, to=self.to + start, numel=numel)


def moves(wanted: Iterable[ShardRange], held: Mapping[int, Sequence[ShardRange]]) -> Iterator[Move]:
    """Yields the moves that bring wanted ranges to their places, in the order of `wanted`.

    Args:
        held: of each parameter that moves, its current ranges, in the parameter's order, without gaps; parameters that
            are missing here are not moved.
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
    """Yields moves in rounds of exchanges (I3), sorted by target and offset within a round.

    Args:
        found: moves in the order of offsets on each target.
        limit: elements that a rank may send, and receive, in a round.
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
    """Yields the parts of a move, cut at multiples of `step` in the target's shard."""
    done = 0
    while done < move.numel:
        numel = min(move.numel - done, step - (move.to + done) % step)
        yield move.cut(done, numel)
        done += numel
