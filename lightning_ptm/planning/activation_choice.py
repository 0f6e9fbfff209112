"""What becomes of each unit's activations between forward and backward, and the choice where memory is short.

Knows bytes and seconds, no tensors. The choice of `choose` is a search over the replay of a step (`replay`): compute in the
order of units, copies on one link in each direction, and the bytes on the device after each call.

I1: whatever is chosen, numbers are the same; only memory and time differ.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ptm.terms import Tier


class Fate(enum.Enum):
    """Fates of a unit's activations between forward and backward. The value is printed for users."""

    KEEP = "kept"
    RECOMPUTE = "recomputed"
    HOST = "in RAM"
    DISK = "on disk"
    RECOMPUTE_FROM_HOST = "recomputed from inputs in RAM"
    RECOMPUTE_FROM_DISK = "recomputed from inputs on disk"

    __hash__ = object.__hash__  # faster: Enum's own is a Python function

    @property
    def recomputes(self) -> bool:
        """Whether the unit's forward is computed again in the backward."""
        return self in (Fate.RECOMPUTE, Fate.RECOMPUTE_FROM_HOST, Fate.RECOMPUTE_FROM_DISK)

    @property
    def tier(self) -> Tier | None:
        """The tier that what is saved is offloaded to; None: it stays on the device."""
        return _TIERS.get(self)


_TIERS = {
    Fate.HOST: Tier.HOST,
    Fate.RECOMPUTE_FROM_HOST: Tier.HOST,
    Fate.DISK: Tier.DISK,
    Fate.RECOMPUTE_FROM_DISK: Tier.DISK,
}


def fate_of(recomputes: bool, tier: Tier | None) -> Fate:
    """Returns the fate with these properties."""
    return next(fate for fate in Fate if (fate.recomputes, fate.tier) == (recomputes, tier))


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Costs of one unit, in the order of the forward.

    Attributes:
        forward_s, backward_s: seconds of compute; recomputing adds another forward to the backward.
        saved_bytes: what autograd saves for the backward.
        input_bytes: what is saved instead if the unit is recomputed.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int


