"""What a run takes of each tier: one table of rows, made once and owned by the Blueprint, by which set-up takes it.

Decides nothing and allocates nothing. Knows how tensors fill pages (the rule of memory/ledger.py), not what they mean.

I1: rows of the whole run stand in the order in which set-up takes them, so that the pages they fill can be counted.
I2: a tier's pool is the sum of its rows: what is taken at once, what comes later, and the room for what comes and goes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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

    def of(self, what: What, flat: int | None = None) -> tuple[Row, ...]:
        """The rows of a kind; with `flat`, those of this flat."""
        return tuple(row for row in self.rows if row.what is what and (flat is None or row.flat == flat))

    def held_bytes(self, tier: Tier, *lifetimes: Lifetime) -> int:
        """Bytes of the pages that a tier's rows of these lifetimes fill."""
        chosen = (row for row in self.rows if row.tier is tier and row.lifetime in lifetimes)
        return pages_of(chosen, self.page_size) * self.page_size

    def pool_bytes(self, tier: Tier) -> int:
        """Bytes of a tier (I2)."""
        return self.held_bytes(tier, *Lifetime)

    def by_what(self, tier: Tier) -> dict[What, int]:
        """Bytes of a tier, by what they are for; what shared pages save is taken from the last row that shares."""
        found: dict[What, int] = {}
        before = 0
        so_far: list[Row] = []
        for row in self.rows:
            if row.tier is tier:
                so_far.append(row)
                after = pages_of(so_far, self.page_size) * self.page_size
                found[row.what] = found.get(row.what, 0) + after - before
                before = after
        return {what: size for what, size in found.items() if size}


NOTHING = Inventory(0, ())


def with_room(
    rows: Iterable[Row],
    page_size: int,
    transit_pages: Mapping[Tier, int],
    gathered_bytes: int,
    least: Mapping[Tier, int],
) -> Inventory:
    """The inventory of these rows, with the room that is left beside them.

    Args:
        transit_pages: by tier, pages through which values pass while a run is set up, gathered or saved.
        gathered_bytes: of the device, for gathered and fetched units and passing gradients.
        least: by tier, bytes of the pool at least: homes were chosen by what they cost in whatever order they share pages.
    """
    taken = list(rows)
    for tier, pages in transit_pages.items():
        taken.append(_room(What.TRANSIT, tier, pages, page_size))
    taken.append(_room(What.GATHERED, Tier.DEVICE, -(-gathered_bytes // page_size), page_size))
    for tier, size in least.items():
        filled = pages_of((row for row in taken if row.tier is tier), page_size)
        taken.append(_room(What.ENDS, tier, size // page_size - filled, page_size))
    return Inventory(page_size, tuple(row for row in taken if row.count > 0))


def _room(what: What, tier: Tier, pages: int, page_size: int) -> Row:
    return Row(what, tier, page_size, "uint8", 1, pages, Lifetime.PASSING, name=what.value)


def pages_of(rows: Iterable[Row], page_size: int) -> int:
    """Pages of one tier that these rows fill if they are taken in this order, and nothing is given back meanwhile."""
    pages = left = 0
    at_the_end = False
    """Whether the page in which a shared tensor ended is the last that was taken."""
    for row in rows:
        size = row.bytes_each
        for _ in range(row.count if size else 0):
            if not row.shares_pages:
                pages += -(-size // page_size)
                at_the_end = False
                continue
            rest = size - left
            if left and rest <= 0:  # a page has two tensors at most
                left = 0
                continue
            if not left or not at_the_end:
                rest = size
            pages += -(-rest // page_size)
            left = -rest % page_size
            at_the_end = True
    return pages


__all__ = ["NOTHING", "Inventory", "Lifetime", "Row", "What", "pages_of", "with_room"]
