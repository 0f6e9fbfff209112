"""Inputs and results of placement: budgets, wishes, homes. Data only.

Owns no choice: placement.py makes it, the simulator checks it, the runtime allocates by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.terms import Tier


@dataclass(frozen=True, slots=True)
class Budget(Mapping[Tier, int]):
    """Bytes that this rank may use in each tier, nearest tier first; 0 means that the run has no such tier."""

    bytes_of: Mapping[Tier, int]

    def __post_init__(self) -> None:
        ordered = dict(sorted(self.bytes_of.items(), key=lambda item: item[0].distance))
        object.__setattr__(self, "bytes_of", ordered)

    def __getitem__(self, tier: Tier) -> int:
        return self.bytes_of.get(tier, 0)

    def __contains__(self, tier: object) -> bool:
        return tier in self.bytes_of

    def __iter__(self) -> Iterator[Tier]:
        return iter(self.bytes_of)

    def __len__(self) -> int:
        return len(self.bytes_of)

    def without(self, tier: Tier, size: int) -> Budget:
        """Returns the budget with `size` bytes fewer in `tier`."""
        return Budget({**self.bytes_of, tier: self[tier] - size})


@dataclass(frozen=True, slots=True)
class Homes:
    """The tiers that store one unit's states between steps; other copies are caches.

    Without kept gradients, a gradient home on the device has no bytes of its own: gradients pass through pages that
    they hold until the update has used them.
    """

    parameter: Tier
    gradient: Tier
    master: Tier


@dataclass(frozen=True, slots=True)
class GradientRow:
    """Device pages of one flat's gradient in a backward pass, until it is at home or used.

    Args:
        flat: index of the flat.
        reduces: whether other ranks have a part in the gradient, so that ranks reduce it.
        full: pages of the whole gradient, in `.grad` or in pages; 0 if it is added straight to its home.
        shard: pages of this rank's shard, which a reduction writes while it reads the whole gradient.
        sum: pages through which the gradient is added to a sum at a home that no tensor can view.
    """

    flat: int
    reduces: bool
    full: int
    shard: int
    sum: int


@dataclass(frozen=True, slots=True)
class PassingPages:
    """Device pages of the gradients of several flats in a backward pass.

    Args:
        full: pages of the whole gradients.
        beside: pages in addition while they leave the device. For a reduced gradient, the buffer of a sum is not
            counted: it takes no more pages than the whole gradient, which is released before.
    """

    full: int
    beside: int


@dataclass(frozen=True, slots=True)
class Gradients:
    """One unit's gradients between its backward and its update.

    Args:
        pass_through: they have no home: they hold device pages until the update has used them.
        rows: one per trainable flat.
    """

    pass_through: bool
    rows: tuple[GradientRow, ...]
    # Derived, once: placement and the scheduler ask for them at each choice.
    reduced: PassingPages = field(init=False, repr=False, compare=False)
    """Pages of gradients that ranks reduce."""
    unreduced: PassingPages = field(init=False, repr=False, compare=False)
    """Pages of gradients that only this rank has."""

    def __post_init__(self) -> None:
        full, beside = {True: 0, False: 0}, {True: 0, False: 0}
        for row in self.rows:
            full[row.reduces] += row.full
            beside[row.reduces] += max(row.shard if row.reduces else 0, row.sum)
        object.__setattr__(self, "reduced", PassingPages(full[True], beside[True]))
        object.__setattr__(self, "unreduced", PassingPages(full[False], beside[False]))

    @property
    def all(self) -> PassingPages:
        """The rows of all flats."""
        one, other = self.reduced, self.unreduced
        return PassingPages(one.full + other.full, one.beside + other.beside)


@dataclass(frozen=True, slots=True)
class PassingPool:
    """The device pages for gathered flats, fetched shards and passing gradients: frames 0 to `frames - 1` of a plan.

    Args:
        in_grad: flats whose gradients take no pages in a backward pass, since they stay in `.grad`.
        around: units in whose ticks other units compute that no plan contains.
        by_need: number of frames, the last ones, that are for those units in these ticks.
    """

    frames: int
    in_grad: frozenset[int] = frozenset()
    around: frozenset[int] = frozenset()
    by_need: int = 0


@dataclass(frozen=True, slots=True)
class PlacementWishes:
    """Homes that the user asked for, for all units; None leaves the choice to placement."""

    parameter: Tier | None = None
    master: Tier | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The homes of all units, and the division of each tier.

    Args:
        homes: one per unit.
        gradients: one per unit.
        master_bytes_per_element: one per flat of the layout; 0 for frozen flats.
        own_state_bytes: by flat, bytes per rank of the optimizer states whose shapes are not the parameter's; a single
            entry represents all ranks where ranks do not own whole parameters.
        keeps_gradients: whether gradients outlive the backward pass (accumulation, clipping by norm).
        sums_gradients: whether gradients of several backward passes may be summed (accumulation).
        at_home_bytes: bytes of homes by tier, on the rank that has most.
        gather_bytes: device bytes for gathered flats, fetched pages and passing gradients: whole pages; never more than
            these could all use at once.
        staging_bytes: bytes through which updates stream between the disk and the CPU.
        staging_tier: the tier of the staging buffers: RAM, which is the device tier where there is no host tier.
        passing_bytes: bytes of RAM through which gradients pass to updates during the backward pass; 0: each gradient that
            leaves the device has a home.
    """

    homes: tuple[Homes, ...]
    gradients: tuple[Gradients, ...]
    master_bytes_per_element: tuple[int, ...]
    keeps_gradients: bool
    sums_gradients: bool
    at_home_bytes: Mapping[Tier, int]
    gather_bytes: int
    staging_bytes: int
    staging_tier: Tier
    own_state_bytes: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    passing_bytes: int = 0

    def master_bytes(self, flat: FlatLayout) -> int:
        """Bytes of a trained flat's master states."""
        return flat.shard_numel * self.master_bytes_per_element[flat.index] + self.own_bytes(flat)

    def own_bytes(self, flat: FlatLayout) -> int:
        """Returns the part of `master_bytes` that is not counted per element."""
        own = self.own_state_bytes.get(flat.index)
        return sum(own[flat.rank]) if own else 0

    def staged_bytes(self, tier: Tier) -> int:
        """Returns the bytes of staging in one tier."""
        return self.staging_bytes if tier is self.staging_tier else 0

    @property
    def streams(self) -> bool:
        """Whether any home is in a tier that cannot update in place, so that its states stream through staging."""
        return any(size for tier, size in self.at_home_bytes.items() if not tier.updates)
