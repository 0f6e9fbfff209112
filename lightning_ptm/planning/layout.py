"""Where every element of every parameter lies: units, flats, stripes, pieces (section 4.1 of the paper).

Owns the arithmetic from named parameters to element offsets and back. Knows no tier and no time. Every rank builds the
same layout, but for the units that it holds, and for whose shard is meant where these are not equally long. Offsets and
lengths are in elements unless the name says bytes.

I1: each parameter lies in exactly one flat; each element of a flat belongs to exactly one rank (`FlatLayout.owner`).
I2: every parameter start, piece start and piece length is a multiple of `ALIGN_NUMEL` elements, so an element-wise
    update that is cut at page borders gives the bits of an uncut one.
I3: all pieces of a stripe have equal length; all but the tail stripe's fill a page; the tail's are a multiple of
    `TAIL_BYTES`.
I4: padding lies at the end of a parameter, of a flat or of a share, never inside a parameter.
I5: a parameter whose update needs it whole begins where a disk block begins, whatever the dtype of what is kept of it.
I6: where several ranks share such a flat, each has one piece of it, its share: the parameters that it owns (`owners`), whole,
    one behind the other. No share is empty, so nobody has to think of tensors without elements.

Long because what cannot be laid out is refused beside the arithmetic that it would break.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.tensor_slices import ElementRange, TensorSlice
from lightning_ptm.planning.whole_parameter_owners import choose_owners
from lightning_ptm.terms import ALIGN_NUMEL, BLOCK_BYTES, MIN_PAGE_BYTES, Code, is_page_size

Family = tuple[bool, str, tuple[int, ...], str]

TAIL_BYTES = 512
"""Pieces of the tail stripe are rounded up to this: one sector, and the alignment that collectives like."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter as the planner sees it.

    Args:
        name: its full name in the model.
        shape: as the model has it.
        dtype: name of the compute dtype ("bfloat16"); compared, never interpreted.
        itemsize: bytes of one element of that dtype.
        trainable: whether it has a gradient and master states.
        group: index of its parameter group within its optimizer; -1 if it is in none.
        optimizer: index of the optimizer that updates it: a flat's parameters have the same ones.
        further: (optimizer, group) of others that update it, too; they share its master, and each has states of its own.
        gradient_itemsize: bytes of one element of its gradient at home; 0: as `itemsize`.
        stride: elements from one to the next along each dimension, where that is not as in a contiguous tensor of the
            shape (channels_last, a transposed weight). The elements lie end to end.
        box: of a part of a larger parameter, which part; `shape` is the part's.
        partial: it is whole on all ranks, and the gradients of the ranks of a tensor group are parts of a sum.
        updated_whole: its update needs all of it at once; the same for all parameters of an optimizer.
        states_bytes: of such a parameter, bytes of all its model states: what its owner has of it.
        code: in which its home has it; None: in its dtype, as always where it is trained.
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
        """Elements of it here; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def optimizers(self) -> tuple[int, ...]:
        """All that update it."""
        return (self.optimizer, *(number for number, _ in self.further)) if self.trainable else ()

    def group_in(self, optimizer: int) -> int:
        """Index of its parameter group within one of them."""
        return self.group if optimizer == self.optimizer else dict(self.further)[optimizer]

    @property
    def order(self) -> tuple[int, ...] | None:
        """Its dimensions, that with the longest strides first; None where that is their own order."""
        if self.stride is None:
            return None
        stride = self.stride
        return tuple(sorted(range(len(self.shape)), key=lambda dimension: (-stride[dimension], -self.shape[dimension])))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """As checkpoints and files have it."""
        return self.shape if self.box is None else self.box.shape

    @property
    def parts(self) -> int:
        """How many there are of the whole."""
        return 1 if self.box is None else self.box.parts

    def stretches(self, start: int, numel: int) -> Iterator[ElementRange]:
        """Where elements [start, start + numel) of it lie in the whole."""
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
    """A unit's parameters of one dtype and code, all of one optimizer or all frozen, all of the same ranks, laid end to end
    and cut into stripes.

    Args:
        unit: index of the unit.
        index: index among the flats of all units that a rank holds (`ModelLayout.flats`).
        dtype: name of the compute dtype; itemsize: its bytes per element.
        trainable: whether the flat has gradients and master states.
        slots: the parameters in order: by group, otherwise as they came.
        numel: elements up to the end of the last parameter.
        world_size: ranks that share the flat.
        piece_numel: elements of a full piece: one page.
        stripes: number of full stripes.
        tail_piece_numel: elements of each piece of the tail stripe; 0 when there is no tail.
        gradient_itemsize: bytes per element of gradients at home: more than `itemsize` where they are sums.
        shares: where ranks own whole parameters, the first element of each rank's share, and the end of the last; else empty.
        rank: among those that share the flat, the one whose shard is meant; of no account where `shares` is empty.
        code: in which homes have it; None: in its dtype.
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

    def of(self, rank: int) -> FlatLayout:
        """As `rank` has it."""
        return replace(self, rank=rank) if self.shares else self

    @property
    def stored(self) -> FlatLayout:
        """As it is at home and on its way between ranks: where it has a code, a flat whose elements are bytes of codes."""
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
    def shared(self) -> bool:
        """Whether several ranks share the flat, so that each has pieces of it alone."""
        return self.world_size > 1

    @property
    def parts(self) -> int:
        """Of how many its parameters are one part each; 1 where they are whole."""
        return self.slots[0].spec.parts

    @property
    def partial(self) -> bool:
        """Whether the gradients of the ranks of a tensor group are parts of a sum."""
        return self.slots[0].spec.partial

    @property
    def optimizers(self) -> tuple[int, ...]:
        """Indices of those that update it; none where it is frozen."""
        return self.slots[0].spec.optimizers

    @property
    def updated_whole(self) -> bool:
        """Whether updates need each of its parameters as a whole."""
        return self.trainable and self.slots[0].spec.updated_whole

    @property
    def family(self) -> Family:
        """What a unit's flats that differ in their parts alone have in common."""
        return _family(self.slots[0].spec)

    @property
    def shard_pages(self) -> int:
        """Pages of a rank's shard; of the longest one where they differ. One for each stripe, where there are stripes, and
        fewer of codes."""
        return -(-self.longest_shard_bytes // (self.piece_numel * self.itemsize))

    @property
    def shard_numel(self) -> int:
        """Elements of the rank's shard, padding included; equal for all ranks, but where they own whole parameters."""
        if self.shares:
            return self.shares[self.rank + 1] - self.shares[self.rank]
        return self.stripes * self.piece_numel + self.tail_piece_numel

    @property
    def owning_ranks(self) -> Sequence[int]:
        """The ranks that own parameters, in order; one that stands for all, where shards do not differ."""
        return sorted({self.owner(slot.start) for slot in self.slots}) if self.shares else (0,)

    @property
    def shard_start(self) -> int:
        """The element of the full flat with which the rank's shard begins, where that is one piece of it."""
        return self.shares[self.rank] if self.shares else 0

    @property
    def longest_shard_numel(self) -> int:
        """Elements of the longest shard of all ranks."""
        if self.shares:
            return max(end - start for start, end in itertools.pairwise(self.shares))
        return self.shard_numel

    @property
    def padded_numel(self) -> int:
        """Elements of the full flat, padding included."""
        return self.shares[-1] if self.shares else self.world_size * self.shard_numel

    @property
    def shard_bytes(self) -> int:
        """Bytes of the rank's shard, as it is at home."""
        return self._bytes_at_home(self.shard_numel)

    @property
    def longest_shard_bytes(self) -> int:
        """Bytes of the longest shard of all ranks, as it is at home."""
        return self._bytes_at_home(self.longest_shard_numel)

    def _bytes_at_home(self, numel: int) -> int:
        return numel * self.itemsize if self.code is None else self.code.bytes_of(numel)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the rank's share of the gradients, where they wait for the update."""
        return self.shard_numel * self.gradient_itemsize

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients at home are sums of a wider dtype than each of them."""
        return self.gradient_itemsize != self.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes of the full flat in the compute dtype."""
        return self.padded_numel * self.itemsize

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that `rank` owns, in the order of its shard."""
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
        """The rank that owns element `offset` of the full flat (0 <= offset < padded_numel)."""
        if not 0 <= offset < self.padded_numel:
            raise IndexError(f"element {offset} is outside of flat {self.index} of {self.padded_numel} elements")
        if self.shares:
            return bisect.bisect_right(self.shares, offset) - 1
        tail_start = self.stripes * self.world_size * self.piece_numel
        if offset < tail_start:
            return offset // self.piece_numel % self.world_size
        return (offset - tail_start) // self.tail_piece_numel

    def whole_slots(self) -> Iterator[tuple[int, ParameterSlot]]:
        """(place in `slots`, slot) of the parameters that lie in the rank's shard as a whole; they start there where told."""
        first = self.shard_start
        for place, slot in enumerate(self.slots):
            if not self.shares or first <= slot.start < self.shares[self.rank + 1]:
                yield place, replace(slot, start=slot.start - first) if first else slot


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All units and their flats. Flats of a unit are neighbours in `flats`, trainable ones first.

    Pages of a unit are counted through its flats in that order, and the trainable pages come first. Where shards differ in
    length, those of the longest are counted: plans are equal on all ranks.

    Attributes:
        units: of the whole model.
        flats: of the units that a rank holds; others have none here.
        first_flats: per unit the index of its first flat, and len(flats) at the end.
        elsewhere: by unit, the flats of those that other ranks hold, numbered as if it were the only one.
    """

    units: tuple[UnitSpec, ...]
    flats: tuple[FlatLayout, ...]
    page_size: int
    world_size: int
    first_flats: tuple[int, ...]
    elsewhere: Mapping[int, tuple[FlatLayout, ...]]

    @property
    def shared(self) -> bool:
        """Whether several ranks share the model, so that they gather weights and reduce gradients."""
        return self.world_size > 1

    def everywhere(self) -> Iterator[FlatLayout]:
        """The flats of all units, unit by unit, whoever holds them."""
        for unit in range(len(self.units)):
            yield from self.elsewhere.get(unit) or self.flats_of(unit)

    def of(self, rank: int) -> ModelLayout:
        """As another rank that holds the same units has it."""
        return replace(self, flats=tuple(flat.of(rank) for flat in self.flats))

    @property
    def owned(self) -> bool:
        """Whether ranks own whole parameters, so that their shards differ in length."""
        return any(flat.shares for flat in self.flats)

    def flats_of(self, unit: int) -> tuple[FlatLayout, ...]:
        """The flats of a unit, trainable first."""
        return self.flats[self.first_flats[unit] : self.first_flats[unit + 1]]

    def gathers(self, unit: int) -> bool:
        """Whether a unit's parameters are divided, so that ranks gather them. An expert may be whole on one rank."""
        return any(flat.shared for flat in self.flats_of(unit))

    def shard_pages(self, unit: int) -> int:
        """Pages of one rank's shard of a unit's parameters: one per stripe, and fewer of codes."""
        return sum(flat.shard_pages for flat in self.flats_of(unit))

    def trainable_pages(self, unit: int) -> int:
        """Pages of one rank's shard of a unit's gradients: one per stripe of its trainable flats."""
        return sum(flat.shard_pages for flat in self.flats_of(unit) if flat.trainable)

    def alone(self, flat: FlatLayout) -> bool:
        """Whether a rank's gradient of a flat is that of the run: nobody shares it, and of its whole all ranks have parts, so
        that they compute one batch. The gradient of an expert that is whole on one rank is of all ranks' batches."""
        return not flat.shared and flat.parts == self.world_size

    def gathered_pages(self, unit: int) -> int:
        """Of a rank's shard pages, those that are brought where the unit computes for a gather. Flats that nobody shares
        come whole."""
        return sum(flat.shard_pages for flat in self.flats_of(unit) if flat.shared)

    def full_pages(self, unit: int, *, in_place: bool = False) -> int:
        """Pages that a unit takes where it computes: each flat is a run of whole pages.

        Args:
            in_place: its home is there, so flats that nobody shares are used where they are, unless they have a code.
        """
        return self._run_pages(
            flat for flat in self.flats_of(unit) if flat.shared or not in_place or flat.code is not None
        )

    def full_gradient_pages(self, unit: int, *, alone: bool | None = None) -> int:
        """Pages that a unit's gradients take before they are reduced; those of flats that are `alone`, or are not."""
        trainable = [flat for flat in self.flats_of(unit) if flat.trainable]
        return self._run_pages(flat for flat in trainable if alone is None or self.alone(flat) is alone)

    def _run_pages(self, flats: Iterable[FlatLayout]) -> int:
        return sum(round_up(flat.padded_bytes, self.page_size) // self.page_size for flat in flats)

    @property
    def whole_numel(self) -> int:
        """Elements of the whole model, whoever has which parts."""
        return sum(math.prod(spec.whole_shape) for unit in self.units for spec in unit.parameters)

    def padding_bytes(self) -> int:
        """Bytes of compute parameters, over all ranks, that hold no element of a parameter."""
        return sum((flat.padded_numel - sum(slot.numel for slot in flat.slots)) * flat.itemsize for flat in self.flats)

    def padding_share(self) -> float:
        """Padding as a share of all bytes; the same for each kind of model states. 0.0 for a model without any."""
        total_bytes = sum(flat.padded_bytes for flat in self.flats)
        return self.padding_bytes() / total_bytes if total_bytes else 0.0


_BY_ALL: Mapping[int, int] = MappingProxyType({})


def build_layout(
    units: Sequence[UnitSpec],
    *,
    page_size: int,
    world_size: int,
    shared_by: Mapping[int, int] = _BY_ALL,
    elsewhere: Collection[int] = (),
    rank: int = 0,
) -> ModelLayout:
    """Lay out a model: a flat per (dtype, trainable, optimizers, code, parts, partial) of each unit, trainable first, ordered
    by group. Flats that differ in the last two alone are neighbours.

    Args:
        units: the units of the model; the first is the root.
        page_size: bytes of a page.
        world_size: number of ranks.
        shared_by: for units that not all ranks share, by index: how many do. Of parameters in parts each rank has one part,
            so of these as many ranks fewer share each.
        elsewhere: units that other ranks hold, and this one does not.
        rank: whose shards are meant where ranks own whole parameters, of units that all of them share.

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
        first, ranks = 0 if unit in elsewhere else len(flats), shared_by.get(unit, world_size)
        # Stable: dtypes stay in the order in which they first occur.
        alike = [each for key in sorted(members, key=lambda key: not key[0]) for each in members[key].items()]
        of_unit = tuple(
            _flat(unit, index, parameters, page_size, ranks // parts, owners, rank)
            for index, ((parts, _), parameters) in enumerate(alike, first)
        )
        if unit in elsewhere:
            others[unit] = of_unit
        else:
            flats += of_unit
        first_flats.append(len(flats))
    return ModelLayout(tuple(units), tuple(flats), page_size, world_size, tuple(first_flats), others)


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
    # So many elements are whole blocks of any dtype (I5).
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
    """Add where the next share begins, behind what the one before has up to `end`, and at least a block (I6)."""
    shares.append(round_up(max(end, shares[-1] + 1), BLOCK_BYTES) if shares else 0)
    return shares[-1]


def _family(spec: ParameterSpec) -> Family:
    """What parameters of a unit have in common that lie in one flat, or in several because of their parts."""
    return spec.trainable, spec.dtype, spec.optimizers, spec.code.name if spec.code else ""


def _check(units: Sequence[UnitSpec], page_size: int, world_size: int) -> None:
    if not is_page_size(page_size):
        raise ConfigError(
            f"page_size is {page_size} bytes, no page of which can be moved to disk; use a multiple of {BLOCK_BYTES} "
            f"of at least {MIN_PAGE_BYTES}, such as 4MiB"
        )
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}, so nobody would own a page; use at least 1")
    if not units:
        raise ConfigError("there are no units, so nothing to plan; give at least a root unit")
    names = [parameter.name for unit in units for parameter in unit.parameters]
    _check_unique("unit", [unit.name for unit in units])
    _check_unique("parameter", names)
    itemsizes: dict[str, int] = {}
    for unit in units:
        for parameter in unit.parameters:
            if any(size < 0 for size in parameter.shape):
                raise ConfigError(f"parameter {parameter.name} has shape {parameter.shape}; sizes must be at least 0")
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
