"""Order of updates, of reads ahead of them, and the updates that compute waits for."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ptm.planning.layout import FlatLayout, ModelLayout
from lightning_ptm.planning.placement_data import Placement


def update_order(layout: ModelLayout, placement: Placement) -> list[int]:
    """Returns the units in the order in which their updates are submitted.

    During a backward, that is the order in which units end, the root last. At the optimizer's step, it is the order of
    the next forward.
    """
    units = range(len(layout.units))
    return list(units) if placement.keeps_gradients else [*reversed(units[1:]), 0]


def read_ahead(layout: ModelLayout, placement: Placement) -> list[FlatLayout]:
    """Returns the flats whose master states are read after a forward, in the order of the backward's updates."""
    if placement.keeps_gradients:
        return []
    of_disk = (unit for unit in update_order(layout, placement) if not placement.homes[unit].master.updates)
    return [flat for unit in of_disk for flat in layout.flats_of(unit) if flat.trainable]


def first_to_wait_for(gradient_bytes: Mapping[int, int], room_bytes: float) -> int | None:
    """Returns the unit whose update compute waits for after the backward of another unit; None: no wait.

    Compute waits when pending gradients take more than `room_bytes`.

    Args:
        gradient_bytes: bytes of pending gradients, by unit, in the order of submission.
        room_bytes: limit for all of them; a single unit may exceed it.
    """
    if len(gradient_bytes) < 2 or sum(gradient_bytes.values()) <= room_bytes:
        return None
    return next(iter(gradient_bytes))
