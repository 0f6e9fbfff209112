"""What this rank has of each kind of states, where it lies in pages, and of which stretches of which parameters: what sharded
checkpoints are written from.

Owns nothing.

I1: the kinds, and the tensors of each, are the same on all ranks, in one order, however units fetch them; of a parameter
that is a part of a larger one, the tensor is the larger one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_ptm.planning.chunk_bounds import chunk_bounds_of
from lightning_ptm.runtime.full_params.optimizer_values import OptimizerValues, Scalars
from lightning_ptm.runtime.tensors.page_io import Elements
from lightning_ptm.runtime.units.store import FlatStore
from lightning_ptm.storage.index import PARAMETERS, kind_of
from lightning_ptm.terms import chunk_numel
from lightning_ptm.update.flat_states import Segment

if TYPE_CHECKING:
    from lightning_ptm.planning.layout import Family, ParameterSpec
    from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats
    from lightning_ptm.runtime.units.discovery import Unit
    from lightning_ptm.runtime.updates.updates import FlatUpdate


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedFlat:
    """What this rank has of one flat, of one kind of its states: paged elements, and those that lie outside of pages.

    Args:
        parameters: the flat's, by their index.
        segments: stretches of parameters in `paged`.
        outside: (parameter, first element, elements) of stretches that no page holds.
        cells: where stretches of `paged` begin that an update changes at once; None where these are equally long.
    """

    paged: Elements
    parameters: Sequence[ParameterSpec]
    segments: Sequence[Segment]
    outside: Sequence[tuple[ParameterSpec, int, Tensor]]
    cells: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedStates:
    """One kind of states of what a unit's modules hold (`Unit.own`).

    Args:
        unit: its name; kind: `PARAMETERS`, or a slot of the optimizer.
        tensors: (name of the parameter, dtype, whole shape), in the order of the flats if all were the unit's, and none were
            apart because its parameters are parts of larger ones; the same on all ranks.
        flats: where this rank's stretches of them are; a flat of the root may be among those of several units.
    """

    unit: str
    kind: str
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    flats: Sequence[ShardedFlat]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One kind of states of a flat.

    Attributes:
        paged: where they are; None where other ranks have all of them.
        slots: the parameters that have them.
    """

    flat: FlatStore
    paged: Elements | None
    dtype: torch.dtype
    slots: Sequence[int]


