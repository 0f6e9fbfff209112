"""What updates of encoded optimizer states (`state_dtype`) take beside those of fp32: elements that are decoded and encoded,
and arithmetic on more bytes than travel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_ptm.forecasting.queues import Load
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.runtime.blueprint import Blueprint
from lightning_ptm.terms import Link
from lightning_ptm.update.encoding import ENCODINGS, VALUES_DTYPE
from lightning_ptm.update.traits import SlotTraits

_WORDS = {encoding: word for word, encoding in ENCODINGS.items()}


@dataclass(frozen=True, slots=True)
class Coding:
    """Of one pass over a rank's shard of a flat, all its encoded states together.

    Attributes:
        more_bytes: by which these states are larger where they are computed than in pages.
        seconds: of decoding and encoding, on a CPU.
    """

    more_bytes: int
    seconds: float


UNCODED: Mapping[int, Coding] = MappingProxyType({})
"""Where nothing is encoded."""


def coding_of(blueprint: Blueprint, numel_per_s: Mapping[str, float] | None) -> Mapping[int, Coding]:
    """By flat, of those with encoded states.

    Args:
        numel_per_s: by word of `state_dtype`, elements of states that are decoded and encoded a second; None, or no such
            word: that takes no time.
    """
    found = {}
    for flat in blueprint.layout.flats:
        slots = [slot for traits in blueprint.traits[flat.index] for slot in traits.slots if slot.encoding is not None]
        if not slots:
            continue
        words = Counter(_word(slot) for slot in slots)
        in_pages = blueprint.placement.own_bytes(flat)
        seconds = 0.0
        if numel_per_s is not None:
            seconds = sum(count * flat.shard_numel / numel_per_s.get(word, math.inf) for word, count in words.items())
        found[flat.index] = Coding(len(slots) * flat.shard_numel * VALUES_DTYPE.itemsize - in_pages, seconds)
    return found


def coded(arithmetic: Load, coding: Coding | None, hardware: Hardware, share: float = 1.0) -> Load:
    """The arithmetic of an update on a share of a flat, with what its encoded states take beside it. The seconds are those of
    a CPU: on a device with arithmetic of its own they count for nothing."""
    if coding is None:
        return arithmetic
    on_cpu = hardware.shared_cores or arithmetic.link is Link.UPDATE_HOST
    return replace(
        arithmetic,
        bytes=arithmetic.bytes + int(2 * coding.more_bytes * share),
        more_s=arithmetic.more_s + (coding.seconds * share if on_cpu else 0.0),
    )


def _word(slot: SlotTraits) -> str:
    assert slot.encoding is not None
    return _WORDS[slot.encoding]
