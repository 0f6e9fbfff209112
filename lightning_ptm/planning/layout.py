"""Layout of the model: where each parameter element is, in units, flats, stripes and pieces.

Implements section 4.1 of the paper. Owns the arithmetic from named parameters to element offsets and back. Knows no
tier and no time. Every rank builds the same layout, except for the units that it holds, and except for `rank`, whose
shard is described where shards differ in length. Offsets and lengths are in elements unless the name says bytes.

I1: each parameter is in exactly one flat; each element of a flat belongs to exactly one rank (`FlatLayout.owner`).
I2: every parameter start, piece start and piece length is a multiple of `ALIGN_NUMEL` elements, so an element-wise
    update that is cut at page borders gives the bits of an uncut one.
I3: all pieces of a stripe have equal length; all but the tail stripe's fill a page; the tail's are a multiple of
    `TAIL_BYTES`.
I4: padding is at the end of a parameter, of a flat or of a share, never inside a parameter.
I5: a parameter whose update needs it whole begins at a disk block border, whatever the dtype of its states.
I6: where several ranks share such a flat, each has one piece of it, its share: the whole parameters that it owns
    (`whole_parameter_owners`), one after another. No share is empty, so no code has to handle empty tensors.

Inputs that cannot be laid out are refused in this file, next to the arithmetic that they would break.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.tensor_slices import ElementRange, TensorSlice
from lightning_ptm.planning.whole_parameter_owners import choose_owners
from lightning_ptm.terms import ALIGN_NUMEL, BLOCK_BYTES, MIN_PAGE_BYTES, Code, is_page_size

Family = tuple[bool, str, tuple[int, ...], str]

TAIL_BYTES = 512
"""Pieces of the tail stripe are rounded up to this: one sector, and an alignment with which collectives are fast."""


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter's properties that planning needs.

    Args:
        name: its full name in the model.
        shape: its shape in the model.
        dtype: name of the compute dtype ("bfloat16"); compared, never interpreted.
        itemsize: bytes of one element of that dtype.
        trainable: whether it has a gradient and master states.
        group: index of its parameter group within its optimizer; -1 if it is in none.
        optimizer: index of the optimizer that updates it; all parameters of a flat have the same optimizers.
        further: (optimizer, group) of further optimizers that update it; they share its master weights, and each has
            its own states.
        gradient_itemsize: bytes of one element of its gradient at home; 0: as `itemsize`.
        stride: strides in elements, where they are not those of a contiguous tensor of the shape (channels_last, a
            transposed weight). The elements have no gaps.
        box: the slice of a larger parameter that this is, if any; `shape` is the shape of the slice.
        partial: it is whole on all ranks, and the gradients on the ranks of a tensor group are summands of its
            gradient.
        updated_whole: its update needs all of it at once; the same for all parameters of an optimizer.
        states_bytes: if `updated_whole`, bytes of all its model states, which are on its owner.
        code: quantization format of its home; None: the parameter's dtype, as for every trained parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool
    group: int
    optimizer: int = 0
    further: tuple[tuple[int, int], ...] = ()
    gradient_itemsize: int = 0
    stride: tuple[int, ...] | None = None
    box: TensorSlice | None = None
    partial: bool = False
    updated_whole: bool = False
    states_bytes: int = 0
    code: Code | None = None

    @property
    def numel(self) -> int:
        """Elements of the parameter on this rank; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def optimizers(self) -> tuple[int, ...]:
        """Indices of all optimizers that update it."""
        return (self.optimizer, *dict(self.further)) if self.trainable else ()

    def group_in(self, optimizer: int) -> int:
        """Returns the index of its parameter group within one of its optimizers."""
        return self.group if optimizer == self.optimizer else dict(self.further)[optimizer]

    @property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions by descending stride; None if the parameter is contiguous."""
        if self.stride is None:
            return None
        stride = self.stride
        return tuple(sorted(range(len(self.shape)), key=lambda dimension: (-stride[dimension], -self.shape[dimension])))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, as checkpoints and weight files have it."""
        return self.shape if self.box is None else self.box.shape

    @property
    def parts(self) -> int:
        """Number of slices of the whole parameter."""
        return 1 if self.box is None else self.box.parts

    def stretches(self, start: int, numel: int) -> Iterator[ElementRange]:
        """Returns the positions in the whole parameter of elements [start, start + numel) of this one."""
        return iter((ElementRange(start, start, numel),)) if self.box is None else self.box.stretches(start, numel)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Modules whose parameters are fetched and released together. The first unit of a model is its root."""

    name: str
    parameters: tuple[ParameterSpec, ...]


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """Elements [start, start + numel) of a flat hold this parameter; start is a multiple of `ALIGN_NUMEL`."""

    spec: ParameterSpec
    start: int
    numel: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of a stripe, padding included.

    Args:
        stripe: index of the stripe in its flat.
        full_start: first element of the piece in the full flat.
        shard_start: first element of the piece in the rank's shard.
        numel: its length; equal for all ranks of the stripe.
    """

    stripe: int
    full_start: int
    shard_start: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A flat: parameters of a unit, laid end to end and cut into stripes.

    Its parameters have one dtype and one quantization format, the same optimizers (or none) and the same ranks.

    Args:
        unit: index of the unit.
        index: index among the flats of all units that a rank holds (`ModelLayout.flats`).
        dtype: name of the compute dtype.
        itemsize: bytes of one element of that dtype.
        trainable: whether the flat has gradients and master states.
        slots: the parameters in order: by group, within a group as given.
        numel: elements up to the end of the last parameter.
        world_size: number of ranks that share the flat.
        piece_numel: elements of a full piece: one page.
        stripes: number of full stripes.
        tail_piece_numel: elements of each piece of the tail stripe; 0 when there is no tail.
        gradient_itemsize: bytes per element of gradients at home: more than `itemsize` where gradients are summed in a
            wider dtype.
        shares: where ranks own whole parameters, the first element of each rank's share, and the end of the last; else
            empty.
        rank: the rank, among those that share the flat, whose shard is described; irrelevant where `shares` is empty.
        code: quantization format of homes; None: the compute dtype.
    """

    unit: int
    index: int
    dtype: str
    itemsize: int
    trainable: bool
    slots: tuple[ParameterSlot, ...]
    numel: int
    world_size: int
    piece_numel: int
    stripes: int
    tail_piece_numel: int
    gradient_itemsize: int
    shares: tuple[int, ...] = ()
    rank: int = 0
    code: Code | None = None
    # Derived, once: they are asked for at every fetch and release.
    shared: bool = field(init=False, repr=False, compare=False)
    """Whether several ranks share the flat, so that each has only pieces of it."""
    shard_numel: int = field(init=False, repr=False, compare=False)
    """Elements of the rank's shard, padding included; equal for all ranks unless they own whole parameters."""
    padded_numel: int = field(init=False, repr=False, compare=False)
    """Elements of the full flat, padding included."""
    padded_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the full flat in the compute dtype."""
    optimizers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Indices of the optimizers that update it; empty where it is frozen."""
    updated_whole: bool = field(init=False, repr=False, compare=False)
    """Whether an update needs each of its parameters as a whole."""
    parts: int = field(init=False, repr=False, compare=False)
    """Number of slices of each parameter's whole; 1 where the parameters are whole."""

    def __post_init__(self) -> None:
        shard_numel = self.stripes * self.piece_numel + self.tail_piece_numel
        padded_numel = self.world_size * shard_numel
        if self.shares:
            shard_numel = self.shares[self.rank + 1] - self.shares[self.rank]
            padded_numel = self.shares[-1]
        object.__setattr__(self, "shared", self.world_size > 1)
        object.__setattr__(self, "shard_numel", shard_numel)
        object.__setattr__(self, "padded_numel", padded_numel)
        object.__setattr__(self, "padded_bytes", padded_numel * self.itemsize)
        first = self.slots[0].spec
        object.__setattr__(self, "optimizers", first.optimizers)
        object.__setattr__(self, "updated_whole", self.trainable and first.updated_whole)
        object.__setattr__(self, "parts", first.parts)

    def of(self, rank: int) -> FlatLayout:
        """Returns the layout with another rank's shard."""
        return replace(self, rank=rank) if self.shares else self

    def each_stripe(self) -> Iterator[FlatLayout]:
        """Yields each stripe as a flat of its own: of the shard, and of the full flat, the next elements. `shares` must be
        empty."""
        for _ in range(self.stripes):
            yield replace(self, stripes=1, tail_piece_numel=0)
        if self.tail_piece_numel:
            yield replace(self, stripes=0)

    @property
    def stored(self) -> FlatLayout:
        """The flat as it is stored at home and sent between ranks: a quantized flat becomes a flat of bytes."""
        if self.code is None:
            return self
        return replace(
            self,
            dtype="uint8",
            itemsize=1,
            numel=self.code.bytes_of(round_up(self.numel, ALIGN_NUMEL)),
            piece_numel=self.code.bytes_of(self.piece_numel),
            tail_piece_numel=self.code.bytes_of(self.tail_piece_numel),
            gradient_itemsize=1,
            code=None,
        )

    @property
    def partial(self) -> bool:
        """Whether the gradients on the ranks of a tensor group are summands of the gradient."""
        return self.slots[0].spec.partial

    @property
    def family(self) -> Family:
        """The key that a unit's flats have in common if they differ in `parts` and `partial` alone."""
        return _family(self.slots[0].spec)

    @property
    def shard_pages(self) -> int:
        """Pages of a rank's shard, or of the longest shard where they differ.

        There is one per stripe if there are stripes, and fewer if the flat is quantized.
        """
        return -(-self.longest_shard_bytes // (self.piece_numel * self.itemsize))

    @property
    def owning_ranks(self) -> Sequence[int]:
        """Ranks that own whole parameters of the flat, in order. (0,) if `shares` is empty: rank 0 represents all."""
        return sorted({self.owner(slot.start) for slot in self.slots}) if self.shares else (0,)

    @property
    def shard_start(self) -> int:
        """First element of the rank's share in the full flat; 0 where there are no shares."""
        return self.shares[self.rank] if self.shares else 0

    @property
    def longest_shard_numel(self) -> int:
        """Elements of the longest shard of all ranks."""
        if self.shares:
            return max(end - start for start, end in itertools.pairwise(self.shares))
        return self.shard_numel

    @property
    def shard_bytes(self) -> int:
        """Bytes of the rank's shard at home."""
        return self._bytes_at_home(self.shard_numel)

    @property
    def longest_shard_bytes(self) -> int:
        """Bytes at home of the longest shard of all ranks."""
        return self._bytes_at_home(self.longest_shard_numel)

    def _bytes_at_home(self, numel: int) -> int:
        return numel * self.itemsize if self.code is None else self.code.bytes_of(numel)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the rank's shard of the gradients while they wait for the update."""
        return self.shard_numel * self.gradient_itemsize

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed at home in a wider dtype than their own."""
        return self.gradient_itemsize != self.itemsize

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Returns the pieces that `rank` owns, in the order of its shard."""
        if self.shares:
            return (Piece(0, self.shares[rank], 0, self.shares[rank + 1] - self.shares[rank]),)
        stripe_numel = self.world_size * self.piece_numel
        pieces = [
            Piece(stripe, stripe * stripe_numel + rank * self.piece_numel, stripe * self.piece_numel, self.piece_numel)
            for stripe in range(self.stripes)
        ]
        if self.tail_piece_numel:
            start = self.stripes * stripe_numel + rank * self.tail_piece_numel
            pieces.append(Piece(self.stripes, start, self.stripes * self.piece_numel, self.tail_piece_numel))
        return tuple(pieces)

    def owner(self, offset: int) -> int:
        """Returns the rank that owns element `offset` of the full flat (0 <= offset < padded_numel)."""
        if not 0 <= offset < self.padded_numel:
            raise IndexError(f"element {offset} is outside of flat {self.index} of {self.padded_numel} elements")
        if self.shares:
            return bisect.bisect_right(self.shares, offset) - 1
        tail_start = self.stripes * self.world_size * self.piece_numel
        if offset < tail_start:
            return offset // self.piece_numel % self.world_size
        return (offset - tail_start) // self.tail_piece_numel

    def whole_slots(self) -> Iterator[tuple[int, ParameterSlot]]:
        """Yields (index in `slots`, slot) of the parameters that are entirely in the rank's shard.

        `slot.start` is relative to the shard.
        """
        first = self.shard_start
        for place, slot in enumerate(self.slots):
            if not self.shares or first <= slot.start < self.shares[self.rank + 1]:
                yield place, replace(slot, start=slot.start - first) if first else slot


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All units and their flats. Flats of a unit are neighbours in `flats`, trainable ones first.

    Pages of a unit are numbered through its flats in that order, so the trainable pages come first. Where shards differ
    in length, page counts are those of the longest: plans are equal on all ranks.

    Attributes:
        units: the units of the whole model.
        flats: flats of the units that this rank holds.
        first_flats: per unit the index of its first flat, and len(flats) at the end.
        remote_flats: by unit, the flats of the units that only other ranks hold, numbered as if each were the only unit.
        stages: number of pipeline stages.
    """

    units: tuple[UnitSpec, ...]
    flats: tuple[FlatLayout, ...]
    page_size: int
    world_size: int
    first_flats: tuple[int, ...]
    remote_flats: Mapping[int, tuple[FlatLayout, ...]]
    stages: int = 1

    @property
    def shared(self) -> bool:
        """Whether several ranks share the model, so that they gather parameters and reduce gradients."""
        return self.world_size > 1

    def all_flats(self) -> Iterator[FlatLayout]:
        """Yields the flats of all units, unit by unit, whichever rank holds them."""
        for unit in range(len(self.units)):
            yield from self.remote_flats.get(unit) or self.flats_of(unit)

    def of(self, rank: int) -> ModelLayout:
        """Returns the layout of another rank that holds the same units."""
        return replace(self, flats=tuple(flat.of(rank) for flat in self.flats))

    @property
    def owned(self) -> bool:
        """Whether ranks own whole parameters, so that their shards differ in length."""
        return any(flat.shares for flat in self.flats)

    def flats_of(self, unit: int) -> tuple[FlatLayout, ...]:
        """Returns the flats of a unit, trainable first."""
        return self.flats[self.first_flats[unit] : self.first_flats[unit + 1]]

    def gathers(self, unit: int) -> bool:
        """Returns whether a unit's parameters are sharded, so that ranks gather them.

        An expert may be whole on one rank, and then is not gathered.
        """
        return any(flat.shared for flat in self.flats_of(unit))

    def shard_pages(self, unit: int) -> int:
        """Returns the pages of one rank's shard of a unit's parameters: one per stripe, fewer if quantized."""
        return sum(flat.shard_pages for flat in self.flats_of(unit))

    def needs_no_reduction(self, flat: FlatLayout) -> bool:
        """Returns whether the gradient of a flat on this rank is the run's gradient, without any reduction.

        That needs two things: no other rank shares the flat, and all ranks of its stage have slices of its parameters, so
        that all ranks compute one batch. By contrast, the gradient of an expert that is whole on one rank is the gradient
        of all ranks' batches.
        """
        return not flat.shared and flat.parts * self.stages == self.world_size

    def gathered_pages(self, unit: int) -> int:
        """Returns the shard pages of a unit that are fetched to the device for an all-gather.

        Flats that no other rank shares are fetched whole, without a gather, and do not count.
        """
        return sum(flat.shard_pages for flat in self.flats_of(unit) if flat.shared)

    def full_pages(self, unit: int, *, in_place: bool = False) -> int:
        """Returns the pages that a unit's full flats take where it computes: each flat is a run of whole pages.

        Args:
            in_place: the unit's home is the device, so unshared flats are used in place, unless they are quantized.
        """
        return sum(
            [
                -(-flat.padded_bytes // self.page_size)
                for flat in self.flats_of(unit)
                if flat.shared or not in_place or flat.code is not None
            ]
        )

    @property
    def whole_numel(self) -> int:
        """Elements of the whole model, over all ranks and slices."""
        return sum(math.prod(spec.whole_shape) for unit in self.units for spec in unit.parameters)

    def padding_bytes(self) -> int:
        """Returns the bytes of compute parameters, over all ranks, that hold no element of a parameter."""
        return sum((flat.padded_numel - sum(slot.numel for slot in flat.slots)) * flat.itemsize for flat in self.flats)

    def padding_share(self) -> float:
        """Returns padding as a share of all bytes; 0.0 for an empty model.

        The share is the same for each kind of model states.
        """
        total_bytes = sum(flat.padded_bytes for flat in self.flats)
        return self.padding_bytes() / total_bytes if total_bytes else 0.0


_BY_ALL: Mapping[int, int] = MappingProxyType({})


def build_layout(
    units: Sequence[UnitSpec],
    *,
    page_size: int,
    world_size: int,
    shared_by: Mapping[int, int] = _BY_ALL,
    remote_units: Collection[int] = (),
    rank: int = 0,
    stages: int = 1,
) -> ModelLayout:
    """Lays out a model: a flat per (dtype, trainable, optimizers, code, parts, partial) of each unit.

    Trainable flats come first; parameters of a flat are ordered by group. Flats that differ only in `parts` and
    `partial` are neighbours.

    Args:
        units: the units of the model; the first is the root.
        page_size: bytes of a page.
        world_size: number of ranks.
        shared_by: by index of a unit that not all ranks share, how many ranks share it. Parameters that are slices are
            shared by fewer ranks, since each rank has one slice: by that number divided by `parts`.
        remote_units: units that other ranks hold, and this one does not.
        rank: the rank whose shard is described where ranks own whole parameters, in units that all ranks share.
        stages: number of pipeline stages.

    Raises:
        ConfigError: the page size is not allowed, a name occurs twice, or a parameter's shape or dtype cannot be laid
            out.
    """
    _check(units, page_size, world_size)
    flats: list[FlatLayout] = []
    others: dict[int, tuple[FlatLayout, ...]] = {}
    first_flats = [0]
    owners = choose_owners(units, world_size) if world_size > 1 else {}
    for unit, spec in enumerate(units):
        members: dict[Family, dict[tuple[int, bool], list[ParameterSpec]]] = {}
        for parameter in spec.parameters:
            members.setdefault(_family(parameter), {}).setdefault((parameter.parts, parameter.partial), []).append(
                parameter
            )
        first, ranks = 0 if unit in remote_units else len(flats), shared_by.get(unit, world_size)
        # The sort is stable: dtypes stay in the order in which they first occur.
        alike = [each for key in sorted(members, key=lambda key: not key[0]) for each in members[key].items()]
        of_unit = tuple(
            _flat(unit, index, parameters, page_size, ranks // parts, owners, rank)
            for index, ((parts, _), parameters) in enumerate(alike, first)
        )
        if unit in remote_units:
            others[unit] = of_unit
        else:
            flats += of_unit
        first_flats.append(len(flats))
    return ModelLayout(tuple(units), tuple(flats), page_size, world_size, tuple(first_flats), others, stages)


def _flat(
    unit: int,
    index: int,
    parameters: list[ParameterSpec],
    page_size: int,
    world_size: int,
    owners: Mapping[str, int],
    rank: int,
) -> FlatLayout:
    first = parameters[0]
    owned = world_size > 1 and first.trainable and first.updated_whole
    slots: list[ParameterSlot] = []
    shares: list[int] = []
    end = 0
    # BLOCK_BYTES elements are whole blocks in any dtype (I5).
    align = BLOCK_BYTES if first.trainable and first.updated_whole else ALIGN_NUMEL
    for parameter in sorted(parameters, key=lambda parameter: (owners.get(parameter.name, 0), parameter.group)):
        while owned and len(shares) <= owners[parameter.name]:
            end = _begin_share(shares, end)
        start = round_up(end, align)
        slots.append(ParameterSlot(parameter, start, parameter.numel))
        end = start + (
            max(1, parameter.numel) if owned else parameter.numel
        )  # in the share that it begins in, also if empty
    numel = end
    while owned and len(shares) <= world_size:
        end = _begin_share(shares, end)
    itemsize = first.itemsize
    piece_numel = page_size // itemsize
    stripes, rest = (0, 0) if owned else divmod(end, world_size * piece_numel)
    tail_piece_numel = round_up(-(-rest // world_size), max(TAIL_BYTES // itemsize, ALIGN_NUMEL))
    if tail_piece_numel == piece_numel:
        stripes, tail_piece_numel = stripes + 1, 0
    return FlatLayout(
        unit=unit,
        index=index,
        dtype=first.dtype,
        itemsize=itemsize,
        trainable=first.trainable,
        slots=tuple(slots),
        numel=numel,
        world_size=world_size,
        piece_numel=piece_numel,
        stripes=stripes,
        tail_piece_numel=tail_piece_numel,
        gradient_itemsize=first.gradient_itemsize or itemsize,
        shares=tuple(shares),
        rank=rank if owned else 0,
        code=first.code,
    )


def _begin_share(shares: list[int], end: int) -> int:
    """Appends the start of the next share, after the end of the one before it and at least a block later (I6)."""
    shares.append(round_up(max(end, shares[-1] + 1), BLOCK_BYTES) if shares else 0)
    return shares[-1]


def _family(spec: ParameterSpec) -> Family:
    """Returns the key of a parameter's family: one flat, or several that differ in `parts` and `partial` alone."""
    return spec.trainable, spec.dtype, spec.optimizers, spec.code.name if spec.code else ""


def _check(units: Sequence[UnitSpec], page_size: int, world_size: int) -> None:
    if not is_page_size(page_size):
        raise ConfigError(
            f"page_size is {page_size} bytes, and pages of that size cannot be moved to disk; use a multiple of "
            f"{BLOCK_BYTES} of at least {MIN_PAGE_BYTES}, such as 4MiB"
        )
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}, so no rank would own a page; use at least 1")
    if not units:
        raise ConfigError("there are no units, so nothing to plan; give at least a root unit")
    names = [parameter.name for unit in units for parameter in unit.parameters]
    _check_unique("unit", [unit.name for unit in units])
    _check_unique("parameter", names)
    itemsizes: dict[str, int] = {}
    for unit in units:
        for parameter in unit.parameters:
            if min(parameter.shape, default=0) < 0:
                raise ConfigError(
                    f"parameter {parameter.name} has shape {parameter.shape}, so its number of elements is not defined; "
                    "use sizes of at least 0"
                )
            if parameter.itemsize not in (1, 2, 4, 8, 16):
                raise ConfigError(
                    f"parameter {parameter.name} of dtype {parameter.dtype} has {parameter.itemsize} bytes per "
                    "element, which do not tile a page; use a dtype of 1, 2, 4, 8 or 16 bytes"
                )
            if itemsizes.setdefault(parameter.dtype, parameter.itemsize) != parameter.itemsize:
                raise ConfigError(
                    f"parameter {parameter.name} of dtype {parameter.dtype} has {parameter.itemsize} bytes per "
                    f"element; others of that dtype have {itemsizes[parameter.dtype]}; give each dtype one size"
                )


def _check_unique(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} name {name!r} occurs twice, so its states would have two homes; name each once")
        seen.add(name)
