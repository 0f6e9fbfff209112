"""Full parameters: written to pages from modules, files and state dicts, and read from pages.

Owns references to tensors that the user built, for runs that keep no master copy of them. Optimizer states are handled
by optimizer_values.py, parameters that users gather by gathered_parameters.py. All three read flats through
gathered_flats.py.

I1: with several ranks the values of rank 0 count. Values of files are the exception: each rank reads what it owns.
Every method is then collective.
I2: of a parameter that is a slice of a larger one (tensor parallelism), the larger one is read and loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError, InternalError, UsageError
from lightning_ptm.progress import Progress, Seen, unseen
from lightning_ptm.runtime.relayout.gathered_flats import flats_of
from lightning_ptm.runtime.tensors.page_io import in_pages
from lightning_ptm.runtime.tensors.parts import cut, put_together
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.runtime.units.store import FlatStore, UnitStore

if TYPE_CHECKING:
    from lightning_ptm.planning.layout import ParameterSpec
    from lightning_ptm.runtime.full_params.first_values import Read
    from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats
    from lightning_ptm.runtime.relayout.previous_state import PreviousState
    from lightning_ptm.runtime.units.binding import FlatBinding


def _rounds(value: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether `dtype` is less precise than the value's."""
    return torch.promote_types(value.dtype, dtype) is not dtype


def _wide(binding: FlatBinding) -> torch.dtype:
    """Returns the dtype in which a flat's first values are assembled before they are written to pages."""
    return torch.float64 if binding.dtype is torch.float64 else torch.float32


def _open(binding: FlatBinding) -> bool:
    """Returns whether all parameters have values that can be read."""
    return not any(isinstance(parameter, GuardedParameter) for parameter in binding.parameters)


def _in_old_pages() -> Tensor:
    raise InternalError(
        "values in pages of the previous engine are copied from page to page, and one was to be read whole"
    )


