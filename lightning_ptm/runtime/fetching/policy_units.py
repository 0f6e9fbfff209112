"""Adapter of the stores of a run to the fetch policy's interface (planning/fetch_policy.py: Units).

Owns nothing: each call goes to the store of the unit. Knows which fetches the ranks have to agree on.

I1: a fetch in which other ranks take part is requested from them before it begins, unless they have agreed on it
    already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lightning_ptm.comm import Agreement, NeededCollective
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Operation


class PolicyUnits:
    """The stores of a run, as the units of the policy.

    Args:
        stores: by unit.
        agreement: ranks agree on all-gathers through it.
        update_pending: whether an update has not reached a unit's compute parameters yet; makes some progress with it.
        reclaim: see `Units.reclaim`.
    """

    def __init__(
        self,
        stores: Sequence[UnitStore],
        agreement: Agreement,
        update_pending: Callable[[int], bool],
        reclaim: Callable[[bool], bool],
    ) -> None:
        self._stores = stores
        self._agreement = agreement
        self.update_pending = update_pending
        self.reclaim = reclaim

    def gathers(self, unit: int) -> bool:
        return self._stores[unit].gathers

    def live(self, unit: int) -> bool:
        return self._stores[unit].live

    def fetched(self, unit: int) -> bool:
        return self._stores[unit].fetched

    def movable(self, unit: int) -> bool:
        return self._stores[unit].movable

    def has_spare_shards(self, unit: int) -> bool:
        return self._stores[unit].has_spare_shards

    def start_fetch(self, unit: int, *, agreed: bool) -> None:
        store = self._stores[unit]
        store.start_fetch(partial(self._agree, unit) if store.gathers and not agreed else None)

    def _agree(self, unit: int) -> None:
        self._agreement.request(NeededCollective(Operation.GATHER, unit))

    def fetch_shards(self, unit: int) -> None:
        self._stores[unit].fetch_shards()

    def release(self, unit: int) -> None:
        self._stores[unit].release()

    def evict(self, unit: int) -> None:
        self._stores[unit].evict()
