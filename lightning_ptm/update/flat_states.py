"""Master states of one flat shard: which pages hold what, and which scalars each parameter has.

Owns the scalars of the flat's parameters; names, but does not move, the paged tensors of the master parameter and of
every slot. Knows a flat's layout and nothing of steps in flight.
I1: element i of the master parameter and of every slot belongs to element i of this rank's shard; where parameters are
    updated whole, slots are laid out as state_layout.py has it.
I2: parameters with the same history share one ScalarState object, so comparing runs is comparing identities. Where parameters
    are updated whole, each has its own.
I3: a run never ends inside the ragged tail of a parameter, nor goes on past it: kernels treat the last, partial vector of a
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
from lightning_ptm.update.state_encoding import VALUES_DTYPE, EncodedTensor
from lightning_ptm.update.state_layout import lay_out_states, layout_groups, states_of_all_ranks
from lightning_ptm.update.trial.traits import OptimizerTraits, ScalarState, Shape, frozen_scalars

if TYPE_CHECKING:
    from lightning_ptm.memory.allocator import Allocator
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.planning.layout import FlatLayout


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one parameter in a shard; all in elements.

    Attributes:
        parameter: index of the parameter in its flat.
        start: first element in the shard.
        parameter_start: first element in the parameter.
        numel: length.
        ragged: it holds the parameter's last element and the parameter's length is no multiple of ALIGN_NUMEL.
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
        """The part of it in [start, stop) of the shard; itself when that is all of it."""
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
    """The parameters' stretches in a rank's shard, by position; stretches that touch in both are joined."""
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
        traits: what the optimizer keeps.
        master: the master parameter, or None when the compute parameter is the truth and is updated in place
            ("true" precisions).
        slots: by name, the paged tensors that `lay_out_states` names.
        groups: parameter group of each of the flat's parameters within the optimizer, None for one that this optimizer
            does not update. Defaults to the layout's groups: right when there is one optimizer.
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
        """Where states lie, by name; of some of them, only other ranks may have any."""
        self.layouts = {name: layout for name, layout in self.everywhere.items() if layout.numel}
        """Where what is in which of `slots`, by name."""
        if flat.shares and flat.rank != rank:
            raise InternalError(f"flat {flat.unit}/{flat.index} is laid out for rank {flat.rank}, not for {rank}")
        known = {name: layout.encoding for name, layout in self.layouts.items()}
        self.encodings = {name: encoding for name, encoding in known.items() if encoding is not None}
        """Of the slots that are not in pages as the optimizer keeps them, by name."""
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
        """By place in the flat, the parameters that this rank updates as a whole; they start in its shard where told."""
        self.slot_names = tuple(tuple(slot.name for slot in group.slots) for group in traits.groups)
        """Names of the slots of each parameter group."""
        self._segment_stops = [segment.stop for segment in self.segments]
        self._within: dict[tuple[int, int], tuple[Segment, ...]] = {}

        self._scalars: list[ScalarState | None] = [None] * len(flat.slots)
        self._updated_elsewhere: set[int] = set()  # parameters that their owner, another rank, has updated

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
        """Take pages in `tier` for the master parameter (unless `master_dtype` is None) and every slot.

        The bytes are not initialised: the master parameter is the caller's to fill, slots are filled by the first step.

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
        """Give the pages back. The object is of no use afterwards."""
        for tensor in self.tensors():
            allocator.release(tensor)

    def tensors(self) -> tuple[PagedTensor, ...]:
        """The master parameter, when there is one, and the slots."""
        return (*((self.master,) if self.master is not None else ()), *self.slots.values())

    def elements(self, name: str) -> PagedTensor | EncodedTensor:
        """A slot, as the optimizer's elements."""
        slot, encoding = self.slots[name], self.encodings.get(name)
        return slot if encoding is None else EncodedTensor(slot, encoding)

    def dtype_of(self, name: str) -> torch.dtype:
        """As the optimizer has a state, on whatever rank it lies."""
        layout = self.everywhere[name]
        return layout.dtype if layout.encoding is None else VALUES_DTYPE

    def home(self) -> Tier | None:
        """Tier of the master states; None when there are none (plain SGD in a true precision)."""
        tensors = self.tensors()
        return tensors[0].tier if tensors else None

    def owns(self, parameter: int) -> bool:
        """Whether this rank keeps the scalars of the flat's parameter at an index: every rank does, or its owner alone."""
        return not self.flat.shares or parameter in self.whole

    def state_names(self, parameter: int) -> tuple[str, ...]:
        """Names of the slots that have a state of the flat's parameter at an index."""
        group = self.groups[parameter]
        if group is None:
            return ()
        if not self.traits.whole:
            return self.slot_names[group]
        return tuple(self.traits.groups[group].state_shapes[self.flat.slots[parameter].spec.shape])

    def own_shape(self, name: str, parameter: int) -> Shape | None:
        """Shape of a state of a parameter that has it, where that is not the parameter's."""
        own = self.everywhere[name].own
        return None if own is None else own.shapes[parameter]

    def bytes_of_ranks(self, ranks: int) -> int:
        """Bytes of the states of so many ranks, all of which have a shard like this or own some of its parameters, as the
        optimizer has them."""
        return sum(
            self.dtype_of(name).itemsize
            * (self.flat.shard_numel * ranks if layout.own is None else layout.own.shares[-1])
            for name, layout in self.everywhere.items()
        )

    def own_state(self, name: str, parameter: int, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
        """A state of a parameter, in its own shape, as a view of elements of its slot from `first` on."""
        own = self.layouts[name].own
        if own is None:
            raise InternalError(f"states {name!r} of {self.flat.unit}/{self.flat.index} have no shapes of their own")
        return own.view(tensor, parameter, own.first + first)

    def state_segments(self, name: str) -> Sequence[Segment]:
        """Which parameters' states lie where in a slot; of those that this rank owns."""
        own = self.everywhere[name].own
        if own is None:
            return self.segments
        return [
            Segment(parameter, own.starts[parameter] - own.first, 0, math.prod(shape), ragged=False)
            for parameter in self.whole
            if (shape := own.shapes[parameter]) is not None
        ]

    def scalars(self, parameter: int) -> ScalarState | None:
        """Scalars of the flat's parameter at an index; None before its first update, and where another rank owns it."""
        return self._scalars[parameter]

    def remembers(self, parameter: int) -> bool:
        """Whether this rank, or the owner, keeps anything of earlier updates of the flat's parameter at an index."""
        scalars, names = self._scalars[parameter], self.state_names(parameter)
        if scalars is not None:
            return bool(scalars.values or names)
        kept = names or any(group.scalars for group in self.traits.groups)
        return bool(kept) and parameter in self._updated_elsewhere

    def set_scalars(self, parameter: int, values: Mapping[str, Any] | None) -> None:
        """Restore a parameter's scalars (None: as if never updated), if they are kept here. Its slots are the caller's to
        restore."""
        self._scalars[parameter] = None
        self._updated_elsewhere.discard(parameter)
        if values is None or not self.owns(parameter):
            self._updated_elsewhere.update([] if values is None else [parameter])
            return
        state = frozen_scalars(values)
        for known in self._scalars:
            if known is not None and known.same_as(state):
                state = known
                break
        self._scalars[parameter] = state

    def regroup(self, groups: Sequence[int | None]) -> None:
        """Parameters are in other groups from now on; no job of the flat is in hand.

        Raises:
            UsageError: a new group keeps other states than the old one; nothing has changed.
        """
        for index, (old, new) in enumerate(zip(self.groups, groups, strict=True)):
            if old is not None and new is not None and self._kept(index, old) != self._kept(index, new):
                raise UsageError(
                    f"parameter {self.flat.slots[index].spec.name} was moved from parameter group {old} to {new} of "
                    f"{self.traits.name}, which keep different states ({_listed(self.slot_names[old])}, and "
                    f"{_listed(self.slot_names[new])}); give the groups the same kind of settings from the start (e.g. a "
                    f"tiny momentum), or end this fit and start another one"
                )
        self.groups = tuple(groups)

    def _kept(self, parameter: int, group: int) -> object:
        """What a parameter has in a group: names of states, and their shapes where these are own."""
        kept = self.traits.groups[group].state_shapes.get(self.flat.slots[parameter].spec.shape)
        return kept if self.traits.whole else set(self.slot_names[group])

    def advance_whole(self, scalars: Mapping[int, ScalarState | None], present: Sequence[bool]) -> None:
        """Parameters that were updated whole have these scalars from now on, by index; of those that had a gradient
        (`present`, by index), owners have updated the others."""
        for index, group in enumerate(self.groups):
            if index in scalars:
                self._scalars[index] = scalars[index]
            elif group is not None and present[index] and not self.owns(index):
                self._updated_elsewhere.add(index)

    def advance(self, successors: Mapping[tuple[int, int], ScalarState | None], present: Sequence[bool]) -> None:
        """Move every updated parameter's scalars on by one step.

        Args:
            successors: scalars after the step by `clock(parameter)`.
            present: for each parameter, whether it had a gradient.
        """
        for index, group in enumerate(self.groups):
            if group is not None and present[index]:
                self._scalars[index] = successors[self.clock(index)]

    def clock(self, parameter: int) -> tuple[int, int]:
        """Group and identity of the scalars: parameters with equal clocks go through the same update."""
        group = self.groups[parameter]
        if group is None:
            raise UsageError(
                f"parameter {parameter} of {self.flat.unit}/{self.flat.index} is not updated by {self.traits.name}"
            )
        return group, id(self._scalars[parameter])

    def started(self, start: int, numel: int) -> bool:
        """Whether any slot element in this stretch of the shard holds state already."""
        return any(self._scalars[each.parameter] is not None for each in self.segments_within(start, start + numel))

    def runs(self, start: int, numel: int, present: Sequence[bool]) -> list[StateRun]:
        """Runs of a stretch of the shard, in order (I3).

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
            behind = itertools.islice(self.segments, bisect.bisect_right(self._segment_stops, start), None)
            inside = itertools.takewhile(lambda segment: segment.start < stop, behind)
            self._within[start, stop] = tuple(segment.cut(start, stop) for segment in inside)
        return self._within[start, stop]
