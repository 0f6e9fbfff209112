"""Frames of a plan: the first page of each lifetime of pages, chosen offline (dynamic storage allocation).

Pure. Knows intervals of instants and page counts, neither units nor tasks. The simulator checks the result by itself.

All lifetimes are known, so a block is placed at the lowest frame that is free during its whole lifetime. The order decides:
by size, by area and by lifetime are tried (docs/design/frames.md has their measurements). While some block finds no frames
below its limit, it is placed earlier, and all are placed again.

I1: blocks whose lifetimes overlap share no frame.
I2: equal inputs give equal frames, on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_EFFORT = 1_600_000
"""Comparisons of two blocks after which no further order is tried: about a quarter of a second."""
_LEAST_ORDERS = 8
"""Reorderings that are tried of each first order, however many blocks there are."""


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
    """Returns the first frame of each block; None for blocks that found none, in the order that left the fewest of them.

    Args:
        lowest: the numbers of blocks that have the lowest frames, in this order.
        effort: comparisons of two blocks that may be made.
    """
    neighbours = _neighbours(blocks)
    numbers = [number for number, block in enumerate(blocks) if block.pages and number not in lowest]
    each = len(numbers) + sum(map(len, neighbours))
    tries = max(_LEAST_ORDERS, effort // max(each, 1) // 3)
    best: dict[int, int] = {}
    random = 1
    for key in (_by_size, _by_area, _by_lifetime):
        order = sorted(numbers, key=lambda number: key(blocks[number]), reverse=True)
        farthest, reached = order, 0
        for _ in range(tries):
            placed, failed = _place_in([*lowest, *order], blocks, neighbours, until_failure=True)
            if failed is None:
                return tuple(placed.get(number, 0) for number in range(len(blocks)))
            if len(placed) > reached:
                farthest, reached = list(order), len(placed)
            at = 0 if failed in lowest else order.index(failed)
            if not at or blocks[failed].pages > blocks[failed].limit:
                break  # it has no room even alone
            random = (random * 1103515245 + 12345) & 0x7FFFFFFF
            order.insert((random >> 8) % at, order.pop(at))
        placed, _ = _place_in([*lowest, *farthest], blocks, neighbours)
        if len(placed) > len(best):
            best = placed
    return tuple(best.get(number) if block.pages else 0 for number, block in enumerate(blocks))


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


def _place_in(
    order: Iterable[int],
    blocks: Sequence[FrameBlock],
    neighbours: Sequence[Sequence[int]],
    *,
    until_failure: bool = False,
) -> tuple[dict[int, int], int | None]:
    """Places blocks in this order, each at the lowest frames that are free.

    Returns their first frames, and the first block that found none; with `until_failure`, no block is placed after it.
    """
    placed: dict[int, int] = {}
    failed: int | None = None
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
        elif failed is None:
            failed = number
            if until_failure:
                break
    return placed, failed
