"""Full optimizer states: read from pages for state dicts, and written to pages from state dicts.

Owns nothing. Handles one kind of states of one flat at a time, so that no more than that exists whole in addition to
the pages.

I1: each state has the shape that the optimizer itself would give it; a state of a slice of a larger parameter has the
larger one's shape. I2: all methods that do not say otherwise are collective where ranks own whole parameters or hold
other units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.progress import Progress, Seen
from lightning_ptm.runtime.tensors.parts import put_together
from lightning_ptm.runtime.units.store import UnitStore

if TYPE_CHECKING:
    from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats
    from lightning_ptm.runtime.relayout.previous_state import PreviousState
    from lightning_ptm.runtime.units.binding import FlatBinding
    from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate

Scalars = Sequence[dict[str, Any] | None]
"""States other than element-wise ones, by parameter of a flat; None for a parameter that was never updated."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Updated:
    """State of a flat in its optimizer, without the elements in pages.

    Attributes:
        scalars: by parameter, the states that are not element-wise.
        slots: by parameter, the names of its states in pages.
        dtypes: dtypes of states in pages, by name.
    """

    scalars: Scalars
    slots: Sequence[frozenset[str]]
    dtypes: Mapping[str, torch.dtype]


class OptimizerValues:
    """Reads and writes full optimizer states. The engine has drained all updates before each call."""

    def __init__(self, gathered_flats: GatheredFlats, progress: Progress | None = None) -> None:
        self._gathered_flats = gathered_flats
        self._progress = progress or Progress(shown=False)

    # -- reading ------------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[tuple[int, int], Scalars]:
        """Returns the scalars of all parameters of each flat that this rank shares, by (flat, optimizer), also of
        parameters that other ranks own. Collective where ranks own whole parameters."""
        found = {key: _scalars_here(update) for key, update in self._gathered_flats.updates.items()}
        owned = {
            key: update.store.layout
            for key, update in self._gathered_flats.updates.items()
            if update.store.layout.shares
        }
        if not owned:
            return found
        here = {key: _in_ram(found[key]) for key in owned}
        sent = [
            self._gathered_flats.communicator.broadcast_object(here, rank)
            for rank in range(self._gathered_flats.communicator.world_size)
        ]
        for key, flat in owned.items():
            owners = [flat.owner(slot.start) for slot in flat.slots]
            found[key] = [sent[owner][key][place] for place, owner in enumerate(owners)]
        return found

    def _states_of(self, optimizer: int) -> Iterator[tuple[UnitStore, FlatBinding, FlatUpdate | None, _Updated]]:
        """Yields the flats of an optimizer; FlatUpdate is None for those that this rank does not hold."""
        scalars = self.scalars()
        for store, binding, flat in self._gathered_flats.flats:
            if optimizer not in binding.layout.optimizers:
                continue
            key = (binding.layout.index, optimizer)
            update = None if flat is None else self._gathered_flats.updates[key]
            known = None if update is None else _updated(update, scalars[key])
            source = self._gathered_flats.source(store)
            if source is not None:
                sent = None if known is None else dataclasses.replace(known, scalars=_in_ram(known.scalars))
                known = self._gathered_flats.communicator.broadcast_object(sent, source)
            assert known is not None
            yield store, binding, update, known

    def states(
        self,
        optimizer: int,
        copy_of: Callable[[str, Tensor], Tensor] = lambda name, value: value.clone(),
        *,
        last_read: bool = False,
    ) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Yields (parameter, state as the optimizer itself would keep it) of all parameters that were ever updated
        (I1).

        Args:
            copy_of: copies an element-wise state; called with the parameter's name and the state.
            last_read: frees the RAM of each state when it has been copied: this is the last read.
        """
        flats = list(self._states_of(optimizer))
        sizes = [
            binding.layout.padded_numel * sum(dtype.itemsize for dtype in known.dtypes.values())
            for _, binding, _, known in flats
        ]
        with self._progress.bar("gathering optimizer states", sum(sizes)) as seen:
            for (store, binding, update, known), size_bytes in zip(flats, sizes, strict=True):
                states = {slot: _copied(scalars) for slot, scalars in enumerate(known.scalars) if scalars is not None}
                for name in known.dtypes if states else ():
                    whole = None
                    if update is not None:
                        held = self._gathered_flats.states_map(update, name)
                        whole = self._gathered_flats.whole(update.store, held)
                    whole = self._gathered_flats.broadcast(store, binding, whole)
                    for slot, state in states.items():
                        if name in known.slots[slot]:
                            spec = binding.layout.slots[slot].spec
                            view = _state_in(binding, update, name, slot, whole)
                            value = put_together(view, spec.box, self._gathered_flats.communicator)
                            state[name] = copy_of(spec.name, value)
                    del whole  # so that no two of them exist at once
                    paged = update.states.slots.get(name) if last_read and update is not None else None
                    if paged is not None:
                        self._gathered_flats.pages.allocator.discard(paged)
                for slot, state in states.items():
                    yield binding.parameters[slot], state
                seen(size_bytes)

    def scalars_in_order(self, optimizer: int, order: Sequence[nn.Parameter]) -> dict[int, dict[str, Any]]:
        """Returns the scalars of each parameter that was ever updated, by place in `order`."""
        places = {id(parameter): place for place, parameter in enumerate(order)}
        found: dict[int, dict[str, Any]] = {}
        for _, binding, _, known in self._states_of(optimizer):
            for parameter, scalars in zip(binding.parameters, known.scalars, strict=True):
                if scalars is not None:
                    found[places[id(parameter)]] = _copied(scalars)
        return {place: found[place] for place in sorted(found)}

    def has_states(self, optimizer: int) -> bool:
        """Returns whether states of earlier steps are in pages of this rank, or of ranks that own its parameters. Not
        collective."""
        flats = [flat.states for flat in self._gathered_flats.updates.values() if flat.optimizer == optimizer]
        return any(states.remembers(slot) for states in flats for slot in range(len(states.groups)))

    # -- writing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(
        self,
        optimizer: int,
        states: Mapping[int, Mapping[str, Any]],
        *,
        handed: PreviousState | None = None,
        before: int = 0,
    ) -> None:
        """Writes optimizer states by id of parameter. Parameters without an entry start with fresh states. Collective where
        `handed` is given.

        Args:
            handed: pages of the previous engine, whose states are written first. `states` then has what is not in them;
                an empty entry is that of a parameter that was updated and has only states in pages.
            before: the optimizer's number in the previous engine.

        Raises: as `ParameterValues.load_parameters`.
        """
        pages = self._gathered_flats.pages
        flats = [flat for flat in self._gathered_flats.updates.values() if flat.optimizer == optimizer]
        total_bytes = sum(flat.states.elements(name).nbytes for flat in flats for name in flat.states.slots)
        title = "loading optimizer states" if handed is None else "optimizer states into pages"
        with self._progress.bar(title, total_bytes) as seen, pages.operation():
            for flat in flats:
                if handed is not None:
                    for name in flat.states.everywhere:
                        paged = flat.states.slots.get(name)
                        if paged is not None and pages.allocator.is_reused(paged):
                            continue
                        target = self._gathered_flats.states_map(flat, name)
                        handed.write_states(target, flat, name, before, pages, seen)
                self._load_flat(flat, states, seen, keep=handed is not None)

    def _load_flat(self, flat: FlatUpdate, states: Mapping[int, Mapping[str, Any]], seen: Seen, *, keep: bool) -> None:
        """Writes states of one flat.

        Args:
            keep: parameters without a state of some name keep the elements that are in pages.
        """
        binding = flat.store.binding
        per_slot = [states.get(id(parameter)) for parameter in binding.parameters]
        ours = flat.states
        for name in ours.everywhere:
            given = [None if state is None else state.get(name) for state in per_slot]
            given = [value if isinstance(value, Tensor) else None for value in given]
            if ours.traits.whole:
                given = [value if name in ours.state_names(slot) else None for slot, value in enumerate(given)]
            for slot, value in enumerate(given):
                own = ours.own_shape(name, slot)
                if value is not None and not (
                    binding.arrangement.fits(slot, value) if own is None else tuple(value.shape) == own
                ):
                    spec = binding.layout.slots[slot].spec
                    raise ConfigError(
                        f"{name} of {spec.name} has shape {tuple(value.shape)} in the loaded state, and "
                        f"{f'the parameter {spec.whole_shape}' if own is None else f'{own} here'}, so it is of "
                        "another model; build the model with the sizes that it was saved with"
                    )
            if ours.traits.whole:
                given = [None if value is None else value.reshape(-1) for value in given]
                boxes = None
            else:
                given, boxes = binding.arrangement.as_laid(given), binding.arrangement.boxes
            if name in ours.slots and not (keep and all(value is None for value in given)):
                target = self._gathered_flats.states_map(flat, name)
                segments = target.segments(flat.store.communicator.rank)
                self._gathered_flats.pages.fill(target.here(), segments, given, boxes, keep=keep, seen=seen)
        for slot, state in enumerate(per_slot):
            paged_names = ours.state_names(slot) if ours.traits.whole else ours.slots.keys()
            fresh = state is None or not (state or keep)
            scalars = (
                None if fresh or state is None else {name: v for name, v in state.items() if name not in paged_names}
            )
            ours.set_scalars(slot, scalars)


def _state_in(binding: FlatBinding, update: FlatUpdate | None, name: str, slot: int, whole: Tensor) -> Tensor:
    """Returns the state of the parameter of `slot` in its shape, a view of `whole`, which has the states of the
    flat."""
    own = None if update is None else update.states.everywhere[name].own
    return binding.arrangement.view(whole, slot) if own is None else own.view(whole, slot)


def _scalars_here(update: FlatUpdate) -> Scalars:
    known = map(update.states.scalars, range(len(update.store.binding.parameters)))
    return [None if each is None else dict(each.values) for each in known]


def _updated(update: FlatUpdate, scalars: Scalars) -> _Updated:
    states = update.states
    return _Updated(
        scalars=scalars,
        slots=[frozenset(states.state_names(slot)) for slot in range(len(states.groups))],
        dtypes={name: states.dtype_of(name) for name in states.everywhere},
    )


def _in_ram(scalars: Scalars) -> Scalars:
    """Moves tensors to the CPU before they are pickled for other ranks: a pickled CUDA tensor names its rank's
    device."""
    return [
        each and {name: value.cpu() if isinstance(value, Tensor) else value for name, value in each.items()}
        for each in scalars
    ]


def _copied(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in scalars.items()}
