"""The words that every layer shares: tiers, page states, operations, phases.

Knows the standard library only. A term that two layers need is defined here once (ARCHITECTURE.md, "Words").
"""

from __future__ import annotations

import enum

BLOCK_BYTES = 4096
"""Alignment of every page, every disk transfer and every buffer that a disk transfer touches (O_DIRECT)."""

MIN_PAGE_BYTES = 64 * 1024
"""A page is a multiple of `BLOCK_BYTES`; below this it costs more in bookkeeping than in bytes."""

ALIGN_NUMEL = 64
"""Each parameter starts at a multiple of this many elements inside its flat.

64 elements of 16 bit are two cache lines. Element-wise kernels treat the last, partial vector of a tensor differently
from the rest, so an update that is cut at page borders gives the bits of an uncut one only when cuts and parameter
starts fall on multiples of the vector width (invariant I2 of planning/layout.py).
"""


class Tier(enum.IntEnum):
    """Where bytes live, fastest first (the paper's GPU, CPU, SSD)."""

    DEVICE = 0
    HOST = 1
    DISK = 2


def is_page_size(size: int) -> bool:
    """Whether pages may be of so many bytes."""
    return size >= MIN_PAGE_BYTES and size % BLOCK_BYTES == 0


def chunk_numel(page_size: int) -> int:
    """Elements of a flat that an update, or a save, moves together: a page of float32, in whole blocks of any dtype."""
    return max(BLOCK_BYTES, page_size // 4)


class PageState(enum.Enum):
    """State of one copy of a page in one tier."""

    ABSENT = "absent"
    ARRIVING = "arriving"
    RESIDENT = "resident"
    LEAVING = "leaving"


class Phase(enum.Enum):
    """What a tick computes."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(enum.Enum):
    """Kinds of model states that a unit has pages of."""

    PARAMETER = "parameter"
    """The compute parameters (p16)."""
    GRADIENT = "gradient"
    """The reduced gradients (g16)."""
    MASTER = "master"
    """The master states: fp32 parameters (when the compute dtype is not the master dtype) and optimizer moments."""
    FULL = "full"
    """A unit's gathered flat: all ranks' pieces, end to end."""


class Operation(enum.Enum):
    """What a task of a plan does (Algorithm 1's move_to_gpu, all_gather, compute, and their counterparts)."""

    FETCH = "fetch"
    EVICT = "evict"
    GATHER = "gather"
    RELEASE = "release"
    COMPUTE = "compute"
    REDUCE = "reduce"
    OFFLOAD = "offload"
    UPDATE = "update"
    EXCHANGE = "exchange"
    """Tokens to experts of other ranks, or back; in no plan, for it follows the batch."""
