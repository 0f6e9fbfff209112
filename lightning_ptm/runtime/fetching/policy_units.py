"""The stores of a run as what the policy of fetching drives (planning/fetch_policy.py: Units).

Owns nothing: each question and each order is one to the store of the unit. Knows which fetches ranks have to agree on.

I1: a fetch that other ranks have a part in is asked for before it begins, unless they have agreed on it already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lightning_ptm.comm import Agreement, NeededCollective
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.terms import Operation


class PolicyUnits:
    """The stores of a run as the policy's units.

    Args:
        stores: by unit.
        agreement: ranks agree on all-gathers through it.
        update_pending: whether a unit's update has not reached its compute parameters yet (after some progress).
        reclaim: as the policy's.
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
