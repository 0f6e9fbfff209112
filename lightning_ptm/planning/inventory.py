"""What a run takes of each tier: one table of rows, made once and owned by the Blueprint, by which set-up takes it.

Decides nothing and allocates nothing. Knows how tensors fill pages (the rule of memory/ledger.py), not what they mean.

I1: rows of the whole run stand in the order in which set-up takes them, so that the pages they fill can be counted.
I2: a tier's pool is the sum of its rows: what is taken at once, what comes later, and the room for what comes and goes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_ptm.planning.capacity_words import uses_in_words
from lightning_ptm.planning.layout import round_up
from lightning_ptm.terms import BLOCK_BYTES, Tier


class What(enum.Enum):
    """What a row is. The value is what users read."""

    PARAMETERS = "parameters"
    MASTERS = "master parameters"
    STATES = "optimizer states"
    GRADIENTS = "gradients"
    STAGING = "staging of updates"
    SAVES = "buffers of saves"
    VERSIONS = "versions in the making"
    TRANSIT = "values in transit"
    GATHERED = "units in use"
    ENDS = "ends of pages"
    """Counted when homes were chosen, and not filled by them: gradients that then stay in `.grad`, staging that takes less.
    These pages are free: units in use and values in transit may take them."""


class Lifetime(enum.Enum):
    """When the bytes of a row are held."""

    RUN = "from set-up to the end"
    FIRST_GRADIENT = "from the first gradient to the end"
    PASSING = "now and then"


@dataclass(frozen=True, slots=True)
class Row:
    """Some paged tensors that are alike.

    Args:
        what, tier, lifetime: see there.
        numel: elements of each tensor.
        dtype: of the elements, by torch's name; item_bytes: of one.
        count: tensors.
        unit: whose; None: of no unit alone.
        flat: whose, within the layout; None likewise.
        name: of each tensor, for errors.
        shares_pages: each begins where the tier's last such tensor ended; else in pages of its own.
    """

    what: What
    tier: Tier
    numel: int
    dtype: str
    item_bytes: int
    count: int = 1
    lifetime: Lifetime = Lifetime.RUN
    unit: int | None = None
    flat: int | None = None
    name: str = ""
    shares_pages: bool = False

    @property
    def bytes_each(self) -> int:
        """Of one tensor, in whole blocks."""
        return round_up(self.numel * self.item_bytes, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Inventory:
    """All rows of one rank.

    Args:
        page_size: bytes of a page.
    """

    page_size: int
    rows: tuple[Row, ...]

    def of(self, what: What) -> tuple[Row, ...]:
        """The rows of a kind."""
        return tuple(row for row in self.rows if row.what is what)

    def of_flats(self, what: What) -> dict[int, list[Row]]:
        """The same by flat; those of no flat are left out."""
        found: dict[int, list[Row]] = {}
        for row in self.of(what):
            if row.flat is not None:
                found.setdefault(row.flat, []).append(row)
        return found

    def held_bytes(self, tier: Tier, *lifetimes: Lifetime) -> int:
        """Bytes of the pages that a tier's rows of these lifetimes fill."""
        chosen = (row for row in self.rows if row.tier is tier and row.lifetime in lifetimes)
        return pages_of(chosen, self.page_size) * self.page_size

    def pool_bytes(self, tier: Tier) -> int:
        """Bytes of a tier (I2)."""
        return self.held_bytes(tier, *Lifetime)

    def by_what(self, tier: Tier) -> dict[What, int]:
        """Bytes of a tier's pages, by what they are for; a shared page is the first one's that is in it."""
        found: dict[What, int] = {}
        filled = _Filled(self.page_size)
        for row in self.rows:
            if row.tier is tier:
                found[row.what] = found.get(row.what, 0) + filled.add(row) * self.page_size
        return {what: size for what, size in found.items() if size}

    def in_words(self, tier: Tier, unified: bool = False) -> str:
        """What most of a tier's pages are for; empty when it has none. `unified`: the device tier is RAM."""
        return uses_in_words(tier, {what.value: size for what, size in self.by_what(tier).items()}, unified)


NOTHING = Inventory(0, ())


def with_room(
    rows: Iterable[Row],
    page_size: int,
    transit_pages: Mapping[Tier, int],
    gathered_bytes: int,
    counted: Mapping[Tier, int],
) -> Inventory:
    """The inventory of these rows, with the room that is left beside them.

    Args:
        transit_pages: by tier, pages through which values pass while a run is set up, gathered or saved.
        gathered_bytes: of the device, for gathered and fetched units and passing gradients.
        counted: by tier, bytes with which all of these were counted when homes were chosen; the pool has no less (What.ENDS).
    """
    taken = list(rows)
    for tier, pages in transit_pages.items():
        taken.append(_room(What.TRANSIT, tier, pages, page_size))
    taken.append(_room(What.GATHERED, Tier.DEVICE, -(-gathered_bytes // page_size), page_size))
    for tier, size in counted.items():
        filled = pages_of((row for row in taken if row.tier is tier), page_size)
        taken.append(_room(What.ENDS, tier, size // page_size - filled, page_size))
    return Inventory(page_size, tuple(row for row in taken if row.count > 0))


def _room(what: What, tier: Tier, pages: int, page_size: int) -> Row:
    return Row(what, tier, page_size, "uint8", 1, pages, Lifetime.PASSING, name=what.value)


def pages_of(rows: Iterable[Row], page_size: int) -> int:
    """Pages of one tier that these rows fill if they are taken in this order, and nothing is given back meanwhile."""
    filled = _Filled(page_size)
    return sum(map(filled.add, rows))


class _Filled:
    """A tier that is filled: a tensor that shares pages begins where the last such one ended."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._left = 0
        """Bytes behind the last shared tensor in its page."""
        self._at_the_end = False
        """Whether that page is the last that was taken."""

    def add(self, row: Row) -> int:
        """Pages more."""
        size = row.bytes_each
        if not size:
            return 0
        if not row.shares_pages:
            self._at_the_end = False
            return row.count * -(-size // self._page_size)
        return sum(self._add_shared(size) for _ in range(row.count))

    def _add_shared(self, size: int) -> int:
        if size <= self._left:
            self._left -= size
            return 0
        rest = size - self._left if self._at_the_end else size
        self._left = -rest % self._page_size
        self._at_the_end = True
        return -(-rest // self._page_size)
