"""Full parameters in the user's module: gathered for a `with` block (`strategy.gathered`), as FSDP's summon_full_params
does, or for good when a run ends.

`SummonFullParams` checks that all ranks take part and that RAM has room. `GatheredParameters` owns which units are gathered
read-only, and which parameters the user has given other shapes; values are read and written through
parameter_values.py. `trained_in` knows which parameters runs of this process have trained: such values may exist nowhere
else, so a run never drops them.

I1: parameters that an outer block of `gathered` has gathered stay as they are in an inner block.
I2: of a parameter that is a slice of a larger one (tensor parallelism), the user gets the slice, as the module computes
with.
I3: before parameters are gathered, all ranks have drained their updates and released all units. A block with edits ends
when all ranks have reached its end: what follows is collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CapacityError, RankError, UsageError
from lightning_ptm.memory.fingerprint import fingerprint
from lightning_ptm.memory.quantization import rounded
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.full_params.parameter_values import ParameterValues
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.ranks.barriers import BarrierReason, Barriers
from lightning_ptm.runtime.relayout.gathered_flats import flats_of
from lightning_ptm.runtime.tensors.parts import cut
from lightning_ptm.runtime.units.binding import ENDED, FlatBinding
from lightning_ptm.runtime.units.discovery import overlap
from lightning_ptm.runtime.units.store import FlatStore, UnitStore
from lightning_ptm.torch_internals import parameters_in

if TYPE_CHECKING:
    from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats


_TRAINED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Names of trained parameters by module, for as long as the module lives: a weak reference to a parameter would keep it from
being exchanged (`torch.utils.swap_tensors`)."""


def note(root: nn.Module, trained: Collection[int]) -> None:
    """Records that optimizers update these parameters of a module. Args: trained: ids of parameters."""
    for module in root.modules():
        names = {name for name, each in parameters_in(module).items() if id(each) in trained}
        if names:
            _TRAINED.setdefault(module, set()).update(names)


def trained_in(root: nn.Module) -> frozenset[int]:
    """Returns the ids of those parameters of a module that a run has trained."""
    # The `_parameters` of a scripted module is a class without `get`.
    return frozenset(
        id(parameters_in(module)[name])
        for module in root.modules()
        for name in _TRAINED.get(module, ())
        if name in parameters_in(module)
    )


