"""Moves whole parameters and optimizer states between the user's hands and pages: first values, `gathered`, state dicts,
and the weights that stay in the module when a run ends.

Owns nothing but references to tensors that the user built, for runs that keep no master copy of them. One flat at a time,
so that no more than a unit exists whole beside the pages (but for `gathered` and `restore`, whose purpose that is).

I1: with several ranks the values of rank 0 count, but for those of files, of which each rank reads what it owns. Every
method is then collective.
I2: the precise value of a parameter is its master where there is one, else its compute parameter.
I3: what some ranks do not hold (experts that others do) they are told by the first rank that holds it; of parts, each by the
first one that holds the same part.
I4: of a parameter that is a part of a larger one, `gathered` and the module at the end of a run have the part, with which the
module computes; what a checkpoint is made of, and what is loaded, is the larger one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.planning.cuts import cuts_of
from lightning_ptm.progress import Progress, Seen, unseen
from lightning_ptm.runtime import pieces
from lightning_ptm.runtime.closed import ClosedParameter
from lightning_ptm.runtime.parts import cut, put_together
from lightning_ptm.runtime.pieces import Elements
from lightning_ptm.runtime.store import FlatStore, UnitStore
from lightning_ptm.storage.index import PARAMETERS, kind_of
from lightning_ptm.terms import chunk_numel
from lightning_ptm.update import Segment, shard_segments

if TYPE_CHECKING:
    from lightning_ptm.comm import Communicator, Communicators
    from lightning_ptm.memory import Allocator, PagedTensor
    from lightning_ptm.planning.holders import Holders
    from lightning_ptm.planning.layout import Family, FlatLayout, ParameterSpec
    from lightning_ptm.runtime.binding import FlatBinding
    from lightning_ptm.runtime.materialize import Read
    from lightning_ptm.runtime.updates import FlatUpdate


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
class ShardedKind:
    """One kind of one unit's states.

    Args:
        unit: its name; kind: `PARAMETERS`, or a slot of the optimizer.
        tensors: (name of the parameter, dtype, whole shape), in the order of the flats if none were apart because its
            parameters are parts of larger ones; the same on all ranks.
        flats: where this rank's stretches of them are.
    """

    unit: str
    kind: str
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    flats: Sequence[ShardedFlat]


def _all_flats(store: UnitStore) -> Iterator[tuple[FlatBinding, FlatStore | None]]:
    """The flats of a unit, in order, whoever holds them; None in place of what this rank has no part in."""
    for flat in store.flats:
        yield flat.binding, flat
    for binding in store.elsewhere:
        yield binding, None


def _state_in(binding: FlatBinding, update: FlatUpdate | None, name: str, slot: int, whole: Tensor) -> Tensor:
    """A state of the parameter of `slot`, in its shape, as a view of `whole`, which holds those of the flat."""
    own = None if update is None else update.states.everywhere[name].own
    return binding.view(whole, slot) if own is None else own.view(whole, slot)


_Scalars = Sequence[dict[str, Any] | None]
"""By parameter of a flat; None for one that was never updated."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Updated:
    """What an optimizer keeps of a flat, but for the elements.

    Attributes:
        slots: by parameter the names of its states in pages.
        dtypes: of these, by name.
    """

    scalars: _Scalars
    slots: Sequence[frozenset[str]]
    dtypes: Mapping[str, torch.dtype]


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


def _scalars_here(update: FlatUpdate) -> _Scalars:
    known = map(update.states.scalars, range(len(update.store.binding.parameters)))
    return [None if each is None else dict(each.values) for each in known]


def _updated(update: FlatUpdate, scalars: _Scalars) -> _Updated:
    states = update.states
    return _Updated(
        scalars=scalars,
        slots=[frozenset(states.state_names(slot)) for slot in range(len(states.groups))],
        dtypes={name: states.dtype_of(name) for name in states.everywhere},
    )


def _in_ram(scalars: _Scalars) -> _Scalars:
    """For other ranks: what is told of a tensor on a device names that device, and theirs is another one."""
    return [
        each and {name: value.cpu() if isinstance(value, Tensor) else value for name, value in each.items()}
        for each in scalars
    ]


def _copied(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in scalars.items()}


