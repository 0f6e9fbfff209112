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
        if first <= last and pages:
            self._add(1, 0, self._size - 1, first, last, pages)

    def peak(self, first: int = 0, last: int | None = None) -> int:
        """Returns the most pages at any of the instants first..last; 0 for an empty range."""
        last = self.instants - 1 if last is None else last
        return self._query(1, 0, self._size - 1, first, last) if first <= last else 0

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

    def _add(self, node: int, low: int, high: int, first: int, last: int, pages: int) -> None:
        if first <= low and high <= last:
            self._peak[node] += pages
            self._added[node] += pages
            return
        middle = (low + high) // 2
        if first <= middle:
            self._add(2 * node, low, middle, first, last, pages)
        if last > middle:
            self._add(2 * node + 1, middle + 1, high, first, last, pages)
        self._peak[node] = max(self._peak[2 * node], self._peak[2 * node + 1]) + self._added[node]

    def _query(self, node: int, low: int, high: int, first: int, last: int) -> int:
        if first <= low and high <= last:
            return self._peak[node]
        middle = (low + high) // 2
        if last <= middle:
            found = self._query(2 * node, low, middle, first, last)
        elif first > middle:
            found = self._query(2 * node + 1, middle + 1, high, first, last)
        else:
            found = max(
                self._query(2 * node, low, middle, first, last),
                self._query(2 * node + 1, middle + 1, high, first, last),
            )
        return found + self._added[node]

    def _last_above(self, node: int, low: int, high: int, first: int, last: int, limit: int) -> int | None:
        if high < first or low > last or self._peak[node] <= limit:
            return None
        if low == high:
            return low
        middle = (low + high) // 2
        limit -= self._added[node]
        found = self._last_above(2 * node + 1, middle + 1, high, first, last, limit)
        return self._last_above(2 * node, low, middle, first, last, limit) if found is None else found
