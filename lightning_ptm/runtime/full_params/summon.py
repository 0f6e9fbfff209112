"""Gathers full parameters for the user during a run (`strategy.gathered`), as FSDP's summon_full_params does.

Checks that all ranks take part and that RAM has room. Owns nothing; `runtime/full_params/lent_parameters.py` owns which
parameters are gathered.

I1: before parameters are gathered, all ranks have drained their updates and released all units.
I2: a block with edits ends when all ranks have reached its end: what follows is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from torch import nn

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import CapacityError, RankError, UsageError
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.full_params.lent_parameters import LentParameters
from lightning_ptm.runtime.full_params.parameter_values import ParameterValues
from lightning_ptm.runtime.machine.machine import free_host_bytes
from lightning_ptm.runtime.ranks.barriers import Barriers, Together
from lightning_ptm.runtime.units.binding import FlatBinding
from lightning_ptm.runtime.units.module_parameters import KnownParameters, overlap
from lightning_ptm.runtime.units.store import UnitStore


class SummonFullParams:
    """Gathers full parameters into the user's module, for a `with` block.

    Args:
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
        lent_parameters: LentParameters,
        barriers: Barriers,
        known: KnownParameters,
        settle: Callable[[str], None],
        *,
        ranks_here: int,
        before_edits: Callable[[], None] | None = None,
    ) -> None:
        self._module = module
        self._blueprint = blueprint
        self._stores = stores
        self._values = values
        self._lent_parameters = lent_parameters
        self._barriers = barriers
        self._known = known
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
            left_out = [] if untrained else self._lent_parameters.untrained()
            if not left_out or not self._barriers.all_agree(self._needed(wanted, left_out) <= free_host_bytes()):
                raise CapacityError(refusal)
        ending = self._ends_on_all_ranks(f"edited {sorted(wanted)}") if write else nullcontext()
        with (
            self._lent_parameters.gathered(
                wanted, write=write, may_write=lambda: not self._barriers.failed, left_out=left_out
            ),
            self._lent_parameters.absent(left_out, f"were not gathered, since RAM had no room for all: {refusal}"),
            ending,
        ):
            yield
            self._check_memory()
            if write:
                self._lent_parameters.check_dtypes(wanted)

    @contextmanager
    def readable(self, module: nn.Module) -> Iterator[None]:
        """Context in which the parameters of `module` can be read and are precise. Gathers nothing if they are so
        already; otherwise collective. Where RAM has room for trained parameters only, the others are absent: a state
        dict of adapters needs no more. Raises as `gathered`."""
        if all(self._stores[unit].readable or self._stores[unit].lent for unit in self._units_in([module])):
            yield
            return
        with self.gathered([module], write=False, untrained=False):
            yield

    def _needed(self, wanted: Collection[int], left_out: Sequence[FlatBinding] = ()) -> int:
        """Returns the RAM of this machine that the units' full parameters take."""
        return self._lent_parameters.bytes_to_gather(wanted, left_out) * self._ranks_here

    @contextmanager
    def writable(self, module: nn.Module) -> Iterator[None]:
        """Context in which the parameters of `module` can be written to. Collective. Raises as `gathered`."""
        with self.gathered([module]):
            yield

    def always_readable(self, module: nn.Module) -> bool:
        return all(self._stores[unit].readable for unit in self._units_in([module]))

    def _check_memory(self) -> None:
        """Raises UsageError if gathered parameters share memory: each would get pages of its own."""
        looked_at = self._known.changed() and not self._blueprint.outside
        shared = overlap(self._module, self._module.parameters()) if looked_at else None
        if shared is not None:
            raise UsageError(
                f"{shared[0]} and {shared[1]} share memory, so that a change of one changes the other, and in pages "
                "each has memory of its own; make them one parameter (`decoder.weight = encoder.weight`), or give the "
                "new one memory of its own, nn.Parameter(tensor.clone())"
            )

    @contextmanager
    def _ends_on_all_ranks(self, deed: str) -> Iterator[None]:
        """Context that ends when all ranks have reached its end: what follows is collective."""
        try:
            yield
        except BaseException:
            with suppress(RankError):  # the error of the block is the cause
                self._barriers.meet(Together.BY_HAND, deed)
            raise
        self._barriers.meet(Together.BY_HAND, deed)

    def _units_in(self, modules: Sequence[nn.Module]) -> set[int]:
        inside = {id(parameter) for module in modules for parameter in module.parameters()}
        return {
            unit.index
            for unit in self._blueprint.units
            if any(id(item.parameter) in inside for item in unit.parameters)
        }
