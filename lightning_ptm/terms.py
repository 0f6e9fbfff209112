"""The words that every layer shares: tiers, links, page states, operations, phases.

Knows the standard library only. A term that two layers need is defined here once (ARCHITECTURE.md, "Words").
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(frozen=True, slots=True)
class Code:
    """How frozen weights are kept in fewer bits: blocks of `ALIGN_NUMEL` elements, each its largest absolute value as a
    float32 and then its codes. Parameters and pieces are whole blocks, so a block is the same on any number of ranks.

    Args:
        name: as settings have it.
        block_bytes: of a block; a multiple of 4.
    """

    name: str
    block_bytes: int

    def bytes_of(self, numel: int) -> int:
        """Of so many elements, whole blocks."""
        return numel // ALIGN_NUMEL * self.block_bytes


CODES = {code.name: code for code in (Code("int8", 4 + ALIGN_NUMEL), Code("nf4", 4 + ALIGN_NUMEL // 2))}


class Link(enum.Enum):
    """What can be busy besides compute: copies by direction, the collectives, and the update by place."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    COLLECTIVE = "collective"
    UPDATE_HOST = "update_host"
    UPDATE_DEVICE = "update_device"
    EXCHANGE = "exchange"
    """Tokens, between the ranks that divide experts."""
    TENSOR_EXCHANGE = "tensor_exchange"
    """Activations, between the ranks of a tensor group."""


@dataclass(frozen=True, slots=True, repr=False)
class Tier:
    """Where bytes live: a row of the table of tiers, with all that other layers ask of one (the paper's GPU, CPU, SSD).

    Whoever adds a row to a run's budget adds a tier to the run (`AngelPTMStrategy.further_tiers`).

    Args:
        name: in capitals; in words it is small.
        place: where something is that is there, in words.
        distance: from compute. Tiers are listed, and homes looked for, nearest first.
        setting: what a user raises for more of it.
        computes: units compute on what lies there; one tier of a run does.
        addressable: its bytes are memory, of which a tensor is a view; else they come and go by I/O, in whole blocks.
        update_link: what is busy while updates run on what lies there; None: it streams through staging.
        toward: the tier through which its bytes come to compute; None: they are there.
        link_toward, link_back: what is busy meanwhile, and on the way back; None: nothing that counts.
    """

    name: str
    place: str
    distance: float
    setting: str
    computes: bool = False
    addressable: bool = True
    update_link: Link | None = None
    toward: Tier | None = None
    link_toward: Link | None = None
    link_back: Link | None = None

    DEVICE: ClassVar[Tier]
    HOST: ClassVar[Tier]
    DISK: ClassVar[Tier]

    @property
    def updates(self) -> bool:
        """Updates run on what lies there."""
        return self.update_link is not None

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name


Tier.DEVICE = Tier("DEVICE", "in the device tier", 0, "device_memory", computes=True, update_link=Link.UPDATE_DEVICE)
Tier.HOST = Tier(
    "HOST",
    "in RAM",
    1,
    "host_memory",
    update_link=Link.UPDATE_HOST,
    toward=Tier.DEVICE,
    link_toward=Link.HOST_TO_DEVICE,
    link_back=Link.DEVICE_TO_HOST,
)
Tier.DISK = Tier(
    "DISK",
    "on disk",
    2,
    "disk_memory, or give a disk_path with more room",
    addressable=False,
    toward=Tier.HOST,
    link_toward=Link.DISK_READ,
    link_back=Link.DISK_WRITE,
)
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""Those that settings name and bound."""


def is_page_size(size: int) -> bool:
    """Whether pages may be of so many bytes."""
    return size >= MIN_PAGE_BYTES and size % BLOCK_BYTES == 0


def chunk_numel(page_size: int) -> int:
    """Elements of a flat that an update, or a save, moves together: about a page of float32, in whole blocks of any dtype."""
    return max(1, page_size // (4 * BLOCK_BYTES)) * BLOCK_BYTES


class PageState(enum.Enum):
    """State of one copy of a page in one tier."""

    __hash__ = object.__hash__  # Enum's own is a call of Python's

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


class Mode(enum.Enum):
    """What kind of iteration runs; each has a plan of its own."""

    TRAIN = "train"
    FORWARD = "forward"


class Operation(enum.Enum):
    """What a task of a plan does (Algorithm 1's move_to_gpu, all_gather, compute, and their counterparts)."""

    __hash__ = object.__hash__  # Enum's own is a call of Python's

    FETCH = "fetch"
    EVICT = "evict"
    GATHER = "gather"
    RELEASE = "release"
    COMPUTE = "compute"
    REDUCE = "reduce"
    OFFLOAD = "offload"
    UPDATE = "update"
    EXCHANGE = "exchange"
    """Tokens to experts of other ranks, or back, and activations in a tensor group; in no plan, for it follows the batch."""
