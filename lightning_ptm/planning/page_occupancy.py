"""Page counts of the device tier over time, updated incrementally: the paper's `get_available_memory`.

Owns a table of page counts over instants. Knows no unit and no task. A tick has two instants: 2 * tick is its trigger,
after the releases of that trigger and before its fetches; 2 * tick + 1 is its compute. The trigger after the last tick
has an instant too.

I1: every query and every update costs O(log instants).
"""

from __future__ import annotations


def trigger_instant(tick: int) -> int:
    """Returns the instant of a tick's trigger, after its releases and before its fetches."""
    return 2 * tick


def compute_instant(tick: int) -> int:
    """Returns the instant of a tick's compute, with everything that its trigger fetched."""
    return 2 * tick + 1


class Occupancy:
    """Page counts over instants with range addition and range maximum (a segment tree)."""

    def __init__(self, tick_count: int) -> None:
        self.instants = 2 * tick_count + 2
        self._size = 1 << (self.instants - 1).bit_length()
        # A node's peak includes its own addition, but none of its ancestors'.
        self._peak = [0] * (2 * self._size)
        self._added = [0] * (2 * self._size)

    def add(self, first: int, last: int, pages: int) -> None:
        """Adds `pages` (which may be negative) to instants first..last; an empty range changes nothing."""
        if first > last or not pages:
            return
        peak, added = self._peak, self._added
        low, high = first + self._size, last + self._size + 1
        while low < high:  # the nodes that cover the range, from both of its ends
            if low & 1:
                peak[low] += pages
                added[low] += pages
                low += 1
            if high & 1:
                high -= 1
                peak[high] += pages
                added[high] += pages
            low, high = low // 2, high // 2
        for leaf in (first, last):
            node = (leaf + self._size) // 2
            while node:
                peak[node] = max(peak[2 * node], peak[2 * node + 1]) + added[node]
                node //= 2

    def peak(self, first: int = 0, last: int | None = None) -> int:
        """Returns the most pages at any of the instants first..last; 0 for an empty range."""
        last = self.instants - 1 if last is None else last
        if first > last:
            return 0
        peak, added = self._peak, self._added
        low, high = first + self._size, last + self._size
        of_low, of_high = peak[low], peak[high]
        while low // 2 != high // 2:
            if not low & 1:
                of_low = max(of_low, peak[low + 1])
            if high & 1:
                of_high = max(of_high, peak[high - 1])
            low, high = low // 2, high // 2
            of_low += added[low]
            of_high += added[high]
        found, node = max(of_low, of_high), low // 2
        while node:
            found += added[node]
            node //= 2
        return found

    def peak_instant(self) -> int:
        """Returns the first instant with the peak number of pages."""
        node, low, high = 1, 0, self._size - 1
        while low < high:
            middle = (low + high) // 2
            left = self._peak[2 * node] >= self._peak[2 * node + 1]
            node, low, high = (2 * node, low, middle) if left else (2 * node + 1, middle + 1, high)
        return low

    def earliest(self, floor: int, last: int, limit: int) -> int:
        """Returns the smallest instant x >= floor such that none of x..last has more than `limit` pages.

        Returns last + 1 if there is none.
        """
        if floor > last:
            return last + 1
        blocking = self._last_above(1, 0, self._size - 1, floor, last, limit)
        return floor if blocking is None else blocking + 1

    def _last_above(self, node: int, low: int, high: int, first: int, last: int, limit: int) -> int | None:
        if high < first or low > last or self._peak[node] <= limit:
            return None
        if low == high:
            return low
        middle = (low + high) // 2
        limit -= self._added[node]
        found = self._last_above(2 * node + 1, middle + 1, high, first, last, limit)
        return self._last_above(2 * node, low, middle, first, last, limit) if found is None else found
