"""Enums and constants shared by all layers: tiers, links, page states, operations, phases.

Knows the standard library only. A term that two layers need is defined here once (docs/glossary.md).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, ClassVar

BLOCK_BYTES = 4096
"""Alignment of every page, every disk transfer and every buffer that a disk transfer touches (O_DIRECT)."""

MIN_PAGE_BYTES = 64 * 1024
"""Smallest page size, in bytes; a page is a multiple of `BLOCK_BYTES`.

A smaller page costs more bookkeeping than it saves bytes.
"""

ALIGN_NUMEL = 64
"""Alignment of parameters inside their flat, in elements.

64 elements of 16 bits are two cache lines. Element-wise kernels treat the last, partial vector of a tensor differently
from the rest. So an update that is cut at page borders gives the bits of an uncut one only when cuts and parameter
starts are multiples of the vector width (invariant I2 of planning/layout.py).
"""


@dataclass(frozen=True, slots=True)
class Code:
    """A quantization format of frozen weights.

    A block is `ALIGN_NUMEL` elements: their largest absolute value as a float32, then one code per element. Parameters
    and pieces are whole blocks, so a block has the same bits on any number of ranks.

    Args:
        name: the format's name in settings.
        block_bytes: bytes of one block; a multiple of 4.
    """

    name: str
    block_bytes: int

    def bytes_of(self, numel: int) -> int:
        """Returns the quantized bytes of `numel` elements, which are whole blocks."""
        return numel // ALIGN_NUMEL * self.block_bytes


CODES = {code.name: code for code in (Code("int8", 4 + ALIGN_NUMEL), Code("nf4", 4 + ALIGN_NUMEL // 2))}

SEVERAL_CHUNKS = ("interleaved", "breadth_first")
"""Values of the setting `pipeline_schedule` with which a stage may have several runs of blocks."""


class Link(enum.Enum):
    """A resource that work can occupy: a copy engine per direction, the collectives, the update by place."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    COLLECTIVE = "collective"
    UPDATE_HOST = "update_host"
    UPDATE_DEVICE = "update_device"
    EXCHANGE = "exchange"
    """All-to-all of tokens between the ranks that divide experts."""
    TENSOR_EXCHANGE = "tensor_exchange"
    """Exchange of activations between the ranks of a tensor-parallel or context-parallel group."""


class _OnePerValues(type):
    """Metaclass whose classes have one object for equal fields, so that comparing is comparing identities, in C."""

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        cls._made: dict[tuple[object, ...], Any] = {}

    def __call__(cls, *args: Any, **values: Any) -> Any:
        made = super().__call__(*args, **values)
        return cls._made.setdefault(tuple(getattr(made, each.name) for each in fields(made)), made)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Tier(metaclass=_OnePerValues):
    """A kind of memory and its properties, as other layers need them (the paper's GPU, CPU, SSD).

    Adding a tier to a run's budget adds it to the run (`AngelPTMStrategy.further_tiers`). Tiers
    with the same values are one object, wherever they are made: a copy, or what is unpickled, is the tier itself.

    Args:
        name: the tier's name in capitals; messages print it in lower case.
        place: the phrase for messages that says where its contents are ("in RAM").
        distance: rank by distance from compute. Tiers are listed, and homes chosen, nearest first.
        setting: the setting that a user raises for more of it.
        computes: whether units compute on its bytes; true of one tier in a run.
        addressable: whether its bytes are memory that a tensor can view; otherwise they are transferred by I/O in whole
            blocks.
        update_link: the link that is busy while updates run on its bytes; None: its states stream through staging.
        toward: the next tier on the way to compute; None: this tier computes.
        link_toward, link_back: the links that are busy during a copy to `toward`, and back; None: no link that is
            modelled.
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
        """Whether the optimizer can update states in this tier in place."""
        return self.update_link is not None

    def updated_in(self, staging_tier: Tier) -> Tier:
        """Returns the tier in which states whose home this is are updated: this one, or staging."""
        return self if self.update_link is not None else staging_tier

    def __reduce__(self) -> tuple[object, ...]:
        return Tier, tuple(getattr(self, each.name) for each in fields(self))

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
"""The built-in tiers, which settings name and bound."""


def is_page_size(size: int) -> bool:
    """Returns whether `size` bytes is an allowed page size."""
    return size >= MIN_PAGE_BYTES and size % BLOCK_BYTES == 0


def chunk_numel(page_size: int) -> int:
    """Returns the elements of a flat that one pass of an update or a save moves.

    That is about a page of float32, in whole disk blocks of any dtype.
    """
    return max(1, page_size // (4 * BLOCK_BYTES)) * BLOCK_BYTES


class PageState(enum.Enum):
    """State of one copy of a page in one tier."""

    __hash__ = object.__hash__  # faster: Enum's own is a Python function

    ABSENT = "absent"
    ARRIVING = "arriving"
    RESIDENT = "resident"
    LEAVING = "leaving"


class Phase(enum.Enum):
    """Kinds of computation of a tick."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(enum.Enum):
    """Kinds of model states for which a unit has pages."""

    PARAMETER = "parameter"
    """The compute parameters (p16)."""
    GRADIENT = "gradient"
    """The reduced gradients (g16)."""
    MASTER = "master"
    """The master states: fp32 parameters (when the compute dtype is not the master dtype) and optimizer moments."""
    FULL = "full"
    """A unit's gathered flat: the pieces of all ranks, end to end."""


class Mode(enum.Enum):
    """Kind of iteration; each kind has its own plan."""

    TRAIN = "train"
    FORWARD = "forward"


class Operation(enum.Enum):
    """Operation of a task in a plan (Algorithm 1's move_to_gpu, all_gather, compute, and their counterparts)."""

    __hash__ = object.__hash__  # faster: Enum's own is a Python function

    FETCH = "fetch"
    EVICT = "evict"
    GATHER = "gather"
    RELEASE = "release"
    COMPUTE = "compute"
    REDUCE = "reduce"
    OFFLOAD = "offload"
    UPDATE = "update"
    EXCHANGE = "exchange"
    """Exchange of tokens with experts of other ranks, or of activations in a tensor-parallel group.

    It depends on the batch, so no plan contains it.
    """
