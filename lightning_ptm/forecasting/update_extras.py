"""Work of updates in addition to one pass over bytes: coding of optimizer states, and matrix products (Muon).

Encoded optimizer states (`optimizer_state_dtype`) are decoded and encoded, and the arithmetic reads and writes more bytes
than are transferred. Optimizers of whole parameters multiply matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_ptm.forecasting.queues import Load
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.terms import Link
from lightning_ptm.update.state_encoding import ENCODINGS, VALUES_DTYPE
from lightning_ptm.update.trial.traits import SlotTraits

_WORDS = {encoding: word for word, encoding in ENCODINGS.items()}


@dataclass(frozen=True, slots=True)
class UpdateExtra:
    """Additional work of one update of a rank's shard of a flat, by all its optimizers.

    Attributes:
        more_bytes: bytes by which decoded states are larger than encoded ones.
        cpu_s: seconds of decoding, encoding and matrix products on a CPU.
        device_s: seconds of matrix products on a device, where coding counts as free.
    """

    more_bytes: int = 0
    cpu_s: float = 0.0
    device_s: float = 0.0


NO_EXTRAS: Mapping[int, UpdateExtra] = MappingProxyType({})
"""The extras of element-wise optimizers without encoded states: none."""


def update_extras(blueprint: Blueprint, hardware: Hardware) -> Mapping[int, UpdateExtra]:
    """Returns the additional work by flat, of flats that have any.

    Where ranks own whole parameters, the seconds are those of the slowest rank, for which the others wait.
    """
    found = {}
    for flat in blueprint.layout.flats:
        slots = [slot for traits in blueprint.traits[flat.index] for slot in traits.slots if slot.encoding is not None]
        more_bytes = 0
        if slots:
            more_bytes = len(slots) * flat.shard_numel * VALUES_DTYPE.itemsize - blueprint.placement.own_bytes(flat)
        products = products_of(blueprint, flat)
        extra = UpdateExtra(
            more_bytes,
            _coding_s(flat, slots, hardware.states_numel_per_s)
            + max((_seconds(each, hardware.update_flops_per_s) for each in products), default=0.0),
            max((_seconds(each, hardware.device_flops_per_s) for each in products), default=0.0),
        )
        if extra != UpdateExtra():
            found[flat.index] = extra
    return found


def products_of(blueprint: Blueprint, flat: FlatLayout) -> list[Counter[str]]:
    """Returns, for each rank that shares the flat, the operations of its updates' matrix products, by name of the dtype."""
    found = [Counter[str]() for _ in range(max(1, len(flat.shares) - 1))]
    for number, traits in zip(flat.optimizers, blueprint.traits[flat.index], strict=True):
        for slot in flat.slots if traits.whole else ():
            products = traits.groups[slot.spec.group_in(number)].matmul_flops.get(slot.spec.shape, {})
            counted = found[flat.owner(slot.start) if flat.shares else 0]
            for dtype, flops in products.items():
                counted[str(dtype).removeprefix("torch.")] += flops
    return found


def with_extra(arithmetic: Load, extra: UpdateExtra | None, hardware: Hardware, share: float = 1.0) -> Load:
    """Returns the load of an update's arithmetic on a share of a flat, with the additional work."""
    if extra is None:
        return arithmetic
    on_cpu = hardware.shared_cores or arithmetic.link is Link.UPDATE_HOST
    return replace(
        arithmetic,
        bytes=arithmetic.bytes + int(2 * extra.more_bytes * share),
        more_s=arithmetic.more_s + (extra.cpu_s if on_cpu else extra.device_s) * share,
    )


def _coding_s(flat: FlatLayout, slots: list[SlotTraits], numel_per_s: Mapping[str, float] | None) -> float:
    if numel_per_s is None:
        return 0.0
    words = Counter(map(_word, slots))
    return sum(count * flat.shard_numel / numel_per_s.get(word, math.inf) for word, count in words.items())


def _seconds(products: Mapping[str, int], flops_per_s: Mapping[str, float] | None) -> float:
    """Seconds of matrix products; a dtype without a rate counts as slow as the slowest."""
    if not flops_per_s:
        return 0.0
    slowest = min(flops_per_s.values())
    return sum(flops / flops_per_s.get(dtype, slowest) for dtype, flops in products.items())


def _word(slot: SlotTraits) -> str:
    assert slot.encoding is not None
    return _WORDS[slot.encoding]
