"""Table of everything that a run allocates in each tier; the Blueprint owns it, and set-up allocates by it.

Decides nothing and allocates nothing. Knows how tensors fill pages (the rule of memory/paged_tensor.py), not what they mean.

I1: rows with lifetime RUN are in the order in which set-up allocates them, so that the pages they fill can be counted; rows
    with later lifetimes are after them.
I2: a tier's pool is the sum of its rows: those allocated at set-up, those allocated later, and room for passing ones.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_ptm.planning.capacity_words import uses_in_words
from lightning_ptm.planning.layout import round_up
from lightning_ptm.terms import BLOCK_BYTES, Tier


class What(enum.Enum):
    """Purpose of a row. The value is printed for users."""

    PARAMETERS = "parameters"
    MASTERS = "master parameters"
    STATES = "optimizer states"
    GRADIENTS = "gradients"
    STAGING = "staging buffers"
    SAVES = "save buffers"
    VERSIONS = "new versions"
    TRANSIT = "values in transit"
    GATHERED = "gathered units"
    ACTIVATIONS = "staging of activations"


class Lifetime(enum.Enum):
    """Times at which the bytes of a row are held."""

    RUN = "from set-up to the end"
    FIRST_GRADIENT = "from the first gradient to the end"
    PASSING = "temporarily"


@dataclass(frozen=True, slots=True)
class Row:
    """A number of paged tensors that are alike.

    Args:
        what: purpose.
        tier: tier that holds them.
        lifetime: when they are held.
        numel: elements of each tensor.
        dtype: dtype of the elements, by torch's name.
        item_bytes: bytes of one element.
        count: number of tensors.
        unit: the unit that they belong to; None: no single unit.
        flat: index of the flat that they belong to, within the layout; None: no single flat.
        name: name of each tensor, for errors.
        shares_pages: each tensor begins where the tier's last such tensor ended; otherwise it has pages of its own.
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
        """Bytes of one tensor, in whole blocks."""
        return round_up(self.numel * self.item_bytes, BLOCK_BYTES)


@dataclass(frozen=True)  # without slots, for the cached properties
class Inventory:
    """All rows of one rank.

    Args:
        page_size: bytes of a page.
    """

    page_size: int
    rows: tuple[Row, ...]

    def of(self, what: What) -> tuple[Row, ...]:
        """Returns the rows of one purpose."""
        return tuple(row for row in self.rows if row.what is what)

    def of_flat(self, what: What, flat: int) -> Sequence[Row]:
        """Returns the rows of one purpose that belong to one flat."""
        return self._by_flat.get((what, flat), ())

    @cached_property
    def _by_flat(self) -> Mapping[tuple[What, int], list[Row]]:
        found: dict[tuple[What, int], list[Row]] = {}
        for row in self.rows:
            if row.flat is not None:
                found.setdefault((row.what, row.flat), []).append(row)
        return found

    @cached_property
    def _bytes_of_rows(self) -> tuple[int, ...]:
        """Bytes of the pages that each row takes in addition to those of the rows before it: a page that tensors share counts
        for the first of them."""
        filled = {tier: _Filled(self.page_size) for tier in {row.tier for row in self.rows}}
        return tuple([filled[row.tier].add(row) * self.page_size for row in self.rows])

    def held_bytes(self, tier: Tier, *lifetimes: Lifetime) -> int:
        """Returns the bytes of the pages that a tier's rows of these lifetimes take (see `_bytes_of_rows`)."""
        sizes = zip(self.rows, self._bytes_of_rows, strict=True)
        return sum([size for row, size in sizes if row.tier is tier and row.lifetime in lifetimes])

    @cached_property
    def pools(self) -> Mapping[Tier, int]:
        """Bytes of each tier's pool (I2)."""
        found: dict[Tier, int] = {}
        for row, size in zip(self.rows, self._bytes_of_rows, strict=True):
            found[row.tier] = found.get(row.tier, 0) + size
        return found

    def pool_bytes(self, tier: Tier) -> int:
        """Returns the bytes of a tier's pool (I2)."""
        return self.pools.get(tier, 0)

    def by_what(self, tier: Tier) -> dict[What, int]:
        """Returns the bytes of a tier's pages by purpose (see `_bytes_of_rows`)."""
        found: dict[What, int] = {}
        for row, size in zip(self.rows, self._bytes_of_rows, strict=True):
            if row.tier is tier:
                found[row.what] = found.get(row.what, 0) + size
        return {what: size for what, size in found.items() if size}

    def in_words(self, tier: Tier, unified: bool = False) -> str:
        """Returns the largest purposes of a tier's pages as text; empty if the tier has no pages.

        Args:
            unified: the device tier is RAM.
        """
        return uses_in_words(tier, {what.value: size for what, size in self.by_what(tier).items()}, unified)


EMPTY = Inventory(0, ())


def with_room(
    rows: Iterable[Row],
    page_size: int,
    transit_pages: Mapping[Tier, int],
    gathered_bytes: int,
) -> Inventory:
    """Returns the inventory of `rows` together with rows for passing values.

    Args:
        transit_pages: by tier, pages through which values pass while a run is set up, gathered or saved.
        gathered_bytes: device bytes for gathered and fetched units and passing gradients.
    """
    taken = list(rows)
    for tier, pages in transit_pages.items():
        taken.append(_room(What.TRANSIT, tier, pages, page_size))
    taken.append(_room(What.GATHERED, Tier.DEVICE, -(-gathered_bytes // page_size), page_size))
    return Inventory(page_size, tuple([row for row in taken if row.count > 0]))


def _room(what: What, tier: Tier, pages: int, page_size: int) -> Row:
    return Row(what, tier, page_size, "uint8", 1, pages, Lifetime.PASSING, name=what.value)


def pages_of(rows: Iterable[Row], page_size: int) -> int:
    """Returns the pages of one tier that `rows` fill.

    The rows are allocated in this order, and nothing is freed meanwhile.
    """
    filled = _Filled(page_size)
    return sum(map(filled.add, rows))


class _Filled:
    """Fill level of a tier: a tensor that shares pages begins where the last such tensor ended."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._left = 0
        """Free bytes after the last shared tensor in its page."""
        self._at_the_end = False
        """Whether that page is the last page allocated."""

    def add(self, row: Row) -> int:
        """Adds a row's tensors to the count; returns how many more pages they need than were counted so far."""
        size, page = row.bytes_each, self._page_size
        if not size:
            return 0
        if not row.shares_pages:
            self._at_the_end = False
            return row.count * -(-size // page)
        pages = 0
        for _ in range(row.count):
            if size <= self._left:
                self._left -= size
            else:
                rest = size - self._left if self._at_the_end else size
                pages += -(-rest // page)
                self._left = -rest % page
                self._at_the_end = True
        return pages
