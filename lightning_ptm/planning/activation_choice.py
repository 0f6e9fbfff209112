"""Choice of how each unit's activations are kept between forward and backward: on the device, offloaded or recomputed.

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


class Handling(enum.Enum):
    """Handlings of a unit's activations between forward and backward. The value is printed for users."""

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
        return self in (Handling.RECOMPUTE, Handling.RECOMPUTE_FROM_HOST, Handling.RECOMPUTE_FROM_DISK)

    @property
    def tier(self) -> Tier | None:
        """The tier that what is saved is offloaded to; None: it stays on the device."""
        return _TIERS.get(self)


_TIERS = {
    Handling.HOST: Tier.HOST,
    Handling.RECOMPUTE_FROM_HOST: Tier.HOST,
    Handling.DISK: Tier.DISK,
    Handling.RECOMPUTE_FROM_DISK: Tier.DISK,
}


def handling_of(recomputes: bool, tier: Tier | None) -> Handling:
    """Returns the handling with these properties."""
    return next(handling for handling in Handling if (handling.recomputes, handling.tier) == (recomputes, tier))


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Costs of one unit, in the order of the forward.

    Attributes:
        forward_s, backward_s: seconds of compute; recomputing adds another forward to the backward.
        saved_bytes: what autograd saves for the backward.
        input_bytes: what is saved instead if the unit is recomputed.
        beside_bytes: temporaries of its backward, twice those of its forward; None: none in its forward, and gradients of its
            inputs and outputs in its backward.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int
    beside_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OffloadTarget:
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
    """Inputs of the choice: costs of all units, sizes and rates.

    Attributes:
        units: the units without the root.
        room_bytes: bytes of the device for activations.
        root_bytes: activations of the root, on the device from its forward to its backward.
        targets: places to offload to.
        recomputes: whether units may be recomputed.
        loss_bytes: what is allocated between the last forward of a unit and the first backward.
    """

    units: tuple[UnitCost, ...]
    room_bytes: float
    root_bytes: int = 0
    targets: Mapping[Tier, OffloadTarget] = field(default_factory=dict)
    recomputes: bool = True
    loss_bytes: int = 0

    @property
    def options(self) -> tuple[Handling, ...]:
        """The handlings that can be chosen besides KEEP."""
        return tuple(
            handling
            for handling in Handling
            if handling is not Handling.KEEP
            and (self.recomputes or not handling.recomputes)
            and (handling.tier is None or handling.tier in self.targets)
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """A replayed step: its seconds, the peak of activations on the device, and the bytes offloaded to each tier."""

    seconds: float
    peak_bytes: int
    away_bytes: Mapping[Tier, int]

    def fits(self, costs: ActivationCosts) -> bool:
        """Whether all bytes have room."""
        away = all(size <= costs.targets[tier].room_bytes for tier, size in self.away_bytes.items())
        return away and self.peak_bytes <= costs.room_bytes


def replay(costs: ActivationCosts, handlings: Sequence[Handling]) -> Replay:
    """Returns the time and the memory of a step in which each unit has its handling.

    As in a run, what a call saves is gone from the device when the next call has ended, and is read back when the backward of
    the unit after it begins. The last call is still on the device then.
    """
    units, count = costs.units, len(costs.units)
    targets = [costs.targets[handling.tier] if handling.tier is not None else None for handling in handlings]
    again = [handling.recomputes for handling in handlings]
    stays = [unit.input_bytes if repeats else unit.saved_bytes for unit, repeats in zip(units, again, strict=True)]
    now = 0.0
    free_s = dict.fromkeys(costs.targets.values(), 0.0)
    written_s, back_s = [0.0] * count, [0.0] * count
    on_device = peak = costs.root_bytes
    for at, (unit, target) in enumerate(zip(units, targets, strict=True)):
        now += unit.forward_s
        peak = max(peak, on_device + max(unit.saved_bytes, stays[at]) + (unit.beside_bytes or 0) // 2)
        on_device += stays[at]
        if at and targets[at - 1] is not None:
            now = max(now, written_s[at - 1])
            on_device -= stays[at - 1]
        if target is not None:
            free_s[target] = written_s[at] = max(now, free_s[target]) + stays[at] / target.away_bytes_per_s
            now += stays[at] * target.core_s_per_byte
    peak = max(peak, on_device + costs.loss_bytes)
    asked = [False] * (count - 1) + [True]
    for at in range(count - 1, -1, -1):
        unit = units[at]
        for each in (at, at - 1) if at else (at,):
            target = targets[each]
            if target is not None and not asked[each]:
                asked[each] = True
                free_s[target] = back_s[each] = max(now, free_s[target]) + stays[each] / target.back_bytes_per_s
                on_device += stays[each]
                now += stays[each] * target.core_s_per_byte
        now = max(now, back_s[at]) + unit.backward_s + (unit.forward_s if again[at] else 0.0)
        beside = 2 * unit.input_bytes if unit.beside_bytes is None else unit.beside_bytes
        peak = max(peak, on_device + (unit.saved_bytes if again[at] else 0) + beside)
        on_device -= stays[at]
    away = dict.fromkeys(costs.targets, 0)
    for handling, size in zip(handlings, stays, strict=True):
        if handling.tier is not None:
            away[handling.tier] += size
    return Replay(now, peak, {tier: size for tier, size in away.items() if size})


_LEVELS = 8
"""Numbers of units of one handling that the search begins with."""
_ROUNDS = 4
"""Most times that every unit is tried with every other handling."""
_STARTS = 3
"""Beginnings that are improved, of models that are small enough for it."""
_SMALL = 32
"""Most units of a model in which pairs of units exchange their handlings; the number of pairs is quadratic."""


def choose(costs: ActivationCosts) -> tuple[Handling, ...]:
    """Returns the handlings with which a step is fastest among those that fit; if none fit, those with the least memory.

    KEEP for all if that fits. Else the search begins with runs of units: the first `a` have one handling, the next `b`
    another, the rest are kept (the first units have the most time to be read back); or every k-th is kept. The best of
    these are improved unit by unit, and in small models pair by pair.
    """
    count = len(costs.units)
    kept = (Handling.KEEP,) * count
    if not costs.options or replay(costs, kept).fits(costs):
        return kept
    tried = [(replay(costs, handlings), handlings) for handlings in (kept, *_starts(count, costs.options))]
    tried.sort(key=lambda each: _rank(costs, each[0]))
    starts = tried[: _STARTS if count <= _SMALL else 1]
    improved = [_improved(costs, handlings, found) for found, handlings in starts]
    return min(improved, key=lambda each: _rank(costs, each[0]))[1]


def _improved(costs: ActivationCosts, best: tuple[Handling, ...], found: Replay) -> tuple[Replay, tuple[Handling, ...]]:
    units = range(len(best))
    pairs = list(itertools.combinations(units, 2)) if len(best) <= _SMALL else []

    def try_with(changes: Mapping[int, Handling]) -> None:
        nonlocal best, found
        handlings = tuple(changes.get(at, handling) for at, handling in enumerate(best))
        if handlings != best and _rank(costs, tried := replay(costs, handlings)) < _rank(costs, found):
            best, found = handlings, tried

    for _ in range(_ROUNDS):
        before = best
        for at, handling in itertools.product(units, (Handling.KEEP, *costs.options)):
            try_with({at: handling})
        for one, other in pairs:
            try_with({one: best[other], other: best[one]})
        if best == before:
            break
    return found, best


def _starts(count: int, options: Sequence[Handling]) -> list[tuple[Handling, ...]]:
    levels = sorted({round(count * level / _LEVELS) for level in range(_LEVELS + 1)})
    found: dict[tuple[Handling, ...], None] = {}
    for first, second in itertools.product(options, options):
        for a, b in itertools.product(levels, levels):
            if a + b <= count:
                rest = count - a - b
                found[(first,) * a + (second,) * b + (Handling.KEEP,) * rest] = None
                found[(Handling.KEEP,) * rest + (first,) * a + (second,) * b] = None
        for every in (2, 3, 4):
            found[tuple(first if at % every == 0 else second for at in range(count))] = None
            found[tuple(first if at % every == 0 else Handling.KEEP for at in range(count))] = None
    return list(found)


def _rank(costs: ActivationCosts, found: Replay) -> tuple[bool, float, float]:
    """A key by which better steps come first: those that fit, then the faster, then those with less traffic; of those that do
    not fit, the ones with less memory."""
    if not found.fits(costs):
        return True, found.peak_bytes, 0.0
    # Times that differ by the rounding of sums alone are equal.
    return False, float(f"{found.seconds:.9g}"), sum(found.away_bytes.values())
