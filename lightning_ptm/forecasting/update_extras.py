"""What updates take beside one pass over bytes: encoded optimizer states (`optimizer_state_dtype`) are decoded and
encoded, and the
arithmetic is on more bytes than travel; optimizers of whole parameters (Muon) multiply matrices."""

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
    """Of one update of a rank's shard of a flat, by all its optimizers.

    Attributes:
        more_bytes: by which encoded states are larger where they are computed than in pages.
        cpu_s: of decoding, encoding and matrix products on a CPU; device_s: of products on a device with arithmetic of
            its own, where coding counts for nothing.
    """

    more_bytes: int = 0
    cpu_s: float = 0.0
    device_s: float = 0.0


NO_EXTRAS: Mapping[int, UpdateExtra] = MappingProxyType({})
"""Of element-wise optimizers with states as they are."""


def update_extras(blueprint: Blueprint, hardware: Hardware) -> Mapping[int, UpdateExtra]:
    """By flat, of those that have any. Where ranks own whole parameters, the seconds are those of the rank that takes
    longest, for which the others wait."""
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
    """By rank of those that share the flat, operations of its updates' matrix products by name of their dtype."""
    found = [Counter[str]() for _ in range(max(1, len(flat.shares) - 1))]
    for number, traits in zip(flat.optimizers, blueprint.traits[flat.index], strict=True):
        for slot in flat.slots if traits.whole else ():
            products = traits.groups[slot.spec.group_in(number)].matmul_flops.get(slot.spec.shape, {})
            counted = found[flat.owner(slot.start) if flat.shares else 0]
            for dtype, flops in products.items():
                counted[str(dtype).removeprefix("torch.")] += flops
    return found


def with_extra(arithmetic: Load, extra: UpdateExtra | None, hardware: Hardware, share: float = 1.0) -> Load:
    """The arithmetic of an update on a share of a flat, with what it takes beside a pass over bytes."""
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
    """A dtype of which nothing is known is as slow as the slowest."""
    if not flops_per_s:
        return 0.0
    slowest = min(flops_per_s.values())
    return sum(flops / flops_per_s.get(dtype, slowest) for dtype, flops in products.items())


def _word(slot: SlotTraits) -> str:
    assert slot.encoding is not None
    return _WORDS[slot.encoding]
