"""State tensors of each flat (master weights, optimizer states, parameters, gradient), and the sizes of their buffers.

Counts only, before homes are decided. build_inventory.py makes the rows of the inventory from it. A `StateTensor` is one
state tensor of a flat; its elements correspond to those of the flat's shard.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from lightning_ptm.planning.chunks import chunk_bounds_of
from lightning_ptm.planning.inventory import Row, What, pages_of
from lightning_ptm.planning.layout import FlatLayout, ModelLayout, round_up
from lightning_ptm.terms import BLOCK_BYTES, Code, Tier, chunk_numel
from lightning_ptm.update.flat_states import StateLayout, lay_out_states, layout_groups, states_of_all_ranks
from lightning_ptm.update.state_encoding import VALUES_DTYPE

if TYPE_CHECKING:
    from lightning_ptm.update.trial.traits import OptimizerTraits


class Flats(Protocol):
    """Layout of a model in flats, with the dtypes and traits of each flat; see Blueprint."""

    @property
    def layout(self) -> ModelLayout: ...
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...
    @property
    def master_dtypes(self) -> tuple[torch.dtype | None, ...]: ...
    @property
    def gradient_dtypes(self) -> tuple[torch.dtype, ...]: ...
    @property
    def traits(self) -> tuple[tuple[OptimizerTraits, ...], ...]: ...
    @property
    def state_tensors(self) -> Sequence[Sequence[StateTensor]]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class StateTensor:
    """One state tensor of a flat; as long as the shard, except for states that have shapes of their own.

    Attributes:
        what: kind of the tensor.
        layout: name, dtype and length of the tensor.
        code: code of a frozen flat's quantized parameters; None if they are not quantized.
        optimizer: number of the optimizer whose state it is; None for other tensors.
    """

    what: What
    layout: StateLayout
    code: Code | None = None
    optimizer: int | None = None

    def chunk(self, numel: int) -> int:
        """Returns the elements of this tensor in a chunk of `numel` elements of the flat."""
        if self.code is not None:
            return self.code.bytes_of(numel) + 2 * BLOCK_BYTES  # includes partial disk blocks at both ends
        return numel if self.layout.encoding is None else self.layout.encoding.stretch(0, numel)[1]


def state_tensors(flats: Flats, flat: FlatLayout) -> tuple[StateTensor, ...]:
    """Returns the state tensors of the shard that `flat` describes, which may be another rank's."""
    master, traits = flats.master_dtypes[flat.index], flats.traits[flat.index]

    def whole(what: What, name: str, dtype: torch.dtype) -> StateTensor:
        return StateTensor(what, StateLayout(name, dtype, flat.shard_numel))

    found = [] if master is None else [whole(What.MASTERS, "master", master)]
    for number, known in zip(flat.optimizers, traits, strict=True):
        groups = layout_groups(flat, number)
        found += [StateTensor(What.STATES, each, optimizer=number) for each in lay_out_states(flat, known, groups)]
    dtype = flats.dtypes[flat.index] if flat.code is None else torch.uint8
    found.append(StateTensor(What.PARAMETERS, StateLayout("parameters", dtype, flat.stored.shard_numel), flat.code))
    if traits:
        found.append(whole(What.GRADIENTS, "gradient", flats.gradient_dtypes[flat.index]))
    return tuple(found)


def streamed(tensors: Iterable[StateTensor], optimizer: int) -> list[StateTensor]:
    """Returns those of a flat's state tensors that the update by this one of its optimizers streams."""
    return [each for each in tensors if each.optimizer in (None, optimizer)]


def _of_owners(flats: Flats, flat: FlatLayout) -> Iterator[tuple[FlatLayout, Sequence[StateTensor]]]:
    """Yields the flat and its state tensors on each rank that owns parameters of it; once if all shards are alike."""
    if not flat.shares:
        yield flat, flats.state_tensors[flat.index]
    else:
        for there in map(flat.of, flat.owning_ranks):
            yield there, state_tensors(flats, there)


def own_state_bytes(flats: Flats) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Returns, by flat, the bytes of each rank's tensors of states that have shapes of their own or are encoded."""
    found = {}
    for flat, traits, tensors in zip(flats.layout.flats, flats.traits, flats.state_tensors, strict=True):
        if not traits:
            continue
        if flat.updated_whole:
            sizes = [
                layout.bytes_by_rank
                for number, known in zip(flat.optimizers, traits, strict=True)
                for layout in states_of_all_ranks(flat, known, layout_groups(flat, number))
            ]
            ranks = range(flat.world_size if flat.shares else 1)
            found[flat.index] = tuple(tuple(of_ranks[rank] for of_ranks in sizes) for rank in ranks)
        else:
            encoded = (each.layout for each in tensors if each.layout.encoding is not None)
            found[flat.index] = (tuple(layout.numel * layout.dtype.itemsize for layout in encoded),)
    return found