@dataclass(frozen=True, slots=True)
class Way:
    """A place that activations can be offloaded to.

    Attributes:
        away_bytes_per_s, back_bytes_per_s: what is left of the rates of its slowest links.
        room_bytes: bytes that it has for activations.
        core_s_per_byte: seconds of compute's own cores for each byte and direction.
    """

    away_bytes_per_s: float
    back_bytes_per_s: float
    room_bytes: float = math.inf
    core_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class ActivationCosts:
    """What a choice depends on.

    Attributes:
        units: the units without the root.
        room_bytes: bytes of the device for activations.
        root_bytes: activations of the root, on the device from its forward to its backward.
        ways: places to offload to.
        recomputes: whether units may be recomputed.
    """

    units: tuple[UnitCost, ...]
    room_bytes: float
    root_bytes: int = 0
    ways: Mapping[Tier, Way] = field(default_factory=dict)
    recomputes: bool = True

    @property
    def options(self) -> tuple[Fate, ...]:
        """The fates that can be chosen besides KEEP."""
        return tuple(
            fate
            for fate in Fate
            if fate is not Fate.KEEP
            and (self.recomputes or not fate.recomputes)
            and (fate.tier is None or fate.tier in self.ways)
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """A replayed step: its seconds, the peak of activations on the device, and the bytes offloaded to each tier."""

    seconds: float
    peak_bytes: int
    away_bytes: Mapping[Tier, int]

    def fits(self, costs: ActivationCosts) -> bool:
        """Whether all bytes have room."""
        away = all(size <= costs.ways[tier].room_bytes for tier, size in self.away_bytes.items())
        return away and self.peak_bytes <= costs.room_bytes


def replay(costs: ActivationCosts, fates: Sequence[Fate]) -> Replay:
    """Returns the time and the memory of a step in which each unit has its fate.

    As in a run, what a call saves is gone from the device when the next call has ended, and is read back when the backward of
    the unit after it begins. The last call is still on the device then.
    """
    units, count = costs.units, len(costs.units)
    ways = [costs.ways[fate.tier] if fate.tier is not None else None for fate in fates]
    again = [fate.recomputes for fate in fates]
    stays = [unit.input_bytes if repeats else unit.saved_bytes for unit, repeats in zip(units, again, strict=True)]
    now = 0.0
    free_s = dict.fromkeys(costs.ways.values(), 0.0)
    written_s, back_s = [0.0] * count, [0.0] * count
    on_device = peak = costs.root_bytes
    for at, (unit, way) in enumerate(zip(units, ways, strict=True)):
        now += unit.forward_s
        peak = max(peak, on_device + max(unit.saved_bytes, stays[at]))
        on_device += stays[at]
        if at and ways[at - 1] is not None:
            now = max(now, written_s[at - 1])
            on_device -= stays[at - 1]
        if way is not None:
            free_s[way] = written_s[at] = max(now, free_s[way]) + stays[at] / way.away_bytes_per_s
            now += stays[at] * way.core_s_per_byte
    asked = [False] * (count - 1) + [True]
    for at in range(count - 1, -1, -1):
        unit = units[at]
        for each in (at, at - 1) if at else (at,):
            way = ways[each]
            if way is not None and not asked[each]:
                asked[each] = True
                free_s[way] = back_s[each] = max(now, free_s[way]) + stays[each] / way.back_bytes_per_s
                on_device += stays[each]
                now += stays[each] * way.core_s_per_byte
        now = max(now, back_s[at]) + unit.backward_s + (unit.forward_s if again[at] else 0.0)
        peak = max(peak, on_device + (unit.saved_bytes if again[at] else 0) + 2 * unit.input_bytes)
        on_device -= stays[at]
    away = dict.fromkeys(costs.ways, 0)
    for fate, size in zip(fates, stays, strict=True):
        if fate.tier is not None:
            away[fate.tier] += size
    return Replay(now, peak, {tier: size for tier, size in away.items() if size})


_LEVELS = 8
"""Numbers of units of one fate that the search begins with."""
_ROUNDS = 4
"""Most times that every unit is tried with every other fate."""


def choose(costs: ActivationCosts) -> tuple[Fate, ...]:
    """Returns the fates with which a step is fastest among those that fit; if none fit, those with the least memory.

    KEEP for all if that fits. Else the search begins with runs of units: the first `a` have one fate, the next `b` another,
    the rest are kept (the first units have the most time for their way back); or every k-th is kept. The best of these is
    improved unit by unit.
    """
    count = len(costs.units)
    kept = (Fate.KEEP,) * count
    if not costs.options or replay(costs, kept).fits(costs):
        return kept
    best, found = kept, replay(costs, kept)
    for fates in _starts(count, costs.options):
        tried = replay(costs, fates)
        if _better(costs, tried, found):
            best, found = fates, tried
    for _ in range(_ROUNDS):
        before = best
        for at, fate in itertools.product(range(count), (Fate.KEEP, *costs.options)):
            if fate is not best[at]:
                fates = (*best[:at], fate, *best[at + 1 :])
                tried = replay(costs, fates)
                if _better(costs, tried, found):
                    best, found = fates, tried
        if best == before:
            break
    return best


def _starts(count: int, options: Sequence[Fate]) -> list[tuple[Fate, ...]]:
    levels = sorted({round(count * level / _LEVELS) for level in range(_LEVELS + 1)})
    found: dict[tuple[Fate, ...], None] = {}
    for first, second in itertools.product(options, options):
        for a, b in itertools.product(levels, levels):
            if a + b <= count:
                rest = count - a - b
                found[(first,) * a + (second,) * b + (Fate.KEEP,) * rest] = None
                found[(Fate.KEEP,) * rest + (first,) * a + (second,) * b] = None
        for every in (2, 3, 4):
            found[tuple(first if at % every == 0 else second for at in range(count))] = None
            found[tuple(first if at % every == 0 else Fate.KEEP for at in range(count))] = None
    return list(found)


_ALIKE = 1e-9


def _better(costs: ActivationCosts, one: Replay, other: Replay) -> bool:
    """Whether a step is better than another: it fits, then it takes less time, then less traffic; if neither fits, it takes
    less memory."""
    if one.fits(costs) != other.fits(costs):
        return one.fits(costs)
    if not one.fits(costs):
        return one.peak_bytes < other.peak_bytes
    if abs(one.seconds - other.seconds) > _ALIKE * other.seconds:
        return one.seconds < other.seconds
    return sum(one.away_bytes.values()) < sum(other.away_bytes.values())
