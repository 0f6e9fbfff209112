"""Weights in the user's hands, of an engine that is driven by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_by_hand import (
    HOMES,
    run,
)

from lightning_ptm.errors import CapacityError
from lightning_ptm.runtime.full_params import summon as module_under_test


@pytest.mark.parametrize("home", HOMES)
def test_edits_of_gathered_weights_are_trained_on(disk: Path, home: str) -> None:
    with run(disk, **HOMES[home]) as it:
        with it.engine.summon.gathered([it.module.blocks[0]]):
            it.module.blocks[0].weight.data.fill_(7.0)
        assert it.weights() == [0.5, 7.0, 3.0]
        it.train()
        assert it.weights()[1] != 7.0


def test_what_ram_cannot_hold_whole_is_not_gathered(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(disk, **HOMES["all on disk"]) as it:
        monkeypatch.setattr(module_under_test, "free_host_bytes", lambda: 0)
        refused = pytest.raises(CapacityError, match=r"the full weights of Chain take .* of RAM")
        with refused, it.engine.summon.gathered([it.module]):
            pass