def buffer_numels(flats: Flats) -> dict[torch.dtype, int]:
    """Returns, by dtype, the elements of a staging buffer for flats that are updated whole: the longest chunk of any rank,
    and at least the length of other buffers."""
    least = chunk_numel(flats.layout.page_size)
    found: dict[torch.dtype, int] = {}
    for flat in flats.layout.flats:
        if not flat.updated_whole:
            continue
        for there, tensors in _of_owners(flats, flat):
            cuts = chunk_bounds_of(there, least)
            cells = [(start, cuts.length(place)) for place, start in enumerate(cuts.starts)]
            for column in tensors:
                longest = max((column.layout.stretch(*cell)[1] for cell in cells), default=0)
                found[column.layout.dtype] = max(found.get(column.layout.dtype, least), round_up(longest, BLOCK_BYTES))
    return found


def chunk_count(layout: ModelLayout) -> int:
    """Returns the chunks of all updates of a step on the rank with the largest shard of each flat, which bounds the chunks in
    flight. The same on all ranks."""
    numel = chunk_numel(layout.page_size)
    found = 0
    for flat in layout.all_flats():
        if flat.trainable:
            ranks = flat.owning_ranks if flat.updated_whole else (None,)
            most = max(len(chunk_bounds_of(flat if rank is None else flat.of(rank), numel).starts) for rank in ranks)
            found += most * len(flat.optimizers)
    return found


def chunk_bytes(flats: Flats) -> int:
    """Returns an upper bound of the staging bytes of one chunk of any update, valid for all homes and for every order in
    which buffers share pages; 0 if nothing is updated."""
    most: Counter[tuple[torch.dtype, int]] = Counter()
    numels = buffer_numels(flats)
    for flat in flats.layout.flats:
        for (_, tensors), number in itertools.product(_of_owners(flats, flat), flat.optimizers):
            most |= buffers(flats, flat, numels, streamed(tensors, number))
    rows = (staging_row(Tier.HOST, dtype, numel, count) for (dtype, numel), count in most.items())
    return _alone_bytes(flats, rows)


def scratch_bytes(flats: Flats) -> int:
    """Returns the bytes of the scratch buffers of one update, the same in every tier that runs updates.

    The buffers are for the gradient of a parameter that is updated whole, and for decoded values of encoded states.
    """
    most: Counter[tuple[torch.dtype, int]] = Counter()
    numels = buffer_numels(flats)
    for flat in flats.layout.flats:
        most |= scratch(flats, flat, numels)
    return _alone_bytes(flats, (staging_row(Tier.HOST, *key, count) for key, count in most.items()))


def scratch(flats: Flats, flat: FlatLayout, numels: Mapping[torch.dtype, int]) -> Counter[tuple[torch.dtype, int]]:
    """Returns the scratch buffers (dtype, elements) of a flat's update, in addition to the buffers of its state tensors; for
    one chunk at a time."""
    if flat.updated_whole:
        dtype = flats.master_dtypes[flat.index] or flats.dtypes[flat.index]
        return Counter([(dtype, numels[dtype])])
    encoded = Counter(each.optimizer for each in flats.state_tensors[flat.index] if each.layout.encoding is not None)
    return Counter([(VALUES_DTYPE, chunk_numel(flats.layout.page_size))] * max(encoded.values(), default=0))


def _alone_bytes(flats: Flats, rows: Iterable[Row]) -> int:
    """Returns the bytes of rows if each has pages of its own."""
    page = flats.layout.page_size
    return pages_of((dataclasses.replace(row, shares_pages=False) for row in rows), page) * page


def buffers(
    flats: Flats, flat: FlatLayout, numels: Mapping[torch.dtype, int], tensors: Iterable[StateTensor]
) -> Counter[tuple[torch.dtype, int]]:
    """Returns the staging buffers (dtype, elements) of some of a flat's state tensors, for one chunk.

    Args:
        numels: result of `buffer_numels`.
    """
    chunk, whole = chunk_numel(flats.layout.page_size), flat.updated_whole
    counted: Counter[tuple[torch.dtype, int]] = Counter()
    for each in tensors:
        dtype = each.layout.dtype
        counted[dtype, numels[dtype] if whole else each.chunk(chunk)] += 1
    return counted


def staging_row(tier: Tier, dtype: torch.dtype, numel: int, count: int) -> Row:
    """Returns the row of staging buffers for states whose home is not the tier of the update's arithmetic."""
    return row_of(What.STAGING, tier, numel, dtype, count=count, name=f"update staging {dtype}", shares_pages=True)


def row_of(what: What, tier: Tier, numel: int, dtype: torch.dtype, **more: object) -> Row:
    """Returns a row for a torch dtype."""
    return Row(what, tier, numel, str(dtype).removeprefix("torch."), dtype.itemsize, **more)  # type: ignore[arg-type]
