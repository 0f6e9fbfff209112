"""Runs that measure fixed costs of steps have the units, and the exchanges, that they measure."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_ptm.commands import fixed_costs
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.runtime.engine.engine import Engine


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines of the runs, as they end."""
    found: list[Engine] = []

    class Watch(fixed_costs._Watch):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(trainer.strategy.engine)

    monkeypatch.setattr(fixed_costs, "_Watch", Watch)
    return found


def test_units_are_units(engines: list[Engine]) -> None:
    """The runs have as many units as they count, beside the root, though each is smaller than any that discovery finds
    by itself."""
    costs = fixed_costs.fixed_costs(CpuBackend(), 2)
    assert [len(each.stores) - 1 for each in engines] == [fixed_costs._FEW, fixed_costs._MANY]
    assert 0 < costs.unit_s < 1 and 0 < costs.step_s < 10


def test_a_block_has_as_many_layers_as_ranks_would_divide(engines: list[Engine]) -> None:
    assert 0 <= fixed_costs.block_s(CpuBackend(), 2) < 1
    blocks = [[each for each in engine.stores if each.unit.name.startswith("blocks")] for engine in engines]
    assert [len(each) for each in blocks] == [fixed_costs._FEW, fixed_costs._MANY]
    assert all(len(block.unit.parameters) == 4 * fixed_costs.PAIRS for each in blocks for block in each)
