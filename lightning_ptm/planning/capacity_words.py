"""Texts of the planner's capacity errors: where in the iteration memory runs out, what uses it, and which setting to
raise.

Owns texts only; decides nothing. Placement, schedule and simulation use the same texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lightning_ptm.errors import CapacityError
from lightning_ptm.errors import format_bytes as format_bytes
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.trace import Trace
from lightning_ptm.terms import Tier

_NOTHING_KNOWN: Mapping[str, int] = MappingProxyType({})
_NAMED_USES = 3
"""Number of a tier's uses that a message names; the rest is summed up."""


def tier_in_words(tier: Tier, unified: bool) -> str:
    """Returns the tier's name for messages: 'the host tier', or 'RAM' for a device tier that is RAM.

    A user without a GPU does not know of a device tier.

    Args:
        unified: the device tier is RAM.
    """
    return "RAM" if unified and tier.computes else f"the {tier.name.lower()} tier"


def place_in_words(tier: Tier, unified: bool) -> str:
    """Returns where the tier's contents are, for messages: 'in RAM', 'on disk'. Args as `tier_in_words`."""
    return (Tier.HOST if unified and tier.computes else tier).place


def setting_for(tier: Tier, unified: bool) -> str:
    """Returns the setting that a user raises for a larger tier. Args as `tier_in_words`."""
    return (Tier.HOST if unified and tier.computes else tier).setting


def uses_in_words(tier: Tier, uses: Mapping[str, int], unified: bool = False) -> str:
    """Returns what a tier's bytes are used for, the largest use first; empty when there are none.

    For example 'the host tier is for optimizer states 60 MiB, master parameters 30 MiB, gradients 8 MiB, others 2 MiB'.

    Args:
        uses: bytes by use.
        unified: the device tier is RAM.
    """
    largest = sorted(((size, what) for what, size in uses.items() if size), key=lambda each: -each[0])
    named = [f"{what} {format_bytes(size)}" for size, what in largest[:_NAMED_USES]]
    others = sum(size for size, _ in largest[_NAMED_USES:])
    if others:
        named.append(f"others {format_bytes(others)}")
    return f"{tier_in_words(tier, unified)} is for {', '.join(named)}" if named else ""


def with_uses(text: str, tier: Tier, uses: Mapping[str, int], unified: bool = False) -> str:
    """Returns an error text, with what takes the tier's bytes appended in parentheses."""
    words = uses_in_words(tier, uses, unified)
    return f"{text} ({words})" if words else text


def tick_label(layout: ModelLayout, trace: Trace, tick: int) -> str:
    """Returns the label of a tick for messages: 'tick 7 (layers.3 backward)'.

    The trigger after the last tick is 'after the last tick'.
    """
    if tick >= len(trace.ticks):
        return "after the last tick"
    at = trace.ticks[tick]
    return f"tick {tick} ({layout.units[at.unit].name or 'the root'} {at.phase.value})"


def device_capacity_error(
    layout: ModelLayout,
    trace: Trace,
    tick: int,
    *,
    need_pages: int,
    have_pages: int,
    reserved_bytes: int,
    unified: bool,
    limit_bytes: int | None = None,
    further: str = "",
    uses: Mapping[str, int] = _NOTHING_KNOWN,
    any_order: bool = False,
) -> CapacityError:
    """Returns the error for a tick whose gathered units and gradients do not fit on the device.

    Args:
        layout: names the unit.
        trace: names the phase.
        tick: the tick with the highest need.
        need_pages: pages that it needs at once.
        have_pages: pages of the tier that are available for it; negative when the reserved bytes alone exceed the tier.
        reserved_bytes: device bytes that are taken already: model states and staging buffers.
        unified: the device tier is RAM.
        limit_bytes: bytes of the tier that pages may take; by default, the reserved ones and what is available.
        further: a remedy in addition to raising the tier's setting.
        uses: of `reserved_bytes`, bytes by use.
        any_order: no tick needs so many pages, but a step that calls the units in another order does.
    """
    label = "a step that calls units in another order" if any_order else tick_label(layout, trace, tick)
    where, setting = tier_in_words(Tier.DEVICE, unified), f"{setting_for(Tier.DEVICE, unified)}{further}"
    page = layout.page_size
    taken = f"{format_bytes(reserved_bytes)} of model states and staging buffers"
    limit = max(0, reserved_bytes + have_pages * page) if limit_bytes is None else limit_bytes
    if need_pages == 0:
        text = (
            f"{taken} are needed at {label}, before any unit computes, and pages may take {format_bytes(limit)} of {where}; "
            f"raise {setting}"
        )
        return CapacityError(with_uses(text, Tier.DEVICE, uses, unified))
    verb = "needs" if any_order or label.startswith("tick") else "the plan needs"
    # Smaller units help only if states and staging leave room for some.
    units = " or use smaller units" if have_pages > 0 else ""
    text = (
        f"{label} {verb} {need_pages} page{'' if need_pages == 1 else 's'} at once "
        f"({format_bytes(need_pages * page)}) in addition to {taken}, together "
        f"{format_bytes(need_pages * page + reserved_bytes)} in the plan that was tried last, and pages may take "
        f"{format_bytes(limit)} of {where}; "
        f"raise {setting}{units}"
    )
    return CapacityError(with_uses(text, Tier.DEVICE, uses, unified))