def _rounds(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` is less precise than the value."""
    return torch.promote_types(value.dtype, dtype) is not dtype


class Values:
    """Reads and writes whole values. The engine has drained all updates before any of these is called."""

    def __init__(
        self,
        allocator: Allocator,
        communicators: Communicators,
        stores: Sequence[UnitStore],
        flats: Sequence[Sequence[FlatUpdate]],
        holders: Holders,
        progress: Progress | None = None,
    ) -> None:
        self._progress = progress or Progress(shown=False)
        self._allocator = allocator
        self._communicator = communicators.everybody
        self._with_same_parts = communicators.along(holders.everybody.parts.axes)
        self._stores = stores
        self._holders = holders
        self._every_update = {(flat.store.layout.index, flat.optimizer): flat for unit in flats for flat in unit}
        self._updates = {flat: self._every_update[flat, number] for flat, number in reversed(self._every_update)}
        """By flat; of several optimizers', the first's: the others have the same master and segments."""
        self._mixed = any(
            update.states.master is not None and update.states.master.dtype is not update.store.binding.dtype
            for update in self._every_update.values()
        )
        self._originals: dict[int, Tensor] = {}
        self._unknown: dict[int, str] = {}
        """Names, by id, of parameters whose values an earlier run has not put back, until they are loaded."""
        self.resized: dict[str, nn.Parameter] = {}
        """By name, parameters that have other shapes than their pages, which have no part in them any more."""
        self._read_only: set[int] = set()
        """Units, by index, that are gathered, and whose edits are not kept."""

    # -- first values -------------------------------------------------------------------------------------------------

    def bytes_to_lay(self) -> int:
        """Of this rank's pages that `take_over` writes, for all units."""
        return sum(self._bytes_of_homes(flat) for store in self._stores for flat in store.flats)

    @torch.no_grad()
    def take_over(
        self,
        store: UnitStore,
        given: Mapping[int, Read] = MappingProxyType({}),
        *,
        keep_originals: bool = False,
        keep_frozen: bool = False,
        seen: Seen = unseen,
    ) -> None:
        """Lays a unit's parameters into pages; from then on they are views of pages, or released.

        Args:
            given: values that files provide, by id of parameter; they take the place of those that a parameter has, and
                go from the file to the pages a few pages at a time.
            keep_originals: keep the user's tensors too, to put them back at the end (a run that trains nothing).
            keep_frozen: keep those of frozen parameters whose pages are less precise under mixed precision: nothing
                else remembers what the user had, and training must not round what it does not train.
            seen: is told how many more bytes lie in pages.
        """
        for flat in store.flats:
            binding = flat.binding
            keep = keep_originals or (keep_frozen and self._mixed and not flat.layout.trainable)
            keep = keep and flat.layout.code is None  # what their codes are for is that nothing else is kept
            reads = [given.get(id(parameter)) for parameter in binding.parameters]
            if not all(reads):
                # Of a unit that some ranks do not hold, the values of one rank are told to all.
                replicate = not keep_originals or self._source(store) is not None
                self._write_flat(flat, self._built(binding, reads, keep=keep, replicate=replicate), seen)
            if any(reads):
                values = [None if read is None else read() for read in reads]
                for slot, (parameter, value) in enumerate(zip(binding.parameters, values, strict=True)):
                    if keep and value is not None and _rounds(value, binding.dtype):
                        self._originals[id(parameter)] = cut(value, binding.boxes[slot]).to(parameter.dtype, copy=True)
                self._fill(flat, values, seen)
            if flat.resident:
                flat.bind_resident()
            else:
                binding.unbind()
        for binding in store.elsewhere:
            reads = [given.get(id(parameter)) for parameter in binding.parameters]
            if not all(reads):
                self._built(binding, reads, keep=False, replicate=False)  # for those who hold it
            binding.unbind()

    def _tells(self, flat: FlatLayout) -> Communicator:
        """Of the ranks of which the first one's values count (I1), and that tell each other (I3): all, or those that have the
        same parts."""
        return self._with_same_parts if flat.parts > 1 else self._communicator

    def _built(
        self,
        binding: FlatBinding,
        reads: Sequence[Read | None],
        *,
        keep: bool,
        replicate: bool,
    ) -> Tensor:
        """A flat's parameters as they are in the first rank's memory, (padded_numel,); zeros for those that files provide."""
        source_dtype = torch.float64 if binding.dtype is torch.float64 else torch.float32
        whole = torch.zeros(binding.layout.padded_numel, dtype=source_dtype)
        built = [slot for slot, read in enumerate(reads) if read is None]
        for slot in built:
            parameter = binding.parameters[slot]
            if isinstance(parameter, ClosedParameter):
                self._unknown[id(parameter)] = binding.layout.slots[slot].spec.name
                binding.view(whole, slot).fill_(float("nan"))
                continue
            binding.view(whole, slot).copy_(parameter.detach())
            if keep and parameter.dtype is not binding.dtype:
                self._originals[id(parameter)] = parameter.data
        communicator = self._tells(binding.layout)
        communicator.broadcast(whole)
        if replicate and not communicator.alone:
            for slot in built:  # I1
                if id(binding.parameters[slot]) in self._originals:
                    self._originals[id(binding.parameters[slot])].copy_(binding.view(whole, slot))
        return whole

    # -- reading ------------------------------------------------------------------------------------------------------

    def precise(self, flat: FlatStore) -> Tensor:
        """The precise values of a flat, whole, on the CPU: (padded_numel,)."""
        whole = self._whole(flat, self._precise_home(flat))
        originals = [self._originals.get(id(parameter)) for parameter in flat.binding.parameters]
        wide = torch.float32 if self._mixed and whole.dtype.itemsize < 4 else whole.dtype
        for original in originals:
            wide = wide if original is None else torch.promote_types(wide, original.dtype)
        replaced = flat.binding.replaced()
        whole = whole.to(wide, copy=bool(replaced))
        for slot, value in replaced.items():
            flat.binding.view(whole, slot).copy_(value)
        for slot, original in enumerate(originals):
            if original is not None:
                flat.binding.view(whole, slot).copy_(original)
        return whole

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, precise value) of every parameter, flat by flat; of a part, of the larger one (I4)."""
        for spec, parameter, value in self._parameters():
            yield spec.name, parameter, put_together(value, spec.box, self._communicator)

    def _parameters(self, *, letting_go: bool = False) -> Iterator[tuple[ParameterSpec, nn.Parameter, Tensor]]:
        """
        Args:
            letting_go: masters, which nobody else has ever seen, lose their RAM when they have been read.
        """
        flats = [(store, binding, flat) for store in self._stores for binding, flat in _all_flats(store)]
        sizes = [self._precise_bytes(binding, flat) for _, binding, flat in flats]
        with self._progress.bar("gathering weights", sum(sizes)) as seen:
            for (store, binding, flat), size_bytes in zip(flats, sizes, strict=True):
                whole = self._precise_of(store, binding, flat)
                for slot, parameter in enumerate(binding.parameters):
                    original = self._originals.get(id(parameter))
                    value = binding.view(whole, slot) if original is None else original
                    yield binding.layout.slots[slot].spec, parameter, value
                master = self._master(flat) if letting_go and flat is not None else None
                if master is not None:
                    self._allocator.discard(master)
                seen(size_bytes)

    def _precise_bytes(self, binding: FlatBinding, flat: FlatStore | None) -> int:
        """Of a whole flat; as if in fp32 where only other ranks know."""
        return binding.layout.padded_numel * (4 if flat is None else self._precise_home(flat).dtype.itemsize)

    def _precise_of(self, store: UnitStore, binding: FlatBinding, flat: FlatStore | None) -> Tensor:
        """As `precise`, also of a flat that this rank does not hold."""
        return self._told(store, binding, None if flat is None else self.precise(flat))

    def _told(self, store: UnitStore, binding: FlatBinding, whole: Tensor | None) -> Tensor:
        """Values of a flat, (padded_numel,), that those who hold it have read (I3)."""
        source = self._source(store)
        if source is None:
            assert whole is not None
            return whole
        communicator = self._tells(binding.layout)
        if binding.layout.parts > 1:
            source = self._holders.everybody.parts.ranks.index(source)  # of the first parts, and so of any
        dtype = communicator.broadcast_object(None if whole is None else whole.dtype, source)
        ours = whole is not None and communicator.rank == source
        told = whole if ours and whole is not None else torch.empty(binding.layout.padded_numel, dtype=dtype)
        communicator.broadcast(told, source)
        return told

    def _source(self, store: UnitStore) -> int | None:
        """The rank that tells all others of a unit; None for one that all ranks hold."""
        sharing = self._holders.apart.get(store.unit.index)
        return None if sharing is None else sharing.whole.ranks[0]

    def _scalars(self) -> dict[tuple[int, int], _Scalars]:
        """By flat that this rank shares, and optimizer, of all its parameters, whoever keeps them. Collective where ranks own
        parameters."""
        found = {key: _scalars_here(update) for key, update in self._every_update.items()}
        owned = {key: update.store.layout for key, update in self._every_update.items() if update.store.layout.shares}
        if not owned:
            return found
        here = {key: _in_ram(found[key]) for key in owned}
        told = [self._communicator.broadcast_object(here, rank) for rank in range(self._communicator.world_size)]
        for key, flat in owned.items():
            owners = [flat.owner(slot.start) for slot in flat.slots]
            found[key] = [told[owner][key][place] for place, owner in enumerate(owners)]
        return found

    def _states_of(self, optimizer: int) -> Iterator[tuple[UnitStore, FlatBinding, FlatUpdate | None, _Updated]]:
        """The flats of an optimizer; FlatUpdate is None for those that this rank does not hold."""
        scalars = self._scalars()
        for store in self._stores:
            for binding, flat in _all_flats(store):
                if optimizer not in binding.layout.optimizers:
                    continue
                key = (binding.layout.index, optimizer)
                update = None if flat is None else self._every_update[key]
                known = None if update is None else _updated(update, scalars[key])
                source = self._source(store)
                if source is not None:
                    told = None if known is None else dataclasses.replace(known, scalars=_in_ram(known.scalars))
                    known = self._communicator.broadcast_object(told, source)
                assert known is not None
                yield store, binding, update, known

    def optimizer_states(
        self,
        optimizer: int,
        copy_of: Callable[[str, Tensor], Tensor] = lambda name, value: value.clone(),
        *,
        letting_go: bool = False,
    ) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """(parameter, state as the optimizer itself would keep it) of all parameters that were ever updated; of a part, of
        the larger one (I4).

        Args:
            copy_of: makes the copies of element-wise state, by the parameter's name.
            letting_go: each state loses its RAM when it has been copied: they are read for the last time.
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
                    whole = None if update is None else self._whole_states(update, name)
                    whole = self._told(store, binding, whole)
                    for slot, state in states.items():
                        if name in known.slots[slot]:
                            spec = binding.layout.slots[slot].spec
                            view = _state_in(binding, update, name, slot, whole)
                            value = put_together(view, spec.box, self._communicator)
                            state[name] = copy_of(spec.name, value)
                    del whole  # no two of them at once
                    paged = update.states.slots.get(name) if letting_go and update is not None else None
                    if paged is not None:
                        self._allocator.discard(paged)
                for slot, state in states.items():
                    yield binding.parameters[slot], state
                seen(size_bytes)

    def optimizer_scalars(self, optimizer: int, order: Sequence[nn.Parameter]) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps of each parameter that was ever updated beside element-wise state, by place in `order`."""
        places = {id(parameter): place for place, parameter in enumerate(order)}
        found: dict[int, dict[str, Any]] = {}
        for _, binding, _, known in self._states_of(optimizer):
            for parameter, scalars in zip(binding.parameters, known.scalars, strict=True):
                if scalars is not None:
                    found[places[id(parameter)]] = _copied(scalars)
        return {place: found[place] for place in sorted(found)}

    def has_optimizer_states(self, optimizer: int) -> bool:
        """Whether pages of this rank, or of those that own its parameters, hold anything that an optimizer knows from earlier
        steps. Not collective."""
        flats = [flat.states for flat in self._every_update.values() if flat.optimizer == optimizer]
        return any(states.remembers(slot) for states in flats for slot in range(len(states.groups)))

    def whole_shapes(self) -> dict[int, tuple[int, ...]]:
        """Of every parameter, by its id, the shape that checkpoints have."""
        return {
            id(parameter): binding.layout.slots[slot].spec.whole_shape
            for store in self._stores
            for binding, _ in _all_flats(store)
            for slot, parameter in enumerate(binding.parameters)
        }

    def names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every parameter, each once."""
        for store in self._stores:
            for binding, _ in _all_flats(store):
                for slot, parameter in enumerate(binding.parameters):
                    yield binding.layout.slots[slot].spec.name, parameter

    def strides(self, kind: str) -> dict[str, tuple[int, ...]]:
        """By name, strides of parameters of which this kind of states lies in pages, and so in files of sharded checkpoints,
        in another order than row by row."""
        found: dict[str, tuple[int, ...]] = {}
        for store in self._stores:
            for binding, flat in _all_flats(store):
                update = None if flat is None else self._updates.get(flat.layout.index)
                if kind != PARAMETERS and update is not None and update.states.traits.whole:
                    continue
                for slot, parameter in zip(binding.layout.slots, binding.parameters, strict=True):
                    if slot.spec.stride is not None and id(parameter) not in self._originals:
                        found[slot.spec.name] = slot.spec.stride
        return found

    # -- writing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_parameters(self, values: Mapping[int, Tensor]) -> None:
        """Writes new values by id of parameter; the others keep theirs. Of each, a rank reads what it owns.

        Raises:
            ConfigError: a shape differs; nothing is written then.
        """
        for binding, _, given in self._given(values):
            for slot, value in enumerate(given):
                if value is not None and not binding.fits(slot, value):
                    spec = binding.layout.slots[slot].spec
                    raise ConfigError(
                        f"{spec.name} has shape {spec.whole_shape} here and {tuple(value.shape)} in what is loaded; build "
                        f"the model with the sizes that it was saved with"
                    )
        for known in values:
            self._unknown.pop(known, None)
        total_bytes = sum(self._bytes_of_homes(flat) for _, flat, _ in self._given(values) if flat is not None)
        with self._progress.bar("loading weights", total_bytes) as seen:
            for binding, flat, given in self._given(values):
                if flat is None:
                    continue
                self._fill(flat, given, seen)
                for slot, theirs in binding.replaced().items():
                    if (value := given[slot]) is not None:
                        theirs.copy_(cut(value, binding.boxes[slot]))
                for slot, (parameter, value) in enumerate(zip(binding.parameters, given, strict=True)):
                    original = self._originals.get(id(parameter))
                    if original is not None and value is not None:
                        self._originals[id(parameter)] = cut(value, binding.boxes[slot]).to(original.dtype, copy=True)

    def _given(
        self, values: Mapping[int, Tensor]
    ) -> Iterator[tuple[FlatBinding, FlatStore | None, list[Tensor | None]]]:
        for store in self._stores:
            for binding, flat in _all_flats(store):
                given = [values.get(id(parameter)) for parameter in binding.parameters]
                if any(value is not None for value in given):
                    yield binding, flat, given

    @torch.no_grad()
    def load_optimizer_states(self, optimizer: int, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Writes optimizer states by id of parameter; parameters without one start afresh. Raises as `load_parameters`."""
        flats = [flat for flat in self._every_update.values() if flat.optimizer == optimizer]
        total_bytes = sum(flat.states.elements(name).nbytes for flat in flats for name in flat.states.slots)
        with self._progress.bar("loading optimizer states", total_bytes) as seen:
            for flat in flats:
                self._load_optimizer_states_of(flat, states, seen)

    def _load_optimizer_states_of(self, flat: FlatUpdate, states: Mapping[int, Mapping[str, Any]], seen: Seen) -> None:
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
                if value is not None and not (binding.fits(slot, value) if own is None else tuple(value.shape) == own):
                    spec = binding.layout.slots[slot].spec
                    raise ConfigError(
                        f"{name} of {spec.name} has shape {tuple(value.shape)} in what is loaded, and "
                        f"{f'the parameter {spec.whole_shape}' if own is None else f'{own} here'}; it is of another model"
                    )
            if ours.traits.whole:
                given = [None if value is None else value.reshape(-1) for value in given]
                boxes = None
            else:
                given, boxes = binding.as_laid(given), binding.boxes
            if name in ours.slots:
                segments = ours.state_segments(name)
                pieces.fill(self._allocator, ours.elements(name), segments, given, boxes, keep=False, seen=seen)
        for slot, state in enumerate(per_slot):
            paged_names = ours.state_names(slot) if ours.traits.whole else ours.slots.keys()
            scalars = None if not state else {name: v for name, v in state.items() if name not in paged_names}
            ours.set_scalars(slot, scalars)

    # -- by hand ------------------------------------------------------------------------------------------------------

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of parameters whose values ended with an earlier run, and that nobody has loaded since."""
        return tuple(self._unknown.values())

    def check_known(self) -> None:
        """Raises UsageError: there are such parameters."""
        if self._unknown:
            raise UsageError(
                f"the values of {', '.join(self.unknown[:3])}{'...' if len(self._unknown) > 3 else ''} ended with an earlier "
                f"run, which could not put them back into the module (restore_weights, or too little RAM); give this run a "
                f"ckpt_path, or load the weights before"
            )

    def bytes_to_lend(self, wanted: Collection[int]) -> int:
        """RAM that `gathered` takes for these units, at most."""
        sizes = [
            self._precise_bytes(binding, flat)
            for store in self._stores
            if store.unit.index in wanted
            for binding, flat in _all_flats(store)
            if not binding.lent
        ]
        return sum(sizes) + max(sizes, default=0)  # one flat twice while it is read

    @contextmanager
    def gathered(
        self, wanted: Collection[int], *, write: bool, may_write: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """The parameters of the units in `wanted` whole inside the block, in their precise dtype. Those that a block around
        this one has gathered already are what they are there.

        Args:
            write: edits are kept: those of rank 0, on all ranks; of parts, those of the first rank that has each.
            may_write: asked at the end: whether all ranks are still there.

        Raises:
            UsageError: edits are to be kept, and a block around this one does not keep them.
        """
        chosen = [store for store in self._stores if store.unit.index in wanted]
        forgets = [store.unit.name or "the root" for store in chosen if write and store.unit.index in self._read_only]
        if forgets:
            raise UsageError(
                f"gathered(write=True) inside of gathered(write=False): edits of {', '.join(forgets[:3])} would be lost; "
                f"give the outer block write=True"
            )
        wholes: list[tuple[FlatBinding, FlatStore | None, Tensor]] = []
        lent: set[int] = set()
        try:
            for store in chosen:
                flats = [(binding, flat) for binding, flat in _all_flats(store) if not binding.lent]
                if flats:
                    lent.add(store.unit.index)
                for binding, flat in flats:
                    whole = self._precise_of(store, binding, flat).clone()
                    wholes.append((binding, flat, whole))
                    binding.lend(binding.view(whole, slot) for slot in range(len(binding.parameters)))
            if not write:
                self._read_only |= lent
            yield
        finally:
            self._read_only -= lent
            write = write and may_write()
            for binding, flat, whole in wholes:
                if write:
                    self.resized |= binding.give_up_resized(whole)
                    self._collect_edits(binding, whole)
                    self._tells(binding.layout).broadcast(whole)
                    if flat is not None:
                        self._write_flat(flat, whole)
                        self._renew_originals(flat, whole)
                if flat is None:
                    binding.unbind()
                else:
                    flat.rebind(whole if write else None)

    def follow_shapes(self) -> bool:
        """Whether users have given parameters other shapes (`parameter.data = ...`): what they are now is theirs, until pages
        are laid out anew."""
        for store in self._stores:
            for binding, _ in _all_flats(store):
                self.resized |= {} if binding.lent else binding.give_up_resized()
        return bool(self.resized)

    @contextmanager
    def lent(self, values: Mapping[int, Tensor] | None) -> Iterator[None]:
        """Inside the block every parameter has its value of `values`, by id of parameter, to be read; with None: can be read
        by those who ask for its name alone, and is NaN."""
        bindings = [(binding, flat) for store in self._stores for binding, flat in _all_flats(store)]
        if any(binding.lent for binding, _ in bindings):
            raise UsageError(
                "a checkpoint cannot be made inside of `with strategy.gathered(module):`; end the block before"
            )
        try:
            for binding, _ in bindings:
                binding.lend(binding.nothing() if values is None else [values[id(each)] for each in binding.parameters])
            yield
        finally:
            for binding, flat in bindings:
                if flat is None:
                    binding.unbind()
                else:
                    flat.rebind(None)

    def restore(self) -> None:
        """Gives every parameter storage of its own with its precise value: the module as the user knows it."""
        slots = {
            id(parameter): (binding, slot)
            for store in self._stores
            for binding, _ in _all_flats(store)
            for slot, parameter in enumerate(binding.parameters)
        }
        theirs = {
            id(binding.parameters[slot])
            for store in self._stores
            for binding, _ in _all_flats(store)
            for slot in binding.replaced()
        }
        for _, parameter, value in self._parameters(letting_go=True):
            if id(parameter) in theirs:
                continue  # the user's own storage stays, as anywhere
            binding, slot = slots[id(parameter)]
            binding.restore(slot, value.clone() if id(parameter) not in self._originals else value)
        for binding, _ in slots.values():
            binding.forget()

    def written(self) -> tuple[str, ...]:
        """Names of parameters that were written to by hand since the last step began, where that is lost."""
        bindings = (binding for store in self._stores for binding, _ in _all_flats(store))
        return tuple(binding.written for binding in bindings if binding.written is not None)

    def let_go(self) -> None:
        """Parameters name no page any more, and cannot be read."""
        for store in self._stores:
            for binding, _ in _all_flats(store):
                binding.unbind(ended=True)

    def leave(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Parameters name no page any more, and cannot be read until other pages have them; they keep the shapes, strides and
        dtypes that users know.

        Args:
            dtypes: by id of parameter.
        """
        for store in self._stores:
            for binding, _ in _all_flats(store):
                binding.leave([dtypes[id(parameter)] for parameter in binding.parameters])

    # -- this rank's own ----------------------------------------------------------------------------------------------

    def segments(self, flat: FlatStore) -> Sequence[Segment]:
        """Where this rank's stretches of a flat's parameters lie in its shard."""
        update = self._updates.get(flat.layout.index)
        return update.states.segments if update is not None else shard_segments(flat.layout, flat.communicator.rank)

    def kinds(self, *, optimizers: bool) -> Sequence[ShardedKind]:
        """Every kind of every unit's states, unit by unit; the same on all ranks, but for what of them is here. Collective.

        Args:
            optimizers: with those of the optimizers.
        """
        here = list(self.kinds_here(optimizers=optimizers))
        if not self._holders.apart:
            return here
        by_unit: dict[str, list[ShardedKind]] = {}
        for kind in here:
            by_unit.setdefault(kind.unit, []).append(kind)
        units = [(store.unit.name, self._source(store)) for store in self._stores]
        for source in sorted({source for _, source in units if source is not None}):
            theirs = [unit for unit, its in units if its == source]
            told = [dataclasses.replace(kind, flats=()) for unit in theirs for kind in by_unit.get(unit, ())]
            for kind in self._communicator.broadcast_object(told, source):
                if all(kind.kind != known.kind for known in by_unit.setdefault(kind.unit, [])):
                    by_unit[kind.unit].append(kind)
        return [kind for unit, _ in units for kind in by_unit[unit]]

    def kinds_here(self, *, optimizers: bool) -> Iterator[ShardedKind]:
        """Those of the units that this rank holds. Collective where ranks own parameters."""
        scalars = self._scalars() if optimizers else {}
        for store in self._stores:
            if store.elsewhere:
                continue
            homes = [(flat, self._precise_home(flat)) for flat in store.flats]
            weights = [_Part(flat, home, home.dtype, range(len(flat.binding.parameters))) for flat, home in homes]
            yield self._kind(store, PARAMETERS, weights)
            by_kind: dict[str, list[_Part]] = {}
            for flat in store.flats if optimizers else ():
                for number in flat.layout.optimizers:
                    update = self._every_update[flat.layout.index, number]
                    of = number if number != flat.layout.optimizers[0] else None
                    for name in update.states.everywhere:
                        part = self._states_part(update, name, scalars[flat.layout.index, number])
                        by_kind.setdefault(kind_of(name, of), []).append(part)
            for kind, parts in by_kind.items():
                yield self._kind(store, kind, parts)

    @staticmethod
    def _states_part(update: FlatUpdate, name: str, scalars: _Scalars) -> _Part:
        """Of parameters that were ever updated."""
        states = update.states
        slots = [slot for slot, known in enumerate(scalars) if known is not None and name in states.state_names(slot)]
        elements = states.elements(name) if name in states.slots else None
        return _Part(update.store, elements, states.dtype_of(name), slots)

    def _kind(self, store: UnitStore, name: str, parts: Sequence[_Part]) -> ShardedKind:
        tensors, flats = [], []
        places = {item.name: place for place, item in enumerate(store.unit.parameters)}
        families: dict[Family, int] = {}
        for part in parts:
            flat, paged = part.flat, part.paged
            parameters, segments = self._laid(flat, name)
            whole = {slot: self._original(flat, slot, name) for slot in part.slots}
            for slot, original in whole.items():
                spec = parameters[slot]
                family = families.setdefault(flat.layout.family, len(families))
                dtype = part.dtype if original is None else original.dtype
                tensors.append(((family, spec.group, places[spec.name]), (spec.name, dtype, spec.whole_shape)))
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
        return ShardedKind(store.unit.name, name, [tensor for _, tensor in tensors], flats)

    def _laid(self, flat: FlatStore, kind: str) -> tuple[Sequence[ParameterSpec], Sequence[Segment]]:
        """A flat's parameters, with the shapes that this kind of states has of them, and where these lie."""
        specs = [slot.spec for slot in flat.layout.slots]
        update = self._updates.get(flat.layout.index)
        if kind == PARAMETERS or update is None or not update.states.traits.whole:
            return specs, self.segments(flat)
        shapes = [update.states.own_shape(kind, slot) for slot in range(len(specs))]
        own = [dataclasses.replace(spec, shape=shape or spec.shape) for spec, shape in zip(specs, shapes, strict=True)]
        return own, update.states.state_segments(kind)

    def _cells(self, flat: FlatStore, kind: str) -> Sequence[int] | None:
        update = self._updates.get(flat.layout.index)
        if update is None or not update.states.traits.whole:
            return None
        cuts = cuts_of(flat.layout, chunk_numel(self._allocator.page_size))
        if kind == PARAMETERS:
            return cuts.starts
        layout = update.states.layouts[kind]
        stretches = [layout.stretch(start, cuts.length(place)) for place, start in enumerate(cuts.starts)]
        return [start for start, numel in stretches if numel]

    def _original(self, flat: FlatStore, slot: int, kind: str) -> Tensor | None:
        return self._originals.get(id(flat.binding.parameters[slot])) if kind == PARAMETERS else None

    # -- pages --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _collect_edits(binding: FlatBinding, whole: Tensor) -> None:
        # `param.data = x` inside the block replaces the view; bring such values home too.
        with torch.no_grad():
            for slot, parameter in enumerate(binding.parameters):
                view = binding.view(whole, slot)
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(cut(parameter, binding.boxes[slot]))

    def _renew_originals(self, flat: FlatStore, whole: Tensor) -> None:
        for slot, parameter in enumerate(flat.binding.parameters):
            original = self._originals.get(id(parameter))
            if original is not None:
                self._originals[id(parameter)] = flat.binding.view(whole, slot).to(original.dtype, copy=True)

    def _precise_home(self, flat: FlatStore) -> Elements:
        return self._master(flat) or flat.values

    def _master(self, flat: FlatStore) -> PagedTensor | None:
        update = self._updates.get(flat.layout.index)
        return update.states.master if update is not None else None

    def _bytes_of_homes(self, flat: FlatStore) -> int:
        master = self._master(flat)
        return flat.values.nbytes + (0 if master is None else master.nbytes)

    def _fill(self, flat: FlatStore, given: Sequence[Tensor | None], seen: Seen) -> None:
        """Writes those of a flat's parameters that are given, whole, reading of each what this rank owns."""
        master, segments = self._master(flat), self.segments(flat)
        given, boxes = flat.binding.as_laid(given), flat.binding.boxes
        if master is not None:
            pieces.fill(self._allocator, master, segments, given, boxes, seen=seen)
        through = None if master is None else master.dtype
        pieces.fill(self._allocator, flat.values, segments, given, boxes, through=through, seen=seen)

    def _write_flat(self, flat: FlatStore, whole: Tensor, seen: Seen = unseen) -> None:
        shard = self._shard(flat, whole)
        if (master := self._master(flat)) is not None:
            pieces.write(self._allocator, master, shard, seen=seen)
        pieces.write(self._allocator, flat.values, shard, seen=seen)

    def _shard(self, flat: FlatStore, whole: Tensor) -> Tensor:
        if not flat.layout.shared:
            return whole
        pieces = flat.layout.pieces(flat.communicator.rank)
        return torch.cat([whole[piece.full_start : piece.full_start + piece.numel] for piece in pieces])

    def _whole(self, flat: FlatStore, paged: Elements) -> Tensor:
        shard = self.read(paged)
        if not flat.layout.shared:
            return shard
        device = flat.binding.device  # where the collectives' backend works
        full = torch.empty(flat.layout.padded_numel, dtype=shard.dtype, device=device)
        flat.communicator.all_gather(shard.to(device), full, flat.layout).wait()
        return full.cpu()

    def _whole_states(self, update: FlatUpdate, name: str) -> Tensor:
        """All ranks' states of one name of a flat, on the CPU."""
        flat, layout, paged = update.store, update.states.everywhere[name], update.states.slots.get(name)
        if layout.own is None or not flat.layout.shared:
            return self._whole(flat, update.states.elements(name))
        device = flat.binding.device
        full = torch.empty(layout.own.shares[-1], dtype=layout.dtype, device=device)
        share = None if paged is None else self.read(paged).to(device)
        flat.communicator.gather_shares(share, full, layout.own.shares).wait()
        return full.cpu()

    def read(self, paged: Elements) -> Tensor:
        """A paged tensor's values, on the CPU."""
        return pieces.read(self._allocator, paged)