class GatheredParameters:
    """Gathers parameters into the user's module and takes edits back. The engine has drained all updates before each
    call.

    Args:
        trained: ids of parameters that a run of this process, this one or an earlier one, has trained.
    """

    def __init__(self, gathered_flats: GatheredFlats, values: ParameterValues, trained: Collection[int] = ()) -> None:
        self._gathered_flats = gathered_flats
        self._values = values
        self._trained = trained
        self._places = {
            id(parameter): (binding, slot)
            for binding in gathered_flats.bindings
            for slot, parameter in enumerate(binding.parameters)
        }
        self.resized: dict[str, nn.Parameter] = {}
        """Parameters by name whose shape the user has changed; pages do not hold their values any more."""
        self._read_only: set[int] = set()
        """Indexes of units that are gathered and whose edits are discarded."""

    # -- for a block --------------------------------------------------------------------------------------------------

    def untrained(self) -> list[FlatBinding]:
        """Returns the flats in which no run has trained a parameter."""
        return [
            each
            for each in self._gathered_flats.bindings
            if not any(id(parameter) in self._trained for parameter in each.parameters)
        ]

    @contextmanager
    def absent(self, left_out: Collection[FlatBinding], why: str) -> Iterator[None]:
        """Context in which parameters of these flats cannot be read. `why` says why, and what to do; their guard raises
        it."""
        for binding in left_out:
            binding.lose(why)
        try:
            yield
        finally:
            for binding in left_out:
                binding.lose("")

    def bytes_to_gather(self, wanted: Collection[int], left_out: Collection[FlatBinding] = ()) -> int:
        """Returns the RAM that `gathered` takes for these units, at most."""
        sizes = [
            self._values.precise_bytes(binding, flat)
            for store in self._gathered_flats.stores
            if store.unit.index in wanted
            for binding, flat in flats_of(store)
            if not binding.summoned and binding not in left_out
        ]
        return sum(sizes) + max(sizes, default=0)  # one flat exists twice while it is read

    @contextmanager
    def gathered(
        self,
        wanted: Collection[int],
        *,
        write: bool,
        may_write: Callable[[], bool] = lambda: True,
        left_out: Collection[FlatBinding] = (),
    ) -> Iterator[None]:
        """Context in which the parameters of the units in `wanted` are full tensors in their precise dtype. Parameters
        that an outer block has gathered stay as they are (I1).

        Args:
            write: edits are kept: those of rank 0, on all ranks; of a slice, those of the first rank that has it.
            may_write: called at the end of the block: whether all ranks still run.
            left_out: flats of these units that are not gathered.

        Raises:
            UsageError: edits are to be kept, and an outer block discards them.
        """
        chosen = [store for store in self._gathered_flats.stores if store.unit.index in wanted]
        forgets = [store.unit.name or "the root" for store in chosen if write and store.unit.index in self._read_only]
        if forgets:
            raise UsageError(
                f"gathered(write=True) inside of gathered(write=False): edits of {', '.join(forgets[:3])} would be "
                "lost; give the outer block write=True"
            )
        gathered_flats: list[tuple[FlatBinding, FlatStore | None, Tensor]] = []
        before: list[list[int]] = []
        summoned: set[int] = set()
        try:
            for store in chosen:
                flats = [each for each in flats_of(store) if not each[0].summoned and each[0] not in left_out]
                if flats:
                    summoned.add(store.unit.index)
                for binding, flat in flats:
                    whole = self._values.precise_of(store, binding, flat).clone()
                    views = [binding.arrangement.view(whole, slot) for slot in range(len(binding.parameters))]
                    gathered_flats.append((binding, flat, whole))
                    before.append([fingerprint(view) for view in views] if write else [])
                    binding.summon(views)
            if not write:
                self._read_only |= summoned
            yield
        finally:
            self._read_only -= summoned
            write = write and may_write()
            for (binding, flat, whole), prints in zip(gathered_flats, before, strict=True):
                if write:
                    self.resized |= binding.give_up_resized(whole)
                    self._collect_edits(binding, whole)
                    self._gathered_flats.broadcast_group(binding.layout).broadcast(whole)
                    if flat is not None:
                        _warn_of_rounding(flat, whole)
                        self._values.write(flat, whole)
                if flat is None:
                    binding.unbind()
                else:
                    flat.rebind(whole if write else None)
                if write:
                    now = (fingerprint(binding.arrangement.view(whole, slot)) for slot in range(len(prints)))
                    pairs = enumerate(zip(prints, now, strict=True))
                    binding.values_change(slot for slot, (one, other) in pairs if one != other)

    def check_dtypes(self, units: Collection[int]) -> None:
        """Raises UsageError if the user has changed the dtype of gathered parameters of these units."""
        for store in self._gathered_flats.stores:
            if store.unit.index in units:
                for binding, _ in flats_of(store):
                    binding.check_dtypes()

    @contextmanager
    def substituted(self, values: Mapping[int, Tensor] | None) -> Iterator[None]:
        """Context in which every parameter has its value of `values` (by id of parameter), to be read. With None,
        parameters are NaN and only their names, shapes and dtypes can be used."""
        flats = [(binding, flat) for _, binding, flat in self._gathered_flats.flats]
        if any(binding.summoned for binding, _ in flats):
            raise UsageError(
                "a checkpoint cannot be saved inside of `with strategy.gathered(module):`, where parameters are not "
                "in pages; save it after the block"
            )
        try:
            for binding, _ in flats:
                binding.summon(
                    binding.nothing() if values is None else [values[id(each)] for each in binding.parameters]
                )
            yield
        finally:
            for binding, flat in flats:
                if flat is None:
                    binding.unbind()
                else:
                    flat.rebind(None)

    def find_resized(self) -> bool:
        """Finds parameters to which the user has given another shape (`parameter.data = ...`) and returns whether there
        are any. Such parameters keep the user's storage until the next re-layout."""
        for binding in self._gathered_flats.bindings:
            self.resized |= {} if binding.summoned else binding.give_up_resized()
        return bool(self.resized)

    @staticmethod
    def _collect_edits(binding: FlatBinding, whole: Tensor) -> None:
        # `param.data = x` inside the block replaces the view, so its values are not in `whole` yet.
        with torch.no_grad():
            for slot, parameter in enumerate(binding.parameters):
                view = binding.arrangement.view(whole, slot)
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(cut(parameter, binding.arrangement.boxes[slot]))

    # -- for good -----------------------------------------------------------------------------------------------------

    def restore(self, left_out: Collection[FlatBinding] = (), absent: str = ENDED) -> None:
        """Gives every parameter storage of its own with its precise value, as before the run.

        Args:
            left_out: flats for which RAM has no room. Of their parameters, only those whose original tensor is still in
                RAM get their values back.
            absent: why the other parameters of these flats have no values, and what to do.
        """
        slots = {
            id(parameter): (binding, slot)
            for binding in self._gathered_flats.bindings
            for slot, parameter in enumerate(binding.parameters)
        }
        theirs = {id(each.parameters[slot]) for each in self._gathered_flats.bindings for slot in each.replaced()}
        for binding in left_out:
            binding.unbind(absent=absent)
            for slot, parameter in enumerate(binding.parameters):
                original = self._values.original_of(parameter)
                if original is not None:
                    binding.restore(slot, original)
        for _, parameter, value in self._values.parts(last_read=True, left_out=left_out):
            if id(parameter) in theirs:
                continue  # the user has replaced its storage, which stays
            binding, slot = slots[id(parameter)]
            binding.restore(slot, value.clone() if self._values.original_of(parameter) is None else value)
        for binding in self._gathered_flats.bindings:
            if binding not in left_out:
                binding.forget()

    def check_written(self) -> None:
        """Raises UsageError if the user has written to a parameter where the write would be lost."""
        for binding in self._gathered_flats.bindings:
            binding.check_written()

    def names_of_copies(self, parameters: Iterable[Tensor]) -> list[str]:
        """Returns the names of those parameters that are copies now, of more precise values or of pages in another
        place, so that writes to them are lost. Called before each step of an optimizer that the run does not page."""
        found = []
        for parameter in parameters:
            binding, slot = self._places.get(id(parameter), (None, 0))
            if binding is not None and binding.parameters[slot] is parameter and not binding.keeps_writes:
                found.append(binding.layout.slots[slot].spec.name)
        return found

    def detach(self, absent: str = ENDED) -> None:
        """Detaches all parameters from their pages; they cannot be read any more. Args: absent: as for `restore`."""
        for binding in self._gathered_flats.bindings:
            binding.unbind(absent=absent)

    def detach_for_relayout(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Detaches all parameters from their pages before a re-layout; they cannot be read until the new pages have
        them. Shapes, strides and dtypes stay those that the user knows.

        Args:
            dtypes: what dtype each parameter shows, by id of parameter.
        """
        for binding in self._gathered_flats.bindings:
            binding.leave([dtypes[id(parameter)] for parameter in binding.parameters])


def _warn_of_rounding(flat: FlatStore, edited: Tensor) -> None:
    """Warns if quantized pages change edited values. Values that were not edited are not changed by quantizing again.

    Args:
        edited: new values of a flat, (padded_numel,).
    """
    code = flat.layout.code
    if code is None:
        return
    values = edited.to(flat.binding.dtype)
    kept = rounded(values, code)
    for slot, place in enumerate(flat.layout.slots):
        wanted, got = (flat.binding.arrangement.view(each, slot).float() for each in (values, kept))
        error = wanted - got
        if error.any():
            warnings.warn(
                f"{place.spec.name} was edited inside of `with strategy.gathered(module):`, and its pages store it as "
                f"{code.name}: from now on it differs from what was written by up to {error.abs().max():.3g}, and in "
                f"all by {error.norm() / wanted.norm():.2%} of its norm, which may be more than the edit; edit it "
                "(merge adapters) in a module that is loaded again after the run, or leave frozen_dtype out",
                stacklevel=2,
            )


class SummonFullParams:
    """Gathers full parameters into the user's module, for a `with` block.

    Args:
        exchanged: returns whether parameters of the module were added, removed or exchanged since set-up.
        settle: drains all updates, on all ranks, and releases gathered flats; gets the name of the operation.
        ranks_here: number of ranks that share this machine's RAM.
        before_edits: called before a block whose edits are kept.
    """

    def __init__(
        self,
        module: nn.Module,
        blueprint: Blueprint,
        stores: Sequence[UnitStore],
        values: ParameterValues,
        gathered_parameters: GatheredParameters,
        barriers: Barriers,
        exchanged: Callable[[], bool],
        settle: Callable[[str], None],
        *,
        ranks_here: int,
        before_edits: Callable[[], None] | None = None,
    ) -> None:
        self._module = module
        self._blueprint = blueprint
        self._stores = stores
        self._values = values
        self._gathered_parameters = gathered_parameters
        self._barriers = barriers
        self._exchanged = exchanged
        self._settle = settle
        self._ranks_here = ranks_here
        self._before_edits = before_edits

    @contextmanager
    def gathered(self, modules: Sequence[nn.Module], *, write: bool = True, untrained: bool = True) -> Iterator[None]:
        """Context in which the parameters of `modules` are full tensors; collective. See `AngelPTMStrategy.gathered`.

        Args:
            untrained: gather parameters that were never trained, too. If False, they are absent where RAM has no room
                for all.

        Raises:
            CapacityError: RAM of some rank has no room for them.
        """
        if write and self._before_edits is not None:
            self._before_edits()
        wanted = self._units_in(modules)
        self._values.check_known()
        self._settle(f"gathered {sorted(wanted)} {write}")
        needed, left_out = self._needed(wanted), list[FlatBinding]()
        refusal = ""
        if not self._barriers.all_agree(needed <= free_host_bytes()):
            names = ", ".join(type(module).__name__ for module in modules)
            refusal = (
                f"the full weights of {names} take {format_bytes(needed)} of RAM (state_dict(), gathered), and "
                f"{format_bytes(free_host_bytes())} are free here, or too little on another rank, so they were not "
                "gathered; gather one block at a time, such as block.state_dict(), or save a checkpoint with "
                "checkpoints=Checkpoints(state_dict_type='sharded'), which gathers nothing"
            )
            left_out = [] if untrained else self._gathered_parameters.untrained()
            if not left_out or not self._barriers.all_agree(self._needed(wanted, left_out) <= free_host_bytes()):
                raise CapacityError(refusal)
        ending = self._ends_on_all_ranks(f"edited {sorted(wanted)}") if write else nullcontext()
        with (
            self._gathered_parameters.gathered(
                wanted, write=write, may_write=lambda: not self._barriers.failed, left_out=left_out
            ),
            self._gathered_parameters.absent(left_out, f"were not gathered, since RAM had no room for all: {refusal}"),
            ending,
        ):
            yield
            self._check_memory()
            if write:
                self._gathered_parameters.check_dtypes(wanted)

    @contextmanager
    def readable(self, module: nn.Module) -> Iterator[None]:
        """Context in which the parameters of `module` can be read and are precise. Gathers nothing if they are so
        already; otherwise collective. Where RAM has room for trained parameters only, the others are absent: a state
        dict of adapters needs no more. Raises as `gathered`."""
        if all(self._readable(unit) or self._stores[unit].summoned for unit in self._units_in([module])):
            yield
            return
        with self.gathered([module], write=False, untrained=False):
            yield

    def _needed(self, wanted: Collection[int], left_out: Sequence[FlatBinding] = ()) -> int:
        """Returns the RAM of this machine that the units' full parameters take."""
        return self._gathered_parameters.bytes_to_gather(wanted, left_out) * self._ranks_here

    @contextmanager
    def writable(self, module: nn.Module) -> Iterator[None]:
        """Context in which the parameters of `module` can be written to. Collective. Raises as `gathered`."""
        with self.gathered([module]):
            yield

    def always_readable(self, module: nn.Module) -> bool:
        return all(map(self._readable, self._units_in([module])))

    def _readable(self, unit: int) -> bool:
        """Returns whether a unit's parameters are precise at all times, on all ranks, which decide alike what to gather."""
        return self._stores[unit].readable and unit not in self._blueprint.holders.by_unit

    def not_always_readable(self) -> list[nn.Module]:
        """Returns the modules some of whose parameters, or of their submodules', cannot be read at all times."""
        hidden = {
            id(item.parameter)
            for each in self._stores
            if not self._readable(each.unit.index)
            for item in each.unit.parameters
        }
        found: dict[int, bool] = {}
        """By id of a module: a metric compares and hashes by its values."""

        def walk(module: nn.Module) -> bool:
            if id(module) not in found:
                inside = [walk(child) for child in module.children()]
                found[id(module)] = any(inside) or not hidden.isdisjoint(map(id, module.parameters(recurse=False)))
            return found[id(module)]

        walk(self._module)
        return [module for module in self._module.modules() if found[id(module)]]

    def _check_memory(self) -> None:
        """Raises UsageError if gathered parameters share memory: each would get pages of its own."""
        looked_at = self._exchanged() and not self._blueprint.outside
        shared = overlap(self._module, self._module.parameters()) if looked_at else None
        if shared is not None:
            raise UsageError(
                f"{shared[0]} and {shared[1]} share memory, so that a change of one changes the other, and in pages "
                "each has memory of its own; make them one parameter (`decoder.weight = encoder.weight`), or give the "
                "new one memory of its own, nn.Parameter(tensor.clone())"
            )

    @contextmanager
    def _ends_on_all_ranks(self, action: str) -> Iterator[None]:
        """Context that ends when all ranks have reached its end: what follows is collective."""
        try:
            yield
        except BaseException:
            with suppress(RankError):  # the error of the block is the cause
                self._barriers.meet(BarrierReason.USER_CALL, action)
            raise
        self._barriers.meet(BarrierReason.USER_CALL, action)

    def _units_in(self, modules: Sequence[nn.Module]) -> set[int]:
        inside = {id(parameter) for module in modules for parameter in module.parameters()}
        return {
            unit.index
            for unit in self._blueprint.units
            if any(id(item.parameter) in inside for item in unit.parameters)
        }
