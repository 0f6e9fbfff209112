"""Which rank updates which parameter, where an update needs all of it: the parameter's owner.

Decides only, from shapes and bytes; equal on all ranks. `layout` puts what a rank owns into its share of the flat, and
everything behind follows shards.

I1: no rank owns more bytes than an equal share and one parameter.
I2: of ranks that own as many bytes, the one that owns least of a parameter's unit takes it: a unit's reduction, update and
    gather are no single rank's affair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ptm.planning.layout import UnitSpec


def work_of(shape: Sequence[int]) -> int:
    """Multiplications of a product of a parameter with itself, as a matrix; what an update is made of that takes long (Muon,
    Shampoo, SOAP)."""
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows * columns * min(rows, columns)


def choose_owners(units: Sequence[UnitSpec], ranks: int) -> dict[str, int]:
    """By name of a parameter that is updated whole, the rank that owns it.

    The largest first, each to the rank that has fewest bytes so far; of several to the one with least of the unit, then with
    the least arithmetic.
    """
    items = [
        (unit, spec)
        for unit, of_unit in enumerate(units)
        for spec in of_unit.parameters
        if spec.trainable and spec.updated_whole
    ]
    owners: dict[str, int] = {}
    total, work = [0] * ranks, [0] * ranks
    of_unit_bytes = {unit: [0] * ranks for unit, _ in items}
    for unit, spec in sorted(items, key=lambda item: -item[1].states_bytes):
        here = of_unit_bytes[unit]
        rank = min(range(ranks), key=lambda rank: (total[rank], here[rank], work[rank]))
        owners[spec.name] = rank
        total[rank] += spec.states_bytes
        here[rank] += spec.states_bytes
        work[rank] += work_of(spec.shape)
    return owners
