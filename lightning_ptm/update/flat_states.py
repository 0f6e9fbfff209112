"""Master states of one flat's shard: the paged tensors of master parameter and optimizer slots, their layout, and scalars.

Owns the scalar states of the flat's parameters. Refers to the paged tensors of the master parameter and of every slot, but
does not move them. Knows a flat's layout; knows nothing of steps in flight.
I1: element i of the master parameter and of every slot belongs to element i of this rank's shard; where parameters are
    updated whole, each parameter has its states in its own share of the slots (`OwnShapes`).
I2: parameters with the same history share one ScalarState object, so runs are compared by identity. Where parameters are
    updated whole, each has its own object.
I3: a state with its own shape begins at a multiple of BLOCK_BYTES elements, so at a disk block whatever its dtype; the states
    of neighbouring parameters are therefore one stretch that begins and ends at a disk block.
I4: a run never ends inside the ragged tail of a parameter, nor goes on past it: kernels treat the last, partial vector of a
    tensor differently, and it must be the parameter's own last one.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.terms import ALIGN_NUMEL, Tier
from lightning_ptm.update.shadow import ScalarState, frozen_scalars
from lightning_ptm.update.state_encoding import VALUES_DTYPE, EncodedTensor
from lightning_ptm.update.trial.traits import OptimizerTraits, Shape

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.backend import Backend
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.planning.layout import FlatLayout

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_ptm.planning.layout import round_up
from lightning_ptm.terms import BLOCK_BYTES, chunk_numel
from lightning_ptm.update.state_encoding import Encoding
from lightning_ptm.update.trial.traits import SlotTraits

if TYPE_CHECKING:
    import torch

    from lightning_ptm.planning.layout import FlatLayout


@dataclasses.dataclass(frozen=True, slots=True)
class OwnShapes:
    """Layout of the states of one name with shapes that are not the parameters' shapes (e.g. factored moments).

    The states of the first rank's parameters come first, then the second rank's, and so on. Each rank stores its share.

    Attributes:
        shapes: by parameter, the shape of its state; None if it has no such state.
        starts: by parameter, the first element of its state (counted without storage if it has none); then the end of all.
        shares: by rank, the first element of its share; then the end of the last share.
        first: first element of this rank's share.
        parameter_starts: by parameter, its first element in this rank's shard; outside of the shard if another rank owns it.
    """

    shapes: tuple[Shape | None, ...]
    starts: tuple[int, ...]
    shares: tuple[int, ...]
    first: int
    parameter_starts: tuple[int, ...]

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, number) in the rank's share of the states of the parameters that begin in [start, start + numel) of
        the shard."""
        first = self.starts[bisect.bisect_left(self.parameter_starts, start)]
        last = self.starts[bisect.bisect_left(self.parameter_starts, start + numel)]
        return first - self.first, last - first

    def view(self, tensor: torch.Tensor, parameter: int, first: int = 0) -> torch.Tensor:
        """A parameter's state in its shape, as a view of `tensor`, which has all ranks' states from element `first` on."""
        shape = self.shapes[parameter]
        if shape is None:
            raise InternalError(f"parameter {parameter} has no state in this layout of states with shapes of their own")
        return tensor.narrow(0, self.starts[parameter] - first, math.prod(shape)).view(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of one paged tensor of states; `dtype` and `numel` are those of the stored elements.

    Attributes:
        own: the shapes, where they are not the shapes of the parameters.
        encoding: the encoding, where the stored elements are not the optimizer's.
    """

    name: str
    dtype: torch.dtype
    numel: int
    own: OwnShapes | None = None
    encoding: Encoding | None = None

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """Bytes on each rank that shares the flat; a single number if all ranks have the same."""
        shares = (0, self.numel) if self.own is None else self.own.shares
        return tuple((end - start) * self.dtype.itemsize for start, end in itertools.pairwise(shares))

    def stretch(self, start: int, numel: int) -> tuple[int, int]:
        """(first element, number) of the stored elements that belong to elements [start, start + numel) of the shard.

        The elements must be whole parameters where states have their own shapes, and a chunk where states are encoded.
        """
        by = self.own or self.encoding
        return (start, numel) if by is None else by.stretch(start, numel)


def lay_out_states(flat: FlatLayout, traits: OptimizerTraits, groups: Sequence[int | None]) -> tuple[StateLayout, ...]:
    """Returns the layouts of all states of a flat's shard that are tensors of several elements.

    Args:
        groups: parameter group of each parameter within its optimizer; None: the optimizer does not update it.
    """
    return tuple(layout for layout in states_of_all_ranks(flat, traits, groups) if layout.numel)


def states_of_all_ranks(
    flat: FlatLayout, traits: OptimizerTraits, groups: Sequence[int | None]
) -> tuple[StateLayout, ...]:
    """Returns the layouts of `lay_out_states` and of states of which only other ranks have elements.

    Names, dtypes and shapes are the same on all ranks.
    """
    if not traits.whole:
        return tuple([_like_the_shard(flat, slot) for slot in traits.slots])
    return tuple(_own_shapes(flat, traits, groups))


def _like_the_shard(flat: FlatLayout, slot: SlotTraits) -> StateLayout:
    if slot.encoding is None:
        return StateLayout(slot.name, slot.dtype, flat.shard_numel)
    encoding = slot.encoding(flat.shard_numel, chunk_numel(flat.piece_numel * flat.itemsize))
    return StateLayout(slot.name, encoding.dtype, encoding.numel, encoding=encoding)


def _own_shapes(flat: FlatLayout, traits: OptimizerTraits, groups: Sequence[int | None]) -> Iterator[StateLayout]:
    begins = [slot.start for slot in flat.slots]
    # By rank, the index of its first parameter.
    firsts = [bisect.bisect_left(begins, share) for share in flat.shares[:-1]] or [0]
    in_shard = tuple(start - flat.shard_start for start in begins)
    for known in traits.slots:
        shapes = tuple(
            None if group is None else traits.groups[group].state_shapes[slot.spec.shape].get(known.name)
            for slot, group in zip(flat.slots, groups, strict=True)
        )
        ends = [0]
        for shape in shapes:
            ends.append(ends[-1] + (0 if shape is None else round_up(math.prod(shape), BLOCK_BYTES)))
        shares = (*(ends[first] for first in firsts), ends[-1])
        if ends[-1]:
            own = OwnShapes(shapes, tuple(ends), shares, shares[flat.rank], in_shard)
            yield StateLayout(known.name, known.dtype, shares[flat.rank + 1] - shares[flat.rank], own)


def layout_groups(flat: FlatLayout, optimizer: int | None = None) -> tuple[int | None, ...]:
    """Returns the parameter group of each of a flat's parameters, within one of its optimizers (None: the first)."""
    number = flat.slots[0].spec.optimizer if optimizer is None else optimizer
    groups = [slot.spec.group_in(number) for slot in flat.slots]
    return tuple([group if group >= 0 else None for group in groups])


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one parameter in a shard, in elements.

    Attributes:
        parameter: index of the parameter in its flat.
        start: first element in the shard.
        parameter_start: first element in the parameter.
        numel: length.
        ragged: whether it has the parameter's last element and the parameter's length is no multiple of ALIGN_NUMEL.
    """

    parameter: int
    start: int
    parameter_start: int
    numel: int
    ragged: bool

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def cut(self, start: int, stop: int) -> Segment:
        """The part of the segment in [start, stop) of the shard; the segment itself if it is all inside."""
        begin, end = max(start, self.start), min(stop, self.stop)
        if begin == self.start and end == self.stop:
            return self
        ragged = self.ragged and end == self.stop
        return Segment(self.parameter, begin, self.parameter_start + begin - self.start, end - begin, ragged)


@dataclasses.dataclass(frozen=True, slots=True)
class StateRun:
    """Consecutive elements of a shard that one optimizer call treats as one parameter (start in the shard, elements)."""

    group: int
    scalars: ScalarState | None
    start: int
    numel: int
    segments: tuple[Segment, ...]

    @property
    def stop(self) -> int:
        return self.start + self.numel


def shard_segments(flat: FlatLayout, rank: int) -> tuple[Segment, ...]:
    """The parameters' stretches in a rank's shard, in order; those adjacent in both parameter and shard are joined."""
    found: list[Segment] = []
    starts = [slot.start for slot in flat.slots]
    for piece in flat.pieces(rank):
        stop = piece.full_start + piece.numel
        index = max(0, bisect.bisect_right(starts, piece.full_start) - 1)
        while index < len(flat.slots) and starts[index] < stop:
            slot = flat.slots[index]
            begin, end = max(slot.start, piece.full_start), min(slot.start + slot.numel, stop)
            if begin < end:
                start = piece.shard_start + begin - piece.full_start
                ragged = end == slot.start + slot.numel and slot.numel % ALIGN_NUMEL != 0
                found.append(Segment(index, start, begin - slot.start, end - begin, ragged))
            index += 1
    return _joined(found)


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.parameter == segment.parameter
            and last.stop == segment.start
            and last.parameter_start + last.numel == segment.parameter_start
        ):
            joined[-1] = dataclasses.replace(last, numel=last.numel + segment.numel, ragged=segment.ragged)
        else:
            joined.append(segment)
    return tuple(joined)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


class FlatStates:
    """The master states of one flat's shard on one rank.

    Args:
        flat: the flat's layout.
        rank: this rank, which chooses the shard.
        traits: the states that the optimizer keeps, as the trial found them.
        master: the master parameter, or None where the compute parameter is updated in place ("true" precisions).
        slots: by name, the paged tensors of the states that `lay_out_states` lists.
        groups: parameter group of each of the flat's parameters within the optimizer, None for a parameter that this
            optimizer does not update. Defaults to the layout's groups, which are right when there is one optimizer.
    """

    def __init__(
        self,
        flat: FlatLayout,
        rank: int,
        traits: OptimizerTraits,
        *,
        master: PagedTensor | None,
        slots: Mapping[str, PagedTensor],
        groups: Sequence[int | None] | None = None,
    ) -> None:
        self.groups = tuple(groups) if groups is not None else layout_groups(flat)
        self.everywhere = {layout.name: layout for layout in states_of_all_ranks(flat, traits, self.groups)}
        """Layouts of all states by name, also of those of which only other ranks have elements."""
        self.layouts = {name: layout for name, layout in self.everywhere.items() if layout.numel}
        """Layouts of this rank's `slots`, by name."""
        if flat.shares and flat.rank != rank:
            raise InternalError(f"flat {flat.unit}/{flat.index} is laid out for rank {flat.rank}, not for {rank}")
        known = {name: layout.encoding for name, layout in self.layouts.items()}
        self.encodings = {name: encoding for name, encoding in known.items() if encoding is not None}
        """Encodings of the slots that are stored in another form than the optimizer's, by name."""
        if self.layouts.keys() != slots.keys():
            raise InternalError(
                f"flat {flat.unit}/{flat.index} got slots {sorted(slots)}, the optimizer keeps {sorted(self.layouts)}"
            )
        tensors = [(slots[name], layout.numel) for name, layout in self.layouts.items()]
        for tensor, numel in (*tensors, *(((master, flat.shard_numel),) if master is not None else ())):
            if tensor.numel != numel:
                raise InternalError(
                    f"{tensor.name} has {tensor.numel} elements, flat {flat.unit}/{flat.index} needs {numel}"
                )
        self.flat = flat
        self.rank = rank
        self.traits = traits
        self.master = master
        self.slots = dict(slots)
        self.segments = shard_segments(flat, rank)
        self.whole = dict(flat.whole_slots()) if traits.whole else {}
        """Slots of the parameters that this rank updates whole, by index in the flat, with their starts in its shard."""
        self.slot_names = tuple([tuple([slot.name for slot in group.slots]) for group in traits.groups])
        """Names of the slots of each parameter group."""
        self._segment_stops = [segment.stop for segment in self.segments]
        self._within: dict[tuple[int, int], tuple[Segment, ...]] = {}

        self._scalars: list[ScalarState | None] = [None] * len(flat.slots)
        self._restored: list[torch.Tensor] = []
        """Scalars of `set_scalars`, allocated on its caller's stream, that no update is known to read."""
        self._updated_elsewhere: set[int] = set()  # parameters that another rank, their owner, has updated

    @classmethod
    def allocate(
        cls,
        allocator: Allocator,
        flat: FlatLayout,
        rank: int,
        traits: OptimizerTraits,
        tier: Tier,
        *,
        master_dtype: torch.dtype | None,
        groups: Sequence[int | None] | None = None,
    ) -> FlatStates:
        """Allocates pages in `tier` for the master parameter (unless `master_dtype` is None) and every slot.

        The bytes are not initialised: the caller fills the master parameter, the first step fills the slots.

        Raises:
            CapacityError: the tier has too few pages.
        """
        name = f"{flat.unit}/{flat.index}"
        master = None
        if master_dtype is not None:
            master = allocator.allocate(f"{name}/master", flat.shard_numel, master_dtype, tier, shared_tail=True)
        slots = {
            slot.name: allocator.allocate(f"{name}/{slot.name}", slot.numel, slot.dtype, tier, shared_tail=True)
            for slot in lay_out_states(flat, traits, layout_groups(flat) if groups is None else groups)
        }
        return cls(flat, rank, traits, master=master, slots=slots, groups=groups)

    def release(self, allocator: Allocator) -> None:
        """Releases the pages. The object must not be used afterwards."""
        for tensor in self.tensors():
            allocator.release(tensor)

    def tensors(self) -> tuple[PagedTensor, ...]:
        """The paged tensors: the master parameter, if there is one, and the slots."""
        return (*((self.master,) if self.master is not None else ()), *self.slots.values())

    def elements(self, name: str) -> PagedTensor | EncodedTensor:
        """A slot as the optimizer's elements: the paged tensor, or one that decodes."""
        slot, encoding = self.slots[name], self.encodings.get(name)
        return slot if encoding is None else EncodedTensor(slot, encoding)

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a state as the optimizer has it, whichever rank stores it."""
        layout = self.everywhere[name]
        return layout.dtype if layout.encoding is None else VALUES_DTYPE

    def home(self) -> Tier | None:
        """Tier of the master states; None if there are none (plain SGD in a true precision)."""
        tensors = self.tensors()
        return tensors[0].tier if tensors else None

    def owns(self, parameter: int) -> bool:
        """Whether this rank keeps the scalars of a parameter of the flat: its owner does or, without owners, every rank."""
        return not self.flat.shares or parameter in self.whole

    def state_names(self, parameter: int) -> tuple[str, ...]:
        """Names of the slots that have a state of a parameter of the flat."""
        group = self.groups[parameter]
        if group is None:
            return ()
        if not self.traits.whole:
            return self.slot_names[group]
        return tuple(self.traits.groups[group].state_shapes[self.flat.slots[parameter].spec.shape])

    def own_shape(self, name: str, parameter: int) -> Shape | None:
        """Shape of a parameter's state where states have shapes of their own, else None."""
        own = self.everywhere[name].own
        return None if own is None else own.shapes[parameter]

    def bytes_of_ranks(self, ranks: int) -> int:
        """Bytes of the states, as the optimizer has them, of `ranks` ranks that each have a shard like this one or own some
        of the flat's parameters."""
        return sum(
            self.dtype_of(name).itemsize
            * (self.flat.shard_numel * ranks if layout.own is None else layout.own.shares[-1])
            for name, layout in self.everywhere.items()
        )

    def own_state(self, name: str, parameter: int, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
        """A parameter's state in its own shape, as a view of `tensor`, the elements of its slot from `first` on."""
        own = self.layouts[name].own
        if own is None:
            raise InternalError(f"states {name!r} of {self.flat.unit}/{self.flat.index} have no shapes of their own")
        return own.view(tensor, parameter, own.first + first)

    def scalars(self, parameter: int) -> ScalarState | None:
        """Scalars of a parameter of the flat; None before its first update, and where another rank owns it."""
        return self._scalars[parameter]

    def remembers(self, parameter: int) -> bool:
        """Whether this rank, or the owner, has any state from earlier updates of a parameter of the flat."""
        scalars, names = self._scalars[parameter], self.state_names(parameter)
        if scalars is not None:
            return bool(scalars.values or names)
        has_state = names or any(group.scalars for group in self.traits.groups)
        return bool(has_state) and parameter in self._updated_elsewhere

    def set_scalars(self, parameter: int, values: Mapping[str, Any] | None) -> None:
        """Restores a parameter's scalars (None: as if never updated) if this rank keeps them. The caller restores its
        slots."""
        self._scalars[parameter] = None
        self._updated_elsewhere.discard(parameter)
        if values is None or not self.owns(parameter):
            self._updated_elsewhere.update([] if values is None else [parameter])
            return
        state = frozen_scalars({name: self._beside(parameter, name, value) for name, value in values.items()})
        for known in self._scalars:
            if known is not None and known.same_as(state):
                state = known
                break
        if state not in self._scalars:
            self._restored += [value for value in state.values.values() if isinstance(value, torch.Tensor)]
        self._scalars[parameter] = state

    def record_use_of_restored(self, backend: Backend) -> None:
        """Records the current stream, on which an update reads the scalars, as a user of those that another stream has
        allocated: the update frees them."""
        for value in self._restored:
            backend.record_use(value)
        self._restored.clear()

    def _beside(self, parameter: int, name: str, value: Any) -> Any:
        """A scalar where the optimizer would have made it; it may have been updated on another device before."""
        group = self.groups[parameter]
        if group is None or not isinstance(value, torch.Tensor):
            return value
        return value.to(self.traits.device if name in self.traits.groups[group].scalars_beside else "cpu")

    def regroup(self, groups: Sequence[int | None]) -> None:
        """Moves parameters to other parameter groups. No job of the flat may be running.

        Raises:
            UsageError: a new group keeps other states than the old one; nothing has changed.
        """
        for index, (old, new) in enumerate(zip(self.groups, groups, strict=True)):
            if old is not None and new is not None and self._states_in(index, old) != self._states_in(index, new):
                raise UsageError(
                    f"parameter {self.flat.slots[index].spec.name} was moved from parameter group {old} to {new} of "
                    f"{self.traits.name}, which keep different states ({_listed(self.slot_names[old])}, and "
                    f"{_listed(self.slot_names[new])}); give the groups the same kind of settings from the start (e.g. a "
                    f"tiny momentum), or end this fit and start another one"
                )
        self.groups = tuple(groups)

    def _states_in(self, parameter: int, group: int) -> object:
        """Names of the states that a parameter has in a group, with their shapes if states have shapes of their own."""
        shapes = self.traits.groups[group].state_shapes.get(self.flat.slots[parameter].spec.shape)
        return shapes if self.traits.whole else set(self.slot_names[group])

    def advance_whole(self, scalars: Mapping[int, ScalarState | None], present: Sequence[bool]) -> None:
        """Sets the scalars of parameters that were updated whole, after their step.

        Args:
            scalars: by index in the flat, the scalars of the parameters that this rank updated. Their owners have updated
                the others that had a gradient.
            present: for each parameter, whether it had a gradient.
        """
        for index, group in enumerate(self.groups):
            if index in scalars:
                self._scalars[index] = scalars[index]
            elif group is not None and present[index] and not self.owns(index):
                self._updated_elsewhere.add(index)

    def advance(self, successors: Mapping[tuple[int, int], ScalarState | None], present: Sequence[bool]) -> None:
        """Sets every updated parameter's scalars to those after the step.

        Args:
            successors: by clock (`clocks`), the scalars after the step.
            present: for each parameter, whether it had a gradient.
        """
        for index, group in enumerate(self.groups):
            if group is not None and present[index]:
                self._scalars[index] = successors[group, id(self._scalars[index])]

    def clocks(self, present: Sequence[bool]) -> dict[tuple[int, int], ScalarState | None]:
        """The scalars of parameters with a gradient, by clock: group and identity of the scalars.

        Parameters with equal clocks go through the same update.
        """
        found: dict[tuple[int, int], ScalarState | None] = {}
        for group, scalars, here in zip(self.groups, self._scalars, present, strict=True):
            if group is not None and here:
                found[group, id(scalars)] = scalars
        return found

    def started(self, start: int, numel: int) -> bool:
        """Whether any slot element in [start, start + numel) of the shard has state already."""
        return any(self._scalars[each.parameter] is not None for each in self.segments_within(start, start + numel))

    def updates(self, start: int, numel: int, present: Sequence[bool]) -> bool:
        """Whether any of elements [start, start + numel) of the shard is updated. Args: as of `runs`."""
        for segment in self.segments_within(start, start + numel):
            if self.groups[segment.parameter] is not None and present[segment.parameter]:
                return True
        return False

    def runs(self, start: int, numel: int, present: Sequence[bool]) -> list[StateRun]:
        """The runs of elements [start, start + numel) of the shard, in order (I4).

        Args:
            start: first element, a multiple of ALIGN_NUMEL.
            numel: length; it ends at a multiple of ALIGN_NUMEL or at the end of the shard.
            present: for each parameter of the flat, whether it has a gradient.
        """
        runs: list[StateRun] = []
        pending: list[Segment] = []
        owner: tuple[int, ScalarState | None] | None = None

        def close() -> None:
            nonlocal owner
            if pending and owner is not None:
                first, last = pending[0], pending[-1]
                runs.append(StateRun(owner[0], owner[1], first.start, last.stop - first.start, tuple(pending)))
                pending.clear()
            owner = None

        for segment in self.segments_within(start, start + numel):
            group = self.groups[segment.parameter]
            if group is None or not present[segment.parameter]:
                close()
                continue
            scalars = self._scalars[segment.parameter]
            if owner is None or owner[0] != group or owner[1] is not scalars:
                close()
                owner = (group, scalars)
            pending.append(segment)
            if segment.ragged:
                close()
        close()
        return runs

    def segments_within(self, start: int, stop: int) -> tuple[Segment, ...]:
        """The parameters' stretches in [start, stop) of the shard."""
        if (start, stop) not in self._within:  # cut once: all steps have the same chunks
            after = itertools.islice(self.segments, bisect.bisect_right(self._segment_stops, start), None)
            inside = itertools.takewhile(lambda segment: segment.start < stop, after)
            self._within[start, stop] = tuple(segment.cut(start, stop) for segment in inside)
        return self._within[start, stop]
