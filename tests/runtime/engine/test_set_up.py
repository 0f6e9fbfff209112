"""Set-ups take what the inventory says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from engine_by_hand import (
    HOMES,
    Chain,
    build,
    hooks_on,
    of_all,
    weights,
)

from lightning_ptm.errors import InternalError
from lightning_ptm.planning.inventory import Lifetime, What
from lightning_ptm.planning.inventory import Row as InventoryRow
from lightning_ptm.terms import Tier


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.DISK])
def test_pages_are_taken_for_the_rows_of_the_inventory_alone(disk: Path, tier: Tier) -> None:
    def with_a_row_more(blueprint: Any) -> Any:
        row = InventoryRow(What.SAVES, tier, 100, "float32", 4, lifetime=Lifetime.RUN)
        inventory = dataclasses.replace(blueprint.inventory, rows=(*blueprint.inventory.rows, row))
        return dataclasses.replace(blueprint, inventory=inventory)

    module = Chain()
    with pytest.raises(InternalError, match=rf"set-up has allocated \d+ bytes of the {tier.name.lower()} tier"):
        build(module, of_all(module), disk, change=with_a_row_more, **HOMES["masters on disk"])
    assert weights(module) == [0.5, 2.0, 3.0] and hooks_on(module) == []