class AllShardedStates:
    """See the file's contract. The engine has drained all updates before any of these is called.

    Args:
        original_of: the precise value of a parameter where pages do not have it.
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
        """Every kind of every unit's states, unit by unit; the same on all ranks, but for what of them is here. Collective.

        Args:
            optimizers: with those of the optimizers.
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
            told = [dataclasses.replace(kind, flats=()) for unit in theirs for kind in by_unit.get(unit, ())]
            for kind in self._gathered_flats.communicator.broadcast_object(told, source):
                if all(kind.kind != known.kind for known in by_unit.setdefault(kind.unit, [])):
                    by_unit[kind.unit].append(kind)
        return [kind for unit, _ in units for kind in by_unit[unit]]

    def _kinds_here(self, *, optimizers: bool) -> Iterator[ShardedStates]:
        """Those of the units that this rank holds. Collective where ranks own parameters."""
        scalars = self._optimizer_values.scalars() if optimizers else {}
        weights: dict[int, list[_Part]] = {}
        states: dict[int, list[tuple[str, _Part]]] = {}
        for store in self._gathered_flats.stores:
            for flat in store.flats:
                home = self._gathered_flats.precise_home(flat)
                for unit, part in self._by_unit(_Part(flat, home, home.dtype, range(len(flat.binding.parameters)))):
                    weights.setdefault(unit, []).append(part)
                for number in flat.layout.optimizers if optimizers else ():
                    update = self._gathered_flats.updates[flat.layout.index, number]
                    of = number if number != flat.layout.optimizers[0] else None
                    for name in update.states.everywhere:
                        part = self._states_part(update, name, scalars[flat.layout.index, number])
                        for unit, its in self._by_unit(part):
                            states.setdefault(unit, []).append((kind_of(name, of), its))
        for store in self._gathered_flats.stores:
            if not store.elsewhere:
                yield from self._kinds_of(
                    store.unit, weights.get(store.unit.index, ()), states.get(store.unit.index, ())
                )

    def _kinds_of(
        self, unit: Unit, weights: Sequence[_Part], states: Sequence[tuple[str, _Part]]
    ) -> Iterator[ShardedStates]:
        families = _order_of_families(unit, weights)
        yield self._kind(unit, PARAMETERS, weights, families)
        by_kind: dict[str, list[_Part]] = {}
        for kind, part in sorted(states, key=lambda each: families[each[1].flat.layout.family]):
            by_kind.setdefault(kind, []).append(part)
        for kind, parts in by_kind.items():
            yield self._kind(unit, kind, parts, families)

    def _by_unit(self, part: _Part) -> Iterator[tuple[int, _Part]]:
        """What of it is of which unit's modules; nothing of it, as of what was never updated, is of its flat's unit."""
        slots: dict[int, list[int]] = {} if part.slots else {part.flat.layout.unit: []}
        for slot in part.slots:
            slots.setdefault(self._unit_of[part.flat.layout.slots[slot].spec.name], []).append(slot)
        return ((unit, dataclasses.replace(part, slots=its)) for unit, its in slots.items())

    def strides(self, kind: str) -> dict[str, tuple[int, ...]]:
        """By name, strides of parameters of which this kind of states lies in pages, and so in files of sharded checkpoints,
        in another order than row by row."""
        found: dict[str, tuple[int, ...]] = {}
        for _, binding, flat in self._gathered_flats.flats():
            update = None if flat is None else self._gathered_flats.update_of(flat)
            if kind != PARAMETERS and update is not None and update.states.traits.whole:
                continue
            for slot, parameter in zip(binding.layout.slots, binding.parameters, strict=True):
                if slot.spec.stride is not None and self._original_of(parameter) is None:
                    found[slot.spec.name] = slot.spec.stride
        return found

    @staticmethod
    def _states_part(update: FlatUpdate, name: str, scalars: Scalars) -> _Part:
        """Of parameters that were ever updated."""
        states = update.states
        slots = [slot for slot, known in enumerate(scalars) if known is not None and name in states.state_names(slot)]
        elements = states.elements(name) if name in states.slots else None
        return _Part(update.store, elements, states.dtype_of(name), slots)

    def _kind(self, unit: Unit, name: str, parts: Sequence[_Part], families: Mapping[Family, int]) -> ShardedStates:
        tensors, flats = [], []
        places = {item.name: place for place, item in enumerate(unit.own)}
        for part in parts:
            flat, paged = part.flat, part.paged
            parameters, segments = self._laid(flat, name)
            given = flat.binding.parameters
            whole = {slot: self._original_of(given[slot]) if name == PARAMETERS else None for slot in part.slots}
            for slot, original in whole.items():
                spec = parameters[slot]
                dtype = part.dtype if original is None else original.dtype
                tensors.append(
                    (
                        (families[flat.layout.family], spec.group, places[spec.name]),
                        (spec.name, dtype, spec.whole_shape),
                    )
                )
            paged_segments, outside = [], []
            for segment in segments:
                if segment.parameter not in whole:
                    continue
                original = whole[segment.parameter]
                if original is None:
                    paged_segments.append(segment)
                else:
                    values = original.reshape(-1).narrow(0, segment.parameter_start, segment.numel)
                    outside.append((parameters[segment.parameter], segment.parameter_start, values))
            if paged is not None:
                flats.append(ShardedFlat(paged, parameters, paged_segments, outside, self._cells(flat, name)))
        tensors.sort(key=itemgetter(0))
        return ShardedStates(unit.name, name, [tensor for _, tensor in tensors], flats)

    def _laid(self, flat: FlatStore, kind: str) -> tuple[Sequence[ParameterSpec], Sequence[Segment]]:
        """A flat's parameters, with the shapes that this kind of states has of them, and where these lie."""
        specs = [slot.spec for slot in flat.layout.slots]
        update = self._gathered_flats.update_of(flat)
        if kind == PARAMETERS or update is None or not update.states.traits.whole:
            return specs, self._gathered_flats.segments(flat)
        shapes = [update.states.own_shape(kind, slot) for slot in range(len(specs))]
        own = [dataclasses.replace(spec, shape=shape or spec.shape) for spec, shape in zip(specs, shapes, strict=True)]
        return own, update.states.state_segments(kind)

    def _cells(self, flat: FlatStore, kind: str) -> Sequence[int] | None:
        update = self._gathered_flats.update_of(flat)
        if update is None or not update.states.traits.whole:
            return None
        cuts = chunk_bounds_of(flat.layout, chunk_numel(self._gathered_flats.allocator.page_size))
        if kind == PARAMETERS:
            return cuts.starts
        layout = update.states.layouts[kind]
        stretches = [layout.stretch(start, cuts.length(place)) for place, start in enumerate(cuts.starts)]
        return [start for start, numel in stretches if numel]


def _order_of_families(unit: Unit, parts: Sequence[_Part]) -> dict[Family, int]:
    """As a layout would have the flats of what a unit's modules hold: trained ones first, else in the order of their first
    parameters."""
    families = {
        part.flat.layout.slots[slot].spec.name: part.flat.layout.family for part in parts for slot in part.slots
    }
    in_order = dict.fromkeys(families[item.name] for item in unit.own if item.name in families)
    return {family: place for place, family in enumerate(sorted(in_order, key=lambda family: not family[0]))}
