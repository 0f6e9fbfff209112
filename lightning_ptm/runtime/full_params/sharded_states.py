"""The table of contents of a sharded checkpoint: which ranges of which parameters this rank has of each kind of states,
and in which pages they are.

Owns nothing.

I1: the kinds of states, and the tensors of each, are the same on all ranks and in the same order, however units are
fetched. For a parameter that is a slice of a larger one (tensor parallelism), the tensor is the larger one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_ptm.planning.chunks import chunk_bounds_of
from lightning_ptm.runtime.full_params.optimizer_values import OptimizerValues, Scalars
from lightning_ptm.runtime.tensors.page_io import Elements
from lightning_ptm.runtime.units.store import FlatStore
from lightning_ptm.storage.index import PARAMETERS, kind_of
from lightning_ptm.terms import chunk_numel
from lightning_ptm.update.flat_states import Segment

if TYPE_CHECKING:
    from lightning_ptm.planning.layout import Family, ParameterSpec
    from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats, ShardMap
    from lightning_ptm.runtime.units.discovery import Unit
    from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
    from lightning_ptm.update.flat_states import StateLayout


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedFlat:
    """Elements of one kind of states of one flat that this rank has: those in pages, and those that are in no page.

    Args:
        parameters: the flat's parameters; segments refer to them by index.
        segments: ranges of parameters in `paged`.
        outside: (parameter, first element, elements) of ranges that are in no page.
        cells: starts of the ranges of `paged` that one update changes together; None where these ranges have equal
            lengths.
    """

    paged: Elements
    parameters: Sequence[ParameterSpec]
    segments: Sequence[Segment]
    outside: Sequence[tuple[ParameterSpec, int, Tensor]]
    cells: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedStates:
    """One kind of states of the parameters that a unit's modules have (`Unit.own`).

    Args:
        unit: name of the unit.
        kind: `PARAMETERS`, or a slot of the optimizer.
        tensors: (name of the parameter, dtype, whole shape), the same on all ranks, in the order that the flats would
            have if all parameters were the unit's own and none were in a flat apart for being a slice.
        flats: the flats that have this rank's ranges of these tensors; a flat of the root may be listed for several
            units.
    """

    unit: str
    kind: str
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    flats: Sequence[ShardedFlat]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One kind of states of a flat.

    Attributes:
        held: where they are.
        slots: indexes of the parameters that have such states.
        cells: see ShardedFlat.
    """

    flat: FlatStore
    held: ShardMap
    slots: Sequence[int]
    cells: Sequence[int] | None


