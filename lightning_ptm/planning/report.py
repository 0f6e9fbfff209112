"""How the planner words its refusals: ticks by name, bytes by size, and the setting that would help.

Owns sentences only; decides nothing. Placement, schedule and simulation refuse in the same words.
"""

from __future__ import annotations

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.trace import Trace


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit that keeps at least one: '4 MiB', '1.5 GiB', '512 B'."""
    size = float(count)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {suffix}"
        size /= 1024
    return f"{size:.4g} TiB"


def tick_label(layout: ModelLayout, trace: Trace, tick: int) -> str:
    """'tick 7 (layers.3 backward)'; the trigger after the last tick is 'after the last tick'."""
    if tick >= len(trace.ticks):
        return "after the last tick"
    at = trace.ticks[tick]
    return f"tick {tick} ({layout.units[at.unit].name or 'the root'} {at.phase.value})"


def device_refusal(
    layout: ModelLayout,
    trace: Trace,
    tick: int,
    *,
    need_pages: int,
    have_pages: int,
    reserved_bytes: int,
    setting: str = "device_memory",
) -> CapacityError:
    """The error for a tick whose gathered units and gradients do not fit on the device.

    Args:
        layout: names the unit.
        trace: names the phase.
        tick: the tick with the highest need.
        need_pages: pages that it needs at once.
        have_pages: pages of the tier that are there for it; negative when what is reserved alone is too much.
        reserved_bytes: device bytes that are taken already: homes, staging, non-model data.
        setting: what to raise; where the device tier is RAM, that is another one.
    """
    label = tick_label(layout, trace, tick)
    if need_pages == 0:
        return CapacityError(
            f"homes, staging and non-model data take {format_bytes(reserved_bytes)} at {label}, which is "
            f"{format_bytes(-have_pages * layout.page_size)} more than the device tier has, before any unit computes; raise "
            f"{setting} or use smaller units"
        )
    have_pages = max(have_pages, 0)
    verb = "needs" if label.startswith("tick") else "the plan needs"
    return CapacityError(
        f"{label} {verb} {need_pages} pages at once ({format_bytes(need_pages * layout.page_size)}), the device tier "
        f"has {have_pages} of {format_bytes(layout.page_size)} beside {format_bytes(reserved_bytes)} of homes, staging "
        f"and non-model data; raise {setting} or use smaller units"
    )
