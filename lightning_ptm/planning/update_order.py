"""In which order updates come, what is read ahead of them, and which of them compute waits for."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ptm.planning.layout import FlatLayout, ModelLayout
from lightning_ptm.planning.placement_data import Placement


def update_order(layout: ModelLayout, placement: Placement) -> list[int]:
    """Units in the order in which their updates come: as they end in a backward, whose last is the root; at the optimizer's
    step from the first on, which the next forward wants first."""
    units = range(len(layout.units))
    return list(units) if placement.keeps_gradients else [*reversed(units[1:]), 0]


def read_ahead(layout: ModelLayout, placement: Placement) -> list[FlatLayout]:
    """Flats whose master states are read behind a forward, in the order in which updates of the backward will need them."""
    if placement.keeps_gradients:
        return []
    of_disk = (unit for unit in update_order(layout, placement) if not placement.homes[unit].master.updates)
    return [flat for unit in of_disk for flat in layout.flats_of(unit) if flat.trainable]


def first_to_wait_for(gradient_bytes: Mapping[int, int], room_bytes: float) -> int | None:
    """The unit whose update compute waits for behind the backward of another, because gradients that wait take too much.

    Args:
        gradient_bytes: of units whose updates are not done, in the order of submission.
        room_bytes: for all of them; those of one unit may take more.
    """
    if len(gradient_bytes) < 2 or sum(gradient_bytes.values()) <= room_bytes:
        return None
    return next(iter(gradient_bytes))