class AllShardedStates:
    """Lists the states of a run for sharded checkpoints. The engine has drained all updates before each call.

    Args:
        original_of: returns the precise value of a parameter if it is not in pages.
    """

    def __init__(
        self,
        gathered_flats: GatheredFlats,
        optimizer_values: OptimizerValues,
        original_of: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        self._gathered_flats = gathered_flats
        self._optimizer_values = optimizer_values
        self._original_of = original_of
        self._unit_of = {item.name: store.unit.index for store in gathered_flats.stores for item in store.unit.own}

    def kinds(self, *, optimizers: bool) -> Sequence[ShardedStates]:
        """Returns every kind of every unit's states, unit by unit; the same on all ranks but for `flats`. Collective.

        Args:
            optimizers: include the optimizers' states.
        """
        here = list(self._kinds_here(optimizers=optimizers))
        if not self._gathered_flats.holders.by_unit:
            return here
        by_unit: dict[str, list[ShardedStates]] = {}
        for kind in here:
            by_unit.setdefault(kind.unit, []).append(kind)
        units = [(store.unit.name, self._gathered_flats.source(store)) for store in self._gathered_flats.stores]
        for source in sorted({source for _, source in units if source is not None}):
            theirs = [unit for unit, its in units if its == source]
            sent = [dataclasses.replace(kind, flats=()) for unit in theirs for kind in by_unit.get(unit, ())]
            for kind in self._gathered_flats.communicator.broadcast_object(sent, source):
                if all(kind.kind != known.kind for known in by_unit.setdefault(kind.unit, [])):
                    by_unit[kind.unit].append(kind)
        return [kind for unit, _ in units for kind in by_unit[unit]]

    def _kinds_here(self, *, optimizers: bool) -> Iterator[ShardedStates]:
        """Yields the kinds of states of units that this rank holds. Collective where ranks own whole parameters."""
        scalars = self._optimizer_values.scalars() if optimizers else {}
        weights: dict[int, list[_Part]] = {}
        states: dict[int, list[tuple[str, _Part]]] = {}
        for store in self._gathered_flats.stores:
            for flat in store.flats:
                every = range(len(flat.binding.parameters))
                home = _Part(flat, self._gathered_flats.precise_map(flat), every, self._cells(flat))
                for unit, part in self._by_unit(home):
                    weights.setdefault(unit, []).append(part)
                for number in flat.layout.optimizers if optimizers else ():
                    update = self._gathered_flats.updates[flat.layout.index, number]
                    of = number if number != flat.layout.optimizers[0] else None
                    for name in update.states.everywhere:
                        part = self._states_part(update, name, scalars[flat.layout.index, number])
                        for unit, its in self._by_unit(part):
                            states.setdefault(unit, []).append((kind_of(name, of), its))
        for store in self._gathered_flats.stores:
            if not store.remote:
                yield from self._kinds_of(
                    store.unit, weights.get(store.unit.index, ()), states.get(store.unit.index, ())
                )

    def _kinds_of(
        self, unit: Unit, weights: Sequence[_Part], states: Sequence[tuple[str, _Part]]
    ) -> Iterator[ShardedStates]:
        families = _order_of_families(unit, weights)
        yield self._kind(unit, PARAMETERS, weights, families)
        by_kind: dict[str, list[_Part]] = {}
        # States of a flat of the root that were never updated: the root has none of its parameters where ranks divide
        # sequences.
        last = len(families)
        for kind, part in sorted(states, key=lambda each: families.get(each[1].flat.layout.family, last)):
            by_kind.setdefault(kind, []).append(part)
        for kind, parts in by_kind.items():
            yield self._kind(unit, kind, parts, families)

    def _by_unit(self, part: _Part) -> Iterator[tuple[int, _Part]]:
        """Splits a part by the unit whose modules have the parameters. A part without slots (states of a flat that was
        never updated) goes to the flat's own unit."""
        slots: dict[int, list[int]] = {} if part.slots else {part.flat.layout.unit: []}
        for slot in part.slots:
            slots.setdefault(self._unit_of[part.flat.layout.slots[slot].spec.name], []).append(slot)
        return ((unit, dataclasses.replace(part, slots=its)) for unit, its in slots.items())

    def strides(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Returns the strides of parameters whose states of this kind are stored in pages, and so in the files of
        sharded checkpoints, in another order than row by row; by name."""
        found: dict[str, tuple[int, ...]] = {}
        for _, binding, flat in self._gathered_flats.flats:
            update = None if flat is None else self._gathered_flats.update_of(flat)
            if kind != PARAMETERS and update is not None and update.states.traits.whole:
                continue
            for slot, parameter in zip(binding.layout.slots, binding.parameters, strict=True):
                if slot.spec.stride is not None and self._original_of(parameter) is None:
                    found[slot.spec.name] = slot.spec.stride
        return found

    def _states_part(self, update: FlatUpdate, name: str, scalars: Scalars) -> _Part:
        """Returns the states of those parameters that were ever updated."""
        states = update.states
        slots = [slot for slot, known in enumerate(scalars) if known is not None and name in states.state_names(slot)]
        held = self._gathered_flats.states_map(update, name)
        return _Part(update.store, held, slots, self._cells(update.store, states.everywhere[name]))

    def _kind(self, unit: Unit, name: str, parts: Sequence[_Part], families: Mapping[Family, int]) -> ShardedStates:
        tensors, flats = [], []
        places = {item.name: place for place, item in enumerate(unit.own)}
        for part in parts:
            flat, held, parameters = part.flat, part.held, part.held.specs()
            given = flat.binding.parameters
            whole = {slot: self._original_of(given[slot]) if name == PARAMETERS else None for slot in part.slots}
            for slot, original in whole.items():
                spec = parameters[slot]
                dtype = held.dtype if original is None else original.dtype
                tensors.append(
                    (
                        (families[flat.layout.family], spec.group, places[spec.name]),
                        (spec.name, dtype, spec.whole_shape),
                    )
                )
            if held.elements is None:
                continue
            paged_segments, outside = [], []
            for segment in held.segments(flat.communicator.rank):
                if segment.parameter not in whole:
                    continue
                original = whole[segment.parameter]
                if original is None:
                    paged_segments.append(segment)
                else:
                    values = original.reshape(-1).narrow(0, segment.parameter_start, segment.numel)
                    outside.append((parameters[segment.parameter], segment.parameter_start, values))
            flats.append(ShardedFlat(held.elements, parameters, paged_segments, outside, part.cells))
        tensors.sort(key=itemgetter(0))
        return ShardedStates(unit.name, name, [tensor for _, tensor in tensors], flats)

    def _cells(self, flat: FlatStore, states: StateLayout | None = None) -> Sequence[int] | None:
        """Returns the cells of a flat's weights, or of some of its optimizer states."""
        update = self._gathered_flats.update_of(flat)
        if update is None or not update.states.traits.whole:
            return None
        cuts = chunk_bounds_of(flat.layout, chunk_numel(self._gathered_flats.pages.allocator.page_size))
        if states is None:
            return cuts.starts
        stretches = [states.stretch(start, cuts.length(place)) for place, start in enumerate(cuts.starts)]
        return [start for start, numel in stretches if numel]


def _order_of_families(unit: Unit, parts: Sequence[_Part]) -> dict[Family, int]:
    """Returns the order that a layout would give the flats of a unit's parameters: trained ones first, then by their
    first parameter."""
    families = {
        part.flat.layout.slots[slot].spec.name: part.flat.layout.family for part in parts for slot in part.slots
    }
    in_order = dict.fromkeys(families[item.name] for item in unit.own if item.name in families)
    return {family: place for place, family in enumerate(sorted(in_order, key=lambda family: not family[0]))}