class ParameterValues:
    """Reads and writes full parameters. The engine has drained all updates before each call.

    Args:
        mixed: mixed precision: pages compute in 16 bits, and the weights have more.
    """

    def __init__(self, gathered_flats: GatheredFlats, progress: Progress | None = None, *, mixed: bool = False) -> None:
        self._progress = progress or Progress(shown=False)
        self._gathered_flats = gathered_flats
        self._mixed = mixed
        self._originals: dict[int, Tensor] = {}
        self._narrow: set[int] = set()
        """Ids of frozen parameters that the user has in the dtype of their pages."""
        self.unknown: dict[int, str] = {}
        """Names, by id, of parameters whose values an earlier run has not restored, and that have not been loaded
        since. Others read it."""
        self.of_files: set[int] = set()
        """Ids of frozen parameters whose values equal those of the files that provided them."""

    # -- first values -------------------------------------------------------------------------------------------------

    @contextmanager
    def taking_over(self) -> Iterator[Seen]:
        """Context of the calls of `take_over` for all units; yields their `seen`."""
        flats = self._gathered_flats
        total_bytes = sum(flats.bytes_of_homes(flat) for store in flats.stores for flat in store.flats)
        with self._progress.bar("weights into pages", total_bytes) as seen, flats.pages.operation():
            yield seen

    @torch.no_grad()
    def take_over(
        self,
        store: UnitStore,
        given: Mapping[int, Read] = MappingProxyType({}),
        *,
        only: Collection[FlatBinding] | None = None,
        keep_originals: bool = False,
        keep_frozen: bool = False,
        handed: PreviousState | None = None,
        seen: Seen = unseen,
    ) -> None:
        """Writes a unit's parameters into pages. From then on they are views of pages, or released.

        Args:
            given: what reads the values that files provide, by id of parameter. They replace the values that a
                parameter has, and are copied from the file to the pages a few pages at a time.
            only: flats of the unit that are written; None: all.
            keep_originals: keep the user's tensors too, to restore them at the end (a run that trains nothing).
            keep_frozen: keep the user's tensors of frozen parameters whose pages are less precise under mixed
                precision: no other copy has the user's values, and training must not round what it does not train.
            handed: the previous engine's pages; their values take precedence over all others.
            seen: called with the number of bytes that were written to pages.
        """
        for binding, flat in flats_of(store):
            if only is not None and binding not in only:
                continue
            reads = [given.get(id(parameter)) for parameter in binding.parameters]
            if handed is not None:
                reads = [_in_old_pages if each in handed else None for each in binding.parameters]
            if flat is None:
                if not all(reads):
                    # Takes part in the broadcast for the ranks that hold it.
                    self._assembled(binding, reads, keep=False, replicate=False)
                binding.unbind()
                continue
            keep = keep_originals or (keep_frozen and self._mixed and not flat.layout.trainable)
            keep = keep and flat.layout.code is None  # a copy in addition to quantized pages would undo what they save
            if not all(reads):
                # The values of a unit that some ranks do not hold are broadcast by one rank.
                replicate = not keep_originals or self._gathered_flats.source(store) is not None
                if (
                    self._gathered_flats.broadcast_group(binding.layout).alone
                    and not keep
                    and not any(reads)
                    and _open(binding)
                ):
                    # Straight from the parameters: assembling a flat of an embedding and a head would take its size in
                    # RAM again.
                    left = self._gathered_flats.bytes_of_homes(flat)

                    def laid(size: int) -> None:
                        nonlocal left
                        left -= size
                        seen(size)

                    self._fill(flat, [each.detach() for each in binding.parameters], laid, through=_wide(binding))
                    seen(left)  # the ends of parameters
                else:
                    self._write_pages(flat, self._assembled(binding, reads, keep=keep, replicate=replicate), seen)
            if any(reads) and handed is not None:
                self._copy_previous(flat, handed, keep=keep, seen=seen)
            elif any(reads):
                values = [None if read is None else read() for read in reads]
                if not flat.layout.trainable:
                    self.of_files |= {id(each) for each, read in zip(binding.parameters, reads, strict=True) if read}
                for slot, (parameter, value) in enumerate(zip(binding.parameters, values, strict=True)):
                    if keep and value is not None and _rounds(value, binding.dtype):
                        self._originals[id(parameter)] = cut(value, binding.arrangement.boxes[slot]).to(
                            parameter.dtype, copy=True
                        )
                self._fill(flat, values, seen)
            if flat.resident:
                flat.bind_resident()
            else:
                binding.unbind()

    def _copy_previous(self, flat: FlatStore, handed: PreviousState, *, keep: bool, seen: Seen) -> None:
        """Copies the parameters that the previous engine's pages have. Args: as `take_over`."""
        known = [each for each in flat.binding.parameters if each in handed]
        if not flat.layout.trainable:
            self.of_files |= handed.of_files & {id(each) for each in known}
        for parameter in known if keep else ():
            dtype, original = handed.dtype(id(parameter)), handed.original(id(parameter))
            assert dtype is not None
            if torch.promote_types(dtype, flat.binding.dtype) is not flat.binding.dtype:
                self._originals[id(parameter)] = (
                    handed.precise(id(parameter), flat.communicator) if original is None else original
                )
        flats = self._gathered_flats
        master, is_reused = flats.master(flat), flats.pages.allocator.is_reused
        if master is not None and not is_reused(master):
            handed.write_precise(flats.precise_map(flat), flat, flats.pages, seen)
        if not is_reused(flat.home):
            handed.write_values(flats.values_map(flat), flat, flats.pages, seen)
        if not keep:  # else it is the same tensor and takes no more memory
            handed.forget_originals([id(each) for each in known])

    def _assembled(
        self,
        binding: FlatBinding,
        reads: Sequence[Read | None],
        *,
        keep: bool,
        replicate: bool,
    ) -> Tensor:
        """Returns a flat's parameters as the first rank has them, (padded_numel,); zeros for those that files
        provide."""
        whole = torch.zeros(binding.layout.padded_numel, dtype=_wide(binding))
        built = [slot for slot, read in enumerate(reads) if read is None]
        for slot in built:
            parameter = binding.parameters[slot]
            if isinstance(parameter, GuardedParameter):
                self.unknown[id(parameter)] = binding.layout.slots[slot].spec.name
                binding.arrangement.view(whole, slot).fill_(float("nan"))
                continue
            binding.arrangement.view(whole, slot).copy_(parameter.detach())
            if keep and parameter.dtype is not binding.dtype:
                self._originals[id(parameter)] = parameter.data
            elif keep:
                self._narrow.add(id(parameter))
        communicator = self._gathered_flats.broadcast_group(binding.layout)
        communicator.broadcast(whole)
        if replicate and not communicator.alone:
            for slot in built:  # I1
                if id(binding.parameters[slot]) in self._originals:
                    self._originals[id(binding.parameters[slot])].copy_(binding.arrangement.view(whole, slot))
        return whole

    # -- reading ------------------------------------------------------------------------------------------------------

    def precise(self, flat: FlatStore) -> Tensor:
        """Returns the precise values of a flat, whole, on the CPU: (padded_numel,)."""
        whole = self._gathered_flats.whole(flat, self._gathered_flats.precise_map(flat))
        originals = [self._originals.get(id(parameter)) for parameter in flat.binding.parameters]
        wide = torch.float32 if self._mixed and whole.dtype.itemsize < 4 else whole.dtype
        for original in originals:
            wide = wide if original is None else torch.promote_types(wide, original.dtype)
        replaced = flat.binding.replaced()
        whole = whole.to(wide, copy=bool(replaced))
        for slot, value in replaced.items():
            flat.binding.arrangement.view(whole, slot).copy_(value)
        for slot, original in enumerate(originals):
            if original is not None:
                flat.binding.arrangement.view(whole, slot).copy_(original)
        return whole

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yields (name, parameter, precise value) of every parameter, flat by flat (I2)."""
        for spec, parameter, value in self.parts():
            yield spec.name, parameter, put_together(value, spec.box, self._gathered_flats.communicator)
            del value

    def parts(
        self, *, last_read: bool = False, left_out: Collection[FlatBinding] = ()
    ) -> Iterator[tuple[ParameterSpec, nn.Parameter, Tensor]]:
        """Yields (spec, parameter, precise value) of every parameter as this rank computes with it: of a slice, the
        slice.

        Args:
            last_read: frees the RAM of master weights, which no user object refers to, when they have been read.
            left_out: flats that are not read.
        """
        flats = [each for each in self._gathered_flats.flats if each[1] not in left_out]
        sizes = [self.precise_bytes(binding, flat) for _, binding, flat in flats]
        with self._progress.bar("gathering weights", sum(sizes)) as seen:
            for (store, binding, flat), size_bytes in zip(flats, sizes, strict=True):
                whole = self.precise_of(store, binding, flat)
                for slot, parameter in enumerate(binding.parameters):
                    original = self._originals.get(id(parameter))
                    value = binding.arrangement.view(whole, slot) if original is None else original
                    value = value.to(binding.dtype) if id(parameter) in self._narrow else value
                    yield binding.layout.slots[slot].spec, parameter, value
                    del value
                del whole  # before the next flat is read: there is one in RAM at a time
                master = self._gathered_flats.master(flat) if last_read and flat is not None else None
                if master is not None:
                    self._gathered_flats.pages.allocator.discard(master)
                seen(size_bytes)

    def precise_bytes(self, binding: FlatBinding, flat: FlatStore | None) -> int:
        """Returns the bytes of a whole flat in its precise dtype; as if in fp32 where only other ranks hold the
        flat."""
        return binding.layout.padded_numel * (
            4 if flat is None else self._gathered_flats.precise_home(flat).dtype.itemsize
        )

    def bytes_to_read(self, flat: FlatStore) -> int:
        """Returns the RAM that `precise` takes for a flat at most, on one rank."""
        home, numel = self._gathered_flats.precise_home(flat), flat.layout.padded_numel
        coded = flat.layout.code is not None
        itemsize = flat.binding.dtype.itemsize if coded else home.dtype.itemsize
        if self._mixed and itemsize < 4:
            return numel * 4  # pages are less precise: their values are converted
        return 0 if in_pages(home).tier.addressable and not coded else numel * itemsize

    def precise_of(self, store: UnitStore, binding: FlatBinding, flat: FlatStore | None) -> Tensor:
        """Returns the flat's precise values, as `precise`, also for a flat that this rank does not hold."""
        return self._gathered_flats.broadcast(store, binding, None if flat is None else self.precise(flat))

    def bytes_of_originals(self) -> int:
        """Returns the RAM that the user's original tensors take."""
        return sum(original.nbytes for original in self._originals.values())

    def original_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns a parameter's original tensor, if pages are less precise; in the shape in which this rank has it."""
        return self._originals.get(id(parameter))

    def pop_originals(self) -> dict[int, Tensor]:
        """Returns all original tensors, by id of parameter, and forgets them. No value can be read or written
        afterwards."""
        given, self._originals = self._originals, {}
        return given

    def check_known(self) -> None:
        """Raises UsageError if there are parameters of which an earlier run has not restored the values (`unknown`)."""
        if self.unknown:
            names = [*self.unknown.values()]
            raise UsageError(
                f"the values of {', '.join(names[:3])}{'...' if len(names) > 3 else ''} ended with an "
                "earlier run, which could not restore them (tuning=Tuning(restore_weights=False), or too little "
                "RAM), so this run has nothing to start from; give it a ckpt_path, or load the weights before it"
            )

    # -- writing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_parameters(self, values: Mapping[int, Tensor]) -> None:
        """Writes new values by id of parameter; parameters without one keep theirs. Each rank reads what it owns.

        Raises:
            ConfigError: a shape differs; nothing is written then.
        """
        for binding, _, given in self._given(values):
            for slot, value in enumerate(given):
                if value is not None and not binding.arrangement.fits(slot, value):
                    spec = binding.layout.slots[slot].spec
                    raise ConfigError(
                        f"{spec.name} has shape {spec.whole_shape} here and {tuple(value.shape)} in the loaded state, "
                        "so nothing was loaded; build the model with the sizes that it was saved with"
                    )
        for known in values:
            self.unknown.pop(known, None)
        self.of_files -= values.keys()
        total_bytes = sum(
            self._gathered_flats.bytes_of_homes(flat) for _, flat, _ in self._given(values) if flat is not None
        )
        with self._progress.bar("loading weights", total_bytes) as seen:
            for binding, flat, given in self._given(values):
                if flat is None:
                    continue
                self._fill(flat, given, seen)
                binding.values_change(slot for slot, value in enumerate(given) if value is not None)
                for slot, theirs in binding.replaced().items():
                    if (value := given[slot]) is not None:
                        theirs.copy_(cut(value, binding.arrangement.boxes[slot]))
                for slot, (parameter, value) in enumerate(zip(binding.parameters, given, strict=True)):
                    original = self._originals.get(id(parameter))
                    if original is not None and value is not None:
                        self._originals[id(parameter)] = cut(value, binding.arrangement.boxes[slot]).to(
                            original.dtype, copy=True
                        )

    def _given(
        self, values: Mapping[int, Tensor]
    ) -> Iterator[tuple[FlatBinding, FlatStore | None, list[Tensor | None]]]:
        for _, binding, flat in self._gathered_flats.flats:
            given = [values.get(id(parameter)) for parameter in binding.parameters]
            if any(value is not None for value in given):
                yield binding, flat, given

    def _fill(
        self, flat: FlatStore, given: Sequence[Tensor | None], seen: Seen, *, through: torch.dtype | None = None
    ) -> None:
        """Writes those of a flat's parameters that are given. They are given whole; each rank reads what it owns.

        Args:
            through: dtype to which values are rounded first; default: that of master weights.
        """
        master, pages = self._gathered_flats.master(flat), self._gathered_flats.pages
        segments = self._gathered_flats.values_map(flat).segments(flat.communicator.rank)
        flat.binding.values_will_change()
        given, boxes = flat.binding.arrangement.as_laid(given), flat.binding.arrangement.boxes
        if master is not None:
            pages.fill(master, segments, given, boxes, seen=seen)
        if through is None and master is not None:
            through = master.dtype
        pages.fill(flat.values, segments, given, boxes, through=through, seen=seen)
        flat.binding.values_have_changed()

    def write(self, flat: FlatStore, whole: Tensor) -> None:
        """Writes new values of a flat that this rank holds: (padded_numel,), in their precise dtype."""
        of_files = self.of_files & {id(parameter) for parameter in flat.binding.parameters}
        if of_files and torch.equal(whole, self.precise(flat)):
            return  # gathered with write=True and not edited: the values of the files still
        self.of_files -= of_files
        self._write_pages(flat, whole)
        for slot, parameter in enumerate(flat.binding.parameters):
            original = self._originals.get(id(parameter))
            if original is not None:
                self._originals[id(parameter)] = flat.binding.arrangement.view(whole, slot).to(
                    original.dtype, copy=True
                )

    def _write_pages(self, flat: FlatStore, whole: Tensor, seen: Seen = unseen) -> None:
        pages, pieces = self._gathered_flats.pages, flat.layout.pieces(flat.communicator.rank)
        own = [(piece.shard_start, whole.narrow(0, piece.full_start, piece.numel)) for piece in pieces]
        if (master := self._gathered_flats.master(flat)) is not None:
            pages.write(master, own, seen=seen)
        pages.write(flat.values, own, seen=seen)
