"""Frames of a plan: the first page of each lifetime of pages, chosen offline (dynamic storage allocation).

Pure. Knows intervals of instants and page counts, neither units nor tasks. The simulator checks the result by itself.

All lifetimes are known. Each block is first placed at the lowest frames that are free during its whole lifetime: largest
first, then by area, then by lifetime. If each of these orders leaves out some block, a search adds it (`_Search`). Very many
blocks are placed once, in the order of their first instants. docs/design/frames.md has measurements.

I1: blocks whose lifetimes overlap share no frame.
I2: equal inputs give equal frames, on every machine.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_EFFORT = 6_000_000
"""Steps of the search times pairs of blocks: 1,800 steps with 58 blocks, about a tenth of a second."""
_LEAST_STEPS = 100
"""Steps of the search, however many blocks there are."""
_MOST_STEPS = 2000
"""Steps of the search, however few blocks there are."""
_RESTART = 500
"""Steps after which the search begins again."""
MANY = 20_000
"""Number of blocks above which pairs of them are too many to be looked at: 100 million pairs with 190,000 blocks."""
_NEVER = 1 << 40
"""Weight of a block that is not moved out."""


@dataclass(frozen=True, slots=True)
class FrameBlock:
    """Adjacent pages during the instants first..last.

    Args:
        limit: the frames of the block are below this one: the least capacity of its instants.
    """

    first: int
    last: int
    pages: int
    limit: int


def place_blocks(
    blocks: Sequence[FrameBlock], effort: int = _EFFORT, lowest: Sequence[int] = ()
) -> tuple[int | None, ...]:
    """Returns the first frame of each block; None for blocks that found none, in the placement that left the fewest of them.

    Args:
        lowest: the numbers of blocks that have the lowest frames, in this order.
        effort: steps of the search times pairs of blocks, before it gives up.
    """
    lowest = [number for number in lowest if blocks[number].pages]
    if len(blocks) > MANY:
        placed = _place_by_time(blocks, lowest)
        return tuple(placed.get(number) if block.pages else 0 for number, block in enumerate(blocks))
    neighbours = _neighbours(blocks)
    numbers = [number for number, block in enumerate(blocks) if block.pages and number not in lowest]
    found: list[dict[int, int]] = []
    for key in (_by_size, _by_area, _by_lifetime):
        order = sorted(numbers, key=lambda number: key(blocks[number]), reverse=True)
        found.append(_place_in([*lowest, *order], blocks, neighbours))
        if all(number in found[-1] for number in numbers):
            break
    else:
        steps = max(_LEAST_STEPS, min(_MOST_STEPS, effort // len(numbers) ** 2))
        found.append(_Search(blocks, neighbours, lowest).run(sorted(found, key=len, reverse=True), steps))
    return tuple(found[-1].get(number) if block.pages else 0 for number, block in enumerate(blocks))


class _Search:
    """Adds blocks to a placement, and moves out those that are in their way.

    Of two placed blocks that overlap in time, it remembers only which is below the other. A block has some freedom: between
    its frames when all are as low as possible, and those when all are as high as possible. In each step, a block is added at
    the frames where those that have to leave, because they can be neither below nor above it, have the least weight. They are
    added again in later steps, the heaviest first. A block that has moved others out becomes heavier.
    """

    def __init__(self, blocks: Sequence[FrameBlock], neighbours: Sequence[Sequence[int]], fixed: Iterable[int]) -> None:
        # Two blocks that overlap do so at the first instant of one of them.
        instants = sorted({block.first for block in blocks})
        ranges = [
            (bisect.bisect_left(instants, each.first), bisect.bisect_right(instants, each.last)) for each in blocks
        ]
        self._instants = len(instants)
        self._lifetimes = [(slice(first, end), end - first) for first, end in ranges]
        self._pages = [block.pages for block in blocks]
        self._limits = [block.limit for block in blocks]
        self._neighbours = neighbours
        self._fixed = frozenset(fixed)
        # State.
        self._order: list[int] = []
        """The placed blocks; each is after those below it."""
        self._placed: list[bool] = []
        self._ends = [0] * len(blocks)
        """The frame after a placed block, as low as possible."""
        self._starts = [0] * len(blocks)
        """The first frame of a placed block, as high as possible."""
        self._weights: list[int] = []
        self._random = 1

    def run(self, placements: Sequence[dict[int, int]], steps: int) -> dict[int, int]:
        """Returns the best placement that is found in so many steps, begun from each of these in turn."""
        best: dict[int, int] = {}
        left: tuple[int, int] | None = None
        out: list[int] = []
        for step in range(steps):
            if step % _RESTART == 0:
                out = self._begin(placements[step // _RESTART % len(placements)])
            else:
                number = max(out, key=self._weights.__getitem__)
                out.remove(number)
                out += self._add(number)
            # The fewest blocks, and of these the shortest lifetimes: a schedule without them differs least from this one.
            now = (len(out), sum(self._lifetimes[each][1] for each in out))
            if left is None or now < left:
                left, best = now, {each: self._ends[each] - self._pages[each] for each in self._order}
            if not out:
                break
        return best

    def _begin(self, placement: dict[int, int]) -> list[int]:
        """Begins with a placement; returns the blocks that it lacks."""
        numbers = range(len(self._pages))
        self._placed = [number in placement for number in numbers]
        self._order = sorted(placement, key=placement.__getitem__)
        self._weights = [1] * len(numbers)
        for number in self._fixed:
            self._weights[number] = _NEVER
            if self._placed[number]:
                self._limits[number] = placement[number] + self._pages[number]
        self._arrange()
        return [number for number in numbers if self._pages[number] and not self._placed[number]]

    def _arrange(self) -> None:
        """Computes the lowest and the highest frames of all placed blocks."""
        lifetimes, pages, limits = self._lifetimes, self._pages, self._limits
        level = [0] * self._instants
        for number in self._order:
            lifetime, instants = lifetimes[number]
            self._ends[number] = frame = max(level[lifetime]) + pages[number]
            level[lifetime] = [frame] * instants
        level = [max(limits)] * self._instants
        for number in reversed(self._order):
            lifetime, instants = lifetimes[number]
            self._starts[number] = frame = min(limits[number], *level[lifetime]) - pages[number]
            level[lifetime] = [frame] * instants

    def _add(self, number: int) -> list[int]:
        """Adds a block, if it has room beside the fixed ones; returns the blocks that have left."""
        pages, ends, starts, weights = self._pages[number], self._ends, self._starts, self._weights
        others = [other for other in self._neighbours[number] if self._placed[other]]
        # The weight in the way of the block changes at these first frames of it.
        changes = {0: 0}
        for other in others:
            first, end = max(starts[other] - pages + 1, 0), ends[other]
            if first < end:
                changes[first] = changes.get(first, 0) + weights[other]
                changes[end] = changes.get(end, 0) - weights[other]
        weight, least = 0, _NEVER - 1
        frames: list[int] = []
        for frame in sorted(changes):
            weight += changes[frame]
            if frame + pages > self._limits[number] or weight > least:
                continue
            frames = [*frames, frame] if weight == least else [frame]
            least = weight
        if not frames:
            return []
        self._random = (self._random * 1103515245 + 12345) & 0x7FFFFFFF
        frame = frames[(self._random >> 8) % len(frames)]
        leave = [other for other in others if starts[other] < frame + pages and frame < ends[other]] if least else []
        for other in leave:
            self._placed[other] = False
            self._order.remove(other)
        if leave:
            weights[number] += 2
        self._placed[number] = True
        ends[number] = frame  # so that the order has it after the blocks that end there
        self._order.append(number)
        self._order.sort(key=ends.__getitem__)
        self._arrange()
        return leave


def _by_area(block: FrameBlock) -> tuple[int, ...]:
    return (block.pages * (block.last - block.first + 1), block.pages)


def _by_size(block: FrameBlock) -> tuple[int, ...]:
    return (block.pages, block.last - block.first)


def _by_lifetime(block: FrameBlock) -> tuple[int, ...]:
    return (block.last - block.first, block.pages)


def _neighbours(blocks: Sequence[FrameBlock]) -> list[list[int]]:
    """Returns, for each block, the others whose lifetimes overlap its own."""
    found: list[list[int]] = [[] for _ in blocks]
    active: list[int] = []
    for number in sorted(range(len(blocks)), key=lambda number: blocks[number].first):
        if not blocks[number].pages:
            continue
        active = [other for other in active if blocks[other].last >= blocks[number].first]
        for other in active:
            found[other].append(number)
        found[number].extend(active)
        active.append(number)
    return found


def _place_by_time(blocks: Sequence[FrameBlock], lowest: Sequence[int]) -> dict[int, int]:
    """Places blocks in the order of their first instants, those that stay longest first, at the lowest frames that are free
    then; returns the first frames of those that fit. The blocks `lowest` keep theirs from before the first instant on."""
    placed: dict[int, int] = {}
    taken: list[tuple[int, int]] = []
    """First frame, and frame after, of each placed block whose lifetime has not ended."""
    by_end: list[tuple[int, tuple[int, int]]] = []
    for number in lowest:
        frame = taken[-1][1] if taken else 0
        if frame + blocks[number].pages > blocks[number].limit:
            continue
        placed[number] = frame
        taken.append((frame, frame + blocks[number].pages))
        by_end.append((blocks[number].last, taken[-1]))
    heapq.heapify(by_end)
    of_lowest = {*lowest}
    numbers = [number for number, block in enumerate(blocks) if block.pages and number not in of_lowest]
    for number in sorted(numbers, key=lambda number: (blocks[number].first, -blocks[number].last)):
        block = blocks[number]
        while by_end and by_end[0][0] < block.first:
            taken.remove(heapq.heappop(by_end)[1])
        frame = 0
        for start, end in taken:
            if start - frame >= block.pages:
                break
            frame = end
        if frame + block.pages <= block.limit:
            placed[number] = frame
            bisect.insort(taken, (frame, frame + block.pages))
            heapq.heappush(by_end, (block.last, (frame, frame + block.pages)))
    return placed


def _place_in(
    order: Iterable[int], blocks: Sequence[FrameBlock], neighbours: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Places blocks in this order, each at the lowest frames that are free; returns the first frames of those that fit."""
    placed: dict[int, int] = {}
    for number in order:
        block = blocks[number]
        taken = sorted([(placed[other], blocks[other].pages) for other in neighbours[number] if other in placed])
        frame = 0
        for start, pages in taken:
            if start - frame >= block.pages:
                break
            frame = max(frame, start + pages)
        if frame + block.pages <= block.limit:
            placed[number] = frame
    return placed
