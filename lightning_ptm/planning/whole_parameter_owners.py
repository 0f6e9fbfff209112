"""Assignment of parameters to ranks, for optimizers whose update needs whole parameters (Muon, Shampoo, SOAP).

Decides only, from shapes and bytes; equal on all ranks. `layout` puts the parameters that a rank owns into its share of
the flat, and everything later works on shards.

I1: no rank owns more bytes than an equal share plus one parameter.
I2: of ranks with equally many bytes, the one that owns least of the parameter's unit takes it, so that a unit's
    reduction, update and gather are spread over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol


class Owned(Protocol):
    """Properties of a parameter that the assignment reads (layout.ParameterSpec)."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def updated_whole(self) -> bool: ...
    @property
    def states_bytes(self) -> int: ...


class OwnedUnit(Protocol):
    """Properties of a unit that the assignment reads (layout.UnitSpec)."""

    @property
    def parameters(self) -> Sequence[Owned]: ...


def work_of(shape: Sequence[int]) -> int:
    """Returns the multiplications of a product of a parameter, as a matrix, with itself.

    The expensive updates (Muon, Shampoo, SOAP) consist of such products.
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows * columns * min(rows, columns)


def choose_owners(units: Sequence[OwnedUnit], ranks: int) -> dict[str, int]:
    """Returns the owning rank of each parameter that is updated whole, by name.

    The largest parameter is first. Each goes to the rank that has fewest bytes so far; of several, to the one with
    least of the unit, then with the least arithmetic.
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
