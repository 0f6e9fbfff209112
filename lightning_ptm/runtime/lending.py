"""Parameters in the user's hands: whole, real and theirs for a while, or for good when a run ends.

Owns who has got what: which units are lent to be read alone, and which parameters have shapes of the user's own. Values come
from runtime/values.py and go back through it.

I1: what a block of `gathered` has got, a block inside of it has, too. I2: of a parameter that is a part of a larger one, the
user has the part, with which the module computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.fingerprint import fingerprint
from lightning_ptm.runtime.parts import cut
from lightning_ptm.runtime.store import FlatStore
from lightning_ptm.runtime.wholes import flats_of

if TYPE_CHECKING:
    from lightning_ptm.runtime.binding import FlatBinding
    from lightning_ptm.runtime.values import Values
    from lightning_ptm.runtime.wholes import Wholes


class Lending:
    """See the file's contract. The engine has drained all updates before any of these is called."""

    def __init__(self, wholes: Wholes, values: Values) -> None:
        self._wholes = wholes
        self._values = values
        self.resized: dict[str, nn.Parameter] = {}
        """By name, parameters that have other shapes than their pages, which have no part in them any more."""
        self._read_only: set[int] = set()
        """Units, by index, that are gathered, and whose edits are not kept."""

    # -- for a while --------------------------------------------------------------------------------------------------

    def bytes_to_lend(self, wanted: Collection[int]) -> int:
        """RAM that `gathered` takes for these units, at most."""
        sizes = [
            self._values.precise_bytes(binding, flat)
            for store in self._wholes.stores
            if store.unit.index in wanted
            for binding, flat in flats_of(store)
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
        chosen = [store for store in self._wholes.stores if store.unit.index in wanted]
        forgets = [store.unit.name or "the root" for store in chosen if write and store.unit.index in self._read_only]
        if forgets:
            raise UsageError(
                f"gathered(write=True) inside of gathered(write=False): edits of {', '.join(forgets[:3])} would be lost; "
                f"give the outer block write=True"
            )
        wholes: list[tuple[FlatBinding, FlatStore | None, Tensor]] = []
        before: list[list[int]] = []
        lent: set[int] = set()
        try:
            for store in chosen:
                flats = [(binding, flat) for binding, flat in flats_of(store) if not binding.lent]
                if flats:
                    lent.add(store.unit.index)
                for binding, flat in flats:
                    whole = self._values.precise_of(store, binding, flat).clone()
                    views = [binding.arrangement.view(whole, slot) for slot in range(len(binding.parameters))]
                    wholes.append((binding, flat, whole))
                    before.append([fingerprint(view) for view in views] if write else [])
                    binding.lend(views)
            if not write:
                self._read_only |= lent
            yield
        finally:
            self._read_only -= lent
            write = write and may_write()
            for (binding, flat, whole), prints in zip(wholes, before, strict=True):
                if write:
                    self.resized |= binding.give_up_resized(whole)
                    self._collect_edits(binding, whole)
                    self._wholes.tells(binding.layout).broadcast(whole)
                    if flat is not None:
                        self._values.write(flat, whole)
                if flat is None:
                    binding.unbind()
                else:
                    flat.rebind(whole if write else None)
                if write:
                    now = (fingerprint(binding.arrangement.view(whole, slot)) for slot in range(len(prints)))
                    pairs = enumerate(zip(prints, now, strict=True))
                    binding.values_change(slot for slot, (one, other) in pairs if one != other)

    @contextmanager
    def lent(self, values: Mapping[int, Tensor] | None) -> Iterator[None]:
        """Inside the block every parameter has its value of `values`, by id of parameter, to be read; with None: can be read
        by those who ask for its name alone, and is NaN."""
        flats = [(binding, flat) for _, binding, flat in self._wholes.flats()]
        if any(binding.lent for binding, _ in flats):
            raise UsageError(
                "a checkpoint cannot be made inside of `with strategy.gathered(module):`; end the block before"
            )
        try:
            for binding, _ in flats:
                binding.lend(binding.nothing() if values is None else [values[id(each)] for each in binding.parameters])
            yield
        finally:
            for binding, flat in flats:
                if flat is None:
                    binding.unbind()
                else:
                    flat.rebind(None)

    def follow_shapes(self) -> bool:
        """Whether users have given parameters other shapes (`parameter.data = ...`): what they are now is theirs, until pages
        are laid out anew."""
        for binding in self._wholes.bindings():
            self.resized |= {} if binding.lent else binding.give_up_resized()
        return bool(self.resized)

    @staticmethod
    def _collect_edits(binding: FlatBinding, whole: Tensor) -> None:
        # `param.data = x` inside the block replaces the view; bring such values home too.
        with torch.no_grad():
            for slot, parameter in enumerate(binding.parameters):
                view = binding.arrangement.view(whole, slot)
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(cut(parameter, binding.arrangement.boxes[slot]))

    # -- for good -----------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Gives every parameter storage of its own with its precise value: the module as the user knows it."""
        slots = {
            id(parameter): (binding, slot)
            for binding in self._wholes.bindings()
            for slot, parameter in enumerate(binding.parameters)
        }
        theirs = {id(each.parameters[slot]) for each in self._wholes.bindings() for slot in each.replaced()}
        for _, parameter, value in self._values.parts(letting_go=True):
            if id(parameter) in theirs:
                continue  # the user's own storage stays, as anywhere
            binding, slot = slots[id(parameter)]
            binding.restore(slot, value.clone() if self._values.original_of(parameter) is None else value)
        for binding, _ in slots.values():
            binding.forget()

    def written(self) -> tuple[str, ...]:
        """Names of parameters that were written to by hand since the last step began, where that is lost."""
        return tuple(binding.written for binding in self._wholes.bindings() if binding.written is not None)

    def let_go(self) -> None:
        """Parameters name no page any more, and cannot be read."""
        for binding in self._wholes.bindings():
            binding.unbind(ended=True)

    def leave(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Parameters name no page any more, and cannot be read until other pages have them; they keep the shapes, strides and
        dtypes that users know.

        Args:
            dtypes: by id of parameter.
        """
        for binding in self._wholes.bindings():
            binding.leave([dtypes[id(parameter)] for parameter in binding.parameters])
